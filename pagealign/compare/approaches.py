"""The three approaches, and how a measurement runs in the tree of one.

SGLang is imported once per process, so what is measured in a tree is measured in a
process of its own: ``python -m MODULE`` with the tree first on its path, a JSON value
for its arguments on standard input, and its findings as JSON in the file it is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagealign.errors import PagealignError
from pagealign.paths import REPO, STANDINS
from pagealign.trees import build_tree


@dataclass(frozen=True)
class Approach:
    """``kernels`` is the stand-in's mode. Only stock needs the page-size-1 kernel, and only
    stock hands it a request without keys, beside others that have some: that is computed as
    the kernel's source does, not refused as the device loss that was seen with it."""

    name: str
    tree: str
    kernels: str
    title: str


APPROACHES = (
    Approach("aligned", "aligned", "strict", "page-aligned"),
    Approach("varlen", "varlen", "strict", "varlen gather"),
    Approach("page1", "stock", "faithful,page1", "page-size-1 view"),
)


def approach(name: str) -> Approach:
    """The approach of that name; PagealignError if there is none."""
    for one in APPROACHES:
        if one.name == name:
            return one
    raise PagealignError(
        f"no approach {name!r}: use one of {', '.join(a.name for a in APPROACHES)}"
    )


def run_in_tree(one: Approach, module: str, arguments: Any, log: Path, **env: str) -> Any:
    """What ``module`` finds, given ``arguments`` (a JSON value), in a process on the
    approach's tree. Its output goes to ``log``; PagealignError, with the end of that, if it
    fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    path = [str(build_tree(one.tree)), str(STANDINS), str(REPO)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "PAGEALIGN_KERNELS": one.kernels,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **env,
    }
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        with log.open("wb") as out:
            code = subprocess.run(
                [sys.executable, "-P", "-m", module, str(found)],
                input=json.dumps({"approach": one.name, "arguments": arguments}).encode(),
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        if code:
            last = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
            raise PagealignError(f"{module} on {one.tree} failed: {''.join(last)} (log: {log})")
        return json.loads(found.read_text())


def serve(measure) -> None:
    """The other end of ``run_in_tree``: call ``measure(approach, arguments)`` and write what
    it returns. For ``if __name__ == "__main__"`` of a measuring module."""
    request = json.load(sys.stdin)
    found = measure(approach(request["approach"]), request["arguments"])
    Path(sys.argv[1]).write_text(json.dumps(found))
