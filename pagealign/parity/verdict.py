"""Recordings of a tree held against stock's: a row per workload."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagealign.bed import Result
from pagealign.fuzz import same
from pagealign.parity import expected
from pagealign.parity.difference import Difference, differences
from pagealign.parity.record import recording_path
from pagealign.parity.recording import Recording
from pagealign.parity.workloads import Workload, select


@dataclass(frozen=True)
class Verdict:
    """``entries``: how many values were compared; ``explained``: how many differences per
    name of an expected one; ``fault``: what is wrong, None if nothing."""

    tree: str
    workload: str
    entries: int
    explained: dict[str, int] = field(default_factory=dict)
    fault: str | None = None

    @property
    def outcome(self) -> str:
        if self.fault:
            return f"DIFFERS: {self.fault}"
        if self.explained:
            return "expected: " + ", ".join(self.explained)
        return "equal"


def compare(
    form: str, stock: Path, other: Path, tree: str, diffs: Collection[str]
) -> Iterator[Verdict]:
    """A verdict per workload of ``form`` on recordings in the folders ``stock`` and
    ``other``, the second of a tree with ``diffs`` of the series applied."""
    answers, reference = _answers(other), _answers(stock)
    for number, workload in enumerate(select(form)):
        paths = [recording_path(folder, number) for folder in (stock, other)]
        recording = Recording(paths[0])
        found = differences(workload.name, *paths)
        entries = len(recording.entries)
        cure = expected.ANSWERS.get(workload.expected or "")
        if cure and set(cure.diffs) & set(diffs):
            fault = _proof(workload, answers[workload.name], next(found, None))
            explained = {} if fault else {cure.name: 1}
        else:
            explain = expected.Explainer(workload, recording, diffs)
            fault, explained = _explain(found, explain)
            crash = reference[workload.name]["crash"]
            if crash and not cure:
                fault = f"stock: {crash}"
        recording.close()
        yield Verdict(tree, workload.name, entries, explained, fault)


def _answers(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "answers.json").read_text())


def _explain(
    found: Iterator[Difference], explain: expected.Explainer
) -> tuple[str | None, dict[str, int]]:
    """The first difference that nobody expects, as text, and how often which was expected."""
    explained: Counter[str] = Counter()
    for difference in found:
        name = explain(difference)
        if name is None:
            return str(difference), dict(explained)
        explained[name] += 1
    return None, dict(explained)


def _proof(workload: Workload, answer: dict, first: Difference | None) -> str | None:
    """What is wrong with a workload on which stock is: no difference to be seen, or an answer
    that is not that of the request alone."""
    if first is None:
        return "stock is not wrong here any more: the expectation is stale"
    if answer["crash"]:
        return answer["crash"]
    results, alone = ([Result(**r) for r in answer[key]] for key in ("results", "alone"))
    for i, (got, reference) in enumerate(itertools.zip_longest(results, alone)):
        aborted = got is not None and got.finish["type"] == "abort"
        if got is None or not same(got, reference, beginning=aborted):
            return f"{workload.name}: request r{i:06} is not answered as it is alone"
    return None
