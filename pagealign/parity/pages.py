"""FlashInfer at page sizes above 1: the tokens have to be those of page size 1."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagealign.bed import Result
from pagealign.fuzz import same
from pagealign.parity.workloads import select


@dataclass(frozen=True)
class PageRow:
    """A workload at a page size above 1, on both trees, against the aligned tree at 1."""

    workload: str
    page_size: int
    requests: int
    stock: str
    aligned: str

    @property
    def right(self) -> bool:
        return self.aligned == "same tokens"


def compare_pages(stock: Path, aligned: Path) -> Iterator[PageRow]:
    """A row per workload of the form ``pages`` above page size 1."""
    answers = [json.loads((f / "answers.json").read_text()) for f in (stock, aligned)]
    workloads = {w.name: w for w in select("pages")}
    for workload in workloads.values():
        if workload.page_size == 1:
            continue
        reference = answers[1][workload.name.replace(f"/page {workload.page_size}", "")]
        outcomes = [_outcome(answer[workload.name], reference) for answer in answers]
        count = sum(len(burst.requests) for burst in workload.bursts)
        yield PageRow(workload.name, workload.page_size, count, *outcomes)


def _outcome(answer: dict, reference: dict) -> str:
    if answer["crash"]:
        return f"dies: {answer['crash'].splitlines()[0][:60]}"
    pairs = itertools.zip_longest(answer["results"], reference["results"])
    wrong = sum(not _right(got, want) for got, want in pairs)
    return f"{wrong} of {len(reference['results'])} other answers" if wrong else "same tokens"


def _right(got: dict | None, want: dict | None) -> bool:
    """An aborted request's answer has to be a beginning of the other, or go on from it."""
    if got is None or want is None:
        return False
    a, b = Result(**got), Result(**want)
    if a.finish["type"] == b.finish["type"] == "abort" and len(a.output_ids) > len(b.output_ids):
        a, b = b, a
    return same(a, b, beginning=a.finish["type"] == "abort")
