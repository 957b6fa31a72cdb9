"""The run's tables and sentences, for the terminal, Markdown and the comparison's report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagealign.bench.records import BASE_PAGE, Approach, CrossOver, Row, Run, Step
from pagealign.report import Column

TITLES = {
    Approach.in_place: "in place",
    Approach.page1_view: "page-size-1 view",
    Approach.gather_varlen: "gather + varlen",
    Approach.gather: "the gather alone",
}
HEADLINE = ("whisper-large-v3", "cross", "decode", 8, "bfloat16")
KERNELS = {  # long names, as a table can hold them
    "single_query_cached_kv_attention": "single_query_cached_kv",
    "scaled_dot_product_attention": "PyTorch's sdpa",
    "BatchDecodeWithPagedKVCacheWrapper": "BatchDecodeWithPagedKVCache",
    "BatchPrefillWithPagedKVCacheWrapper": "BatchPrefillWithPagedKVCache",
    "BatchPrefillWithRaggedKVCacheWrapper": "BatchPrefillWithRaggedKVCache",
}
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
SHAPE = ("model", "kind", "phase", "batch", "q_len", "kv_len", "dtype")


@dataclass(frozen=True)
class Table:
    """``note`` says what the columns mean."""

    title: str
    note: str
    columns: tuple[Column, ...]
    rows: Sequence[Any]


def milliseconds(seconds: float) -> str:
    """Three digits: ``87.7``, ``2.10``, ``0.0456``; nothing for what was not timed."""
    if math.isnan(seconds):
        return ""
    value = 1000 * seconds
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, digits)}f}"


def times(value: float) -> str:
    """A ratio: ``35``, ``9.1``, ``0.75``."""
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def title(approach: str, page_size: int) -> str:
    """``in place, 64``; the other approaches start from rows on pages of 64."""
    found = TITLES[Approach(approach)]
    return f"{found}, {page_size}" if approach == Approach.in_place else found


def headline(run: Run) -> list[Row]:
    """The rows of large-v3's decode step at batch 8."""
    key = HEADLINE
    return [r for r in run.rows if (r.model, r.kind, r.phase, r.batch, r.dtype) == key]


def fastest(rows: Sequence[Row], approach: str, page_size: int) -> Row | None:
    """Of the kernels that were right."""
    found = [r for r in rows if (r.approach, r.page_size) == (approach, page_size)]
    found = [r for r in found if r.within and r.rounds]
    return min(found, key=lambda r: r.median_s, default=None)


def tables(run: Run) -> list[Table]:
    """The headline's kernels one by one, every shape, whole steps, who would win where."""
    return [_kernels(run), _shapes(run), _steps(run), _cross_overs(run)]


def _kernels(run: Run) -> Table:
    return Table(
        "Kernels: one layer's cross-attention of a Whisper-large-v3 decode step, batch 8",
        "bf16, 20 heads of 64, 1500 keys per request. Times are medians with quartiles; ratio: "
        f"to the fastest kernel in place at page size {BASE_PAGE}, round by round; of the floor: "
        "the time to read the keys and values once, measured in the same rounds, over the time "
        "taken; error: the largest against float64 and what the rule allows.",
        (
            Column("backend", lambda r: r.backend),
            Column("approach", lambda r: TITLES[Approach(r.approach)]),
            Column("page", lambda r: str(r.page_size), right=True),
            Column("kernel", lambda r: KERNELS.get(r.kernel, r.kernel)),
            Column("ms", lambda r: milliseconds(r.median_s), right=True),
            Column(
                "quartiles",
                lambda r: f"{milliseconds(r.low_s)} .. {milliseconds(r.high_s)}",
                right=True,
            ),
            Column("ratio", lambda r: times(r.ratio), right=True),
            Column("of the floor", lambda r: _percent(r.floor_fraction), right=True),
            Column(
                "error",
                lambda r: f"{r.max_error:.1e} of {r.max_allowed:.1e}" if r.within else "WRONG",
                right=True,
            ),
        ),
        headline(run),
    )


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0%}"


