"""Starting, watching and stopping a server, and reading its log; no SGLang here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pagealign import server as module
from pagealign.errors import PagealignError
from pagealign.paths import REPO, STANDINS
from pagealign.server import PoolChecks, Server, ServerDied, ServerSpec, free_port
from pagealign.server_log import reason

FAKE = Path(__file__).with_name("fake_server.py")


def spec(mode: str, **fields: object) -> ServerSpec:
    launcher = (sys.executable, str(FAKE), mode)
    return ServerSpec(tree=Path("/tree"), model=Path("/model"), launcher=launcher, **fields)


# --- the command line and the environment -----------------------------------------------


def test_command() -> None:
    command = ServerSpec(Path("/t"), Path("/m"), page_size=128, extra_args=("--x", "1")).command(7)
    assert command[:3] == [sys.executable, "-m", "forking_launcher"]
    options = dict(zip(command[3::2], command[4::2], strict=False))
    assert options["--host"] == "127.0.0.1" and options["--port"] == "7"
    assert options["--model-path"] == "/m" and options["--device"] == "cpu"
    assert options["--attention-backend"] == "intel_xpu" and options["--page-size"] == "128"
    assert options["--dtype"] == "float32"
    assert "--disable-cuda-graph" in command and command[-2:] == ["--x", "1"]


@pytest.mark.parametrize("device", ["xpu", "cuda"])
def test_a_devices_server_is_not_forked(device: str) -> None:
    command = ServerSpec(Path("/t"), Path("/m"), device=device).command(7)
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]


@pytest.mark.parametrize(
    ("page_size", "slots"),
    # 1500 + 448 tokens; 24 + 7 pages of 64; 12 + 4 pages of 128; for 2 requests and one more
    [(1, 3 * 1948), (64, 3 * 31 * 64), (128, 3 * 16 * 128)],
)
def test_the_pool_holds_the_requests(page_size: int, slots: int) -> None:
    assert ServerSpec(Path("t"), Path("m"), page_size=page_size, concurrency=2).pool_slots == slots


def test_environment_on_a_cpu() -> None:
    env = ServerSpec(Path("/t"), Path("/m"), kernels="page1", poison=True).environment()
    assert env["PYTHONPATH"].split(os.pathsep) == [str(STANDINS), "/t"]
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "1"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert env["PAGEALIGN_KERNELS"] == "page1" and env["PAGEALIGN_POISON"] == "1"


def test_flashinfer_on_a_cpu_has_a_stand_in() -> None:
    wanted = {"PAGEALIGN_FLASHINFER": "1", "TRITON_INTERPRET": "1"}
    for device, backend, there in (
        ("cpu", "flashinfer", True),
        ("cpu", "torch_native", False),
        ("cuda", "flashinfer", False),
    ):
        env = ServerSpec(Path("/t"), Path("/m"), device=device, backend=backend).environment()
        assert (wanted.items() <= env.items()) is there
        assert there or not wanted.keys() & env.keys()


def test_environment_on_an_xpu_has_no_stand_in() -> None:
    env = ServerSpec(Path("/t"), Path("/m"), device="xpu").environment()
    assert env["PYTHONPATH"] == "/t"
    assert not {"SGLANG_USE_CPU_ENGINE", "PAGEALIGN_KERNELS", "OMP_NUM_THREADS"} & env.keys()


def test_the_servers_own_requests_pass_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    env = ServerSpec(Path("/t"), Path("/m")).environment()
    assert env["NO_PROXY"] == env["no_proxy"] == "example.org,127.0.0.1"


def test_pool_checks() -> None:
    def on(checks: PoolChecks) -> set[str]:
        env = ServerSpec(Path("t"), Path("m"), pool_checks=checks).environment()
        found = {k: v for k, v in env.items() if "POOL" in k or "MEM_CHECK" in k or "KV" in k}
        assert len(found) == 4 and set(found.values()) <= {"0", "1"}
        return {k for k, v in found.items() if v == "1"}

    idle = {"SGLANG_DEBUG_MEMORY_POOL", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"}
    assert on(PoolChecks.OFF) == set() and on(PoolChecks.IDLE) == idle
    assert on(PoolChecks.BUSY) - idle == {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS",
    }


def test_free_port_is_none_of_the_kernels_own() -> None:
    """An outgoing connection must not take it before the server listens."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 <= free_port() < first for _ in range(50))


def test_free_port_is_another_each_time() -> None:
    """Servers that start together listen on theirs only after a while."""
    ports = [free_port() for _ in range(1000)]
    assert len(set(ports)) == len(ports)


