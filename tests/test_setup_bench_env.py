"""scripts/setup_bench_env.sh with a Python that installs nothing, and its pins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagealign.paths import REPO

FAKE = r"""#!/bin/bash
case "$*" in
    *sys.version_info*) [[ $1 == -c ]] && { echo "$VERSION"; exit; } ;;
esac
case "$1 $2" in
    "-m venv")
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        exit ;;
    "-m pip")
        echo "pip $*" >>"$LOG"
        [[ -z ${FAIL:-} ]] || { echo "ERROR: no such version"; exit 1; }
        exit ;;
    "-c import torch") [[ -z ${BROKEN:-} ]] || { echo "OSError: libcudart"; exit 1; }; exit ;;
    "-I -c") exit ;;
esac
exec "$REAL" "$@"
"""


class Clone:
    """A clone with what the script reads, and a cache."""

    def __init__(self, tmp: Path) -> None:
        self.root, self.cache, self.log = tmp / "a clone", tmp / "cache", tmp / "log"
        for name in (
            "scripts/setup_bench_env.sh",
            "pagealign/__init__.py",
            "pagealign/errors.py",
            "pagealign/paths.py",
            "pagealign/bench/constraints.txt",
            "pagealign/bench/requirements.txt",
        ):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, self.root / name)
        bin_ = tmp / "bin"
        bin_.mkdir()
        (bin_ / "python3.11").write_text(FAKE)
        (bin_ / "python3.11").chmod(0o755)
        self.env = {
            "PATH": f"{bin_}:/usr/bin:/bin",
            "HOME": str(tmp),
            "PAGEALIGN_CACHE": str(self.cache),
            "VERSION": "3.11",
            "REAL": os.path.realpath(sys.executable),
            "LOG": str(self.log),
        }

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "scripts" / "setup_bench_env.sh"), *arguments],
            env=self.env | env,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    def environments(self) -> list[Path]:
        return sorted(p for p in (self.cache / "bench-envs").glob("*") if p.is_dir())


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path)


def test_it_installs_once_with_its_own_pins(clone):
    first = clone.run()
    assert first.returncode == 0, first.stderr
    env = Path(first.stdout.splitlines()[-1])
    assert clone.environments() == [env] and (env / ".complete").is_file()
    assert clone.run("--print").stdout.strip() == str(env)
    (pip,) = clone.log.read_text().splitlines()
    assert f"-c {clone.root}/pagealign/bench/constraints.txt" in pip
    second = clone.run()
    assert (second.returncode, second.stdout) == (0, f"{env}\n")
    assert len(clone.log.read_text().splitlines()) == 1


def test_other_pins_are_another_environment(clone):
    before = clone.run("--print").stdout
    pins = clone.root / "pagealign" / "bench" / "constraints.txt"
    pins.write_text(pins.read_text().replace("rich==", "rich==99."))
    assert clone.run("--print").stdout != before


@pytest.mark.parametrize(
    ("env", "message"),
    [({"FAIL": "1"}, "ERROR: no such version"), ({"BROKEN": "1"}, "OSError: libcudart")],
)
def test_a_failed_build_leaves_nothing_and_the_next_one_works(clone, env, message):
    failed = clone.run(**env)
    assert failed.returncode == 1 and message in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("setup_bench_env: ")
    assert clone.environments() == []
    assert clone.run().returncode == 0


def test_a_half_made_environment_is_not_used(clone):
    env = Path(clone.run().stdout.splitlines()[-1])
    (env / ".complete").unlink()
    assert clone.run().returncode == 0
    assert len(clone.log.read_text().splitlines()) == 2


def test_remove(clone):
    clone.run()
    assert clone.run("--remove").returncode == 0
    assert not (clone.cache / "bench-envs").exists()


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["--frobnicate"], {}, "unknown option --frobnicate"),
        (["--print", "--print"], {}, "one option at most"),
        ([], {"VERSION": "3.12"}, "is Python 3.12; the packages are for 3.11"),
        ([], {"PYTHON": "/nowhere/python"}, "/nowhere/python does not run"),
    ],
)
def test_refusals_are_one_line_and_change_nothing(clone, arguments, env, message):
    refused = clone.run(*arguments, **env)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert message in line
    assert not clone.cache.exists()


def test_a_full_disk_is_told_before_anything_is_installed(clone, tmp_path):
    df = tmp_path / "bin" / "df"
    df.write_text("#!/bin/sh\nprintf 'head\\nx 1 1 5000000 1 /\\n'\n")
    df.chmod(0o755)
    refused = clone.run()
    assert refused.returncode == 1
    assert "11 GB are needed" in refused.stderr and "5 GB are free" in refused.stderr
    assert clone.environments() == []


def test_the_pins_are_exact_and_name_no_place():
    lines = (REPO / "pagealign" / "bench" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins == sorted(pins)
    for pin in pins:
        name, version = pin.split("==")
        assert name and version and not set(pin) & set("+@/ *")
    asked = (REPO / "pagealign" / "bench" / "requirements.txt").read_text().splitlines()
    names = {pin.split("==")[0] for pin in pins}
    assert {line.split("==")[0] for line in asked if not line.startswith("#")} <= names
    assert {"torch==2.8.0", "intel-extension-for-pytorch==2.8.0"} <= set(pins)
