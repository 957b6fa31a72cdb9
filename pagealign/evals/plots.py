"""One picture of an evaluation: the score with its interval, and the latencies, per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Score = tuple[str, Sequence[float], Sequence[tuple[float, float]]]


def write(
    path: Path, labels: Sequence[str], score: Score, seconds: Sequence[Sequence[float]]
) -> Path:
    """Write a PNG: left, ``score`` (its name, values, 95 % intervals); right, ``seconds`` of
    each run's answers as boxes. Replaced in one step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    at = range(len(labels))
    name, values, intervals = score
    for x, value, (low, high) in zip(at, values, intervals, strict=True):
        left.plot([x], [value], "o", color="#1f5fa8")
        if low <= high:  # not NaN
            left.vlines(x, low, high, color="#1f5fa8")
    left.set_xticks(at, labels)
    left.set_xlim(-0.5, len(labels) - 0.5)
    left.set_ylim(bottom=0)
    left.set_ylabel(f"{name}, 95 % interval")
    right.boxplot([list(s) or [float("nan")] for s in seconds], positions=list(at), whis=(1, 99))
    right.set_xticks(at, labels)
    right.set_ylim(bottom=0)
    right.set_ylabel("seconds per answer")
    new = path.with_name(f".{path.name}.new")
    figure.savefig(new, format="png", dpi=120)
    return new.replace(path)
