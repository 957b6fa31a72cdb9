"""``pagealign doctor``: what is installed here, which parts can run, and what is missing.

It has to run where things are missing, so only the standard library is imported at the
top, versions are read from package metadata, and torch is asked in a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from pagealign.paths import REPO, STANDINS, cache_root

MAKE_ENV = "make env"
KERNEL_PACKAGES = ("sgl-kernel-xpu", "sgl-kernel", "sglang-kernel")
DEMO_DISK_GB = 2  # weights, recordings, trees and logs; the environment is there by then
DEMO_MEMORY_GB = 5  # a float32 server with its pools, beside the reference

_ASK_TORCH = """
import json, torch
def names(kind):
    if not (kind and kind.is_available()):
        return []
    return [kind.get_device_name(i) for i in range(kind.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": names(torch.cuda),
                  "xpu": names(getattr(torch, "xpu", None))}))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    ``found`` says what is there, ``ok`` whether it serves; ``how`` is how to get it.
    """

    name: str
    found: str
    ok: bool
    needed_for: str
    how: str = ""


@dataclass(frozen=True)
class Part:
    """One thing that the project can do, and the findings' names that it lacks here."""

    name: str
    lacks: tuple[str, ...]

    @property
    def runs(self) -> bool:
        return not self.lacks


@dataclass(frozen=True)
class Report:
    """All findings and parts; the first part is the demo on a CPU."""

    findings: tuple[Finding, ...]
    parts: tuple[Part, ...]

    @property
    def ok(self) -> bool:
        return self.parts[0].runs


# -- looking -------------------------------------------------------------------------------


def installed(package: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def pins(constraints: Path = REPO / "constraints.txt") -> dict[str, str]:
    """Package -> pinned version; empty if the file is missing."""
    try:
        lines = constraints.read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split("==") for line in lines if "==" in line and line[0] != "#")


def look_at_python() -> list[Finding]:
    found = platform.python_version()
    system = f"{platform.system()} {platform.machine()}"
    return [
        Finding(
            "python",
            f"{found} ({sys.executable})",
            sys.version_info[:2] == (3, 11),
            "everything",
            f"Python 3.11, then {MAKE_ENV}",
        ),
        Finding(
            "platform",
            system,
            system == "Linux x86_64",
            "the pinned packages",
            "a Linux x86_64 machine (others are untested)",
        ),
    ]


def look_at_torch() -> list[Finding]:
    """torch itself, and the devices that it sees."""
    asked = _ask_torch()
    if isinstance(asked, str):
        torch = Finding("torch", asked, False, "everything", MAKE_ENV)
        asked = {"cuda": [], "xpu": []}
    else:
        torch = _package("torch", "everything", found=asked["version"])
    xpu, cuda = ", ".join(asked["xpu"]), ", ".join(asked["cuda"])
    return [
        torch,
        Finding(
            "xpu device",
            xpu or "none",
            bool(xpu),
            "intel_xpu on the real kernels",
            "an Intel GPU with its driver, and an XPU build of torch",
        ),
        Finding(
            "cuda device",
            cuda or "none",
            bool(cuda),
            "FlashInfer, FA3 and CUDA graphs for real",
            "an NVIDIA GPU with its driver",
        ),
    ]


