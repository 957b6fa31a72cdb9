"""The command: find the release, try the series, say how each hunk fared."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagealign import report
from pagealign.errors import PagealignError
from pagealign.paths import PATCHES
from pagealign.pin import load_pin
from pagealign.port import newpin
from pagealign.port import repo as repository
from pagealign.port.release import Release, all_wheels, find
from pagealign.port.trial import FileTrial, Hunk, Outcome, Trial, try_series
from pagealign.series import load_diffs
from pagealign.trees import wheel


def run(
    version: str,
    patches: Path | None = None,
    write_pin: Path | None = None,
    repo: Path | None = None,
    as_json: bool = False,
    brief: bool = False,
) -> int:
    """Try the series in ``patches`` on a release and print the report; 0 if all applies,
    else 1.

    ``write_pin`` is the folder for the series with a new PIN, written only if all applies.
    ``repo`` is the folder for a git repository to mend the series in. ``brief`` leaves the
    code out. Raises PagealignError for what the user can put right.
    """
    patches = patches or PATCHES
    # before the trial: its report is no comfort to one whose folder is then refused
    if repo is not None:
        repository.check(repo)
    if write_pin is not None:
        newpin.check(write_pin)
    started = time.monotonic()
    console = Console(stderr=True) if as_json else report.console()
    with report.progress(console) as say:
        say(f"finding SGLang {version}")
        release = find(version, patches)
        say(f"trying the series on {release.path.name}")
        pinned = load_pin(patches).release
        versions = (pinned, release.version)
        trial = try_series(load_diffs(patches), wheel(patches), release.path, versions)
    if as_json:
        print(json.dumps(dataclasses.asdict(trial) | {"applies": trial.applies}, indent=2))
    else:
        show(console, trial, brief)
        console.print(f"{time.monotonic() - started:.0f} s", highlight=False)
    if repo is not None:
        repository.make(repo, release, patches)
        line = f"made {repo}; next, in it: {repository.REBASE} (docs/porting.md)"
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if write_pin is None:
        return 0 if trial.applies else 1
    if not trial.applies:
        raise PagealignError(
            f"no PIN written: the series doesn't apply to {release.version} as a whole; mend the "
            "diffs first (docs/porting.md)"
        )
    _write(console, release, write_pin, patches)
    return 0


def _write(console: Console, release: Release, folder: Path, patches: Path) -> None:
    names = newpin.write(release, all_wheels(release, load_pin(patches)), folder, patches)
    console.print(
        f"wrote {len(names)} files to {folder}: the series for {release.version}. Next: set "
        f"sglang=={release.version} in pyproject.toml, make constraints, make test.",
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip


def show(console: Console, trial: Trial, brief: bool = False) -> None:
    """Print the table, then the code for each hunk that doesn't apply, then the sum."""
    console.print(report.table(trial.files, COLUMNS))
    if not brief:
        for file in trial.files:
            for hunk in file.hunks:
                if hunk.rows:
                    title = Text(_title(file, hunk), style="bold")
                    console.print(title, soft_wrap=True, highlight=False)
                    console.print(_code(trial, hunk))
    for line in trial.broken:
        console.print(f"applies, but does not compile: {line}", style="red", markup=False)
    console.print(summary(trial), markup=False, highlight=False, soft_wrap=True)


def summary(trial: Trial) -> str:
    """One line: how many hunks fared how."""
    counts = [f"{outcome} {n}" for outcome in Outcome if (n := trial.count(outcome))]
    verdict = "the series applies" if trial.applies else "the series has to be mended"
    return (
        f"SGLang {trial.release} (the series is for {trial.pinned}): {len(trial.hunks)} hunks "
        f"({', '.join(counts)}): {verdict}"
    )


def hunk_cell(hunks: Sequence[Hunk]) -> str:
    """Every hunk's number with its outcome: ``1 ok  2 +14  3 fails``; equal ones as a range."""
    words = [_word(hunk) for hunk in hunks]
    out, at = [], 0
    while at < len(words):
        end = at
        while end + 1 < len(words) and words[end + 1] == words[at]:
            end += 1
        span = f"{at + 1}" if end == at else f"{at + 1}-{end + 1}"
        out.append(f"{span} {words[at]}")
        at = end + 1
    return "  ".join(out)


def _word(hunk: Hunk) -> str:
    match hunk.outcome:
        case Outcome.APPLIES:
            return "ok"
        case Outcome.OFFSET:
            return f"{hunk.offset:+d}"
        case Outcome.GONE:
            return "gone"
    return "fails (its result is there)" if hunk.there else "fails"


def _title(file: FileTrial, hunk: Hunk) -> str:
    where = f"{file.diff}: hunk {hunk.number} of {file.path.removeprefix('python/')}"
    what = hunk.outcome.value
    if hunk.there:
        what += ", its result is in the file already"
    if hunk.outcome is Outcome.GONE:
        moved = ", ".join(path.removeprefix("python/") for path in file.elsewhere)
        what += f"; of the same name: {moved}" if moved else "; none of the same name"
    return f"{where}: {what}"


def _code(trial: Trial, hunk: Hunk) -> Table:
    out = Table(box=None, pad_edge=False)
    out.add_column("", justify="right", style="dim")
    out.add_column(f"{trial.pinned}, before this hunk", ratio=1, overflow="fold")
    out.add_column("", width=1)
    out.add_column("", justify="right", style="dim")
    out.add_column(trial.release, ratio=1, overflow="fold")
    for row in hunk.rows:
        style = "" if row.mark == " " else "yellow"
        numbers = ["" if n is None else str(n) for n in (row.old_line, row.new_line)]
        out.add_row(
            numbers[0],
            Text(row.old or "", style),
            row.mark,
            numbers[1],
            Text(row.new or "", style),
        )
    return out


COLUMNS = (
    report.Column("diff", lambda file: file.diff.removesuffix(".diff")),
    report.Column("file", lambda file: file.path.removeprefix("python/sglang/srt/")),
    report.Column("hunks", lambda file: hunk_cell(file.hunks)),
)
