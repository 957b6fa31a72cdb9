"""The runner of the test groups: what it counts, and what it does not let pass."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagealign.paths import REPO

spec = importlib.util.spec_from_file_location("run_tests", REPO / "scripts" / "run_tests.py")
run_tests = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = run_tests
spec.loader.exec_module(run_tests)
Outcome = run_tests.Outcome

PASSING = "def test_one(): pass\n"
WHERE = """\
import os
def test_where():
    tree, standins, repo = os.environ["PYTHONPATH"].split(os.pathsep)
    assert tree.endswith("/trees/{group}")
    assert standins.endswith("/pagealign/standins")
    assert os.environ["OMP_NUM_THREADS"] == "1"
"""
INI = """\
[tool.pytest.ini_options]
markers = ["slow: left out"]
"""
TREE = """\
import sys
command, name = sys.argv[1:]
assert command == "tree"
if name in {broken}:
    sys.exit("cannot build " + name)
print("/trees/" + name)
"""


@pytest.fixture
def repo(tmp_path) -> Path:
    """A repository with one passing test in each group."""
    for name in ("scripts/run_tests.sh", "scripts/run_tests.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(REPO / name, tmp_path / name)
    write(tmp_path / "pyproject.toml", INI)
    write(tmp_path / "pagealign" / "__init__.py", "")
    write(tmp_path / "pagealign" / "__main__.py", TREE.format(broken=[]))
    write(tmp_path / "tests" / "test_unit.py", PASSING)
    write(tmp_path / "tests" / "aligned" / "test_a.py", WHERE.format(group="aligned"))
    write(tmp_path / "tests" / "stock" / "test_b.py", WHERE.format(group="stock"))
    write(tmp_path / "tests" / "varlen" / "test_b.py", WHERE.format(group="varlen"))
    write(tmp_path / "tests" / "server" / "test_c.py", PASSING)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def start(repo: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(repo / "scripts" / "run_tests.sh"), *arguments],
        # Without plugins pytest starts in a third of the time.
        env=os.environ
        | {
            "PYTHON": sys.executable,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin",
        },
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(repo: Path, *arguments: str) -> tuple[int, list[str]]:
    """The exit code and the lines of output."""
    process = start(repo, *arguments)
    try:
        out, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()
        print(process.communicate(timeout=30)[0])
        raise
    return process.returncode, out.splitlines()


def test_all_groups_each_with_its_tree(repo):
    code, lines = run(repo)
    assert (code, lines[-1]) == (0, "5 passed, 0 failed, 0 skipped"), "\n".join(lines)
    assert any(line.startswith("aligned | ") for line in lines)


def test_server_tests_of_a_file_run_in_one_process(repo):
    write(
        repo / "tests" / "server" / "test_shared.py",
        "import os, pathlib, pytest\n"
        "@pytest.mark.parametrize('n', range(8))\n"
        "def test_who(n): pathlib.Path(f'who-{n}').write_text(str(os.getpid()))\n",
    )
    code, lines = run(repo, "server")
    assert (code, lines[-1]) == (0, "9 passed, 0 failed, 0 skipped"), "\n".join(lines)
    assert len({path.read_text() for path in repo.glob("who-*")}) == 1


def test_failures_errors_and_skips_are_added_up(repo):
    write(
        repo / "tests" / "test_more.py",
        "import pytest\n"
        "@pytest.fixture\n"
        "def bad(): yield; raise OSError('no\\nroom')\n"
        "def test_fails(): assert 1 == 2, 'why'\n"
        "def test_teardown(bad): pass\n"
        "@pytest.mark.skip\n"
        "def test_skipped(): pass\n",
    )
    code, lines = run(repo, "unit", "server")
    assert (code, lines[-1]) == (1, "2 passed, 2 failed, 1 skipped")
    fails, teardown = lines[-3:-1]
    assert fails == "failed: tests.test_more::test_fails: AssertionError: why"
    assert teardown.startswith("failed: tests.test_more::test_teardown: ")


def test_one_group_and_arguments_for_pytest(repo):
    write(repo / "tests" / "test_more.py", "def test_two(): pass\ndef test_three(): pass\n")
    assert run(repo, "unit", "--", "-k", "two or three")[1][-1] == "2 passed, 0 failed, 0 skipped"


def test_a_group_that_runs_no_test_fails(repo):
    write(repo / "tests" / "server" / "test_c.py", "")
    code, lines = run(repo, "unit", "server")
    assert code == 1
    assert lines[-2:] == ["server: ran no test", "1 passed, 1 failed, 0 skipped"]


def test_a_group_of_skips_ran_no_test(repo):
    write(
        repo / "tests" / "server" / "test_c.py",
        "import pytest\n@pytest.mark.skip\ndef test_c(): pass\n",
    )
    code, lines = run(repo, "server")
    assert code == 1
    assert lines[-2:] == ["server: ran no test", "0 passed, 1 failed, 1 skipped"]


def test_a_missing_folder_fails(repo):
    shutil.rmtree(repo / "tests" / "stock")
    code, lines = run(repo, "stock", "server")
    assert code == 1
    assert lines[-2] == f"stock: no folder {repo}/tests/stock"
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"


def test_a_crash_is_a_failure(repo):
    write(repo / "tests" / "server" / "test_c.py", "import os\ndef test_c(): os._exit(0)\n")
    code, lines = run(repo, "-j1", "server")
    assert code == 1
    assert lines[-2:] == [
        "server: pytest exited with 0 and left no result",
        "0 passed, 1 failed, 0 skipped",
    ]


def test_a_crash_in_one_of_two_processes_is_a_failure(repo):
    write(repo / "tests" / "test_c.py", "import os\ndef test_c(): os._exit(0)\n")
    code, lines = run(repo, "unit")
    assert (code, lines[-1]) == (1, "1 passed, 1 failed, 0 skipped")
    assert "crashed" in lines[-2]


def test_a_crash_in_the_server_group_is_not_tried_again(repo):
    write(
        repo / "tests" / "server" / "test_d.py",
        "import os, pathlib\n"
        "def test_d():\n"
        f"    with open({str(repo / 'tries')!r}, 'a') as file: file.write('x')\n"
        "    os._exit(0)\n",
    )
    code, lines = run(repo, "server")
    assert code == 1
    assert lines[-1].endswith(" passed, 1 failed, 0 skipped")
    assert "crashed" in lines[-2]
    assert (repo / "tries").read_text() == "x"


def test_two_processes_run_at_the_same_time(repo):
    os.mkfifo(repo / "meet")
    meet = f"import pathlib\nmeet = pathlib.Path({str(repo / 'meet')!r})\n"
    write(
        repo / "tests" / "server" / "test_c.py",
        f"{meet}def test_c(): assert meet.read_text() == 'x'\n",
    )
    write(repo / "tests" / "server" / "test_d.py", f"{meet}def test_d(): meet.write_text('x')\n")
    assert run(repo, "server")[1][-1] == "2 passed, 0 failed, 0 skipped"


def test_a_result_of_an_earlier_run_is_not_counted(repo):
    assert run(repo, "server")[0] == 0
    test_a_crash_is_a_failure(repo)


def test_a_tree_that_cannot_be_built_fails_its_group_only(repo):
    write(repo / "pagealign" / "__main__.py", TREE.format(broken=["aligned"]))
    code, lines = run(repo)
    assert code == 1
    assert "cannot build aligned" in "\n".join(lines)
    assert lines[-2].startswith("aligned: ")
    assert lines[-1] == "4 passed, 1 failed, 0 skipped"


def test_slow_tests_are_run_apart(repo):
    write(
        repo / "tests" / "test_more.py",
        "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\n",
    )
    assert run(repo, "unit")[1][-1] == "1 passed, 0 failed, 0 skipped"
    code, lines = run(repo, "--slow", "unit", "server")
    assert (code, lines[-1]) == (0, "1 passed, 0 failed, 0 skipped")
    code, lines = run(repo, "--slow", "server")
    assert code == 1
    assert lines[-2:] == ["no test is marked slow", "0 passed, 1 failed, 0 skipped"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_run_stops_its_tests_in_order(repo, jobs, signum):
    """A signal reaches pytest as an interruption, so that fixtures are torn down."""
    os.mkfifo(repo / "started")
    write(
        repo / "tests" / "server" / "test_c.py",
        "import pathlib, time, pytest\n"
        f"here = pathlib.Path({str(repo)!r})\n"
        "@pytest.fixture\n"
        "def server():\n"
        "    yield\n"
        "    (here / 'stopped').touch()\n"
        "def test_c(server):\n"
        "    (here / 'started').write_text('x')\n"
        # in pieces: a long wait can miss a signal that comes just before it
        "    for _ in range(6000): time.sleep(0.01)\n",
    )
    process = start(repo, f"-j{jobs}", "server")
    (repo / "started").read_text()
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert (repo / "stopped").exists()


@pytest.mark.parametrize("arguments", [("nonsense",), ("--fast",)])
def test_wrong_usage(repo, arguments):
    assert run(repo, *arguments)[0] == 2


def test_without_an_environment_it_says_what_to_do(repo):
    env = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    done = subprocess.run([repo / "scripts/run_tests.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "make env" in done.stderr


@pytest.mark.parametrize(
    ("counts", "code", "slow", "problem"),
    [
        (Outcome(passed=1), 0, False, None),
        (Outcome(passed=1, failures=("t: why",)), 1, False, None),
        (Outcome(passed=1), 1, False, "pytest exited with 1"),
        (Outcome(passed=1), 2, True, "pytest exited with 2"),
        (Outcome(), 3, True, "pytest exited with 3"),
        (Outcome(), 5, False, "ran no test"),
        (Outcome(), 5, True, None),
        (Outcome(skipped=2), 0, False, "ran no test"),
    ],
)
def test_what_an_exit_code_adds(counts, code, slow, problem):
    assert run_tests.judge(counts, code, none_is_fine=slow).problem == problem
