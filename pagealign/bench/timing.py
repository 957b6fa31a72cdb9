"""Times of several ways to do one thing, taken in turn so that noise meets them all."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and the least of ``count`` values."""

    median: float
    low: float
    high: float
    least: float
    count: int


@dataclass(frozen=True)
class Effort:
    """At least ``least`` rounds and at most ``most``, no new one after ``seconds``."""

    least: int
    most: int
    seconds: float


def spread(values: Sequence[float]) -> Spread:
    """Of one value or more; ValueError for none."""
    if not values:
        raise ValueError("no values")
    if len(values) == 1:
        return Spread(*[values[0]] * 4, count=1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, min(values), len(values))


def interleaved(
    calls: Mapping[K, Sequence[Callable[[], object]]],
    wait: Callable[[], None],
    effort: Effort,
    *,
    clock: Callable[[], float] = time.perf_counter,
    watch: Callable[[], float] = time.monotonic,
    seed: int = 0,
) -> dict[K, list[float]]:
    """Seconds of each way, one value a round.

    A round times every way once, in an order of its own. ``calls`` has a callable per input
    set, taken in turn, so that a way does not find its last inputs in the cache. All are
    called once before the first round. ``wait`` returns when the device is idle. ``clock``
    times the calls, ``watch`` keeps to the effort.
    """
    for ways in calls.values():
        for call in ways:
            call()
    wait()
    order, found = list(calls), {key: [] for key in calls}
    shuffle = random.Random(seed).shuffle
    start, collecting = watch(), gc.isenabled()
    gc.disable()
    try:
        for number in range(effort.most):
            if number >= effort.least and watch() - start >= effort.seconds:
                break
            shuffle(order)
            for key in order:
                call = calls[key][number % len(calls[key])]
                before = clock()
                call()
                wait()
                found[key].append(clock() - before)
    finally:
        if collecting:
            gc.enable()
    return found


def ratio(of: Sequence[float], to: Sequence[float]) -> Spread:
    """``of / to``, round by round: what a busy moment does to both cancels out."""
    return spread([a / b for a, b in zip(of, to, strict=True)])
