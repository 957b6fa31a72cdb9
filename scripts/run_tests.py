"""Runs groups of tests; prints last which failed and why, and ``N passed, N failed, N skipped``.

    scripts/run_tests.sh [--slow] [-j N] [GROUP...] [-- PYTEST_ARGUMENT...]

SGLang is imported once per process, so each group is a run of pytest of its own, in N
processes (pytest-xdist; 2 by default):

    unit      tests/test_*.py   no SGLang tree
    aligned   tests/aligned     the aligned tree first on PYTHONPATH
    stock     tests/stock       the stock tree first on PYTHONPATH
    varlen    tests/varlen      the varlen tree first on PYTHONPATH
    server    tests/server      starts servers, each with a tree of its own

Exits non-zero if a test failed, a group could not run, or a group ran no test.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
GROUPS = ("unit", "aligned", "stock", "varlen", "server")
WITH_TREE = ("aligned", "stock", "varlen")
# How pytest-xdist shares the tests out. Fixtures of the server group's files take minutes, so a
# file's tests go to one process ("loadgroup" does not group with pytest 9.2); after a crash a new
# process would begin the file again, crash and all, up to eight times.
SHARES = {"server": ("--dist=loadfile", "--max-worker-restart=0")}
NONE_COLLECTED = 5  # pytest's exit code


@dataclass(frozen=True)
class Outcome:
    """How a group ended: ``failures`` has a line per test that failed, with its first line of
    why; ``problem`` is a reason to fail that no test shows."""

    passed: int = 0
    failures: tuple[str, ...] = ()
    skipped: int = 0
    problem: str | None = None


def read_junit(path: Path) -> Outcome:
    """Read the test cases of a junit XML file; a failure in teardown counts as failed."""
    passed = skipped = 0
    failures = {}
    for case in ET.parse(path).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            # A test that fails and whose teardown fails too has two cases.
            why = (bad.get("message") or "").partition("\n")[0]
            failures.setdefault(f"{case.get('classname')}::{case.get('name')}", why)
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Outcome(passed, tuple(f"{test}: {why}" for test, why in failures.items()), skipped)


def judge(counts: Outcome, code: int, none_is_fine: bool) -> Outcome:
    """Add the problem that pytest's exit code or the counts show, if any."""
    ran = counts.passed + len(counts.failures)
    problem = None
    if code == NONE_COLLECTED or (ran == 0 and code == 0):
        problem = None if none_is_fine else "ran no test"
    elif code != 0 and not counts.failures:
        problem = f"pytest exited with {code}"
    return replace(counts, problem=problem)


def tests_of(group: str, repo: Path = REPO) -> list[str]:
    """The group's files or folder, for pytest; FileNotFoundError if there are none."""
    if group == "unit":
        found = sorted(str(path) for path in (repo / "tests").glob("test_*.py"))
        if not found:
            raise FileNotFoundError(f"no test_*.py in {repo / 'tests'}")
        return found
    folder = repo / "tests" / group
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    return [str(folder)]


class Runner:
    """Runs groups one after another; their output goes to stdout, line by line."""

    def __init__(
        self, pytest_args: Sequence[str], slow: bool, prefixed: bool, jobs: int, repo: Path = REPO
    ):
        self.pytest_args = list(pytest_args)
        self.slow = slow
        self.prefixed = prefixed
        self.jobs = jobs
        self.repo = repo
        self.out = repo / "build" / "tests"
        self.interrupted = False
        self._running: subprocess.Popen[str] | None = None

    def interrupt(self) -> None:
        """Interrupt pytest and its workers, so that fixtures are torn down; start no more."""
        self.interrupted = True
        if self._running and self._running.poll() is None:
            os.killpg(self._running.pid, signal.SIGINT)

    def run(self, group: str) -> Outcome:
        if self.interrupted:
            return Outcome(problem="interrupted")
        junit = self.out / f"{group}.xml"
        junit.unlink(missing_ok=True)
        try:
            tests = tests_of(group, self.repo)
            env = self._environment(group)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            return Outcome(problem=str(error))
        marker = "slow" if self.slow else "not slow"
        command = [sys.executable, "-m", "pytest", "-m", marker, f"--junitxml={junit}"]
        if self.jobs > 1:
            command += ["-n", str(self.jobs), *SHARES.get(group, ("--dist=worksteal",))]
        command += ["-o", f"cache_dir={self.out / f'{group}.cache'}", *self.pytest_args, *tests]
        code = self._stream(group, command, env)
        try:
            counts = read_junit(junit)
        except (FileNotFoundError, ET.ParseError):
            return Outcome(problem=f"pytest exited with {code} and left no result")
        return judge(counts, code, none_is_fine=self.slow)

    def _environment(self, group: str) -> dict[str, str]:
        """One OpenMP thread per process, and on PYTHONPATH: tree, stand-ins, repository."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        paths = [str(self.repo)]
        env["PYTHONPATH"] = paths[0]
        if group in WITH_TREE:
            tree = subprocess.run(
                [sys.executable, "-m", "pagealign", "tree", group],
                env=env,
                cwd=self.repo,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.strip()
            paths = [tree, str(self.repo / "pagealign" / "standins"), *paths]
        env["PYTHONPATH"] = os.pathsep.join(paths)
        return env

    def _stream(self, group: str, command: Sequence[str], env: dict[str, str]) -> int:
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if self.prefixed else {}
        process = self._running = subprocess.Popen(
            command,
            env=env | {"PYTHONUNBUFFERED": "1"},
            cwd=self.repo,
            text=True,
            errors="replace",
            process_group=0,  # all of it is interrupted together, and by us alone
            **pipe,
        )
        if self.interrupted:  # before there was a process to interrupt
            self.interrupt()
        for line in process.stdout or ():
            print(f"{group:>7} | {line}", end="", flush=True)
        return process.wait()


def summarise(outcomes: dict[str, Outcome], slow: bool) -> tuple[list[str], int]:
    """The closing lines and the exit code. A group with a problem counts as one failure."""
    lines = [f"failed: {line}" for o in outcomes.values() for line in o.failures]
    lines += [f"{group}: {o.problem}" for group, o in outcomes.items() if o.problem]
    passed = sum(o.passed for o in outcomes.values())
    failed = len(lines)
    skipped = sum(o.skipped for o in outcomes.values())
    if slow and passed + failed == 0:
        lines.append("no test is marked slow")
        failed = 1
    lines.append(f"{passed} passed, {failed} failed, {skipped} skipped")
    return lines, int(failed > 0)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    pytest_args: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, pytest_args = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(prog="run_tests.sh", description="Run groups of tests.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--slow", action="store_true", help="the tests marked slow, not the rest")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="processes (2)")
    options = parser.parse_args(arguments)
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    groups = list(dict.fromkeys(options.groups)) or list(GROUPS)

    runner = Runner(pytest_args, options.slow, len(groups) > 1, options.j)
    runner.out.mkdir(parents=True, exist_ok=True)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: runner.interrupt())
    outcomes = {group: runner.run(group) for group in groups}
    lines, code = summarise(outcomes, options.slow)
    # After a crash the last line of output may have no end.
    print("", *lines, sep="\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
