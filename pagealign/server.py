"""Start, watch and stop one real SGLang server.

``python -m sglang.launch_server`` runs in a session of its own, with a tree of
SGLang (and, without an XPU, the kernel stand-in) first on its path. Whatever happens to
us, that session and nothing else is ended.
"""

from __future__ import annotations

import ctypes
import enum
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import httpx
import psutil

from pagealign import server_log
from pagealign.errors import PagealignError
from pagealign.layout import ceil_align
from pagealign.paths import STANDINS

LAUNCHER = (sys.executable, "-m", "sglang.launch_server")
CPU_LAUNCHER = (sys.executable, "-m", "forking_launcher")  # the same, started sooner
READY_TIMEOUT = 900.0  # seconds; 25 are usual, on a loaded machine it takes minutes
GRACE = 15.0  # seconds from SIGTERM to SIGKILL; SGLang takes about 5
PORT_TAKEN = "error while attempting to bind on address"  # uvicorn's; SGLang then hangs
WHISPER_TOKENS = (1500, 448)  # encoder and decoder positions of one request, at most


POOL_CHECKS = (
    "SGLANG_DEBUG_MEMORY_POOL",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS",
)


class PoolChecks(enum.StrEnum):
    """SGLang's own checks of the KV pool: none; its debug mode and a count when idle;
    these, a count in every step and each page's owners."""

    OFF = "off"
    IDLE = "idle"
    BUSY = "busy"

    @property
    def variables(self) -> tuple[str, ...]:
        return POOL_CHECKS[: {self.OFF: 0, self.IDLE: 2, self.BUSY: 4}[self]]


class ServerDied(PagealignError):
    """The server ended by itself. ``reason`` is from its log, ``log`` is where that is."""

    def __init__(self, reason: str, log: Path) -> None:
        super().__init__(f"the server died: {reason} (log: {log})")
        self.reason, self.log = reason, log


