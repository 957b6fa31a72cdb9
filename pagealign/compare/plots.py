"""The report's plots: functions from tables to matplotlib Figures."""

from __future__ import annotations

import io
from collections.abc import Callable

from matplotlib.figure import Figure

from pagealign.compare import row_picture
from pagealign.compare.results import Results
from pagealign.compare.summary import TITLES, per_step, shown_page_size

COLORS = {"aligned": "#4c78a8", "varlen": "#f58518", "page1": "#54a24b"}
MARKERS = {"aligned": "o", "varlen": "s", "page1": "^"}


def svg(figure: Figure) -> bytes:
    """The figure as SVG, the same bytes for the same figure."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    return out.getvalue()


def _grid(count: int, height: float = 3.2) -> tuple[Figure, list]:
    """A figure with ``count`` plots side by side."""
    figure = Figure(figsize=(4.5 * count if count > 1 else 6, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _legend(figure: Figure, axes) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def rows(results: Results) -> Figure:
    return row_picture.draw()


def fragmentation(results: Results) -> Figure:
    """Internal fragmentation against page size, a plot per trace."""
    found = list(results.fragmentation.groupby("trace", sort=False))
    figure, axes = _grid(len(found))
    for one, (trace, table) in zip(axes, found, strict=True):
        for name in TITLES:
            line = table[table.approach == name].sort_values("page_size")
            one.plot(
                line.page_size,
                100 * line.fragmentation,
                marker=MARKERS[name],
                color=COLORS[name],
                label=TITLES[name],
            )
        one.set_xscale("log", base=2)
        one.set_xticks(sorted(table.page_size.unique()), sorted(table.page_size.unique()))
        one.set_title(trace, fontsize=10)
        one.set_xlabel("page size (slots)")
    axes[0].set_ylabel("reserved, without a token (%)")
    return _legend(figure, axes[0])


def pool_over_time(results: Results) -> Figure:
    """The pool's slots over the steps, first trace: aligned beside stock's rows."""
    samples = results.samples
    page_size = shown_page_size(samples)
    samples = samples[(samples.page_size == page_size) & (samples.trace == samples.trace.iloc[0])]
    figure, axes = _grid(2)
    for one, (name, title) in zip(
        axes, (("aligned", "page-aligned"), ("page1", "stock's rows")), strict=True
    ):
        table = samples[samples.approach == name]
        one.stackplot(
            table.step,
            table["written"],
            table["gap"],
            table["tail"],
            labels=("written", "gap", "tail of a last page"),
            colors=("#4c78a8", "#e45756", "#f2cf5b"),
        )
        one.set_title(title, fontsize=10)
        one.set_xlabel("step")
    axes[0].set_ylabel("slots")
    axes[1].sharey(axes[0])
    return _legend(figure, axes[0])


def copied_by_length(results: Results) -> Figure:
    """Bytes copied per token generated, against the decoded length."""
    cost = results.cost
    steps = cost[(cost.part == "step") & (cost.phase == "decode") & (cost.text_only == 0)]
    steps = steps[(steps.page_size == 64) & (steps.batch == 4)]
    full = steps.groupby("model").encoder_len.transform(lambda s: s.mode().max())
    steps = steps[steps.encoder_len == full]
    models = list(steps.groupby("model", sort=False))
    figure, axes = _grid(len(models))
    for one, (model, table) in zip(axes, models, strict=True):
        for name in TITLES:
            line = table[table.approach == name].sort_values("decoded")
            one.plot(
                line.decoded,
                line.copied / line.batch / 1e6,
                marker=MARKERS[name],
                color=COLORS[name],
                label=TITLES[name],
            )
        one.set_title(model, fontsize=10)
        one.set_xlabel("decoded tokens")
    axes[0].set_ylabel("MB copied per token")
    return _legend(figure, axes[0])


def syncs(results: Results) -> Figure:
    """Host syncs and attention launches of one decode step."""
    table = per_step(results)
    models = list(table.groupby("model", sort=False))
    figure, axes = _grid(len(models))
    for one, (model, found) in zip(axes, models, strict=True):
        bars = one.bar(
            [TITLES[name] for name in found.approach],
            found.syncs,
            color=[COLORS[name] for name in found.approach],
        )
        one.bar_label(bars)
        one.set_title(model, fontsize=10)
        one.tick_params(axis="x", labelsize=8)
    axes[0].set_ylabel("host syncs per decode step")
    return figure


def accuracy(results: Results) -> Figure:
    """The largest and the mean error of attention by dtype, with plain code's as a line."""
    table = results.accuracy
    table = table[(table.level == "attention") & (table.compared > 0)]
    dtypes = list(table.groupby("dtype", sort=False))
    figure, axes = _grid(len(dtypes))
    for one, (dtype, found) in zip(axes, dtypes, strict=True):
        by_name = found.groupby("approach", sort=False)
        for x, name in enumerate(TITLES):
            rows = by_name.get_group(name)
            mean, most = rows.mean_error.mean(), rows.max_error.max()
            one.errorbar(
                x,
                mean,
                yerr=[[0], [most - mean]],
                marker=MARKERS[name],
                color=COLORS[name],
                capsize=4,
            )
        one.axhline(found.plain_max_error.max(), color="#888888", ls="--", lw=1)
        one.set_yscale("log")
        one.set_xticks(range(len(TITLES)), TITLES.values(), fontsize=8)
        one.set_xlim(-0.5, len(TITLES) - 0.5)
        one.set_title(f"{dtype} (dashed: plain code's largest)", fontsize=9)
    axes[0].set_ylabel("error, mean to largest")
    return figure


PLOTS: dict[str, tuple[str, Callable[[Results], Figure]]] = {
    "rows": ("A row of the pool, and what each kernel reads of it", rows),
    "syncs": ("How often the host waits for the device", syncs),
    "copied": ("What a generated token copies", copied_by_length),
    "fragmentation": (
        "What the pool wastes (stock's rows above page size 1: of slots that requests share)",
        fragmentation,
    ),
    "pool": ("The pool over time", pool_over_time),
    "accuracy": ("How far attention is from float64", accuracy),
}