def test_a_taken_port_is_told_at_once(tmp_path: Path) -> None:
    server = Server(spec("taken"), tmp_path / "log", timeout=60)
    with pytest.raises(PagealignError, match="another process took port"):
        server.__enter__()


def test_free_port_can_be_bound() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", free_port()))


def test_resolve_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for there, device in ((True, "xpu"), (False, "cpu")):
        monkeypatch.setattr(torch.xpu, "is_available", lambda there=there: there)
        assert module.resolve_device("auto") == device
        assert module.resolve_device("cuda") == "cuda"


# --- life and death ---------------------------------------------------------------------


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that gets the id of the fake server's own child."""
    path = tmp_path / "child"
    monkeypatch.setenv("FAKE_CHILD", str(path))
    return path


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: int, seconds: float = 10) -> bool:
    """Whether the process ends within ``seconds``."""
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_server_runs_inside_the_with_only(child: Path, tmp_path: Path) -> None:
    with Server(spec("ok"), tmp_path / "log") as server:
        leader, descendant = server.pid, int(child.read_text())
        assert alive(leader) and alive(descendant)
        assert os.getsid(descendant) == leader != os.getsid(0)
        assert server.pool_free() == server.spec.pool_slots
    assert gone(leader, 0) and gone(descendant, 0)


def test_pool_free_counts_a_page_freed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ANSWERS", '{"free": 9984}')
    with Server(spec("ok"), tmp_path / "log") as server:
        assert server.pool_free() == 9984


def test_stopping_touches_nothing_else(child: Path, tmp_path: Path) -> None:
    with Server(spec("ok"), tmp_path / "one") as other:
        others_child = int(child.read_text())
        with Server(spec("ok"), tmp_path / "two") as server:
            assert server.port != other.port
        assert alive(other.pid) and alive(others_child)
        other.check_alive()
    assert gone(others_child, 0)


def test_a_stubborn_server_is_killed(
    child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.5)
    with Server(spec("stubborn"), tmp_path / "log") as server:
        leader, descendant = server.pid, int(child.read_text())
    assert gone(leader) and gone(descendant)


def test_an_exception_stops_the_server_too(child: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Server(spec("ok"), tmp_path / "log") as server:
        leader = server.pid
        raise KeyboardInterrupt
    assert gone(leader, 0) and gone(int(child.read_text()), 0)


def test_a_death_at_start_is_reported_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ServerDied) as death, Server(spec("dies"), tmp_path / "log", timeout=300):
        pass
    assert time.monotonic() - started < 30
    assert death.value.reason == (
        "sgl_kernel._errors.StrictnessError: Unsupported page size for prefill attention: 1"
    )
    assert str(tmp_path / "log") in str(death.value)


def test_a_server_that_never_answers(child: Path, tmp_path: Path) -> None:
    with pytest.raises(PagealignError, match="isn't ready after 1 s; see its log: .*log"):
        Server(spec("mute"), tmp_path / "log", timeout=1).__enter__()
    assert gone(int(child.read_text()), 0)


def test_a_missing_launcher_is_not_left_running(tmp_path: Path) -> None:
    bad = ServerSpec(Path("t"), Path("m"), launcher=(sys.executable, "-m", "not_a_module"))
    with pytest.raises(ServerDied, match="No module named not_a_module"):
        Server(bad, tmp_path / "log").__enter__()


OWNER = """\
import sys
from pathlib import Path
from pagealign.client import Client, at_once
from pagealign.server import Server, ServerSpec, terminable
fake, mode, log = sys.argv[1:]
spec = ServerSpec(Path("/t"), Path("/m"), launcher=(sys.executable, fake, mode))
with terminable(), Server(spec, Path(log)) as server, Client(server.url) as client:
    print(server.pid, flush=True)
    at_once(client.generate_text, ["x"] * 2, 2) if mode == "hangs" else sys.stdin.read()
"""


