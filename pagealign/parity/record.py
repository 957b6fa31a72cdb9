"""Records workloads on the tree that is first on ``sys.path``: one process, one tree."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagealign.bed import Bed, Result
from pagealign.parity.kernels import Kernels
from pagealign.parity.recorder import Recorder
from pagealign.parity.recording import Writer
from pagealign.parity.workloads import Workload


def record(workloads: Sequence[Workload], models: Path, out: Path) -> None:
    """Run each workload and write ``out/NAME.zip`` and, last, ``out/answers.json``: per
    workload the results of its requests, or what killed the scheduler."""
    answers = {}
    for number, workload in enumerate(workloads):
        answers[workload.name] = run(workload, models, recording_path(out, number))
    (out / "answers.json").write_text(json.dumps(answers))


def recording_path(out: Path, number: int) -> Path:
    return out / f"{number:03}.zip"


def run(workload: Workload, models: Path, path: Path) -> dict:
    """``{"results": [...], "crash": text or None}`` of one workload, recorded to ``path``."""
    results: list[Result] = []
    crash = None
    kernels = Kernels()
    with kernels.ready(workload.backend), Writer(path) as writer, _bed(workload, models) as bed:
        recorder = Recorder(bed, kernels, writer)
        for burst in workload.bursts:
            writer.add(bed.steps, "burst", "name", burst.name)
            rids = [f"r{len(bed.results) + i:06}" for i in range(len(burst.requests))]
            try:
                found = bed.run(burst.requests)
            except Exception as fault:  # whatever kills a scheduler
                crash = f"{type(fault).__name__}: {fault}"
                writer.add(recorder.step, "scheduler", "crash", crash)
                break
            recorder.finish(rids, found)
            results += found
    return {"results": [dataclasses.asdict(r) for r in results], "crash": crash}


@contextlib.contextmanager
def _bed(workload: Workload, models: Path) -> Iterator[Bed]:
    bed = Bed(models / workload.model, workload.backend, workload.page_size, **workload.options)
    try:
        yield bed
    finally:
        bed.close()
