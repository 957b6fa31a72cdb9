"""``pagealign compare``: everything measured, one report."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from pagealign import report
from pagealign.compare import (
    accuracy,
    cost,
    cost_cases,
    fragmentation,
    kernels,
    model_accuracy,
    page,
    results,
    summary,
)
from pagealign.compare.fragmentation import Limits, Workload
from pagealign.compare.parallel import Where
from pagealign.compare.parallel import check as check_parallel
from pagealign.compare.results import Results
from pagealign.compare.tree_worker import workers
from pagealign.errors import PagealignError
from pagealign.server import terminable

MODELS = {model.name.lower(): model for model in cost_cases.MODELS}


def user_workloads(
    traces: Sequence[Path], model: str, pool_slots: int, max_running: int, rate: float
) -> list[Workload]:
    """A workload for each trace file; PagealignError for a bad one or an unknown model."""
    if model not in MODELS:
        raise PagealignError(f"no model {model!r}: use one of {', '.join(MODELS)}")
    limits = Limits(pool_slots=pool_slots, max_running=max_running)
    return [
        fragmentation.user_workload(path, MODELS[model], limits, steps_per_second=rate)
        for path in traces
    ]


def measure(
    quick: bool,
    out: Path,
    say: Callable[..., None],
    extra: Sequence[Workload],
    page_sizes: Sequence[int],
    backend: str | None,
    parallel: Where,
    jobs: int,
    scheduler: str | None,
) -> Results:
    """Measure; what can be refused is refused before anything runs."""
    check_parallel(parallel, jobs, scheduler)
    served = [*fragmentation.workloads(quick), *extra]
    fragmentation.check(served, page_sizes, backend)
    folder = out / "accuracy"
    with workers(out) as trees:  # they import SGLang while the pools are simulated
        pools = fragmentation.run(
            quick, out, say, extra, page_sizes, backend, parallel, jobs, scheduler
        )
        costs = cost.run(trees, quick, say)
        say("accuracy: the backends")
        measured = accuracy.outputs(trees, quick, folder)
    with contextlib.nullcontext({}) if quick else model_accuracy.servers(folder) as started:
        say("accuracy: float64")  # while the servers start
        errors = accuracy.rows(measured)
        if started:
            say("accuracy: a server per tree")
            errors += model_accuracy.server_rows(started)
    return Results(
        fragmentation=results.frame(pools),
        samples=pd.read_csv(out / fragmentation.SERIES_FILE),
        cost=results.frame(costs),
        accuracy=results.frame(errors),
        about=results.about(quick),
    )


def run(
    quick: bool,
    out: Path,
    traces: Sequence[Path] = (),
    model: str = "whisper-large-v3",
    pool_slots: int = 131_072,
    max_running: int = 256,
    rate: float = 1.0,
    page_sizes: Sequence[int] = (),
    backend: str | None = None,
    parallel: Where = "processes",
    jobs: int = -1,
    scheduler: str | None = None,
) -> int:
    """Measure, print the summary, write the report to ``out``. Returns the exit code: 1 if the
    aligned tree is not right somewhere. ``page_sizes``: all that ``backend``'s kernels take, or
    1 to 256, if none."""
    from transformers.utils import logging

    page_sizes = page_sizes or fragmentation.page_sizes_of(backend)

    logging.disable_progress_bar()  # there is one already
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # transformers' own
    console, out = report.console(), out.absolute()
    extra = user_workloads(traces, model, pool_slots, max_running, rate)
    timed = kernels.section(out.parent / "bench" / kernels.FILE)
    report.out_folder(out)
    with report.progress(console) as say, terminable():
        found = measure(quick, out, say, extra, page_sizes, backend, parallel, jobs, scheduler)
        say("the report")
        written = [
            *results.write(found, out),
            report.write(out / "compare.md", page.markdown(found, timed)),
            report.write(out / "compare.html", page.html(found, timed)),
        ]
    for sentence in summary.sentences(found):
        said = sentence.replace("**", "")
        console.print(f"- {said}", soft_wrap=True, markup=False, highlight=False)
    for path in written:
        console.print(f"written: {path}", soft_wrap=True)
    faults = summary.faults_of_aligned(found)
    for fault in faults:
        console.print(f"aligned: {fault}", style="red", soft_wrap=True, markup=False)
    return int(bool(faults))
