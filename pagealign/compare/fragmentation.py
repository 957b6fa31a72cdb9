"""How much of the pool each approach wastes, loses or gives away twice, under a trace.

Approaches differ in two ways here. The *layout* of rows decides who owns which slots: the
aligned tree has its own, varlen and the page-size-1 view share stock's. How attention
*reads* decides the tables that it builds and what it copies: page ids for aligned, slot ids
for the others, and for varlen a gather of all keys and values.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from pagealign.compare import cost_cases
from pagealign.compare.approaches import APPROACHES, approach
from pagealign.compare.parallel import Where, run_all
from pagealign.compare.pool_model import Census, Layout
from pagealign.compare.scheduler_model import Limits, Scheduler
from pagealign.compare.traces import (
    MOST,
    Trace,
    mllama_tiles,
    mllama_with_text,
    read_trace,
    whisper_service,
)
from pagealign.errors import PagealignError
from pagealign.layout import ceil_align

PAGE_SIZES = (1, 16, 32, 64, 128, 256)
# Allocators take any page size; these backends have kernels for some only.
KERNEL_PAGE_SIZES = {"intel_xpu": (64, 128), "torch_native": (), "flashinfer": (), "fa3": ()}
TABLE_ENTRY = 4  # bytes: int32
POINTS = 128
SERIES_FILE = "fragmentation_series.csv"
WHISPER_LARGE_V3, LLAMA_11B_VISION = cost_cases.MODELS


@dataclass(frozen=True)
class Workload:
    """A trace, the model that serves it, and the server's limits."""

    trace: Trace
    model: cost_cases.Model
    limits: Limits


@dataclass(frozen=True)
class Sample:
    """One moment between an allocation and its forward. ``pool``: what the requests that hold
    slots have. The lengths, in tokens over these requests, are what a decode step would read:
    their sums, and the tables of ids that it takes (rows x the longest, as the backends build
    them)."""

    step: int
    running: int
    waiting: int
    pool: Census
    encoder_tokens: int
    decoder_tokens: int
    slot_table: int
    page_table: int


@dataclass(frozen=True)
class Service:
    """A trace served once. ``samples`` are evenly spaced over the steps that ran a batch; what
    does not come from them is counted at every step. ``waited``: float64 ``[N]``, steps until
    the first prefill, NaN for requests that had none."""

    steps: int
    prefills: int
    finished: int
    aborted: int
    retractions: int
    stopped: str
    freed_twice: int
    first_freed_twice: int | None
    peak_running: int
    lost_at_end: int
    waited: np.ndarray
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Row:
    """One trace under one approach at one page size.

    Slots (``reserved`` to ``aliased``: ``pool_model.Census``), ``running`` and the bytes of
    ``tables`` and ``gather`` are means over the samples; waits are in steps. ``fragmentation``:
    reserved slots without a token, as a share. ``gap_per_encoder``: gap slots per encoder slot.
    ``freed_twice``: times that a page was freed while free, ``first_freed_twice`` the step of
    the first; ``owned_twice``: most pages in two requests' rows at once, over the samples;
    ``lost``: pages that never came back. ``capacity``: average requests of the trace, at full
    length, that the pool holds. ``gather_layer``: the largest buffer of one layer.
    ``stopped``: why the scheduler ended before the trace did.
    """

    trace: str
    model: str
    approach: str
    page_size: int
    pool_slots: int
    max_running: int
    requests: int
    finished: int
    aborted: int
    retractions: int
    stopped: str
    steps: int
    prefills: int
    reserved: float
    written: float
    gap: float
    tail: float
    aliased: float
    fragmentation: float
    gap_per_encoder: float
    freed_twice: int
    first_freed_twice: int | None
    owned_twice: int
    lost: int
    running: float
    peak_running: int
    capacity: int
    wait_mean: float
    wait_p95: float
    wait_max: float
    table_bytes: float
    gather_layer_bytes: int
    gather_step_bytes: float


