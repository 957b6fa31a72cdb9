"""Recordings made on several trees, two processes at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagealign.errors import PagealignError
from pagealign.paths import REPO, STANDINS


@dataclass(frozen=True)
class Job:
    """Record the workloads of ``form`` (see ``workloads.select``) on ``tree`` into ``out``;
    ``imports``: modules to import besides. ``name`` is for messages."""

    name: str
    tree: Path
    form: str
    out: Path
    imports: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        return self.out.with_suffix(".log")


@dataclass(frozen=True)
class Call:
    """Call ``module.function(**arguments)`` on ``tree``; output goes to ``log``."""

    name: str
    tree: Path
    log: Path
    module: str
    function: str
    arguments: dict[str, Any]


def run_jobs(
    jobs: Sequence[Job],
    models: Path,
    at_once: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Make the tiny models in the folder ``models`` and run all jobs. PagealignError, with
    the end of its log, for a job that did not get through."""
    run_calls([_call(job, models) for job in jobs], models, at_once, progress)


def _call(job: Job, models: Path) -> Call:
    arguments = dict(form=job.form, models=str(models), out=str(job.out), imports=list(job.imports))
    return Call(job.name, job.tree, job.log, "pagealign.parity.record", "record", arguments)


def run_calls(
    jobs: Sequence[Call],
    models: Path,
    at_once: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """As ``run_jobs``, any functions."""
    arguments = []
    for job in jobs:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        # stock's intel_xpu needs page size 1, and drops the NaN of empty rows itself
        env = {"PAGEALIGN_KERNELS": "page1,faithful"}
        fields = {k: v if isinstance(v, dict) else str(v) for k, v in vars(job).items()}
        arguments.append(fields | {"env": env})
    request = {"models": str(models), "at_once": at_once, "jobs": arguments}
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(STANDINS), str(REPO)]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", "pagealign.parity.zygote"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        process.stdin.write(json.dumps(request))
        process.stdin.close()
        failed = []
        for line in process.stdout:
            number, code = map(int, line.split())
            progress(f"recorded {jobs[number].name}")
            if code:
                failed.append(jobs[number])
        if process.wait():
            raise PagealignError(f"the recording process ended with {process.returncode}")
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if failed:
        last = failed[0].log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
        raise PagealignError(
            f"recording {failed[0].name} failed: {''.join(last)} (log: {failed[0].log})"
        )