@contextmanager
def owner(mode: str, log: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program of ours with a server that runs, and the server's process id."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(FAKE), mode, str(log)],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_our_own_end_is_the_servers(child: Path, tmp_path: Path, how: signal.Signals) -> None:
    with owner("ok", tmp_path / "log") as (process, leader):
        assert alive(leader)
        process.send_signal(how)
        process.wait(30)
        assert gone(leader, 0) and gone(int(child.read_text()), 0)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_our_end_does_not_wait_for_answers(
    child: Path, tmp_path: Path, how: signal.Signals
) -> None:
    log = tmp_path / "log"
    with owner("hangs", log) as (process, leader):
        deadline = time.monotonic() + 30
        while log.read_text().count("a request") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(how)
        process.wait(30)
        assert gone(leader, 0) and gone(int(child.read_text()), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child of its parent's death")
def test_even_a_sudden_one(child: Path, tmp_path: Path) -> None:
    with owner("ok", tmp_path / "log") as (process, leader):
        process.kill()
        assert gone(leader)
    os.kill(int(child.read_text()), signal.SIGKILL)  # a real server ends its children itself


# --- the log ----------------------------------------------------------------------------

HARMLESS = """\
[2026-11-30 00:51:13] torchcodec AudioDecoder failed (Could not load libtorchcodec.
The following exceptions were raised as we tried to load libtorchcodec:

[start of libtorchcodec loading traceback]
FFmpeg version 4:
Traceback (most recent call last):
  File "/v/torch/_ops.py", line 1587, in load_library
    ctypes.CDLL(path)
  File "/v/ctypes/__init__.py", line 376, in __init__
    self._handle = _dlopen(self._name, mode)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^
OSError: libavutil.so.56: cannot open shared object file: No such file or directory

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/v/torchcodec/_internally_replaced_utils.py", line 132, in load_core_libraries
    torch.ops.load_library(core_library_path)
OSError: Could not load this library: /v/torchcodec/libtorchcodec_core4.so
[end of libtorchcodec loading traceback].); falling back to soundfile + torchaudio.
"""

FREED_TWICE = """\
[2026-11-30 00:55:21] Decode batch, #running-req: 1, #token: 1600, token usage: 0.16
[2026-11-30 00:55:22] Scheduler hit an exception: Traceback (most recent call last):
  File "/t/sglang/srt/managers/scheduler.py", line 2071, in pop_and_process
    self.process_batch_result(tmp_batch, tmp_result)
  File "/t/sglang/srt/observability/scheduler_stage_metrics.py", line 186, in wrapper
    return profiled_func(self, *args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/t/sglang/srt/mem_cache/allocator/paged.py", line 352, in free_segment
    assert torch.equal(
AssertionError

[2026-11-30 00:55:22] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
[2026-11-30 00:55:27] kill_process_tree called: parent_pid=9346, include_parent=True, pid=9346
"""

LEAK = """\
[2026-11-30 00:55:22 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/t/sglang/srt/managers/scheduler_components/invariant_checker.py", line 343, in busy
    assert not full_leak, f"Full Pool Mem Leak Detected! {full_msg}"
AssertionError: Full Pool Mem Leak Detected! available=6912, evictable=0, total=10240
"""

IMPORT = """\
Traceback (most recent call last):
  File "/t/sglang/kernels/ops/kvcache/cache_move.py", line 10, in <module>
    from sgl_kernel import copy_all_layer_kv_cache_cpu
ImportError:
[sgl_kernel] CRITICAL: Could not load any common_ops library!

Attempted locations:
"""

CHAINED = """\
Traceback (most recent call last):
  File "/t/a.py", line 1, in f
    g()
KeyError: 'encoder'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/t/a.py", line 3, in f
    raise ValueError("intel_amx can't serve Whisper at page size 64")
ValueError: intel_amx can't serve Whisper at page size 64
"""

USAGE = """\
usage: launch_server.py [-h] --model-path MODEL_PATH
launch_server.py: error: argument --page-size: invalid int value: 'x'
"""

COLOURED = "\x1b[1;33m[2026-11-30 00:55:22] RuntimeError: in colour, not a traceback\x1b[0m\n"


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        (FREED_TWICE, -9, "AssertionError in free_segment (paged.py:352): assert torch.equal("),
        (HARMLESS + FREED_TWICE, -9, "AssertionError in free_segment (paged.py:352): assert"),
        (FREED_TWICE + HARMLESS, -9, "AssertionError in free_segment (paged.py:352): assert"),
        (LEAK, -9, "AssertionError: Full Pool Mem Leak Detected! available=6912, evictable=0"),
        (IMPORT, 1, "ImportError: [sgl_kernel] CRITICAL: Could not load any common_ops library!"),
        (CHAINED, 1, "ValueError: intel_amx can't serve Whisper at page size 64"),
        (USAGE, 2, "argument --page-size: invalid int value: 'x'"),
        (HARMLESS, -9, "ended by SIGKILL, as when memory runs out; nothing in the log says why"),
        ("", -15, "ended by SIGTERM; nothing in the log says why"),
        ("one\ntwo\n\n", 3, "exit code 3; the log ends with: two"),
        ("", 1, "exit code 1; the log ends with: nothing"),
        (COLOURED, 1, "exit code 1; the log ends with: RuntimeError: in colour"),
        ("Traceback (most recent call last):\n  File", -9, "ended by SIGKILL"),
    ],
)
def test_reason(log: str, code: int, expected: str) -> None:
    found = reason(log, code)
    assert found.startswith(expected) and "\n" not in found
