"""Wall time of ``init_forward_metadata``, on CPU tensors, as ratios.

A machine's speed wanders more than the approaches differ, so a process per tree stays up and
they take turns: in each round each builds the same batch's metadata a few times. A round
gives a ratio to the aligned tree's time; the median of the rounds is what counts. Page tables
in a device's memory would cost otherwise; the host's share, the operators' overhead, is what
this shows.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagealign.compare.approaches import Approach
from pagealign.compare.batches import Heads
from pagealign.compare.cost_cases import Case, batch_of
from pagealign.compare.tree_worker import Workers

CALLS = 20  # per turn


@dataclass(frozen=True)
class Time:
    """Medians over the rounds: of the time of one call, and of its ratio to the aligned
    tree's in the same round."""

    microseconds: float
    ratio: float


def measure(trees: Workers, cases: Sequence[Case], rounds: int) -> dict[tuple[str, Case], Time]:
    """The times of every approach in every case."""

    def seconds(name: str, case: Case) -> float:
        return trees[name].call(__name__, "seconds", dataclasses.asdict(case))

    found = {}
    for case in cases:
        for name in trees:
            seconds(name, case)  # warms up
        turns = [{name: seconds(name, case) for name in trees} for _ in range(rounds)]
        for name in trees:
            found[name, case] = Time(
                microseconds=1e6 * statistics.median(turn[name] for turn in turns),
                ratio=statistics.median(turn[name] / turn["aligned"] for turn in turns),
            )
    return found


def seconds(approach: Approach, case: dict[str, Any]) -> float:
    """In the approach's tree: of one call, the mean of a few."""
    build = _builder(Case(**case), approach.name == "aligned")
    started = time.perf_counter()
    for _ in range(CALLS):
        build()
    return (time.perf_counter() - started) / CALLS


@functools.cache
def _builder(case: Case, aligned: bool) -> Callable[[], None]:
    import torch

    from pagealign.compare.backend_harness import Rig

    heads = Heads(1, 1, 64)  # metadata doesn't depend on them
    rig = Rig(heads, torch.float32, case.page_size, batch_of(case), aligned=aligned)
    return torch.no_grad()(rig.build_metadata)