@dataclass(frozen=True)
class ServerSpec:
    """What to run; every field ends up in the command line or the environment.

    ``tree`` is the folder that holds ``sglang/``. ``kernels`` (strict, faithful, page1)
    and ``poison`` are the stand-in's. ``concurrency`` sizes the pool and is the number of
    requests that run at once, besides one without audio; ``slots`` is another size for the
    pool. ``launcher`` is LAUNCHER, on a CPU CPU_LAUNCHER, where it is None.
    """

    tree: Path
    model: Path
    backend: str = "intel_xpu"
    page_size: int = 64
    device: str = "cpu"
    dtype: str = "float32"
    kernels: str = "strict"
    poison: bool = False
    pool_checks: PoolChecks = PoolChecks.BUSY
    concurrency: int = 4
    slots: int | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] | None = None

    @property
    def pool_slots(self) -> int:
        """``slots``, or KV slots for ``concurrency`` whole requests and one more, in whole
        pages."""
        if self.slots is not None:
            return self.slots
        one = sum(ceil_align(n, self.page_size) for n in WHISPER_TOKENS)
        return one * (self.concurrency + 1)

    def command(self, port: int) -> list[str]:
        launcher = self.launcher or (CPU_LAUNCHER if self.device == "cpu" else LAUNCHER)
        return [
            *launcher,
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--model-path", str(self.model), "--served-model-name", "whisper"),
            *("--device", self.device, "--dtype", self.dtype),
            *("--attention-backend", self.backend, "--page-size", str(self.page_size)),
            *("--max-total-tokens", str(self.pool_slots)),
            *("--max-running-requests", str(self.concurrency + 4)),
            # SGLang's own guess is for a GPU; the pool's size is already given
            *("--mem-fraction-static", "0.8"),
            "--disable-cuda-graph",
            "--sleep-on-idle",  # a waiting scheduler would keep a core busy
            *self.extra_args,
        ]

    def environment(self) -> dict[str, str]:
        """The variables to add to our own environment."""
        env = {}
        path = [str(self.tree)]
        if self.device == "cpu":
            path.insert(0, str(STANDINS))
            # more OpenMP threads spin against the server's other processes
            env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "PAGEALIGN_KERNELS": self.kernels}
            # a busy CPU takes its time over a step: 20 seconds are for a GPU
            env |= {"SGLANG_HEALTH_CHECK_TIMEOUT": "300"}
            env |= {"PAGEALIGN_POISON": str(int(self.poison))}
            if self.backend == "flashinfer":  # its index kernel in Triton's interpreter
                env |= {"PAGEALIGN_FLASHINFER": "1", "TRITON_INTERPRET": "1"}
        # each one set, so that nothing in our own environment decides
        env |= {name: str(int(name in self.pool_checks.variables)) for name in POOL_CHECKS}
        env["PYTHONPATH"] = os.pathsep.join(path)
        env["PYTHONUNBUFFERED"] = "1"
        # a folder called sglang where we happen to be must not come before the tree
        env["PYTHONSAFEPATH"] = "1"
        # the server's own warm-up request must not go through a proxy
        direct = [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"]
        env["NO_PROXY"] = env["no_proxy"] = ",".join(filter(None, direct))
        return env | dict(self.extra_env)


def resolve_device(device: str) -> str:
    """``auto`` -> ``xpu`` where torch sees one, else ``cpu``; anything else stays."""
    if device != "auto":
        return device
    import torch

    return "xpu" if torch.xpu.is_available() else "cpu"


_given: set[int] = set()


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on now, and that this process
    was not given before: servers that are started together listen only after a while.

    Below those that Linux gives to outgoing connections: one of these could take it before
    the server listens.
    """
    first = 32768
    with suppress(OSError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [p for p in range(max(1024, first - 10_000), first) if p not in _given]
    for port in (*random.sample(ports, min(100, len(ports))), 0):  # 0: any
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            found = s.getsockname()[1]
            _given.add(found)
            return found
    raise PagealignError("no free TCP port on 127.0.0.1")


@contextmanager
def terminable() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise SystemExit and SIGINT KeyboardInterrupt (a shell
    starts background jobs without the latter), so that servers are stopped."""

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    handlers = {
        signal.SIGTERM: leave,
        signal.SIGHUP: leave,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {s: signal.signal(s, handler) for s, handler in handlers.items()}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _end_with_parent() -> None:
    """In the child, before exec: Linux sends it SIGTERM should we be killed outright."""
    _libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Server:
    """A running server, as a context manager: ready inside, gone afterwards.

    Start it in the main thread: on Linux it ends with the thread that started it.
    Raises ServerDied when the server ends before it is ready, PagealignError when it is
    still not ready after ``timeout`` seconds.
    """

    def __init__(self, spec: ServerSpec, log: Path, timeout: float = READY_TIMEOUT) -> None:
        self.spec, self.log, self.timeout = spec, log, timeout
        self.port = 0
        self.startup_seconds = 0.0
        self._started_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id, which is its session's too."""
        assert self._process is not None
        return self._process.pid

    @property
    def started(self) -> bool:
        """Whether it was started and not stopped since; it may be loading, or have died."""
        return self._process is not None

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        self.startup_seconds = time.monotonic() - self._started_at
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and return at once; nothing if it is started already."""
        if self.started:
            return
        self._started_at = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.spec.command(self.port),
                env=os.environ | self.spec.environment(),
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent if _libc else None,
            )

    def wait_ready(self) -> None:
        """Return when the server answers requests and its own warm-up is over."""
        deadline = time.monotonic() + self.timeout
        with httpx.Client(base_url=self.url, timeout=10, trust_env=False) as client:
            while time.monotonic() < deadline:
                self.check_alive()
                if PORT_TAKEN in self.log.read_text("utf-8", errors="replace"):
                    raise PagealignError(
                        f"another process took port {self.port} before the server listened on "
                        f"it; run this again (log: {self.log})"
                    )
                with suppress(httpx.TransportError):
                    if client.get("/ready").status_code == 200:
                        return
                time.sleep(0.2)
        raise PagealignError(
            f"the server isn't ready after {self.timeout:.0f} s; see its log: {self.log}"
        )

    def check_alive(self) -> None:
        """Raise ServerDied if the process has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServerDied(self.reason(), self.log)

    def reason(self) -> str:
        """Why the server ended, from its log."""
        assert self._process is not None
        text = self.log.read_text("utf-8", errors="replace")
        return server_log.reason(text, self._process.returncode)

    def died_within(self, seconds: float) -> bool:
        """Whether the process ends in the next ``seconds``.

        After a request failed: a dying scheduler takes the others with it, which takes a
        moment.
        """
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def pool_free(self, settle: float = 10.0) -> int:
        """Free KV slots, as the scheduler counts them, once nothing runs any more.

        From ``/v1/loads``: the pool's size less the slots in use. A page lost makes it
        smaller than ``spec.pool_slots``, a page freed twice larger. Raises
        PagealignError if requests still run after ``settle`` seconds.
        """
        asked = time.time()
        deadline = time.monotonic() + settle
        while time.monotonic() < deadline:
            self.check_alive()
            load = httpx.get(f"{self.url}/v1/loads", timeout=30, trust_env=False).json()["loads"][0]
            idle = load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0
            if idle and load["timestamp"] >= asked:
                return load["max_total_num_tokens"] - load["num_used_tokens"]
            time.sleep(0.1)
        raise PagealignError(f"{self.url} is still busy after {settle:.0f} s: {load}")

    def stop(self) -> None:
        """End the server and its children: SIGTERM, then SIGKILL after the grace.

        Only processes of the session that ``start`` made are touched.
        """
        if self._process is None:
            return
        process = self._process
        try:
            if process.poll() is None:
                # the leader alone: it drains, and ends its children itself
                process.terminate()
                process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when a second interruption ends the wait
            left = session_members(process.pid)
            for member in left:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
            psutil.wait_procs(left, timeout=GRACE)
            self._process = None


def session_members(session: int) -> list[psutil.Process]:
    """The living processes of a session (zombies are not alive)."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            ours = os.getsid(process.pid) == session
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