def _ask_torch() -> dict[str, object] | str:
    """What torch says, from a process that may crash; or why it says nothing."""
    if not find_spec("torch"):
        return "not installed"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120
        )
        return json.loads(answer.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return "does not import: no answer in 120 s"
    except (IndexError, ValueError):
        why = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        return f"does not import: {why[-1]}"


def look_at_kernels() -> list[Finding]:
    """Whose ``sgl_kernel`` an import would give."""
    packages = [f"{name} {v}" for name in KERNEL_PACKAGES if (v := installed(name))]
    try:
        spec = find_spec("sgl_kernel")
    except (ImportError, ValueError):
        spec = None
    if spec and spec.origin and Path(spec.origin).resolve().is_relative_to(STANDINS):
        found = "the stand-in of this project"
    elif spec:
        found = ", ".join(packages) or f"of unknown origin: {spec.origin}"
    else:
        found = "not installed (the stand-in serves on a CPU)"
    real_xpu = found.startswith("sgl-kernel-xpu")
    return [
        Finding(
            "sgl_kernel",
            found,
            real_xpu,
            "intel_xpu on the real kernels",
            "sgl-kernel-xpu, built for this XPU from its source",
        ),
        _package(
            "intel-extension-for-pytorch",
            "timings on Intel's own CPU kernels",
            "make bench-kernels (an environment of its own)",
        ),
    ]


def look_at_sglang() -> list[Finding]:
    release, problem = _pinned_release()
    have = installed("sglang")
    if have is None:
        found = "not installed"
    elif have == release:
        found = f"{have}; installed package: {_installed_state()}"
    else:
        found = f"{have}, not the pinned {release}" if release else f"{have}; {problem}"
    return [
        Finding("sglang", found, have is not None and have == release, "everything", MAKE_ENV),
        _package("transformers", "everything: the models and the reference"),
        _package("triton", "FlashInfer's metadata kernel"),
        _package("flashinfer-python", "FlashInfer for real"),
        _package("jiwer", "word error rates"),
        _package("pytest", "the tests"),
        _package("hypothesis", "the tests"),
    ]


def _pinned_release() -> tuple[str | None, str]:
    """The release in patches/PIN, or None and why it can't be told."""
    try:
        from pagealign.pin import load_pin

        return load_pin().release, ""
    except Exception as error:  # an older Python may not even compile that module
        return None, str(error)


def _installed_state() -> str:
    """stock, applied, ...: what ``apply_patches.sh --status --installed`` says."""
    command = ["bash", str(REPO / "scripts" / "apply_patches.sh"), "--status", "--installed"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHON": sys.executable},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    lines = done.stdout.splitlines() or done.stderr.splitlines() or ["unknown"]
    return lines[0].rpartition(": ")[2]


def _package(name: str, needed_for: str, how: str = MAKE_ENV, found: str | None = None) -> Finding:
    """A package; another version than the pinned one is named and still serves."""
    have = found or installed(name)
    if have is None:
        return Finding(name, "not installed", False, needed_for, how)
    pinned = pins().get(name)
    note = f" (pinned: {pinned})" if pinned and have.split("+")[0] != pinned else ""
    return Finding(name, have + note, True, needed_for)


def look_at_tools() -> list[Finding]:
    def tool(name: str, needed_for: str, how: str) -> Finding:
        path = shutil.which(name)
        return Finding(name, path or "not on PATH", path is not None, needed_for, how)

    return [
        tool("git", "applying the series (or patch)", "apt install git"),
        tool("patch", "applying the series (or git)", "apt install patch"),
        tool(
            "ffmpeg",
            "optional: compressed audio (SGLang's torchcodec traceback is harmless)",
            "apt install ffmpeg",
        ),
        tool("espeak-ng", "optional: a spoken sentence to transcribe", "apt install espeak-ng"),
    ]


def look_at_room() -> list[Finding]:
    """Free disk for the cache, and free memory."""
    root = cache_root()
    there = next(path for path in [root, *root.parents] if path.exists())
    disk = shutil.disk_usage(there).free / 1e9
    memory = _free_memory_gb()
    return [
        Finding(
            "free disk",
            f"{disk:.0f} GB in {root}",
            disk >= DEMO_DISK_GB,
            "the demo",
            f"free {DEMO_DISK_GB} GB, or move the cache: PAGEALIGN_CACHE=/path/with/space",
        ),
        Finding(
            "free memory",
            "unknown" if memory is None else f"{memory:.0f} GB",
            memory is None or memory >= DEMO_MEMORY_GB,
            "the demo",
            f"free {DEMO_MEMORY_GB} GB",
        ),
    ]


def _free_memory_gb() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = dict(line.split(":") for line in lines).get("MemAvailable", "").split()
    return int(kib[0]) * 1024 / 1e9 if kib else None


# -- judging -------------------------------------------------------------------------------


def judge(findings: tuple[Finding, ...]) -> tuple[Part, ...]:
    """Which parts can run, given what was found."""
    ok = {finding.name: finding.ok for finding in findings}

    def part(name: str, *needs: str) -> Part:
        # "a or b": either will do.
        lacks = [need for need in needs if not any(ok[n] for n in need.split(" or "))]
        return Part(name, tuple(lacks))

    base = ("python", "platform", "torch", "transformers", "sglang", "jiwer", "git or patch")
    return (
        part("the demo, on a CPU with stand-in kernels", *base, "free disk", "free memory"),
        part("the tests", *base, "triton", "pytest", "hypothesis", "free disk", "free memory"),
        part("intel_xpu on the real kernels", *base, "xpu device", "sgl_kernel"),
        part("FlashInfer on a GPU", *base, "cuda device", "flashinfer-python", "triton"),
    )


def examine() -> Report:
    """Look at everything; takes some seconds, most of them torch's import."""
    findings = (
        *look_at_python(),
        *look_at_torch(),
        *look_at_sglang(),
        *look_at_kernels(),
        *look_at_tools(),
        *look_at_room(),
    )
    return Report(findings, judge(findings))


# -- telling -------------------------------------------------------------------------------


def to_json(report: Report) -> str:
    data = {
        "ok": report.ok,
        "findings": [asdict(finding) for finding in report.findings],
        "parts": [{**asdict(part), "runs": part.runs} for part in report.parts],
    }
    return json.dumps(data, indent=2)


def to_lines(report: Report) -> list[str]:
    """The report as plain text, for where rich is missing."""
    lines = []
    for f in report.findings:
        how = "" if f.ok else f"  <- {f.how}"
        lines.append(f"{'ok' if f.ok else '--':3} {f.name:28} {f.found}  [{f.needed_for}]{how}")
    lines.append("")
    lines += [f"{_verdict(part):4} {part.name}{_lacks(part)}" for part in report.parts]
    return lines


def _verdict(part: Part) -> str:
    return "runs" if part.runs else "no"


def _lacks(part: Part) -> str:
    return f" (lacks: {', '.join(part.lacks)})" if part.lacks else ""


def print_tables(report: Report) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    found = Table(title="What is here", title_justify="left", box=SIMPLE_HEAD)
    found.add_column("")
    found.add_column("what", max_width=18, overflow="fold")
    found.add_column("found, or how to get it", overflow="fold", ratio=3)
    found.add_column("needed for", ratio=2)
    for f in report.findings:
        mark = Text("ok", style="green") if f.ok else Text("--", style="yellow")
        how = Text("" if f.ok else f"\n{f.how}", style="dim")
        found.add_row(mark, f.name, Text(f.found) + how, f.needed_for)
    console.print(found)
    parts = Table(title="What can run", title_justify="left", box=SIMPLE_HEAD)
    for column in ("part", "", "lacks"):
        parts.add_column(column, overflow="fold")
    for part in report.parts:
        style = "green" if part.runs else "yellow"
        parts.add_row(part.name, Text(_verdict(part), style=style), ", ".join(part.lacks))
    console.print(parts)


def run(as_json: bool = False) -> int:
    """Print the report; 0 if the demo can run on this machine's CPU, else 1."""
    report = examine()
    if as_json:
        print(to_json(report))
    elif find_spec("rich"):
        print_tables(report)
    else:
        print(*to_lines(report), "", "(plain, since rich is not installed)", sep="\n")
    return 0 if report.ok else 1


def main(argv: list[str]) -> int:
    """``doctor`` without typer: the option ``--json`` and nothing else."""
    if unknown := [argument for argument in argv if argument != "--json"]:
        print(f"pagealign doctor: unknown argument {unknown[0]}; there is --json", file=sys.stderr)
        return 2
    return run(as_json=bool(argv))