@dataclass(frozen=True)
class Simulation:
    row: Row
    samples: tuple[Sample, ...]


def layout_of(name: str) -> Layout:
    """Whose rows an approach has."""
    return "aligned" if approach(name).tree == "aligned" else "stock"


def serve(workload: Workload, layout: Layout, page_size: int, points: int = POINTS) -> Service:
    """Serve the trace to its end, and keep about ``points`` to twice as many samples (all
    steps, if there are fewer)."""
    scheduler = Scheduler(workload.trace, layout, page_size, workload.limits)
    samples: list[Sample] = []
    stride = 1
    peak_running = 0
    first_freed_twice = None
    while scheduler.step():
        peak_running = max(peak_running, scheduler.running)
        if first_freed_twice is None and scheduler.pool.freed_twice:
            first_freed_twice = scheduler.now
        if scheduler.steps % stride:
            continue
        samples.append(_sample(scheduler))
        if len(samples) == 2 * points:
            samples = samples[1::2]  # those at steps that the new stride divides
            stride *= 2
    if first_freed_twice is None and scheduler.pool.freed_twice:
        first_freed_twice = scheduler.now
    return Service(
        steps=scheduler.steps,
        prefills=scheduler.prefills,
        finished=scheduler.finished,
        aborted=scheduler.aborted,
        retractions=scheduler.retractions,
        stopped=scheduler.stopped,
        freed_twice=scheduler.pool.freed_twice,
        first_freed_twice=first_freed_twice,
        peak_running=peak_running,
        lost_at_end=scheduler.pool.census(scheduler.holding).lost,
        waited=scheduler.waited,
        samples=tuple(samples),
    )


def _sample(scheduler: Scheduler) -> Sample:
    batch, page_size = scheduler.holding, scheduler.page_size
    longest_encoder, longest_decoder = int(batch.encoder_len.max()), int(batch.seq_len.max())
    encoder_pages = ceil_align(longest_encoder, page_size) // page_size
    decoder_pages = ceil_align(longest_decoder, page_size) // page_size
    with_encoder = int(np.count_nonzero(batch.encoder_len))
    return Sample(
        step=scheduler.now,
        running=len(batch),
        waiting=scheduler.waiting,
        pool=scheduler.pool.census(batch),
        encoder_tokens=int(batch.encoder_len.sum()),
        decoder_tokens=int(batch.seq_len.sum()),
        # Stock's encoder table has a row for every request, aligned's for those with one.
        slot_table=len(batch) * (longest_encoder + longest_decoder),
        page_table=with_encoder * encoder_pages + len(batch) * decoder_pages,
    )


def simulate(name: str, workload: Workload, page_size: int, points: int = POINTS) -> Simulation:
    """One approach at one page size."""
    check([workload], [page_size])
    service = serve(workload, layout_of(name), page_size, points)
    return Simulation(_row(name, workload, page_size, service), service.samples)


def sweep(
    workloads: Sequence[Workload],
    page_sizes: Sequence[int] = PAGE_SIZES,
    parallel: Where = "processes",
    jobs: int = -1,
    scheduler: str | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Simulation]:
    """All approaches at all page sizes; a service that two approaches share runs once.

    ``parallel``, ``jobs``, ``scheduler`` and ``progress``: see ``run_all``. PagealignError
    before anything runs where ``check`` refuses.
    """
    check(workloads, page_sizes)
    layouts = sorted({layout_of(one.name) for one in APPROACHES})
    calls = [(w, layout, p) for w in workloads for layout in layouts for p in page_sizes]
    services = run_all(serve, calls, parallel, jobs, scheduler, progress)
    found = {(id(w), *rest): service for (w, *rest), service in zip(calls, services, strict=True)}
    simulations = []
    for workload in workloads:
        for page_size in page_sizes:
            for one in APPROACHES:
                service = found[id(workload), layout_of(one.name), page_size]
                row = _row(one.name, workload, page_size, service)
                simulations.append(Simulation(row, service.samples))
    return simulations


