"""Rows of frozen dataclasses as a terminal table, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagealign.errors import PagealignError

WIDTH = 130  # columns, at least: a log file or a pipe has no width of its own


def console() -> Console:
    """A console on standard output, wide enough for the tables."""
    found = Console()
    return found if found.is_terminal else Console(width=max(WIDTH, found.width))


@contextmanager
def progress(console: Console) -> Iterator[Callable[..., None]]:
    """A function that says what is going on now and, with two numbers more, how much of how
    much is done: a bar with the time it has taken on a terminal, a line with the time since
    the start elsewhere."""
    started = time.monotonic()
    if not console.is_terminal:

        def line(text: str, *_: int) -> None:
            took = time.monotonic() - started
            console.print(f"{took:5.0f} s  {text}", soft_wrap=True, markup=False, highlight=False)

        yield line
        return
    what = TextColumn("{task.description}")
    columns = (SpinnerColumn(), what, BarColumn(30), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")

        def update(text: str, done: int = 0, of: int | None = None) -> None:
            bar.reset(task, description=escape(text), completed=done, total=of)

        yield update


@dataclass(frozen=True)
class Column:
    """A column's title and how a row's cell reads."""

    title: str
    cell: Callable[[Any], str]
    right: bool = False


def table(rows: Sequence[object], columns: Sequence[Column], title: str = "") -> Table:
    """A rich table; print it with a rich Console."""
    out = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        out.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        out.add_row(*(escape(column.cell(row)) for column in columns))
    return out


def markdown(rows: Sequence[object], columns: Sequence[Column]) -> str:
    """A Markdown table; cells keep on one line."""
    lines = [
        "| " + " | ".join(c.title for c in columns) + " |",
        "|" + "|".join("---:" if c.right else "---" for c in columns) + "|",
    ]
    for row in rows:
        cells = (c.cell(row).replace("|", "\\|").replace("\n", " ") for c in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[Any], **more: Any) -> str:
    """``{**more, "rows": [...]}``, every field of every row, paths as text."""
    body = {**more, "rows": [dataclasses.asdict(row) for row in rows]}
    return json.dumps(body, indent=2, default=str) + "\n"


def out_folder(out: Path) -> Path:
    """``out``, made if missing; PagealignError if it can't be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PagealignError(f"--out {out} can't be made: {error.strerror}") from error
    return out


def write(path: Path, text: str) -> Path:
    """Write ``text`` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as f:
        f.write(text)
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)
    return path
