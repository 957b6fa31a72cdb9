"""A process on the tree of an approach, which measures what it is asked to.

SGLang is imported once per process, and that takes a slow core most of a minute, so one
process per tree stays up for all measurements. It reads calls from standard input, a JSON
line each, and answers with JSON lines; whatever else it prints goes to its log.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pagealign.compare.approaches import APPROACHES, Approach, approach
from pagealign.errors import PagealignError
from pagealign.paths import REPO, STANDINS
from pagealign.server import POOL_CHECKS
from pagealign.trees import build_tree


class Worker:
    """Use it as a context; what runs in it is ended when the context is left."""

    def __init__(self, one: Approach, log: Path) -> None:
        path = [str(build_tree(one.tree)), str(STANDINS), str(REPO)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "PAGEALIGN_KERNELS": one.kernels,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # Stock and varlen free pages twice, which SGLang's checks of the pool don't stand.
            **dict.fromkeys(POOL_CHECKS, "0"),
        }
        self.approach, self.log = one, log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pagealign.compare.tree_worker", one.name],
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

    def call(self, module: str, function: str, *arguments: Any) -> Any:
        """What ``function(approach, *arguments)`` of ``module`` returns there; arguments and
        result are JSON values. PagealignError, with the end of the log, if it fails."""
        with contextlib.suppress(BrokenPipeError):
            call = json.dumps([module, function, arguments])
            print(call, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            last = self.log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
            raise PagealignError(
                f"{module} on the tree {self.approach.tree} failed: {''.join(last)} "
                f"(log: {self.log})"
            )
        return json.loads(answer)


_BACKEND = "sglang.srt.layers.attention.xpu_backend"
Workers = dict[str, Worker]  # by the approach's name


@contextlib.contextmanager
def workers(out: Path) -> Iterator[Workers]:
    """A worker for each approach, with its log in the folder ``out``."""
    with contextlib.ExitStack() as stack:
        yield {
            one.name: stack.enter_context(Worker(one, out / f"worker-{one.name}.log"))
            for one in APPROACHES
        }


def call_all(
    trees: Workers, module: str, function: str, arguments: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The same call in every tree, at once, each with its approach's ``arguments``."""
    with ThreadPoolExecutor(len(trees)) as pool:
        found = pool.map(lambda n: trees[n].call(module, function, *arguments[n]), trees)
        return dict(zip(trees, found, strict=True))


def _serve(one: Approach) -> None:
    """The worker's side."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.modules["flashinfer"] = None  # not on a machine with an XPU, and slow to import
    gc.disable()  # what is imported is no garbage
    for module in ("pagealign.bed", "sglang.srt.managers.scheduler", _BACKEND):
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        module, function, arguments = json.loads(line)
        found = getattr(importlib.import_module(module), function)(one, *arguments)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    _serve(approach(sys.argv[1]))