def _row(name: str, workload: Workload, page_size: int, service: Service) -> Row:
    trace, model, limits = workload.trace, workload.model, workload.limits
    samples = service.samples
    pool = {
        field.name: float(np.mean([getattr(sample.pool, field.name) for sample in samples]))
        for field in fields(Census)
    }
    encoder = np.array([sample.encoder_tokens for sample in samples])
    decoder = np.array([sample.decoder_tokens for sample in samples])
    by_page = layout_of(name) == "aligned"
    table = [sample.page_table if by_page else sample.slot_table for sample in samples]
    gathered = model.kv_bytes if name == "varlen" else 0
    waited = service.waited[~np.isnan(service.waited)]
    return Row(
        trace=trace.name,
        model=model.name,
        approach=name,
        page_size=page_size,
        pool_slots=limits.pool_slots,
        max_running=limits.max_running,
        requests=len(trace),
        finished=service.finished,
        aborted=service.aborted,
        retractions=service.retractions,
        stopped=service.stopped,
        steps=service.steps,
        prefills=service.prefills,
        reserved=pool["reserved"],
        written=pool["written"],
        gap=pool["gap"],
        tail=pool["tail"],
        aliased=pool["aliased"],
        fragmentation=1 - pool["written"] / pool["reserved"],
        gap_per_encoder=pool["gap"] / encoder.mean() if encoder.any() else 0.0,
        freed_twice=service.freed_twice,
        first_freed_twice=service.first_freed_twice,
        owned_twice=max(sample.pool.owned_twice for sample in samples),
        lost=service.lost_at_end,
        running=float(np.mean([sample.running for sample in samples])),
        peak_running=service.peak_running,
        capacity=capacity(trace, layout_of(name), page_size, limits.pool_slots),
        wait_mean=float(waited.mean()),
        wait_p95=float(np.quantile(waited, 0.95)),
        wait_max=float(waited.max()),
        table_bytes=float(np.mean(table)) * TABLE_ENTRY,
        gather_layer_bytes=int(np.maximum(encoder, decoder).max()) * gathered,
        gather_step_bytes=gathered
        * float((model.cross_layers * encoder + model.self_layers * decoder).mean()),
    )


