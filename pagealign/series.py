"""Keeps the series: its diffs live here as files and are edited as commits in a repository.

``import`` makes a git repository with one commit per diff on top of the stock package;
edit, reorder and rebase the commits there; ``export`` writes the diffs back; ``pin``
records the hashes; ``check`` proves the whole. Run as ``python -m pagealign.series``.
An alternative is a series of its own in a folder of ``patches``: ``pin`` and ``check`` see to
it too, ``import`` and ``export`` with ``--patches``.

A diff file is its commit: the message (a subject line, an empty line, why), an empty line,
then what ``git diff`` shows. The message's last line in the repository, ``Diff: NAME.diff``,
names the file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagealign.errors import PagealignError
from pagealign.fetch import sha256_of
from pagealign.paths import PATCHES
from pagealign.pin import FilePin, Pin, WheelPin, load_pin, load_series
from pagealign.trees import unpack, wheel

BASE = "stock"  # the tag of an imported repository's first commit

Files = dict[str, bytes]  # path as in a checkout -> content, for the files that exist

_PIN_HEADER = """\
# What the series in this folder applies to: written by `python -m pagealign.series pin`,
# read by scripts/apply_patches.sh and pagealign/pin.py.
#
#   release  of SGLang; tag: in its git repository
#   wheel    SHA-256, file name
#   file     SHA-256 before, after the core diffs, after all ("-": no such file), path
"""

# Whatever the user's own settings, git writes and applies diffs in one way.
_GIT_ENV = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "pagealign",
    "GIT_AUTHOR_EMAIL": "pagealign@localhost",
    "GIT_COMMITTER_NAME": "pagealign",
    "GIT_COMMITTER_EMAIL": "pagealign@localhost",
    "LC_ALL": "C",
}


@dataclass(frozen=True)
class Diff:
    """One file of the series: a commit message and a unified diff."""

    name: str
    header: str
    body: str

    @property
    def text(self) -> str:
        return f"{self.header}\n\n{self.body}"

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that it touches, as in a checkout."""
        return tuple(re.findall(r"^diff --git a/(.+) b/\1$", self.body, re.MULTILINE))


def load_diff(path: Path) -> Diff:
    """Read one diff file; PagealignError where it holds no ``diff --git`` line."""
    text = path.read_bytes().decode()
    start = re.search(r"^diff --git ", text, re.MULTILINE)
    if not start:
        raise PagealignError(f"{path} has no line 'diff --git a/... b/...'")
    return Diff(path.name, text[: start.start()].strip("\n"), text[start.start() :])


def load_diffs(patches: Path = PATCHES) -> list[Diff]:
    """The diffs of the series, in order."""
    return [load_diff(patches / name) for name in load_series(patches).all]


def import_series(
    repo: Path, patches: Path = PATCHES, *, whole: bool = True, source: Path | None = None
) -> None:
    """Make the git repository ``repo``: the pinned package, tagged ``stock``, then the diffs.

    With ``whole`` False the repository holds only the files that the series touches.
    ``source`` is another release's wheel in place of the pinned one; the diffs may apply to
    it with an offset.
    """
    if repo.exists() and any(repo.iterdir()):
        raise PagealignError(f"{repo} is not empty: name a new folder")
    diffs = load_diffs(patches)
    python = repo / "python"
    python.mkdir(parents=True, exist_ok=True)
    if whole:
        unpack(source or wheel(patches), python)
    else:
        write_files(repo, stock_files(source or wheel(patches), _paths(diffs)))
    git(repo, "-c", "init.defaultBranch=main", "init", "--quiet", "--template=")
    git(repo, "config", "core.autocrlf", "false")
    git(repo, "add", "--all", "--force")
    release = source.name.split("-")[1] if source else load_pin(patches).release
    commit(repo, f"SGLang {release}\n")
    git(repo, "tag", BASE)
    for diff in diffs:
        git(repo, "apply", "--index", "--whitespace=nowarn", "-", text=diff.body)
        commit(repo, f"{diff.header}\n\nDiff: {diff.name}\n")


