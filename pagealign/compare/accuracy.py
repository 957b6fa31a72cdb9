"""Accuracy: how far each approach's results are from the truth.

Two levels, both against float64 and beside plain code of the same precision:
``attention_accuracy`` (a backend alone) and ``model_accuracy`` (whole models, and real
servers). One process per tree measures both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagealign.compare import attention_accuracy, model_accuracy
from pagealign.compare.accuracy_row import Row
from pagealign.compare.approaches import APPROACHES, Approach, run_in_tree, serve
from pagealign.server import POOL_CHECKS


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


def run(quick: bool, out: Path, say: Callable[[str], None]) -> list[Row]:
    """The rows of both levels; logs and outputs go to the folder ``out``. ``quick``: fewer
    cases, the tiny model alone, no server."""
    import torch

    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    cases = attention_accuracy.cases(quick)
    page_sizes = (64,) if quick else (64, 128)
    jobs = model_accuracy.jobs(quick, out)
    attended, answered = {}, {}
    for one in APPROACHES:
        say(f"accuracy: {one.title}")
        outputs = out / f"attention-{one.name}.pt"
        models = [job.arguments(out / f"model-{n}-{one.name}.pt") for n, job in enumerate(jobs)]
        arguments = {
            "attention": {
                "cases": [dataclasses.asdict(case) for case in cases],
                "page_sizes": page_sizes,
                "outputs": str(outputs),
            },
            "models": models,
        }
        # Stock and varlen free pages twice, which SGLang's checks of the pool don't stand.
        checks_off = dict.fromkeys(POOL_CHECKS, "0")
        log = out / f"accuracy-{one.name}.log"
        run_in_tree(one, "pagealign.compare.accuracy", arguments, log, **checks_off)
        attended[one.name] = torch.load(outputs)
        answered[one.name] = [torch.load(model["outputs"]) for model in models]
    say("accuracy: float64")
    rows = list(attention_accuracy.rows(cases, page_sizes, attended))
    for n, job in enumerate(jobs):
        answers = {name: found[n] for name, found in answered.items()}
        rows += model_accuracy.rows(job.subject, job.dtype, answers)
    return rows if quick else [*rows, *model_accuracy.server_rows(out, say)]


if __name__ == "__main__":
    serve(measure)
