"""Accuracy: how far each approach's results are from the truth.

Two levels, both against float64 and beside plain code of the same precision:
``attention_accuracy`` (a backend alone) and ``model_accuracy`` (whole models, and real
servers). One process per tree measures both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagealign.compare import attention_accuracy, model_accuracy
from pagealign.compare.accuracy_row import Row
from pagealign.compare.approaches import Approach
from pagealign.compare.tree_worker import Workers, call_all


def measure(approach: Approach, arguments: dict[str, Any]) -> None:
    """In the approach's tree: the outputs of all cases and all models' answers, into the
    files that the arguments name."""
    import torch

    attention = arguments["attention"]
    outputs = [
        attention_accuracy.attend(
            attention_accuracy.Case.of(fields), page_size, approach.name == "aligned"
        )
        for page_size in attention["page_sizes"]
        for fields in attention["cases"]
    ]
    torch.save(outputs, attention["outputs"])
    for job in arguments["models"]:
        torch.save(model_accuracy.answers(job), job["outputs"])


@dataclass(frozen=True)
class Measured:
    """What was measured, and where each tree's outputs lie."""

    cases: list[attention_accuracy.Case]
    page_sizes: tuple[int, ...]
    jobs: list[model_accuracy.Job]
    arguments: dict[str, dict[str, Any]]


def outputs(trees: Workers, quick: bool, out: Path) -> Measured:
    """Let every tree ``measure``; outputs go to the folder ``out``. ``quick``: fewer cases, the
    tiny model alone."""
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    cases = attention_accuracy.cases(quick)
    page_sizes = (64,) if quick else (64, 128)
    jobs = model_accuracy.jobs(quick, out)
    arguments = {
        name: {
            "attention": {
                "cases": [dataclasses.asdict(case) for case in cases],
                "page_sizes": page_sizes,
                "outputs": str(out / f"attention-{name}.pt"),
            },
            "models": [job.arguments(out / f"model-{n}-{name}.pt") for n, job in enumerate(jobs)],
        }
        for name in trees
    }
    call_all(trees, __name__, "measure", {name: (given,) for name, given in arguments.items()})
    return Measured(cases, page_sizes, jobs, arguments)


def rows(measured: Measured) -> list[Row]:
    """The rows of both levels, but for a server's (``model_accuracy.server_rows``)."""
    import torch

    arguments = measured.arguments
    attended = {n: torch.load(given["attention"]["outputs"]) for n, given in arguments.items()}
    found = list(attention_accuracy.rows(measured.cases, measured.page_sizes, attended))
    for n, job in enumerate(measured.jobs):
        answers = {
            name: torch.load(given["models"][n]["outputs"]) for name, given in arguments.items()
        }
        found += model_accuracy.rows(job.subject, job.dtype, answers)
    return found
