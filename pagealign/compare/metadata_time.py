"""Wall time of ``init_forward_metadata``, on CPU tensors, as ratios.

A machine's speed wanders more than the approaches differ, so a process per tree stays up and
they take turns: in each round each builds the same batch's metadata a few times. A round
gives a ratio to the aligned tree's time; the median of the rounds is what counts. Page tables
in a device's memory would cost otherwise; the host's share, the operators' overhead, is what
this shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagealign.compare.approaches import APPROACHES, Approach
from pagealign.compare.batches import Heads
from pagealign.compare.cost_cases import Case, batch_of
from pagealign.errors import PagealignError
from pagealign.paths import REPO, STANDINS
from pagealign.trees import build_tree

CALLS = 20  # per turn


@dataclass(frozen=True)
class Time:
    """Medians over the rounds: of the time of one call, and of its ratio to the aligned
    tree's in the same round."""

    microseconds: float
    ratio: float


class Worker:
    """A process on an approach's tree that builds metadata when asked to."""

    def __init__(self, one: Approach, log: Path) -> None:
        path = [str(build_tree(one.tree)), str(STANDINS), str(REPO)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "PAGEALIGN_KERNELS": one.kernels,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pagealign.compare.metadata_time", one.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def seconds(self, case: Case) -> float:
        """Of one call, the mean of a few; PagealignError if the process has ended."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(dataclasses.asdict(case)), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise PagealignError(f"measuring metadata failed (log: {self.log})")
        return float(answer)


def measure(cases: Sequence[Case], out: Path, rounds: int) -> dict[tuple[str, Case], Time]:
    """The times of every approach in every case; logs go to the folder ``out``."""
    with contextlib.ExitStack() as stack:
        workers = {
            one.name: stack.enter_context(Worker(one, out / f"metadata-time-{one.name}.log"))
            for one in APPROACHES
        }
        found = {}
        for case in cases:
            for worker in workers.values():
                worker.seconds(case)  # warms up
            turns = [{n: w.seconds(case) for n, w in workers.items()} for _ in range(rounds)]
            for name in workers:
                found[name, case] = Time(
                    microseconds=1e6 * statistics.median(turn[name] for turn in turns),
                    ratio=statistics.median(turn[name] / turn["aligned"] for turn in turns),
                )
        return found


def _answer(name: str) -> None:
    """The worker's side: a case per line in, its time per line out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    builders: dict[str, Callable[[], None]] = {}
    for line in sys.stdin:
        if line not in builders:
            builders[line] = _builder(Case(**json.loads(line)), name == "aligned")
        build = builders[line]
        started = time.perf_counter()
        for _ in range(CALLS):
            build()
        print((time.perf_counter() - started) / CALLS, file=answers, flush=True)


def _builder(case: Case, aligned: bool) -> Callable[[], None]:
    import torch

    from pagealign.compare.backend_harness import Rig

    heads = Heads(1, 1, 64)  # metadata doesn't depend on them
    rig = Rig(heads, torch.float32, case.page_size, batch_of(case), aligned=aligned)
    return torch.no_grad()(rig.build_metadata)


if __name__ == "__main__":
    _answer(sys.argv[1])
