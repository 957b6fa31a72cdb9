"""What both evaluations make of a run's records: speed, failures, the files they write."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagealign import report
from pagealign.evals.journal import Record
from pagealign.evals.scores import Difference, busy_seconds, percentiles

MOST_NAMED = 10  # of what was skipped or failed; the JSON has all


@contextmanager
def progress_bar(console: Console, what: str, count: int) -> Iterator:
    """A function to call after each of ``count`` items: a bar on a terminal, a line for
    each tenth elsewhere."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=count)
            yield lambda: bar.advance(task)
        return
    done = 0

    def line() -> None:
        nonlocal done
        done += 1
        if done * 10 // count != (done - 1) * 10 // count:
            console.print(f"{what}: {done} of {count}", highlight=False, soft_wrap=True)

    yield line


def latencies(records: Sequence[Record]) -> tuple[float, ...]:
    """The 50th, 90th and 99th percentile of the answers' seconds."""
    return percentiles([record["seconds"] for record in records])


def busy(records: Sequence[Record]) -> float:
    """Seconds in which at least one request was under way."""
    return busy_seconds([(record["started"], record["ended"]) for record in records])


def per_second(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else float("nan")


def name_some(console: Console, what: str, lines: Sequence[str]) -> None:
    """Print ``what`` with its count, and the first few lines."""
    if not lines:
        return
    console.print(f"{what}: {len(lines)}", style="yellow", markup=False, highlight=False)
    for line in lines[:MOST_NAMED]:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if len(lines) > MOST_NAMED:
        console.print(f"  and {len(lines) - MOST_NAMED} more, in the JSON", highlight=False)


def number(value: float | None, form: str) -> str:
    """A figure for a table; empty where there is none."""
    return "" if value is None or math.isnan(value) else format(value, form)


def numbers(values: Sequence[float], form: str) -> str:
    """Figures in one cell; empty where there are none."""
    return "" if any(map(math.isnan, values)) else ", ".join(format(x, form) for x in values)


def difference(found: Difference | None, form: str) -> str:
    """A run's score less the first run's, with its standard error; empty for the first."""
    if found is None:
        return ""
    error = number(found.error, form)
    return f"{found.value:+{form}}" + (f" (SE {error})" if error else "")


def identical(found: Difference | None) -> str:
    """How many texts are the first run's; empty for the first."""
    return "" if found is None else f"{found.identical} of {found.items}"


def plain(value: object) -> object:
    """For JSON, which has no NaN: None in its place, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def write_json(
    folder: Path, runs: Sequence[Any], skipped: Sequence[Any], about: dict[str, Any]
) -> None:
    """Write ``results.json`` into ``folder``; runs and what was skipped are dataclasses."""
    body = {
        **about,
        "skipped": [dataclasses.asdict(item) for item in skipped],
        "runs": [dataclasses.asdict(found) for found in runs],
    }
    text = json.dumps(plain(body), indent=2, ensure_ascii=False) + "\n"
    report.write(folder / "results.json", text)
