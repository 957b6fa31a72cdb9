"""Records workloads on the tree that is first on ``sys.path``: one process, one tree."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from pagealign.bed import Bed, Result
from pagealign.graph_decode import GraphDecode
from pagealign.parity.kernels import Kernels
from pagealign.parity.recorder import Recorder
from pagealign.parity.recording import Writer
from pagealign.parity.workloads import Workload, select


def record(form: str, models: str, out: str, imports: Sequence[str] = ()) -> None:
    """Run each workload of ``form`` and write ``out/NNN.zip`` in their order and, last,
    ``out/answers.json``: what their requests were answered, or what killed the scheduler;
    where stock is known to be wrong, also each request by itself, at page size 1 on
    torch_native without a prefix cache, as ``alone``. ``imports`` are modules to import
    first."""
    for name in imports:
        import_module(name)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    answers = {}
    for number, workload in enumerate(select(form)):
        answer = run(workload, Path(models), recording_path(folder, number))
        if workload.expected:
            answer["alone"] = by_itself(workload, Path(models))
        answers[workload.name] = answer
        print(f"recorded {workload.name}", flush=True)
    (folder / "answers.json").write_text(json.dumps(answers))


def recording_path(out: Path, number: int) -> Path:
    return out / f"{number:03}.zip"


def by_itself(workload: Workload, models: Path) -> list[dict]:
    """Each request of the workload alone, from its arrival to its end: the reference."""
    requests = [request for burst in workload.bursts for request in burst.requests]
    bed = Bed(models / workload.model, "torch_native", 1)
    try:
        found = [bed.run_one(dataclasses.replace(r, arrive_at=0, abort_at=None)) for r in requests]
    finally:
        bed.close()
    return [dataclasses.asdict(result) for result in found]


def run(workload: Workload, models: Path, path: Path) -> dict:
    """``{"results": [...], "crash": text or None}`` of one workload, recorded to ``path``."""
    results: list[Result] = []
    crash = None
    kernels = Kernels()
    with kernels.ready(workload.backend), Writer(path) as writer, _bed(workload, models) as bed:
        recorder = Recorder(bed, kernels, writer)
        try:
            if workload.graph:
                GraphDecode(bed)
            for burst in workload.bursts:
                writer.add(bed.steps, "burst", "name", burst.name)
                rids = [f"r{len(bed.results) + i:06}" for i in range(len(burst.requests))]
                found = bed.run(burst.requests)
                recorder.finish(rids, found)
                results += found
        except Exception as fault:  # whatever kills a scheduler
            crash = f"{type(fault).__name__}: {fault}"
            writer.add(recorder.step, "scheduler", "crash", crash)
    return {"results": [dataclasses.asdict(r) for r in results], "crash": crash}


@contextlib.contextmanager
def _bed(workload: Workload, models: Path) -> Iterator[Bed]:
    bed = Bed(models / workload.model, workload.backend, workload.page_size, **workload.options)
    try:
        yield bed
    finally:
        bed.close()
