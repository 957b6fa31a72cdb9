"""The whole benchmark: which backends run, every shape on each, the files."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from pagealign import __version__, report
from pagealign.bench import machine, projection, tables
from pagealign.bench.backends import all_backends
from pagealign.bench.backends.interface import Backend
from pagealign.bench.measure import measure
from pagealign.bench.records import FILE, Row, Run, Status, to_json
from pagealign.bench.shapes import grid
from pagealign.bench.timing import Effort
from pagealign.errors import PagealignError

SECONDS = {"quick": 60.0, "full": 360.0}  # per backend, inputs and checks included
OVERTIME = 1.2  # what a busy machine may add before shapes are left out, the last ones first
LEAST = 3
MOST = 25


def chosen(names: Sequence[str], known: Sequence[Backend]) -> tuple[list[Backend], list[Status]]:
    """The backends to run, and what is to be said of all.

    Without names, all that can run, plain PyTorch only if nothing else can. PagealignError
    for a name that is unknown or can't run.
    """
    status = [Status(one.name, one.device, one.why_not()) for one in known]
    why_not = {one.name: one.why_not for one in status}
    for name in names:
        if name not in why_not:
            raise PagealignError(f"no backend {name!r}: use one of {', '.join(why_not)}")
        if why_not[name]:
            raise PagealignError(f"the backend {name} can't run here: {why_not[name]}")
    able = [one for one in known if not why_not[one.name]]
    if names:
        return [one for one in able if one.name in names], status
    return [one for one in able if one.name != "torch"] or able, status


def run_all(
    backends: Sequence[Backend],
    quick: bool,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Row], list[str]]:
    """Rows of every shape on every backend, and what was left out. What time one shape leaves
    over is the others'."""
    rows, left_out = [], []
    shapes, page_sizes = grid(quick)
    seconds = SECONDS["quick" if quick else "full"]
    for backend in backends:
        start = time.monotonic()
        for number, shape in enumerate(shapes):
            spent = time.monotonic() - start
            why = backend.refuses(shape)
            if spent > OVERTIME * seconds:
                why = "no time left: the machine was slow or busy"
            if why:
                left_out.append(f"{backend.name}, {shape}: {why}")
                continue
            say(f"{backend.name} {number + 1}/{len(shapes)}: {shape}")
            effort = Effort(LEAST, MOST, max(0.0, seconds - spent) / (len(shapes) - number))
            rows += measure(shape, backend, page_sizes, effort, clock)
    return rows, left_out


def about(quick: bool, backends: Sequence[Backend], busy: tuple[float, float]) -> dict[str, str]:
    """What the figures depend on."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "form": "quick" if quick else "full",
        "pagealign": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{f"{b.name}: {name}": value for b in backends for name, value in b.versions().items()},
        **machine.processor(),
        "last-level cache": f"{machine.last_level_cache_bytes() / 2**20:.0f} MiB",
        "threads": f"{torch.get_num_threads()}, each on a core of its own",
        "load before and after": f"{busy[0]:.1f}, {busy[1]:.1f} (1 minute's average)",
    }


def run(quick: bool, out: Path, names: Sequence[str], cpu_time: bool) -> int:
    """Measure, print the tables, write the files. Returns 1 if a kernel was wrong.

    ``cpu_time``: count the processor's time and not the wall's, so that what else runs on the
    machine counts less. PagealignError if that means nothing: with threads, which spin while
    they wait for each other, and on a GPU.
    """
    console = report.console()
    backends, status = chosen(names, all_backends())
    if cpu_time and (torch.get_num_threads() > 1 or any(b.device != "cpu" for b in backends)):
        raise PagealignError("--cpu-time is for one thread on a CPU: add --threads 1")
    report.out_folder(out)
    before = machine.busy()
    with report.progress(console) as say, torch.inference_mode():
        clock = time.process_time if cpu_time else time.perf_counter
        rows, left_out = run_all(backends, quick, say, clock)
    found = Run(
        about=about(quick, backends, (before, machine.busy()))
        | {"clock": "processor time" if cpu_time else "wall time"},
        backends=tuple(status),
        rows=tuple(rows),
        steps=tuple(projection.steps(rows)),
        cross_overs=tuple(projection.cross_overs(rows)),
        left_out=tuple(left_out),
    )
    for table in tables.tables(found):
        console.print(report.table(table.rows, table.columns, table.title))
    for sentence in tables.sentences(found):
        console.print(sentence, soft_wrap=True, highlight=False)
    written = [
        report.write(out / FILE, to_json(found)),
        report.write(out / "kernels.md", markdown(found)),
    ]
    for path in written:
        console.print(f"written: {path}", soft_wrap=True)
    for row in found.wrong:
        console.print(f"WRONG: {row}", style="red", soft_wrap=True, markup=False)
    return int(bool(found.wrong))


def markdown(found: Run) -> str:
    parts = ["# Attention kernels"]
    parts += [f"- {sentence}" for sentence in tables.sentences(found)]
    for table in tables.tables(found):
        body = report.markdown(table.rows, table.columns)
        parts.append(f"## {table.title}\n\n{table.note}\n\n{body}")
    parts.append("; ".join(f"{name}: {value}" for name, value in found.about.items()))
    parts += [f"{s.name} did not run: {s.why_not}." for s in found.backends if s.why_not]
    parts += [f"Left out: {one}." for one in found.left_out]
    return "\n\n".join(parts) + "\n"


def list_backends() -> int:
    """Say which backends can run here and why not. Returns 0."""
    console = report.console()
    columns = (
        report.Column("backend", lambda s: s.name),
        report.Column("device", lambda s: s.device),
        report.Column("runs here", lambda s: "no" if s.why_not else "yes"),
        report.Column("why not", lambda s: s.why_not or ""),
    )
    console.print(report.table(chosen([], all_backends())[1], columns))
    return 0
