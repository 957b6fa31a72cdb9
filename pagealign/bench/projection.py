"""A whole decode step's attention, added up from kernel times, and who would win where.

Only attention: projections and MLPs are the same whatever the approach. A step of a model
is ``layers`` calls of cross-attention over the encoder and as many of self-attention over
what has been decoded. Times between measured lengths are interpolated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagealign.bench.records import BASE_PAGE, Approach, CrossOver, Row, Step
from pagealign.bench.shapes import BASE, LARGE, TURBO

# a model, and the one whose kernels were timed
MODELS = ((LARGE, LARGE), (TURBO, LARGE), (BASE, BASE))
# approach and page size of the pool, the first one being what the others are compared with
WAYS = (
    (Approach.in_place, BASE_PAGE),
    (Approach.in_place, 128),
    (Approach.gather_varlen, BASE_PAGE),
    (Approach.page1_view, BASE_PAGE),
)


@dataclass(frozen=True)
class Line:
    """Seconds against decoded length, straight between the measured points."""

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, length: float) -> float:
        """ValueError outside the measured lengths."""
        first, last = self.lengths[0], self.lengths[-1]
        if not first <= length <= last:
            raise ValueError(f"{length} is not in {first} .. {last}")
        right = min(bisect_right(self.lengths, length), len(self.lengths) - 1)
        left = max(0, right - 1)
        if left == right:
            return self.seconds[left]
        share = (length - self.lengths[left]) / (self.lengths[right] - self.lengths[left])
        return self.seconds[left] + share * (self.seconds[right] - self.seconds[left])


def steps(rows: Sequence[Row]) -> list[Step]:
    """For each model, way and batch that both kinds of attention were timed for."""
    out = []
    for backend, model, way, batch, cross_s, line in _timed(rows):
        for decoded, self_s in zip(line.lengths, line.seconds, strict=True):
            out.append(
                Step(
                    backend=backend,
                    model=model.name,
                    layers=model.layers,
                    approach=way[0].value,
                    page_size=way[1],
                    batch=batch,
                    decoded=decoded,
                    cross_s=model.layers * cross_s,
                    self_s=model.layers * self_s,
                )
            )
    return out


def cross_overs(rows: Sequence[Row]) -> list[CrossOver]:
    """The ways of other approaches against the first of ``WAYS``. Self-attention of a model
    whose kernels are another's is not told twice."""
    timed = list(_timed(rows))
    base = {
        (backend, model.name, batch): (cross_s, line)
        for backend, model, way, batch, cross_s, line in timed
        if way == WAYS[0]
    }
    out = []
    for backend, model, way, batch, cross_s, line in timed:
        if way[0] == WAYS[0][0] or (backend, model.name, batch) not in base:
            continue
        base_cross, base_line = base[backend, model.name, batch]
        parts = {"step": cross_s - base_cross}
        if (model, model) in MODELS:
            parts["self-attention"] = 0.0
        for part, lead in parts.items():
            out.append(
                CrossOver(
                    backend=backend,
                    model=model.name,
                    approach=way[0].value,
                    page_size=way[1],
                    batch=batch,
                    part=part,
                    faster=faster(line, base_line, lead),
                    measured=(line.lengths[0], line.lengths[-1]),
                )
            )
    return out


def faster(line: Line, base: Line, lead: float) -> tuple[tuple[float, float], ...]:
    """Where ``line + lead < base``, as ``from .. to`` pairs; both have the same lengths."""
    points = [
        (length, line.at(length) + lead - base.at(length))
        for length in sorted({*line.lengths, *base.lengths})
        if base.lengths[0] <= length <= base.lengths[-1]
        and line.lengths[0] <= length <= line.lengths[-1]
    ]
    found: list[list[float]] = []
    if len(points) == 1 and points[0][1] < 0:
        return ((points[0][0], points[0][0]),)
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= 0 and y1 >= 0:
            continue
        zero = x0 + (x1 - x0) * y0 / (y0 - y1) if y0 != y1 else x0
        start, end = (x0 if y0 < 0 else zero), (x1 if y1 < 0 else zero)
        if found and found[-1][1] == start:
            found[-1][1] = end
        else:
            found.append([start, end])
    return tuple((start, end) for start, end in found)


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest of the rows that were right and timed."""
    return min((r for r in rows if r.within and r.rounds), key=lambda r: r.median_s, default=None)


def _timed(rows: Sequence[Row]):
    """Backend, model, way, batch, seconds of one cross-attention, and of self-attention."""
    decode = [r for r in rows if r.phase == "decode" and r.dtype == "bfloat16"]
    for backend in dict.fromkeys(r.backend for r in decode):
        for model, timed in MODELS:
            own = [r for r in decode if r.backend == backend and r.model == timed.name]
            for batch in sorted({r.batch for r in own}):
                for way in WAYS:
                    of_way = [r for r in own if (r.approach, r.page_size, r.batch) == (*way, batch)]
                    cross = best(r for r in of_way if r.kind == "cross")
                    line = _line(r for r in of_way if r.kind == "self")
                    if cross and line:
                        yield backend, model, way, batch, cross.median_s, line


def _line(rows: Iterable[Row]) -> Line | None:
    by_length: dict[int, list[Row]] = {}
    for row in rows:
        by_length.setdefault(row.kv_len, []).append(row)
    points = [(length, best(found)) for length, found in sorted(by_length.items())]
    points = [(length, row.median_s) for length, row in points if row]
    return Line(*map(tuple, zip(*points, strict=True))) if points else None
