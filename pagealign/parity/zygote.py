"""``python -m pagealign.parity.zygote``: jobs on standard input, a process of its own each.

SGLang is imported once per process and tree, but most of that import is PyTorch and
transformers, which are the same for all trees: they are imported here once, and each job
is a fork that puts its tree on the path. Nothing of SGLang is imported before the fork.
Standard input is a list of jobs as JSON; ``NUMBER EXIT_CODE`` is printed as each ends.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

# Imported before the forks, if there: what takes longest of what SGLang imports.
SHARED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed",
    "torchvision",
    "torchaudio",
    "scipy.special",
    "scipy.spatial",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "triton",
    "openai",
    "fastapi",
    "aiohttp",
    "uvicorn",
    "compressed_tensors",
    "xgrammar",
    "zmq",
    "IPython",
)


def main() -> None:
    request = json.load(sys.stdin)
    sys.dont_write_bytecode = False  # trees keep their own bytecode
    # A machine with an XPU has no FlashInfer; on a CPU importing it takes 10 seconds.
    sys.modules["flashinfer"] = None  # type: ignore[assignment]
    import pagealign.bed  # noqa: F401  sets what SGLang reads when it is imported

    gc.disable()
    for name in SHARED:
        with suppress(Exception):
            import_module(name)
    if request["models"]:
        _make_models(Path(request["models"]))
    gc.freeze()
    gc.enable()
    running: dict[int, int] = {}
    waiting = list(enumerate(request["jobs"]))
    # so that the block below is left by an exception
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while waiting or running:
            while waiting and len(running) < request["at_once"]:
                number, job = waiting.pop(0)
                running[_fork(job)] = number
            pid, status = os.wait()
            number = running.pop(pid)
            print(number, os.waitstatus_to_exitcode(status), flush=True)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def _make_models(folder: Path) -> None:
    from transformers.utils import logging

    from pagealign import tiny_models
    from pagealign.parity.workloads import WHISPER_LEN

    logging.disable_progress_bar()

    for name, make in (
        ("whisper", lambda path: tiny_models.tiny_whisper(path, WHISPER_LEN)),
        ("mllama", tiny_models.tiny_mllama),
        ("llama", tiny_models.tiny_llama),
    ):
        (folder / name).mkdir(parents=True)
        make(folder / name)


def _fork(job: dict) -> int:
    """Start a job; its output goes to its log."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        sys.path.insert(0, job["tree"])
        os.environ.update(job["env"])
        call = getattr(import_module(job["module"]), job["function"])
        call(**job["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