def export_diffs(repo: Path) -> list[Diff]:
    """The diffs that the commits of ``repo`` after its tag ``stock`` amount to."""
    if git(repo, "status", "--porcelain", "--untracked-files=no"):
        raise PagealignError(f"{repo} has changes that are not committed: commit them first")
    if git(repo, "rev-list", "--merges", f"{BASE}..HEAD"):
        raise PagealignError(f"{repo} has a merge after {BASE}: rebase it into single commits")
    commits = git(repo, "rev-list", "--reverse", f"{BASE}..HEAD").split()
    diffs = [_export(repo, commit) for commit in commits]
    names = [diff.name for diff in diffs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise PagealignError(f"two commits say 'Diff: {twice[0]}': squash them")
    if sorted(names, key=_is_fix) != names:
        raise PagealignError("the commits of the fixes_* diffs must come last: rebase")
    return diffs


def export_series(repo: Path, patches: Path = PATCHES) -> list[str]:
    """Write the diffs of ``repo`` into ``patches``; what changed there, a line each."""
    diffs = export_diffs(repo)
    old = load_series(patches).all if (patches / "series").exists() else ()
    report = []
    patches.mkdir(parents=True, exist_ok=True)
    for diff in diffs:
        path = patches / diff.name
        before = path.read_bytes().decode() if path.exists() else None
        if before != diff.text:
            report.append(f"{'added' if before is None else 'changed'} {diff.name}")
            _replace(path, diff.text)
    names = tuple(diff.name for diff in diffs)
    if names != old:
        report.append("changed series")
        _replace(patches / "series", "".join(f"{line}\n" for line in (*_comments(patches), *names)))
    for name in set(old) - set(names):
        report.append(f"removed {name}")
        (patches / name).unlink()
    return report


def stock_files(wheel: Path, paths: Iterable[str]) -> Files:
    """Those of ``paths`` (as in a checkout) that the wheel has, with their content."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        return {
            path: archive.read(path.removeprefix("python/"))
            for path in paths
            if path.removeprefix("python/") in inside
        }


def compute_files(diffs: Sequence[Diff], wheel: Path) -> tuple[FilePin, ...]:
    """The file lines of a PIN: the wheel's files at each level, found by applying the diffs."""
    paths = _paths(diffs)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_files(work, stock_files(wheel, paths))
        before = core = _hashes(work, paths)
        for diff in diffs:
            _apply(work, diff, "git")
            if not _is_fix(diff.name):
                core = _hashes(work, paths)
        after = _hashes(work, paths)
    return tuple(FilePin(path, before[path], core[path], after[path]) for path in paths)


def pin_text(pin: Pin) -> str:
    """The content of a PIN file."""
    lines = [f"release {pin.release}", f"tag {pin.tag}"]
    lines += [f"wheel {wheel.sha256} {wheel.filename}" for wheel in pin.wheels]
    for file in pin.files:
        shas = (sha or "-" for sha in (file.before, file.core, file.after))
        lines.append(" ".join(["file", *shas, file.path]))
    return _PIN_HEADER + "".join(f"{line}\n" for line in lines)


def write_pin(patches: Path = PATCHES, wheels: Sequence[Path] = ()) -> None:
    """Recompute ``patches/PIN`` from the wheel and the series.

    With ``wheels`` (files of one release) it pins these instead of the wheels it names.
    """
    if wheels:
        releases = {path.name.split("-")[1] for path in wheels}
        if len(releases) != 1:
            raise PagealignError("the wheels are of more than one release")
        release = releases.pop()
        hashed = tuple(WheelPin(sha256_of(path), path.name) for path in wheels)
        pin, source = Pin(release, f"v{release}", hashed, ()), wheels[0]
    else:
        pin, source = load_pin(patches), wheel(patches)
    files = compute_files(load_diffs(patches), source)
    _replace(patches / "PIN", pin_text(replace(pin, files=files)))


def series_folders(patches: Path = PATCHES) -> list[Path]:
    """``patches`` and the folders in it that hold a series of their own: alternatives."""
    return [patches, *sorted(path.parent for path in patches.glob("*/series"))]


def check_all(patches: Path = PATCHES) -> list[str]:
    """What is wrong with the series and its alternatives, a line each."""
    problems = []
    for folder in series_folders(patches):
        where = "" if folder == patches else f"{folder.name}/"
        problems += [where + problem for problem in check(folder)]
    return problems


def check(patches: Path = PATCHES) -> list[str]:
    """What is wrong with the one series in ``patches``, a line each; empty when nothing is.

    Each diff has a header and applies to the pinned wheel in its turn, by git and by patch,
    with neither fuzz nor offset, and reverses; after each the files compile; an export of
    an import gives the same bytes; PIN holds the hashes; no diff lies about unlisted.
    """
    diffs = load_diffs(patches)
    names = {diff.name for diff in diffs}
    problems = [
        f"{path.name} is not in the series: list it or delete it"
        for path in sorted(patches.glob("*.diff"))
        if path.name not in names
    ]
    for diff in diffs:
        problems += _check_text(diff)
    if problems:
        return problems
    source = wheel(patches)
    try:
        for tool in ("git", "patch"):
            _check_applies(diffs, stock_files(source, _paths(diffs)), tool)
    except PagealignError as error:
        return [str(error)]
    with tempfile.TemporaryDirectory() as folder:
        import_series(Path(folder), patches, whole=False)
        for diff, exported in zip(diffs, export_diffs(Path(folder)), strict=True):
            if diff.text != exported.text:
                problems.append(f"{diff.name} is not as export writes it: import, then export")
    if load_pin(patches).files != compute_files(diffs, source):
        problems.append("PIN is not up to date: run python -m pagealign.series pin")
    return problems


def _check_text(diff: Diff) -> list[str]:
    subject, _, rest = diff.header.partition("\n")
    problems = []
    if not subject.strip():
        problems.append("has no subject line")
    elif not rest.startswith("\n") or not rest.strip():
        problems.append("has no paragraph that says why, after the subject and an empty line")
    if bad := re.search(r"^(---|\+\+\+|@@|Index:|Diff:|\*\*\* ).*", diff.header, re.MULTILINE):
        problems.append(f"has a header line that git or patch would misread: {bad[0]!r}")
    if bad := [path for path in diff.paths if not path.startswith("python/sglang/")]:
        problems.append(f"touches {bad[0]}, outside python/sglang/")
    if len(diff.paths) != len(re.findall(r"^diff --git ", diff.body, re.MULTILINE)):
        problems.append("renames a file: delete and add it instead")
    return [f"{diff.name} {problem}" for problem in problems]


def _check_applies(diffs: Sequence[Diff], stock: Files, tool: str) -> None:
    """Apply all, compiling after each, then reverse all; PagealignError where one fails."""
    paths = _paths(diffs)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_files(work, stock)
        for diff in diffs:
            _apply(work, diff, tool)
            for path in diff.paths if tool == "git" else ():  # once is enough
                if path.endswith(".py") and (work / path).exists():
                    _compile(work / path, f"{path} after {diff.name}")
        for diff in reversed(diffs):
            _apply(work, diff, tool, reverse=True)
        if _hashes(work, paths) != {path: _sha256(stock.get(path)) for path in paths}:
            raise PagealignError(f"{tool}: reversing the series doesn't give the stock files")


def _compile(path: Path, label: str) -> None:
    try:
        compile(path.read_bytes(), label, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise PagealignError(
            f"{label} does not compile: line {error.lineno}: {error.msg}"
        ) from error


def _apply(work: Path, diff: Diff, tool: str, *, reverse: bool = False) -> None:
    """Apply one diff in ``work`` exactly: PagealignError where it fails, or by fuzz or offset."""
    command = {
        "git": ["git", "apply", "--verbose", "--whitespace=nowarn"],
        "patch": ["patch", "-p1", "--fuzz=0", "--force", "--no-backup-if-mismatch", "--verbose"],
    }[tool] + ["--reverse"] * reverse
    done = subprocess.run(
        command, cwd=work, env=git_environment(GIT_DIR=os.devnull), input=diff.text.encode(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode:
        bad = [line for line in lines if "error:" in line or "FAILED" in line] or lines[-1:]
    else:
        # "|" and what follows is patch's echo of the diff's header
        said = [line for line in lines if not line.startswith("|")]
        bad = [line for line in said if re.search(r"\boffset\b|\bfuzz\b", line)]
    if bad:
        verb = "reverse" if reverse else "apply"
        raise PagealignError(f"{diff.name} does not {verb} exactly by {tool}: {bad[0].strip()}")


def _export(repo: Path, commit: str) -> Diff:
    message = git(repo, "log", "-1", "--format=%B", commit).strip("\n")
    header, _, trailer = message.rpartition("\n")
    name = trailer.removeprefix("Diff: ")
    if name == trailer or not re.fullmatch(r"[\w.-]+\.diff", name):
        subject = message.partition("\n")[0]
        raise PagealignError(
            f"commit {commit[:12]} ({subject}) must end with the line 'Diff: NAME.diff'"
        )
    body = git(
        repo, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames",
        "--unified=3", "--inter-hunk-context=0", "--diff-algorithm=myers", "--indent-heuristic",
        "--src-prefix=a/", "--dst-prefix=b/", "--no-relative", f"{commit}~", commit,
    )  # fmt: skip
    body = re.sub(r"^index .*\n", "", body, flags=re.MULTILINE)
    return Diff(name, header.strip("\n"), body)


def git(repo: Path, *args: str, text: str = "") -> str:
    """git's output, in which no line end was translated; PagealignError where it fails."""
    command = ["git", *args]
    done = subprocess.run(
        command, cwd=repo, env=git_environment(), input=text.encode(), capture_output=True
    )
    if done.returncode:
        why = (done.stderr.decode(errors="replace").strip() or "no reason given").splitlines()[0]
        raise PagealignError(f"git {args[0]} failed in {repo}: {why}")
    return done.stdout.decode()


def commit(repo: Path, message: str) -> None:
    """Commit what is staged, with exactly this message."""
    git(repo, "commit", "--quiet", "--cleanup=verbatim", "--file=-", text=message)


def git_environment(**more: str) -> dict[str, str]:
    """Variables under which git behaves in one way, and ``more``."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return ours | _GIT_ENV | more


def _is_fix(name: str) -> bool:
    return name.startswith("fixes_")


def _paths(diffs: Iterable[Diff]) -> list[str]:
    return sorted({path for diff in diffs for path in diff.paths})


def write_files(folder: Path, files: Files) -> None:
    """Write ``files`` under ``folder``."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def _sha256(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _hashes(folder: Path, paths: Iterable[str]) -> dict[str, str | None]:
    files = {path: folder / path for path in paths}
    return {path: sha256_of(file) if file.is_file() else None for path, file in files.items()}


def _comments(patches: Path) -> list[str]:
    """The comment lines at the top of the series file."""
    path = patches / "series"
    lines = path.read_text().splitlines() if path.exists() else []
    end = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    return lines[:end]


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(text.encode())
    new.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when all is well, else 1 with a line on stderr for each problem."""
    parser = argparse.ArgumentParser("python -m pagealign.series", description="Keeps the series.")
    parser.add_argument("--patches", type=Path, default=PATCHES, help="the series' folder")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("import", "make a git repository with one commit per diff on the stock package"),
        ("export", "write the diffs from such a repository"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--repo", type=Path, required=True)
    command = commands.add_parser("pin", help="recompute PIN from the wheel and the diffs")
    command.add_argument(
        "--wheel", type=Path, action="append", default=[], metavar="FILE",
        help="pin this wheel's release instead; once for each processor",
    )  # fmt: skip
    commands.add_parser("check", help="prove that the series and its alternatives are in order")
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except PagealignError as error:
        print(f"series: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    patches = options.patches
    match options.command:
        case "import":
            import_series(options.repo, patches)
            print(f"{options.repo}: git log {BASE}..HEAD shows the series")
        case "export":
            for line in export_series(options.repo, patches) or ["nothing has changed"]:
                print(line)
        case "pin":
            for folder in [patches] if options.wheel else series_folders(patches):
                write_pin(folder, options.wheel)
                print(f"wrote {folder / 'PIN'}")
        case "check":
            problems = check_all(patches)
            for problem in problems:
                print(f"series: {problem}", file=sys.stderr)
            if problems:
                return 1
            count = sum(len(load_series(folder).all) for folder in series_folders(patches))
            print(f"{count} diffs in order")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
