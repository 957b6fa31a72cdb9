"""The kernel benchmarks' figures in the comparison's report, where ``make bench-kernels`` has
left a results file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from pagealign.bench import tables
from pagealign.bench.records import BASE_PAGE, FILE, Approach, Run, read

# as the same approaches look in the report's other plots
COLORS = {
    Approach.in_place: "#4c78a8",
    Approach.gather_varlen: "#f58518",
    Approach.page1_view: "#54a24b",
    Approach.gather: "#bab0ac",
}
MODEL = "whisper-large-v3"

__all__ = ["FILE", "Section", "draw", "section"]


@dataclass(frozen=True)
class Section:
    """What the report shows of one results file; ``title`` is the figure's."""

    title: str
    sentences: Sequence[str]
    tables: Sequence[tables.Table]
    figure: Figure


def section(path: Path) -> Section | None:
    """None if there is no file; PagealignError if it is not one of the benchmarks'."""
    if not path.exists():
        return None
    run = read(path)
    origin = f"Kernels were timed on {run.about['processor']}, {run.about['date']}"
    return Section(
        title="What the kernels take",
        sentences=[*tables.sentences(run), f"{origin} ({run.about['form']} form)."],
        tables=tables.tables(run),
        figure=draw(run),
    )


def draw(run: Run) -> Figure:
    """For the first backend: the headline's ways beside the bandwidth floor, and attention of a
    whole decode step against the decoded length."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    backend = run.rows[0].backend if run.rows else ""
    _ways(left, run, backend)
    _steps(right, run, backend)
    return figure


def _ways(axes, run: Run, backend: str) -> None:
    rows = [r for r in tables.headline(run) if r.backend == backend]
    keys = sorted(
        {(r.approach, r.page_size) for r in rows},
        key=lambda key: (list(COLORS).index(Approach(key[0])), key[1]),
    )
    found = [row for key in keys if (row := tables.fastest(rows, *key))]
    if not found:
        return
    names = [tables.title(row.approach, row.page_size) for row in found]
    bars = axes.barh(
        names,
        [1000 * row.median_s for row in found],
        color=[COLORS[Approach(row.approach)] for row in found],
    )
    axes.bar_label(bars, [tables.milliseconds(row.median_s) for row in found], padding=3)
    axes.axvline(1000 * found[0].floor_s, color="#888888", ls="--", lw=1)
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("ms (dashed: reading the keys and values once)")
    axes.set_title(f"{backend}: cross-attention of {MODEL}, batch 8", fontsize=10)


def _steps(axes, run: Run, backend: str) -> None:
    steps = [s for s in run.steps if (s.backend, s.model, s.batch) == (backend, MODEL, 8)]
    for approach, color in COLORS.items():
        line = [s for s in steps if (s.approach, s.page_size) == (approach, BASE_PAGE)]
        if line:
            axes.plot(
                [s.decoded for s in line],
                [1000 * s.total_s for s in line],
                marker="o",
                color=color,
                label=tables.title(approach, BASE_PAGE),
            )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("decoded tokens")
    axes.set_ylabel("ms, all layers")
    axes.set_title("attention of a whole decode step, projected", fontsize=10)
    if steps:
        axes.legend(frameon=False, fontsize=8)
