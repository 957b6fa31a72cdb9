"""What the results file holds. Standard library only: the comparison's report reads it too."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pagealign.errors import PagealignError

FILE = "kernels.json"
SCHEMA = 1
BASE_PAGE = 64  # ratios are to the fastest kernel in place at this page size


class Approach(StrEnum):
    """How attention reads the pool; the values are those in the results file."""

    in_place = "in_place"  # a kernel that takes page tables
    page1_view = "page1_view"  # that kernel on pages of one slot, rows on larger pages
    gather_varlen = "gather_varlen"  # copy keys and values out, a ragged kernel on the copy
    gather = "gather"  # the copy alone


@dataclass(frozen=True)
class Row:
    """A variant's times for one shape, in seconds, and its error against float64.

    ``ratio`` is to the fastest kernel in place at page size 64, ``floor_fraction`` is the
    floor over the time; both are medians over rounds. ``floor_s``: see ``bandwidth``.
    ``least_s`` is what tells most when the machine was busy with something else.
    """

    backend: str
    approach: str
    page_size: int
    kernel: str
    model: str
    kind: str
    phase: str
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    kv_bytes: int
    sets: int
    rounds: int
    median_s: float
    low_s: float
    high_s: float
    least_s: float
    floor_s: float
    floor_fraction: float
    ratio: float
    ratio_low: float
    ratio_high: float
    max_error: float
    max_allowed: float
    within: bool


@dataclass(frozen=True)
class Step:
    """Attention of one decode step: seconds of all layers."""

    backend: str
    model: str
    layers: int
    approach: str
    page_size: int
    batch: int
    decoded: int
    cross_s: float
    self_s: float

    @property
    def total_s(self) -> float:
        return self.cross_s + self.self_s


@dataclass(frozen=True)
class CrossOver:
    """Decoded lengths at which ``approach`` is faster than in place at page size 64, as
    ``from .. to`` pairs within the measured ones; ``part``: the step or its self-attention."""

    backend: str
    model: str
    approach: str
    page_size: int
    batch: int
    part: str
    faster: tuple[tuple[float, float], ...]
    measured: tuple[int, int]


@dataclass(frozen=True)
class Status:
    """Whether a backend can run on the machine, and why not."""

    name: str
    device: str
    why_not: str | None


@dataclass(frozen=True)
class Run:
    """One run. ``about``: when, where and with what. ``left_out``: what was not run and why."""

    about: dict[str, str]
    backends: tuple[Status, ...]
    rows: tuple[Row, ...]
    steps: tuple[Step, ...]
    cross_overs: tuple[CrossOver, ...]
    left_out: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Row, ...]:
        """Kernels that did not compute attention."""
        return tuple(row for row in self.rows if not row.within)


def to_json(run: Run) -> str:
    """Standard JSON: what was not timed is null."""
    body = {"schema": SCHEMA, **dataclasses.asdict(run)}
    return json.dumps(_without_nan(body), indent=1, allow_nan=False) + "\n"


def read(path: Path) -> Run:
    """What ``to_json`` wrote; PagealignError if that is something else."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != SCHEMA:
            raise ValueError(f"schema {body['schema']}, not {SCHEMA}")
        return Run(
            about=body["about"],
            backends=tuple(Status(**one) for one in body["backends"]),
            rows=tuple(_filled(Row, one) for one in body["rows"]),
            steps=tuple(Step(**one) for one in body["steps"]),
            cross_overs=tuple(
                CrossOver(
                    **one
                    | {
                        "faster": tuple(tuple(pair) for pair in one["faster"]),
                        "measured": tuple(one["measured"]),
                    }
                )
                for one in body["cross_overs"]
            ),
            left_out=tuple(body["left_out"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PagealignError(
            f"{path} is no results file of the kernel benchmarks ({error}); `make bench-kernels` "
            "writes it anew"
        ) from error


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _filled(kind: type[Row], one: dict[str, Any]) -> Row:
    return kind(**{key: math.nan if value is None else value for key, value in one.items()})
