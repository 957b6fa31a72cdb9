"""The series tried on another release, hunk by hunk, in a scratch folder.

Two folders advance together: the pinned release's files, to which every diff applies, and
the other release's, to which ``git apply --reject`` applies what it can. What a hunk was
made for and what it meets are then the same file in the two, just before its diff.
"""

from __future__ import annotations

import enum
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagealign.errors import PagealignError
from pagealign.port.beside import Row, beside
from pagealign.port.release import BROKEN_WHEEL
from pagealign.series import Diff, git_environment, stock_files, write_files

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@", re.MULTILINE)
_OFFSET = re.compile(r"^Hunk #(\d+) succeeded at \d+ \(offset (-?\d+) lines?\)", re.MULTILINE)
_REJECTED = re.compile(r"^Rejected hunk #(\d+)\.", re.MULTILINE)


class Outcome(enum.StrEnum):
    """How a hunk met the other release."""

    APPLIES = "applies"
    OFFSET = "applies with offset"
    FAILS = "fails"
    GONE = "file gone"


@dataclass(frozen=True)
class Hunk:
    """One hunk of one file of one diff, tried.

    ``number`` counts the file's hunks in this diff from 1; ``line`` is where it starts in
    the pinned file just before this diff. ``offset`` is in lines, 0 unless OFFSET.
    ``there`` says that a failing hunk's result is in the file already. ``rows`` are the
    pinned and the new code side by side, for one that doesn't apply.
    """

    number: int
    line: int
    outcome: Outcome
    offset: int = 0
    there: bool = False
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class FileTrial:
    """A diff's hunks in one file. ``elsewhere``: files of the same name, if it is gone."""

    diff: str
    path: str
    hunks: tuple[Hunk, ...]
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """The whole series on one release. ``broken`` names what applies and doesn't compile."""

    release: str
    pinned: str
    files: tuple[FileTrial, ...]
    broken: tuple[str, ...]

    @property
    def hunks(self) -> list[Hunk]:
        return [hunk for file in self.files for hunk in file.hunks]

    def count(self, outcome: Outcome) -> int:
        return sum(hunk.outcome is outcome for hunk in self.hunks)

    @property
    def applies(self) -> bool:
        """Whether every hunk applies, with an offset or without, and the files compile."""
        bad = self.count(Outcome.FAILS) + self.count(Outcome.GONE)
        return not bad and not self.broken


def try_series(
    diffs: Sequence[Diff], pinned: Path, other: Path, releases: tuple[str, str]
) -> Trial:
    """Try ``diffs``, made for the wheel ``pinned``, on the wheel ``other``.

    ``releases`` are the two's versions. Raises PagealignError where ``other`` isn't a wheel
    or the series doesn't apply to ``pinned``.
    """
    paths = sorted({path for diff in diffs for path in diff.paths})
    try:
        with zipfile.ZipFile(other) as archive:
            inside = [f"python/{name}" for name in archive.namelist()]
        there = stock_files(other, paths)
    except BROKEN_WHEEL as error:
        raise PagealignError(f"{other} can't be read as a wheel: {error}") from error
    if not any(name.startswith("python/sglang/srt/") for name in inside):
        raise PagealignError(f"{other} holds no sglang/srt: it isn't a wheel of SGLang")
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder, "pinned"), Path(folder, "other")
        for work, files in ((old, stock_files(pinned, paths)), (new, there)):
            work.mkdir()
            write_files(work, files)
        for diff in diffs:
            for path, body in split(diff.body):
                trials.append(_try_file(diff.name, path, body, old, new, inside))
        broken = [] if _any_bad(trials) else _broken(new, paths)
    return Trial(releases[1], releases[0], tuple(trials), tuple(broken))


def split(body: str) -> Iterable[tuple[str, str]]:
    """A diff's body as (path as in a checkout, that file's part of the diff)."""
    for part in re.split(r"^(?=diff --git )", body, flags=re.MULTILINE)[1:]:
        name = re.match(r"diff --git a/(.+) b/\1$", part, re.MULTILINE)
        assert name, part[:80]
        yield name[1], part


def _try_file(
    diff: str, path: str, body: str, old: Path, new: Path, inside: Sequence[str]
) -> FileTrial:
    before = {work: _read(work / path) for work in (old, new)}
    if _apply(old, body)[0]:
        raise PagealignError(
            f"{diff} doesn't apply to the pinned release: python -m pagealign.series check"
        )
    creates = before[old] is None
    gone = not creates and before[new] is None
    code, said = (1, "") if gone else _apply(new, body)
    offsets = {int(n): int(by) for n, by in _OFFSET.findall(said)}
    rejected = {int(n) for n in _REJECTED.findall(said)}
    # git tries nothing where the file as a whole is wrong: one to be made that is there
    nothing = code != 0 and not rejected
    hunks = []
    for number, (line, size, text) in enumerate(_hunks(body), 1):
        if gone:
            outcome = Outcome.GONE
        elif nothing or number in rejected:
            outcome = Outcome.FAILS
        else:
            outcome = Outcome.OFFSET if offsets.get(number) else Outcome.APPLIES
        rows: tuple[Row, ...] = ()
        there = False
        if outcome is Outcome.FAILS:
            there = _result(text) in "".join(before[new] or ())
        if outcome in (Outcome.FAILS, Outcome.GONE):
            rows = beside(before[old] or (), before[new] or (), line, size)
        offset = offsets.get(number, 0) if outcome is Outcome.OFFSET else 0
        hunks.append(Hunk(number, line, outcome, offset, there, rows))
    name = path.rsplit("/", 1)[1]
    elsewhere = [other for other in inside if other.endswith(f"/{name}")] if gone else []
    return FileTrial(diff, path, tuple(hunks), tuple(elsewhere[:5]))


def _hunks(body: str) -> Iterable[tuple[int, int, str]]:
    """Each hunk's first line and number of lines in the old file, and its text."""
    marks = [*_HUNK.finditer(body)]
    ends = [mark.start() for mark in marks[1:]] + [len(body)]
    for mark, end in zip(marks, ends, strict=True):
        text = body[mark.start() : end].partition("\n")[2]
        yield int(mark[1]), int(mark[2] or 1), text


def _result(text: str) -> str:
    """The lines that a hunk leaves in the file."""
    return "".join(line[1:] for line in text.splitlines(True) if line[0] in " +")


def _apply(work: Path, body: str) -> tuple[int, str]:
    """Apply what can be applied of a one-file diff; git's exit code and words."""
    done = subprocess.run(
        ["git", "apply", "--reject", "--verbose", "--whitespace=nowarn"],
        cwd=work, env=git_environment(GIT_DIR=os.devnull), input=body.encode(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(errors="replace")


def _read(path: Path) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    return tuple(path.read_bytes().decode(errors="replace").splitlines(True))


def _any_bad(trials: Iterable[FileTrial]) -> bool:
    bad = (Outcome.FAILS, Outcome.GONE)
    return any(hunk.outcome in bad for trial in trials for hunk in trial.hunks)


def _broken(work: Path, paths: Iterable[str]) -> list[str]:
    """The Python files that don't compile, each with why."""
    found = []
    for path in paths:
        if path.endswith(".py") and (work / path).is_file():
            try:
                compile((work / path).read_bytes(), path, "exec", dont_inherit=True)
            except SyntaxError as error:
                found.append(f"{path}: line {error.lineno}: {error.msg}")
    return found
