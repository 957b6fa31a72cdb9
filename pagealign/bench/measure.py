"""One shape on one backend: check every kernel against float64, then time them in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pagealign.bench import bandwidth
from pagealign.bench.backends.interface import Backend, Variant
from pagealign.bench.inputs import Inputs, make_inputs
from pagealign.bench.records import BASE_PAGE, Approach, Row
from pagealign.bench.shapes import Shape
from pagealign.bench.timing import Effort, Spread, interleaved, ratio, spread
from pagealign.kernels.reference import Errors, ragged_attention, twice_plain_error

CACHES_OVER = 3  # the input sets together are that many times the last-level cache
UNKNOWN_CACHE = 512 << 20  # bytes, no smaller than any device's
MOST_SETS = 64


def measure(
    shape: Shape,
    backend: Backend,
    page_sizes: tuple[int, ...],
    effort: Effort,
    clock: Callable[[], float],
) -> list[Row]:
    """A row per variant. One that fails its check is not timed: its times are NaN."""
    sets = sets_for(shape.kv_bytes, backend.cache_bytes())
    inputs = make_inputs(shape, sets, backend.device)
    calls = {v: backend.prepare(v, inputs) for v in backend.variants(shape, page_sizes)}
    errors = check(inputs, {variant: ways[0]() for variant, ways in calls.items()})
    timed = {variant: ways for variant, ways in calls.items() if errors[variant].ok}
    floors = bandwidth.calls(shape.kv_bytes, sets, backend.device)
    times = interleaved(timed | floors, backend.wait, effort, clock=clock)
    return rows(shape, backend.name, sets, times, errors)


def sets_for(kv_bytes: int, cache_bytes: int) -> int:
    """How many input sets keep a call from finding its inputs in the cache."""
    wanted = CACHES_OVER * (cache_bytes or UNKNOWN_CACHE)
    return min(MOST_SETS, max(1, math.ceil(wanted / kv_bytes)))


def check(inputs: Inputs, results: dict[Variant, Tensor]) -> dict[Variant, Errors]:
    """Errors of the first input set's results: attention against float64 in the first and
    the last request, a copy against what should be in it."""
    shape = inputs.shape
    truth, plain = _references(inputs)
    rows = first_and_last(shape)
    found = {}
    for variant, result in results.items():
        if variant.approach is Approach.gather:
            want = torch.stack([inputs.k[0], inputs.v[0]]).flatten(1, 2)
            found[variant] = twice_plain_error(result, want, want, max_eps=0, mean_eps=0)
        else:
            out = result.view(shape.batch, shape.q_len, shape.heads, shape.head_size)
            found[variant] = twice_plain_error(out[rows].flatten(0, 1).cpu(), truth, plain)
    return found


def first_and_last(shape: Shape) -> list[int]:
    return [0, shape.batch - 1] if shape.batch > 1 else [0]


def _references(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Attention of the first and the last request, in float64 and in the inputs' type."""
    shape = inputs.shape
    rows = first_and_last(shape)
    q = inputs.q[0].view(shape.batch, shape.q_len, shape.heads, shape.head_size)[rows].cpu()
    k, v = (x[0][rows].flatten(0, 1).cpu() for x in (inputs.k, inputs.v))
    counts = torch.arange(len(rows) + 1)
    cu_q, cu_k = counts * shape.q_len, counts * shape.kv_len
    return tuple(
        ragged_attention(
            q.flatten(0, 1), k, v, cu_q, cu_k, scale=shape.scale, causal=shape.causal, dtype=dtype
        ).out
        for dtype in (torch.float64, q.dtype)
    )


def rows(
    shape: Shape,
    backend: str,
    sets: int,
    times: dict[Variant | str, Sequence[float]],
    errors: dict[Variant, Errors],
) -> list[Row]:
    """``times``: seconds per round, of the variants that were timed and of ``bandwidth``'s
    two. Ratios are NaN if nothing was timed in place at page size 64."""
    floor = [
        bandwidth.floor_seconds(read, copy)
        for read, copy in zip(times[bandwidth.READ], times[bandwidth.COPY], strict=True)
    ]
    base = fastest(times, Approach.in_place, BASE_PAGE)
    out = []
    for variant, error in errors.items():
        own = times.get(variant)
        took = spread(own) if own else NOT_TIMED
        to_base = ratio(own, times[base]) if own and base else NOT_TIMED
        out.append(
            Row(
                backend=backend,
                approach=variant.approach.value,
                page_size=variant.page_size,
                kernel=variant.kernel,
                model=shape.model,
                kind=shape.kind,
                phase=shape.phase,
                batch=shape.batch,
                q_len=shape.q_len,
                kv_len=shape.kv_len,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_size=shape.head_size,
                dtype=shape.dtype,
                kv_bytes=shape.kv_bytes,
                sets=sets,
                rounds=took.count,
                median_s=took.median,
                low_s=took.low,
                high_s=took.high,
                least_s=took.least,
                floor_s=spread(floor).median,
                floor_fraction=ratio(floor, own).median if own else math.nan,
                ratio=to_base.median,
                ratio_low=to_base.low,
                ratio_high=to_base.high,
                max_error=error.max_error,
                max_allowed=error.max_allowed,
                within=error.ok,
            )
        )
    return out


NOT_TIMED = Spread(*[math.nan] * 4, count=0)


def fastest(
    times: dict[Variant | str, Sequence[float]], approach: Approach, page_size: int
) -> Variant | None:
    """The variant with the least median among those of an approach and page size."""
    found = [
        variant
        for variant in times
        if isinstance(variant, Variant)
        and (variant.approach, variant.page_size) == (approach, page_size)
    ]
    return min(found, key=lambda variant: spread(times[variant]).median, default=None)