def _shapes(run: Run) -> Table:
    """A line per backend and shape; the ratio of each approach's fastest kernel."""
    groups: dict[tuple, list[Row]] = {}
    for row in run.rows:
        key = (row.backend, *(getattr(row, name) for name in SHAPE))
        groups.setdefault(key, []).append(row)
    places = sorted({r.page_size for r in run.rows if r.approach == Approach.in_place})

    def cell(approach: str, page_size: int):
        def text(rows: list[Row]) -> str:
            found = fastest(rows, approach, page_size)
            return times(found.ratio) if found else ""

        return text

    def base(rows: list[Row]) -> Row | None:
        return fastest(rows, Approach.in_place, BASE_PAGE)

    first = [
        Column("model", lambda rows: rows[0].model),
        Column("attention", lambda rows: f"{rows[0].kind} {rows[0].phase}"),
        Column("dtype", lambda rows: DTYPES[rows[0].dtype]),
        Column(
            "batch x q x keys",
            lambda rows: f"{rows[0].batch} x {rows[0].q_len} x {rows[0].kv_len}",
            right=True,
        ),
    ]
    if len({row.backend for row in run.rows}) > 1:
        first.insert(0, Column("backend", lambda rows: rows[0].backend))
    return Table(
        "Every shape",
        "The fastest kernel of each approach. Numbers are page sizes in place: "
        f"{BASE_PAGE} in ms, and its part of the floor; the others, the page-size-1 view of rows "
        f"on pages of {BASE_PAGE}, gather plus varlen and the gather alone: times as long.",
        (
            *first,
            Column(
                f"{BASE_PAGE} (ms)",
                lambda rows: milliseconds(found.median_s) if (found := base(rows)) else "",
                right=True,
            ),
            Column(
                "of the floor",
                lambda rows: _percent(found.floor_fraction) if (found := base(rows)) else "",
                right=True,
            ),
            *(
                Column(str(p), cell(Approach.in_place, p), right=True)
                for p in places
                if p != BASE_PAGE
            ),
            *(
                Column(name, cell(a, BASE_PAGE), right=True)
                for a, name in (
                    (Approach.page1_view, "view at 1"),
                    (Approach.gather_varlen, "varlen"),
                    (Approach.gather, "gather"),
                )
            ),
        ),
        list(groups.values()),
    )


def _steps(run: Run) -> Table:
    by_step: dict[tuple, dict[tuple[str, int], Step]] = {}
    for one in run.steps:
        key = (one.backend, one.model, one.batch, one.decoded)
        by_step.setdefault(key, {})[one.approach, one.page_size] = one
    ways = list(dict.fromkeys((s.approach, s.page_size) for s in run.steps))

    def cell(way: tuple[str, int]):
        def text(found: dict[tuple[str, int], Step]) -> str:
            return milliseconds(found[way].total_s) if way in found else ""

        return text

    def field(name: str):
        return lambda found: str(getattr(next(iter(found.values())), name))

    return Table(
        "Attention of a whole decode step (ms, projected)",
        "Kernel times of one layer's cross- and self-attention, each approach's fastest kernel, "
        "times the layers.",
        (
            Column("backend", field("backend")),
            Column("model", field("model")),
            Column("layers", field("layers"), right=True),
            Column("batch", field("batch"), right=True),
            Column("decoded", field("decoded"), right=True),
            *(Column(title(*way), cell(way), right=True) for way in ways),
        ),
        list(by_step.values()),
    )


def ranges(found: CrossOver) -> str:
    """``8 to 57 tokens``; ``never`` within what was measured."""
    if not found.faster:
        return f"never from {found.measured[0]} to {found.measured[1]}"
    return ", ".join(f"{start:.0f} to {end:.0f}" for start, end in found.faster)


def _cross_overs(run: Run) -> Table:
    return Table(
        f"Where another way is faster than in place at page size {BASE_PAGE}",
        "Decoded lengths, interpolated between the measured ones.",
        (
            Column("backend", lambda c: c.backend),
            Column("model", lambda c: c.model),
            Column("part", lambda c: c.part),
            Column("batch", lambda c: str(c.batch), right=True),
            Column("way", lambda c: title(c.approach, c.page_size)),
            Column("faster at decoded lengths", ranges),
        ),
        list(run.cross_overs),
    )


def sentences(run: Run) -> list[str]:
    """The headline's figures, a sentence per backend and page size."""
    out = []
    for backend in dict.fromkeys(r.backend for r in run.rows):
        rows = [r for r in headline(run) if r.backend == backend]
        for page_size in (BASE_PAGE, 128):
            own = fastest(rows, Approach.in_place, page_size)
            if not own:
                continue
            told = []
            for approach in (Approach.page1_view, Approach.gather_varlen, Approach.gather):
                other = fastest(rows, approach, BASE_PAGE)
                if other:
                    part = times(other.ratio / own.ratio)
                    told.append(f"{TITLES[approach]} takes {part} times as long")
            out.append(
                f"{backend}, Whisper-large-v3's cross-attention, batch 8: in place at page size "
                f"{page_size} {milliseconds(own.median_s)} ms ({own.floor_fraction:.0%} of the "
                f"bandwidth floor); {'; '.join(told)}."
            )
    return out
