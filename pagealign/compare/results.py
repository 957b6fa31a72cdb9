"""All findings of one comparison, and the files that hold them."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from pagealign import __version__, report


@dataclass(frozen=True)
class Results:
    """A table per measure, one line per row of it (see the ``Row`` of ``accuracy``,
    ``fragmentation`` and ``cost``); ``samples`` are the pools over time. ``about``: when,
    where and with what."""

    accuracy: pd.DataFrame
    fragmentation: pd.DataFrame
    samples: pd.DataFrame
    cost: pd.DataFrame
    about: dict[str, str]

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {
            "accuracy": self.accuracy,
            "fragmentation": self.fragmentation,
            "samples": self.samples,
            "cost": self.cost,
        }


def frame(rows: Sequence[Any]) -> pd.DataFrame:
    """Frozen dataclasses of one kind as a table."""
    return pd.DataFrame([dataclasses.asdict(row) for row in rows])


def about(quick: bool) -> dict[str, str]:
    """What figures depend on, for the report's foot."""
    packages = ("sglang", "torch", "transformers")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "form": "quick" if quick else "full",
        "pagealign": __version__,
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {_processor()}",
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return f"{len(names)} x {names[0]}" if names else "unknown processor"


def write(results: Results, out: Path) -> list[Path]:
    """Every table as CSV, and all but the samples in one JSON file."""
    written = []
    for name, table in results.tables.items():
        written.append(report.write(out / f"{name}.csv", table.to_csv(index=False)))
    body = {"about": results.about}
    for name in ("accuracy", "fragmentation", "cost"):
        body[name] = json.loads(results.tables[name].to_json(orient="records"))
    written.append(report.write(out / "compare.json", json.dumps(body, indent=1) + "\n"))
    return written


def read(out: Path) -> Results:
    """What ``write`` wrote."""
    body = json.loads((out / "compare.json").read_text())
    names = ("accuracy", "fragmentation", "samples", "cost")
    texts = ("stopped", "note")  # in these two, nothing is an answer too
    tables = {
        n: pd.read_csv(out / f"{n}.csv", dtype=dict.fromkeys(texts, str)).fillna(
            dict.fromkeys(texts, "")
        )
        for n in names
    }
    return Results(**tables, about=body["about"])
