"""scripts/setup_env.sh, with a Python whose pip installs nothing and takes no time.

The fake interpreter passes code on to the real one; ``-m venv`` and ``-m pip install`` it
plays itself and writes down. It obeys files in the folder ``orders``: ``fail`` makes pip
fail, ``hold`` (a named pipe) makes it wait until somebody writes there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagealign.paths import REPO

FAKE = r"""#!/bin/bash
# VERSION, REAL, LOG and ORDERS are set by the test.
here=$(dirname "$0")
case "$*" in
    *sys.version_info*) [[ $1 == -c ]] && { echo "$VERSION"; exit; } ;;
esac
case "$1 $2" in
    "-m venv")
        dir=${!#}
        echo "venv $*" >>"$LOG"
        [[ ! -e $ORDERS/no-venv ]] || exit 1
        mkdir -p "$dir/bin" "$dir/lib/python3.11/site-packages/pip-1.dist-info"
        if [[ $* == *--without-pip* ]]; then
            # A thin environment: a real one, so that its .pth file can be tried.
            exec "$REAL" -m venv --without-pip "$dir"
        fi
        cp "$here/$(basename "$0")" "$dir/bin/python"
        exit ;;
    "-m pip")
        echo "pip $*" >>"$LOG"
        [[ ! $* =~ --report\ ([^ ]+) ]] || exec cp "$ORDERS/report" "${BASH_REMATCH[1]}"
        echo "Collecting everything"
        if [[ -p $ORDERS/hold ]]; then
            echo held >"$ORDERS/held"
            read -r _ <"$ORDERS/hold"
        fi
        [[ ! -e $ORDERS/fail ]] || { echo "ERROR: no route to the index"; exit 1; }
        site=$here/../lib/python3.11/site-packages
        mkdir -p "$site/alpha-1.dist-info"
        echo "where = __file__" >"$site/alpha.py"
        exit ;;
    "-c import torch, transformers, sglang")
        [[ ! -e $ORDERS/broken ]] || { echo "ImportError: GLIBC_2.34"; exit 1; }
        exit ;;
    "-I -c") [[ $3 != *ensurepip* || ! -e $ORDERS/no-ensurepip ]]; exit ;;
