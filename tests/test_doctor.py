"""The doctor, with packages, devices, tools and room that are there or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagealign import doctor
from pagealign.doctor import Finding
from pagealign.paths import REPO, STANDINS

BASE = ("python", "platform", "torch", "transformers", "sglang", "jiwer")
NAMES = (
    *BASE,
    *("git", "patch", "free disk", "free memory", "triton", "pytest", "hypothesis"),
    *("xpu device", "cuda device", "sgl_kernel", "flashinfer-python"),
)


def parts(*missing: str) -> dict[str, tuple[str, ...]]:
    """The parts' lacks when everything but ``missing`` is there."""
    findings = tuple(Finding(name, "", name not in missing, "") for name in NAMES)
    return {part.name.split(",")[0]: part.lacks for part in doctor.judge(findings)}


def test_with_everything_everything_runs():
    assert set(parts().values()) == {()}


@pytest.mark.parametrize("name", [*BASE, "free disk", "free memory"])
def test_the_demo_needs(name):
    assert parts(name)["the demo"] == (name,)


def test_the_demo_needs_no_accelerator():
    lacks = parts("xpu device", "cuda device", "sgl_kernel", "flashinfer-python", "triton")
    assert lacks["the demo"] == ()
    assert lacks["intel_xpu on the real kernels"] == ("xpu device", "sgl_kernel")
    assert lacks["FlashInfer on a GPU"] == ("cuda device", "flashinfer-python", "triton")


def test_git_or_patch_will_do():
    assert parts("git")["the demo"] == ()
    assert parts("patch")["the demo"] == ()
    assert parts("git", "patch")["the demo"] == ("git or patch",)


# -- what is looked at ---------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Makes packages importable in this process and the ones it starts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def add(name: str, source: str = "", version: str | None = None, dist: str = "") -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "__init__.py").write_text(source)
        if version:
            info = tmp_path / f"{(dist or name).replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {dist or name}\nVersion: {version}\n")

    return add


def by_name(findings) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


TORCH = """
__version__ = "9.8.7"
class _Kind:
    def __init__(self, *names): self.names = names
    def is_available(self): return bool(self.names)
    def device_count(self): return len(self.names)
    def get_device_name(self, i): return self.names[i]
cuda = _Kind()
xpu = _Kind("Arc One", "Arc Two")
"""


def test_torchs_devices_are_named(packages):
    packages("torch", TORCH)
    found = by_name(doctor.look_at_torch())
    assert found["torch"].ok and found["torch"].found.startswith("9.8.7 (pinned: ")
    assert (found["xpu device"].ok, found["xpu device"].found) == (True, "Arc One, Arc Two")
    assert (found["cuda device"].ok, found["cuda device"].found) == (False, "none")


def test_a_torch_without_xpu_is_fine(packages):
    packages("torch", TORCH.replace("xpu = ", "other = "))
    assert by_name(doctor.look_at_torch())["torch"].ok


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('libmkl.so.2: cannot open')", "ImportError: libmkl.so.2: cannot open"),
        ("import os; os._exit(11)", "exit code 11"),
    ],
)
def test_a_broken_torch_is_reported_and_survived(packages, source, says):
    packages("torch", source)
    torch = by_name(doctor.look_at_torch())["torch"]
    assert not torch.ok
    assert torch.found == f"does not import: {says}"


def test_the_stand_in_is_told_from_the_real_kernels(packages, monkeypatch):
    packages("sgl_kernel", version="1.2.3", dist="sgl-kernel-xpu")
    real = by_name(doctor.look_at_kernels())["sgl_kernel"]
    assert real.ok and real.found.startswith("sgl-kernel-xpu 1.2.3")
    monkeypatch.syspath_prepend(str(STANDINS))
    stand_in = by_name(doctor.look_at_kernels())["sgl_kernel"]
    assert (stand_in.ok, stand_in.found) == (False, "the stand-in of this project")


@pytest.fixture
def pinned(monkeypatch):
    monkeypatch.setattr(doctor, "_pinned_release", lambda: ("0.5.23", ""))
    monkeypatch.setattr(doctor, "_installed_state", lambda: "stock")