def pages_at_full_length(trace: Trace, layout: Layout, page_size: int) -> np.ndarray:
    """Pages that each request has taken before its last forward, int64 ``[N]``. The last token
    generated is never written."""

    def pages(tokens: np.ndarray) -> np.ndarray:
        return -(-tokens // page_size)

    decoder = trace.prompt_len + trace.decode_len - 1
    if layout == "aligned":
        return pages(trace.encoder_len) + pages(decoder)
    prefill = pages(trace.encoder_len + trace.prompt_len)
    return prefill + pages(decoder) - pages(trace.prompt_len)


def page_sizes_of(backend: str | None) -> tuple[int, ...]:
    """What is swept if nobody says: what the backend's kernels take, or all of PAGE_SIZES."""
    return KERNEL_PAGE_SIZES.get(backend or "") or PAGE_SIZES


def capacity(trace: Trace, layout: Layout, page_size: int, pool_slots: int) -> int:
    """Average requests of the trace, at their full length, that the pool's pages hold."""
    mean = pages_at_full_length(trace, layout, page_size).mean()
    return int(pool_slots // page_size / mean)


def check(
    workloads: Sequence[Workload], page_sizes: Sequence[int], backend: str | None = None
) -> None:
    """PagealignError, in a line, for what can't be simulated: a page size below 1 or one that
    ``backend``'s kernels refuse, two traces of one name, limits below 1, a pool too small for
    one of the requests."""
    if backend is not None and backend not in KERNEL_PAGE_SIZES:
        raise PagealignError(
            f"no page sizes are known for {backend!r}: use {', '.join(KERNEL_PAGE_SIZES)}, or none"
        )
    for page_size in page_sizes:
        if not 1 <= page_size <= MOST:
            raise PagealignError(f"page size {page_size}: give 1 to {MOST}")
        kernels = KERNEL_PAGE_SIZES.get(backend or "")  # none: any
        if kernels and page_size not in kernels:
            raise PagealignError(
                f"page size {page_size}: {backend} has kernels for "
                f"{' and '.join(map(str, kernels))} only"
            )
    names = [workload.trace.name for workload in workloads]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PagealignError(f"two traces are named {min(twice)}: rename the file of one")
    for workload in workloads:
        limits = workload.limits
        for name in ("pool_slots", "max_running", "max_prefill_tokens"):
            if getattr(limits, name) < 1:
                raise PagealignError(f"{name} is {getattr(limits, name)}; give at least 1")
        if not 0 <= limits.new_token_ratio <= 1:
            raise PagealignError(f"new_token_ratio is {limits.new_token_ratio}; give 0 to 1")
        for page_size in page_sizes:
            _check_fits(workload.trace, page_size, limits.pool_slots)


def _check_fits(trace: Trace, page_size: int, pool_slots: int) -> None:
    """SGLang admits a request if its prompt, in whole pages, its answer, and one page more are
    less than the pool."""
    reserve = -(-trace.encoder_len // page_size) * page_size
    needs = -(-(reserve + trace.prompt_len) // page_size) * page_size
    needs = needs + trace.decode_len + page_size + 1
    pool = pool_slots // page_size * page_size
    if (needs > pool).any():
        request = int(np.argmax(needs))
        raise PagealignError(
            f"trace {trace.name}, request {request}: needs a pool of {needs[request]} slots at "
            f"page size {page_size}, and {pool_slots} are {pool} in whole pages; give more"
        )


def workloads(quick: bool) -> list[Workload]:
    """The three services that the report shows: about as many requests as the pool holds, so
    that it is full at times."""
    count = 500 if quick else 10_000
    limits = Limits(pool_slots=131_072)
    return [
        Workload(whisper_service(count, rate=0.5), WHISPER_LARGE_V3, limits),
        Workload(mllama_tiles(count, rate=0.2), LLAMA_11B_VISION, limits),
        Workload(mllama_with_text(count, rate=0.4), LLAMA_11B_VISION, limits),
    ]


def run(
    quick: bool,
    out: Path,
    say: Callable[..., None],
    extra: Sequence[Workload] = (),
    page_sizes: Sequence[int] = PAGE_SIZES,
    backend: str | None = None,
    parallel: Where = "processes",
    jobs: int = -1,
    scheduler: str | None = None,
) -> list[Row]:
    """Sweep the services and ``extra`` ones; the samples go to ``out / SERIES_FILE``.

    ``backend`` refuses ``page_sizes`` that its kernels don't take; without one the sweep is
    about the allocator, which takes any. PagealignError before anything runs, as ``check``.
    """
    served = [*workloads(quick), *extra]
    check(served, page_sizes, backend)
    simulations = sweep(
        served,
        page_sizes,
        parallel=parallel,
        jobs=jobs,
        scheduler=scheduler,
        progress=lambda done, of: say(f"fragmentation: {done} of {of} services", done, of),
    )
    write_series(simulations, out / SERIES_FILE)
    return [simulation.row for simulation in simulations]


def user_workload(
    path: Path, model: cost_cases.Model, limits: Limits, steps_per_second: float = 1.0
) -> Workload:
    """A user's trace file as a workload."""
    return Workload(read_trace(path, steps_per_second), model, limits)


def write_series(simulations: Sequence[Simulation], path: Path) -> None:
    """The samples as CSV, a line each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for simulation in simulations:
            row = simulation.row
            for sample in simulation.samples:
                line = {"trace": row.trace, "approach": row.approach, "page_size": row.page_size}
                line |= asdict(sample)
                line |= line.pop("pool")
                if writer is None:
                    writer = csv.DictWriter(file, line)
                    writer.writeheader()
                writer.writerow(line)