esac
exec "$REAL" "$@"
"""

PYPROJECT = """\
[project]
dependencies = ["alpha"]
[project.optional-dependencies]
test = ["beta>=2"]
"""


@dataclass
class Clone:
    """A clone with nothing in it but what the script reads, and a cache."""

    root: Path
    tmp: Path
    env: dict[str, str]

    @property
    def envs(self) -> Path:
        return self.tmp / "cache" / "envs"

    @property
    def orders(self) -> Path:
        return self.tmp / "orders"

    def calls(self, what: str) -> list[str]:
        log = self.tmp / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.startswith(what)]

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / "setup_env.sh"), *arguments],
            env=self.env | env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def shared(self) -> Path:
        return Path(self.run("--print").stdout.strip())

    def python(self, code: str, cwd: Path) -> str:
        command = [str(self.root / ".venv" / "bin" / "python"), "-P", "-c", code]
        return subprocess.check_output(command, cwd=cwd, text=True, env={"PATH": "/usr/bin:/bin"})


def tool(folder: Path, name: str, source: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(source)
    (folder / name).chmod(0o755)


def make_clone(root: Path, tmp: Path) -> Clone:
    for name in (
        "scripts/setup_env.sh",
        "pagealign/__init__.py",
        "pagealign/errors.py",
        "pagealign/paths.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / name, root / name)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "constraints.txt").write_text("# all of it\nalpha==1\nbeta==2.1\n")
    tool(tmp / "bin", "python3.11", FAKE)
    (tmp / "orders").mkdir(exist_ok=True)
    env = {
        "PATH": f"{tmp / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp),
        "PAGEALIGN_CACHE": str(tmp / "cache"),
        "VERSION": "3.11",
        "REAL": os.path.realpath(sys.executable),
        "LOG": str(tmp / "log"),
        "ORDERS": str(tmp / "orders"),
    }
    return Clone(root, tmp, env)


@pytest.fixture
def clone(tmp_path) -> Clone:
    return make_clone(tmp_path / "a clone", tmp_path)


# -- the good path -------------------------------------------------------------------------


def test_the_first_run_installs_with_the_pins_and_the_second_does_nothing(clone):
    first = clone.run()
    assert first.returncode == 0, first.stderr
    shared = clone.shared()
    assert first.stdout.splitlines()[-1] == f"environment ready: {shared}"
    assert (shared / ".complete").is_file()
    assert [path.name for path in clone.envs.iterdir() if path.name.startswith(".")] == [".lock"]
    (pip,) = clone.calls("pip")
    assert f"-c {clone.root}/constraints.txt" in pip

    before = (clone.tmp / "log").read_bytes()
    second = clone.run()
    assert (second.returncode, second.stdout) == (0, f"environment ready: {shared}\n")
    assert (clone.tmp / "log").read_bytes() == before


def test_pip_is_given_all_dependencies_and_none_of_the_users_redirections(clone):
    tool(
        clone.tmp / "bin",
        "python3.11",
        FAKE.replace(
            'echo "pip $*" >>"$LOG"',
            'cat "${!#}" >>"$LOG"; env | grep -E "^PIP_(TARGET|PREFIX|USER)" >>"$LOG"',
        ),
    )
    result = clone.run(PIP_TARGET="/elsewhere", PIP_PREFIX="/elsewhere", PIP_USER="1")
    assert result.returncode == 0, result.stderr
    written = (clone.tmp / "log").read_text()
    assert "alpha\nbeta>=2\n" in written
    assert "PIP_" not in written


def test_the_thin_environment_finds_the_clone_and_the_shared_packages(clone, tmp_path):
    assert clone.run().returncode == 0
    code = "import alpha, pagealign, pagealign.paths as p; print(alpha.where); print(p.REPO)"
    where, repo = clone.python(code, tmp_path).splitlines()
    assert Path(where).resolve().is_relative_to(clone.shared())
    assert repo == str(clone.root)
    # A child process of that interpreter, too.
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', {code!r}])"
    assert clone.python(code, tmp_path).splitlines() == [where, repo]


def test_the_console_script_runs_the_clones_package_from_anywhere(clone, tmp_path):
    (clone.root / "pagealign" / "__main__.py").write_text(
        "import sys, pagealign; print(pagealign.__file__, sys.argv[1:])"
    )
    assert clone.run().returncode == 0
    link = tmp_path / "link"
    link.symlink_to(clone.root / ".venv" / "bin" / "pagealign")
    env = {"PATH": "/usr/bin:/bin"}  # without our own PYTHONPATH
    out = subprocess.check_output([str(link), "a b", "--c"], cwd=tmp_path, text=True, env=env)
    assert out == f"{clone.root}/pagealign/__init__.py ['a b', '--c']\n"


# -- what makes another environment --------------------------------------------------------


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("constraints.txt", "alpha==1", "alpha==1.1"),
        ("pyproject.toml", '["alpha"]', '["alpha", "gamma"]'),
        ("pyproject.toml", "beta>=2", "beta>=2.1"),
    ],
)
def test_a_changed_dependency_makes_a_new_environment(clone, file, old, new):
    assert clone.run().returncode == 0
    before = clone.shared()
    edit(clone.root / file, old, new)
    assert clone.shared() != before
    result = clone.run()
    assert result.returncode == 0, result.stderr
    assert len(clone.calls("pip")) == 2
    assert (before / ".complete").exists(), "another clone may use the old one"
    where = clone.python("import alpha; print(alpha.where)", clone.tmp)
    assert Path(where.strip()).resolve().is_relative_to(clone.shared())


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("constraints.txt", "# all of it", "# every one"),
        ("pyproject.toml", "[project]\n", '[project]\ndescription = "other"\n'),
    ],
)
def test_anything_else_does_not(clone, file, old, new):
    before = clone.shared()
    edit(clone.root / file, old, new)
    assert clone.shared() == before


def test_clones_share_an_environment(clone, tmp_path):
    other = make_clone(tmp_path / "other", tmp_path)
    assert clone.run().returncode == 0
    assert other.run().returncode == 0
    assert other.shared() == clone.shared()
    assert len(clone.calls("pip")) == 1
    for one in (clone, other):
        repo = one.python("import pagealign.paths as p; print(p.REPO)", tmp_path)
        assert repo.strip() == str(one.root)


@pytest.mark.parametrize(
    ("env", "root"),
    [
        ({"PAGEALIGN_CACHE": "/one"}, "/one"),
        ({"PAGEALIGN_CACHE": "", "XDG_CACHE_HOME": "/two"}, "/two/pagealign"),
        ({"PAGEALIGN_CACHE": "", "HOME": "/three"}, "/three/.cache/pagealign"),
    ],
)
def test_where_the_cache_is(clone, env, root):
    assert clone.run("--print", **env).stdout.startswith(f"{root}/envs/")
    assert not Path(root).exists()


# -- things that went away or moved --------------------------------------------------------


def test_a_moved_clone_is_linked_afresh(clone, tmp_path):
    assert clone.run().returncode == 0
    moved = Clone(clone.root.rename(tmp_path / "moved"), tmp_path, clone.env)
    assert moved.run().returncode == 0
    assert len(moved.calls("pip")) == 1
    repo = moved.python("import pagealign.paths as p; print(p.REPO)", tmp_path)
    assert repo.strip() == str(moved.root)


def test_an_environment_removed_from_the_cache_is_built_again(clone):
    assert clone.run().returncode == 0
    shutil.rmtree(clone.shared())
    assert clone.run().returncode == 0
    assert len(clone.calls("pip")) == 2
    clone.python("import alpha", clone.tmp)


def test_an_environment_whose_python_went_away_is_built_again(clone):
    assert clone.run().returncode == 0
    (clone.shared() / "bin" / "python").unlink()
    assert clone.run().returncode == 0
    assert len(clone.calls("pip")) == 2


def test_an_incomplete_environment_is_removed_and_built_again(clone):
    left = clone.shared() / "lib" / "left"
    left.mkdir(parents=True)
    result = clone.run()
    assert result.returncode == 0, result.stderr
    assert not left.exists()
    assert (clone.shared() / ".complete").is_file()


def test_a_half_made_thin_environment_is_made_again(clone):
    assert clone.run().returncode == 0
    (clone.root / ".venv" / ".pagealign").write_text("")
    (clone.root / ".venv" / "bin" / "python").unlink()
    assert clone.run().returncode == 0
    clone.python("import alpha", clone.tmp)


def test_a_foreign_venv_is_left_alone(clone):
    mine = clone.root / ".venv" / "mine"
    mine.parent.mkdir()
    mine.write_text("")
    result = clone.run()
    assert result.returncode == 1
    assert "move it or delete it" in result.stderr
    assert mine.exists()


# -- refusals and failures -----------------------------------------------------------------


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of stderr of a run that failed."""
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def plain_path(tmp_path) -> str:
    """A PATH with what the script needs, and no Python of any name."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in ("bash", "dirname", "env", "mkdir"):
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


def test_no_python_at_all(clone, plain_path):
    line = refusal(clone.run(PATH=plain_path))
    assert "no Python 3.11 on PATH" in line and "PYTHON=" in line
    assert not clone.envs.exists()


def test_no_python_of_that_version(clone, plain_path):
    for name in ("python3.11", "python3", "python"):  # the first one is another's shim
        tool(Path(plain_path), name, FAKE)
    assert "no Python 3.11 on PATH" in refusal(clone.run(PATH=plain_path, VERSION="3.13"))


def test_python3_will_do_if_it_is_the_version(clone, plain_path):
    tool(Path(plain_path), "python3", FAKE)
    result = clone.run("--print", PATH=plain_path)
    assert result.returncode == 0, result.stderr


def test_a_named_python_of_another_version(clone, tmp_path):
    tool(tmp_path / "other", "py", FAKE)
    line = refusal(clone.run(PYTHON=str(tmp_path / "other" / "py"), VERSION="3.12"))
    assert "is Python 3.12; Python 3.11 is needed" in line


def test_a_named_python_that_is_not_there(clone):
    assert "PYTHON=/no/such does not run" in refusal(clone.run(PYTHON="/no/such"))


def test_a_python_without_venv(clone):
    (clone.orders / "no-ensurepip").touch()
    assert "python3.11-venv" in refusal(clone.run())
    assert not clone.shared().exists()


DF = """#!/bin/sh
echo "Filesystem 1024-blocks Used Available Capacity Mounted on"
echo "/dev/x 100000000 1 $FREE_KIB 1% /"
"""


def test_too_little_disk(clone):
    tool(clone.tmp / "bin", "df", DF)
    line = refusal(clone.run(FREE_KIB="9000000"))
    assert "needs 16 GB free" in line and "9 GB are free" in line
    assert "PAGEALIGN_CACHE=" in line and "--prune" not in line
    assert clone.calls("pip") == []
    assert not clone.shared().exists()
    (clone.envs / "0123456789ab").mkdir()
    assert "--prune` removes 1 unused" in refusal(clone.run(FREE_KIB="15900000"))
    assert clone.run(FREE_KIB="16100000").returncode == 0


def test_an_environment_that_is_there_needs_no_disk(clone):
    assert clone.run().returncode == 0
    tool(clone.tmp / "bin", "df", DF)
    assert clone.run(FREE_KIB="0").returncode == 0


def test_a_cache_that_cannot_be_made(clone, tmp_path):
    (tmp_path / "file").touch()
    result = clone.run(PAGEALIGN_CACHE=str(tmp_path / "file" / "cache"))
    assert result.returncode == 1
    assert "move the cache" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("order", "says", "shows"),
    [
        ("fail", "pip failed", "ERROR: no route to the index"),
        ("broken", "do not load", "ImportError: GLIBC_2.34"),
    ],
)
def test_a_failed_build_leaves_its_log_and_nothing_else(clone, order, says, shows):
    (clone.orders / order).touch()
    result = clone.run()
    assert result.returncode == 1
    assert shows in result.stderr
    log = clone.envs / f"{clone.shared().name}.log"
    assert says in result.stderr.splitlines()[-1] and str(log) in result.stderr.splitlines()[-1]
    assert sorted(path.name for path in clone.envs.iterdir()) == [".lock", log.name]
    assert not (clone.root / ".venv").exists()
    (clone.orders / order).unlink()
    assert clone.run().returncode == 0


@pytest.mark.parametrize("option", [("--what",), ("--print", "--prune")])
def test_unknown_options(clone, option):
    assert "option" in refusal(clone.run(*option))


# -- one at a time -------------------------------------------------------------------------


def test_a_build_waits_for_another_and_then_uses_what_it_made(clone):
    clone.envs.mkdir(parents=True)
    with (clone.envs / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = clone.start()
        assert process.stdout.readline().startswith("waiting for another clone")
        # The other one finishes.
        shared = clone.shared()
        subprocess.run([clone.tmp / "bin" / "python3.11", "-m", "venv", shared], env=clone.env)
        (shared / ".complete").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == f"environment ready: {shared}"
    assert clone.calls("pip") == []


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_an_interrupted_build_stops_pip_and_leaves_nothing(clone, signum, code):
    for name in ("hold", "held"):
        os.mkfifo(clone.orders / name)
    process = clone.start()
    (clone.orders / "held").read_text()  # returns when pip is under way
    assert clone.shared().exists()
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not clone.shared().exists()
    # pip is gone: nobody has the pipe open for reading.
    with pytest.raises(OSError):
        os.open(clone.orders / "hold", os.O_WRONLY | os.O_NONBLOCK)


def test_prune_removes_the_others(clone):
    assert clone.run().returncode == 0
    old = clone.envs / "0123456789ab"
    (old / "bin").mkdir(parents=True)
    (clone.envs / "0123456789ab.log").touch()
    result = clone.run("--prune")
    assert result.stdout == f"removing {old}\nremoved 1 environment(s)\n"
    assert not old.exists() and not (clone.envs / "0123456789ab.log").exists()
    assert clone.run().stdout == f"environment ready: {clone.shared()}\n"
    assert len(clone.calls("pip")) == 1


# -- the pins ----------------------------------------------------------------


def test_constraints_are_rewritten_from_what_pip_resolves(clone):
    found = [("Zeta_x", "1.0+cu130"), ("alpha", "1.5"), ("alpha-b", "2")]
    report = {"install": [{"metadata": {"name": n, "version": v}} for n, v in found]}
    (clone.orders / "report").write_text(json.dumps(report))
    result = clone.run("--constraints")
    assert result.returncode == 0, result.stderr
    (pip,) = clone.calls("pip")
    assert "--dry-run" in pip and "-c " not in pip
    lines = (clone.root / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "alpha==1.5",
        "alpha-b==2",
        "zeta-x==1.0",
    ]
    assert "make constraints" in lines[0]


def test_constraints_stay_when_pip_fails(clone):
    before = (clone.root / "constraints.txt").read_bytes()
    result = clone.run("--constraints")  # the fake has no report to give
    assert result.returncode == 1
    assert (clone.root / "constraints.txt").read_bytes() == before


def test_the_real_constraints_are_exact_and_name_no_place():
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins == sorted(pins, key=lambda pin: pin.split("==")[0])
    for pin in pins:
        name, version = pin.split("==")
        assert name and version
        assert not set(pin) & set("+@/ *"), f"{pin}: a local build, a place or a range"
    assert "sglang==0.5.23" in pins
    assert "torch==2.14.1" in pins