@pytest.mark.parametrize(
    ("version", "ok", "found"),
    [
        ("0.5.23", True, "0.5.23; installed package: stock"),
        ("0.5.20", False, "0.5.20, not the pinned 0.5.23"),
    ],
)
def test_sglang_against_the_pin(packages, pinned, version, ok, found):
    packages("sglang", "raise AssertionError('must not be imported')", version=version)
    sglang = by_name(doctor.look_at_sglang())["sglang"]
    assert (sglang.ok, sglang.found) == (ok, found)


def test_sglang_missing(pinned, monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    found = by_name(doctor.look_at_sglang())
    assert (found["sglang"].ok, found["sglang"].found) == (False, "not installed")
    assert (found["jiwer"].ok, found["jiwer"].how) == (False, "make env")


def test_a_package_beside_its_pin_serves_and_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "pins", lambda: {"jiwer": "4.0.0"})
    monkeypatch.setattr(doctor, "installed", lambda package: "3.1.0")
    jiwer = by_name(doctor.look_at_sglang())["jiwer"]
    assert (jiwer.ok, jiwer.found) == (True, "3.1.0 (pinned: 4.0.0)")


def test_pins_are_those_of_the_constraints(tmp_path):
    file = tmp_path / "constraints.txt"
    file.write_text("# a==1\nsglang==0.5.23\ntorch==2.14.1\n")
    assert doctor.pins(file) == {"sglang": "0.5.23", "torch": "2.14.1"}
    assert doctor.pins(tmp_path / "none") == {}


def test_tools_are_found_on_path(tmp_path, monkeypatch):
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_name(doctor.look_at_tools())
    assert (found["git"].ok, found["git"].found) == (True, str(git))
    assert (found["ffmpeg"].ok, found["ffmpeg"].found) == (False, "not on PATH")


def test_too_little_room(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEALIGN_CACHE", str(tmp_path / "not" / "yet" / "there"))
    usage = doctor.shutil.disk_usage(tmp_path)._replace(free=1_400_000_000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(doctor, "_free_memory_gb", lambda: 2.0)
    found = by_name(doctor.look_at_room())
    assert (found["free disk"].ok, found["free memory"].ok) == (False, False)
    assert found["free disk"].found == f"1 GB in {tmp_path / 'not' / 'yet' / 'there'}"
    monkeypatch.setattr(doctor, "_free_memory_gb", lambda: None)
    assert by_name(doctor.look_at_room())["free memory"].ok


# -- what is printed -----------------------------------------------------------------------


def report(ok: bool) -> doctor.Report:
    findings = (Finding("torch", "9.8.7", ok, "everything", "make env"),)
    return doctor.Report(findings, (doctor.Part("the demo", () if ok else ("torch",)),))


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_json(monkeypatch, capsys, ok, code):
    monkeypatch.setattr(doctor, "examine", lambda: report(ok))
    assert doctor.run(as_json=True) == code
    assert json.loads(capsys.readouterr().out) == {
        "ok": ok,
        "findings": [
            {
                "name": "torch",
                "found": "9.8.7",
                "ok": ok,
                "needed_for": "everything",
                "how": "make env",
            }
        ],
        "parts": [{"name": "the demo", "lacks": [] if ok else ["torch"], "runs": ok}],
    }


@pytest.mark.parametrize("with_rich", [True, False])
def test_tables(monkeypatch, capsys, with_rich):
    monkeypatch.setattr(doctor, "examine", lambda: report(False))
    if not with_rich:
        monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor.run() == 1
    out = capsys.readouterr().out
    assert "9.8.7" in out and "make env" in out and "the demo" in out
    assert ("rich is not installed" in out) is not with_rich


def test_the_whole_of_it_where_nothing_is_installed(tmp_path):
    """A Python with no package at all, through the plain path, as JSON."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(REPO),
    }
    done = subprocess.run(
        [sys.executable, "-S", "-m", "pagealign", "doctor", "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in data["findings"]}
    assert found["python"]["ok"]
    assert {name for name in BASE if not found[name]["ok"]} == set(BASE) - {"python", "platform"}
    assert not data["ok"]
    assert not any(part["runs"] for part in data["parts"])
    assert Path(found["git"]["found"]).is_file()
