"""scripts/apply_patches.sh on a tiny release: what it does, refuses and survives.

Each refusal is held against a snapshot of the whole tree: paths, modes and contents.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tiny_release import (
    ALL,
    CORE,
    LEVELS,
    RELEASE,
    STOCK,
    TOUCHED,
    UNTOUCHED,
    VARLEN,
    TinyRelease,
    Version,
    make_package,
    make_release,
    snapshot,
)

SCRIPT = Path(__file__).parents[1] / "scripts" / "apply_patches.sh"

# The script's interface: what each exit code means.
FAILED, USAGE, NO_PATH, NO_SGLANG, OTHER_RELEASE, DIFFERS, PARTLY = 1, 2, 3, 4, 5, 6, 7
READ_ONLY, NO_TOOL, HAS_CRLF, SYMLINK, BUSY, BAD_SERIES, HAS_FIXES = 8, 9, 10, 11, 12, 13, 14
HAS_OTHER = 15

# All that the script may call beside git and patch.
COREUTILS = "bash cat cp dirname env mkdir mktemp mv rm sha256sum tr"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> TinyRelease:
    return make_release(tmp_path_factory.mktemp("a release"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The parent of a stock package; there are spaces on the way to it."""
    folder = tmp_path / "a tree"
    make_package(folder)
    return folder


@pytest.fixture
def run(release: TinyRelease):
    def call(
        *args: str | Path, path: str | None = None, env: Mapping[str, str] | None = None, **more
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": path or os.environ["PATH"]} | dict(env or {})
        return subprocess.run(
            ["bash", SCRIPT, "--patches", release.patches, *args],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            **more,
        )

    return call


def contents(package: Path) -> Version:
    return {path: (package / path).read_text() for path in TOUCHED if (package / path).exists()}


def ok(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """It says one line on stderr, with these words, and exits with that code."""
    assert done.returncode == code, done
    assert done.stderr.startswith("apply_patches: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def tools(folder: Path, *names: str) -> str:
    """A PATH with nothing but the coreutils and these."""
    folder.mkdir()
    for name in (*COREUTILS.split(), *names):
        (folder / name).symlink_to(shutil.which(name) or "/missing")
    return str(folder)


def fake(folder: Path, name: str, script: str) -> str:
    """A PATH on which ``name`` is the script; in it, ``$REAL`` is the real one."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/bash\nREAL={shutil.which(name)}\n{script}\n")
    file.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


# --- applying and reversing -----------------------------------------------------------


@pytest.mark.parametrize("layout", ["python/sglang", "sglang"])
@pytest.mark.parametrize("named", ["parent", "package", "link"])
def test_finds_the_tree_applies_and_reverses(run, tmp_path, layout, named):
    root = tmp_path / "my checkout"
    package = make_package((root / layout).parent)
    before = snapshot(root)
    link = tmp_path / "link"
    link.symlink_to(root)
    path = {"parent": root, "package": package, "link": link}[named]

    ok(run(path))
    assert contents(package) == ALL
    assert {path: (package / path).read_text() for path in UNTOUCHED} == UNTOUCHED
    after = snapshot(root)
    added = f"{layout}/srt/added.py"
    assert after.keys() - before.keys() == {added}
    assert {path: mode for path, (mode, _) in after.items() if path != added} == {
        path: mode for path, (mode, _) in before.items()
    }
    assert after[f"{layout}/srt/script.py"][0] & 0o777 == 0o755

    ok(run("--reverse", path))
    assert snapshot(root) == before


def test_finds_pythons_own_folder_of_a_checkout(run, tmp_path):
    package = make_package(tmp_path / "python")
    ok(run(tmp_path / "python"))
    assert contents(package) == ALL


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_needs_only_coreutils_and_either_tool(run, tree, tmp_path, tool):
    path = tools(tmp_path / "bin", tool)
    before = snapshot(tree)
    ok(run("--check", tree, path=path))
    ok(run("--core", tree, path=path))
    assert contents(tree / "sglang") == CORE
    ok(run(tree, path=path))
    assert contents(tree / "sglang") == ALL
    ok(run("--reverse", tree, path=path))
    assert snapshot(tree) == before


def test_core_leaves_the_fixes_out(run, tree):
    before = snapshot(tree)
    ok(run("--core", tree))
    assert contents(tree / "sglang") == CORE
    assert "already" in ok(run("--core", tree))
    ok(run("--reverse", tree))
    assert snapshot(tree) == before


def test_core_is_refused_where_the_fixes_are_in(run, tree):
    ok(run(tree))
    before = snapshot(tree)
    refused(run("--core", tree), HAS_FIXES, "--reverse first")
    assert snapshot(tree) == before


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_a_second_run_has_nothing_to_do(run, tree, flags):
    ok(run(tree))
    file = tree / "sglang/srt/many.py"
    before, inode = snapshot(tree), file.stat().st_ino
    assert "already applied" in ok(run(*flags, tree))
    assert (snapshot(tree), file.stat().st_ino) == (before, inode)


def test_reversing_stock_has_nothing_to_do(run, tree):
    before = snapshot(tree)
    assert "nothing to reverse" in ok(run("--reverse", tree))
    assert snapshot(tree) == before


@pytest.mark.parametrize("flags", [[], ["--core"]])
def test_check_changes_nothing(run, tree, flags):
    before = snapshot(tree)
    files = 4 if flags else 5  # `fixed.py` is for the fixes only
    assert f"would apply: {files} files" in ok(run("--check", *flags, tree))
    assert snapshot(tree) == before


def test_files_keep_owner_and_odd_modes(run, tree):
    file = tree / "sglang/srt/many.py"
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 12345, 23456)
    before = file.stat()
    ok(run(tree))
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert after.st_ino != before.st_ino  # replaced, not written into


def test_a_hard_links_other_name_is_left_alone(run, tree, tmp_path):
    other = tmp_path / "other.py"
    os.link(tree / "sglang/srt/many.py", other)
    ok(run(tree))
    assert other.read_text() == STOCK["srt/many.py"]
    assert contents(tree / "sglang") == ALL


def test_the_users_git_and_environment_do_not_matter(run, tmp_path):
    """In a repository, from a hook (GIT_DIR), under settings that would change a diff's effect."""
    repo = tmp_path / "repo"
    package = make_package(repo / "python")
    (tmp_path / ".gitconfig").write_text(
        "[apply]\n whitespace = fix\n[core]\n autocrlf = true\n[user]\n name = me\n email = me@x\n"
    )
    make_package(tmp_path / "decoy/python")
    other = make_checkout(tmp_path / "other", "v0.5.22")
    git(repo, "init", "-q")
    env = {
        "HOME": str(tmp_path),
        "CDPATH": str(tmp_path / "decoy"),
        "GIT_DIR": str(other / ".git"),
    }
    before = snapshot(package)
    ok(run("python", env=env, cwd=repo))
    assert contents(package) == ALL
    ok(run("--reverse", ".", env=env, cwd=package))
    assert snapshot(package) == before


@pytest.mark.parametrize(
    "env",
    [
        {"GIT_CONFIG_PARAMETERS": "'core.autocrlf=true'"},
        {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "core.autocrlf",
            "GIT_CONFIG_VALUE_0": "true",
        },
    ],
    ids=["parameters", "count"],
)
def test_git_settings_in_the_environment_do_not_matter(run, tree, env):
    ok(run(tree, env=env))
    assert contents(tree / "sglang") == ALL


def test_a_path_that_begins_with_a_dash(run, tmp_path):
    package = make_package(tmp_path / "-tree")
    ok(run("--", "-tree", cwd=tmp_path))
    assert contents(package) == ALL
    refused(run("--", "-tree", "other", cwd=tmp_path), USAGE, "one PATH")
    refused(run("--"), USAGE, "--installed")


def test_check_without_a_temporary_folder(run, tree, tmp_path):
    missing = str(tmp_path / "missing")
    refused(run("--check", tree, env={"TMPDIR": missing}), FAILED, missing, "TMPDIR")


@pytest.mark.parametrize("mode", [[], ["--check"]])
@pytest.mark.parametrize("name", ["cp", "cat", "git", "mkdir"])
def test_a_full_disk(run, tree, tmp_path, mode, name):
    """The lock's own mkdir comes before there is anything to write."""
    passes = 'case "$*" in -p*) ;; *) exec "$REAL" "$@" ;; esac' if name == "mkdir" else ""
    script = f'{passes}\necho "{name}: error writing: No space left on device" >&2\nexit 1'
    before = snapshot(tree)
    refused(run(*mode, tree, path=fake(tmp_path / "bin", name, script)), FAILED, "full")
    assert snapshot(tree) == before


# --- which tree -----------------------------------------------------------------------


def git(repo: Path, *args: str, env: Mapping[str, str] | None = None) -> None:
    subprocess.run(["git", *args], cwd=repo, check=True, env=os.environ | dict(env or {}))


def make_checkout(folder: Path, tag: str, *later: str) -> Path:
    """A git checkout at ``tag``, with commits after it; it has no _version.py."""
    (make_package(folder / "python") / "_version.py").unlink()
    who = ["-c", "user.name=me", "-c", "user.email=me@x"]
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, *who, "commit", "-qm", "stock")
    git(folder, *who, "tag", "-a", "-m", "x", tag)
    git(folder, "tag", "gateway-v0.3.1")
    for subject in later:
        git(folder, *who, "commit", "-q", "--allow-empty", "-m", subject)
    return folder


@pytest.mark.parametrize("later", [[], ["my own commit"]])
def test_a_checkouts_release_is_its_tag(run, tmp_path, later):
    repo = make_checkout(tmp_path / "repo", f"v{RELEASE}", *later)
    assert f"SGLang {RELEASE} " in ok(run("--status", repo))
    ok(run(repo))
    assert contents(repo / "python/sglang") == ALL


@pytest.mark.parametrize(
    ("tag", "later", "named"), [("v0.5.22", [], "0.5.22,"), ("v0.5.22", ["more"], "0.5.22-1-g")]
)
@pytest.mark.parametrize("mode", [[], ["--check"], ["--core"], ["--status"]])
def test_another_tag_is_refused_and_named(run, tmp_path, tag, later, named, mode):
    repo = make_checkout(tmp_path / "repo", tag, *later)
    before = snapshot(repo / "python")
    refused(run(*mode, repo), OTHER_RELEASE, f"SGLang {named}", f"v{RELEASE}")
    assert snapshot(repo / "python") == before


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("sglang/_version.py", "__version__ = version = '0.5.19'\n"),
        ("sglang/version.py", '__version__ = "0.5.19"\n'),
        ("sglang-0.5.19.dist-info/METADATA", ""),
    ],
)
def test_another_release_is_refused_and_named(run, tree, file, text):
    (tree / "sglang/_version.py").unlink()
    (tree / file).parent.mkdir(exist_ok=True)
    (tree / file).write_text(text)
    (tree / "sglang/srt/many.py").write_text("(another release's)\n")
    before = snapshot(tree)
    refused(run(tree), OTHER_RELEASE, "SGLang 0.5.19,", RELEASE)
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    "text", ["__version__ = '0.5.24.dev7+gabc'", f"__version__ = '{RELEASE}+cpu'"]
)
def test_a_tree_of_unclear_release_is_judged_by_its_files(run, tree, text):
    (tree / "sglang/_version.py").write_text(text + "\n")
    ok(run(tree))
    assert contents(tree / "sglang") == ALL


def test_installed_asks_python_without_importing(run, tree, tmp_path):
    (tree / "sglang/__init__.py").write_text("raise SystemExit('imported')\n")
    make_package(tmp_path / "decoy")  # the folder one happens to be in
    env = {"PYTHON": sys.executable, "PYTHONPATH": str(tree)}
    ok(run("--installed", env=env, cwd=tmp_path / "decoy"))
    assert contents(tree / "sglang") == ALL
    assert contents(tmp_path / "decoy/sglang") == STOCK


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "--installed"),
        (["x", "--installed"], "--installed"),
        (["x", "y"], "one PATH"),
        (["--frobnicate", "x"], "--frobnicate"),
        (["--check", "--reverse", "x"], "only one"),
        (["--reverse", "--core", "x"], "--core"),
        (["--status", "--core", "x"], "--core"),
        (["x", "--patches"], "--patches"),
        (["x", "--series"], "--series needs a name"),
        (["x", "--series", ""], "--series needs a name"),
        (["--series", "alternatives/varlen", "--core", "x"], "--core does not go"),
    ],
)
def test_wrong_usage(run, args, word):
    refused(run(*args), USAGE, word)


def test_help_names_every_exit_code(run):
    text = ok(run("--help"))
    codes = dict(
        re.findall(
            r"\b([A-Z_]+)=(\d+)", re.search(r"readonly (.+?)\n\n", SCRIPT.read_text(), re.DOTALL)[1]
        )
    )
    assert sorted(map(int, codes.values())) == list(range(1, 16))
    assert sorted(map(int, re.findall(r"^ +(\d+)  ", text, re.M))) == list(range(8))
    assert sorted(map(int, re.findall(r"\S {2,}(\d+)  ", text))) == list(range(8, 16))


def test_no_such_path(run, tmp_path):
    refused(run(tmp_path / "nowhere"), NO_PATH, "nowhere")


def test_no_sglang_there(run, tmp_path):
    refused(run(tmp_path), NO_SGLANG, str(tmp_path), "checkout's root")
    (tmp_path / "file").touch()
    refused(run(tmp_path / "file"), NO_SGLANG)


def test_no_sglang_installed(run):
    python = Path(sys.base_prefix) / "bin/python3"
    refused(run("--installed", env={"PYTHON": f"{python}", "PYTHONPATH": ""}), NO_SGLANG, "PYTHON")
    refused(run("--installed", env={"PYTHON": "no-such-python"}), NO_TOOL, "no-such-python")


@pytest.mark.parametrize("mode", [[], ["--check"], ["--core"], ["--reverse"], ["--status"]])
def test_a_file_that_differs_is_named(run, tree, mode):
    (tree / "sglang/srt/fixed.py").write_text(STOCK["srt/fixed.py"] + "# mine\n")
    before = snapshot(tree)
    refused(run(*mode, tree), DIFFERS, "srt/fixed.py differs", RELEASE)
    assert snapshot(tree) == before
    (tree / "sglang/srt/many.py").write_text("")
    refused(run(*mode, tree), DIFFERS, "and 1 more", "--status")


def test_a_file_that_is_missing_is_named(run, tree):
    (tree / "sglang/srt/many.py").unlink()
    before = snapshot(tree)
    refused(run(tree), DIFFERS, "srt/many.py is missing")
    assert snapshot(tree) == before


def test_a_foreign_file_in_the_added_ones_place(run, tree):
    (tree / "sglang/srt/added.py").write_text("mine\n")
    before = snapshot(tree)
    refused(run(tree), DIFFERS, "srt/added.py differs")
    assert snapshot(tree) == before


@pytest.mark.parametrize("version", [STOCK, ALL])
@pytest.mark.parametrize("mode", [[], ["--reverse"], ["--status"]])
def test_crlf_line_ends(run, tmp_path, version, mode):
    package = make_package(tmp_path, version)
    for path in contents(package):
        file = package / path
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    before = snapshot(tmp_path)
    refused(run(*mode, tmp_path), HAS_CRLF, "CRLF", "autocrlf")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("mode", [[], ["--check"], ["--reverse"]])
def test_a_linked_file_is_refused(run, tmp_path, mode):
    package = make_package(tmp_path, ALL if mode == ["--reverse"] else STOCK)
    file = package / "srt/many.py"
    file.rename(tmp_path / "elsewhere.py")
    file.symlink_to(tmp_path / "elsewhere.py")
    before = snapshot(tmp_path)
    refused(run(*mode, package), SYMLINK, "srt/many.py", "symbolic link")
    assert snapshot(tmp_path) == before


def test_a_linked_folder_is_refused(run, tree, tmp_path):
    (tree / "sglang/srt").rename(tmp_path / "elsewhere")
    (tree / "sglang/srt").symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path)
    refused(run(tree), SYMLINK, "symbolic link")
    assert snapshot(tmp_path) == before


def test_neither_git_nor_patch(run, tree, tmp_path):
    path = tools(tmp_path / "bin")
    before = snapshot(tree)
    refused(run(tree, path=path), NO_TOOL, "git", "patch")
    assert "stock" in ok(run("--status", tree, path=path))
    assert snapshot(tree) == before


def test_no_sha256sum(run, tree, tmp_path):
    path = tools(tmp_path / "bin", "git")
    (tmp_path / "bin/sha256sum").unlink()
    refused(run(tree, path=path), NO_TOOL, "sha256sum")


@pytest.fixture
def readable(release: TinyRelease) -> Iterator[Path]:
    """A folder that every user can reach, with copies of the script and the series."""
    folder = Path(tempfile.mkdtemp())
    (folder / "scripts").mkdir()
    shutil.copy(SCRIPT, folder / "scripts")
    shutil.copytree(release.patches, folder / "patches")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["file", "folder", "package", "all"])
@pytest.mark.parametrize("mode", [[], ["--check"], ["--reverse"]])
def test_a_read_only_tree(readable, what, mode):
    package = make_package(readable / "tree", ALL if mode == ["--reverse"] else STOCK)
    user = {}
    if os.geteuid() == 0:  # root may write anywhere: be somebody else, who owns the tree
        user = {"user": 65534, "group": 65534, "extra_groups": []}
        for path in (readable, *readable.rglob("*")):
            os.chown(path, 65534, 65534)
    doomed = {
        "file": [package / "srt/many.py"],
        "folder": [package / "srt"],
        "package": [package],
        "all": [package, *package.rglob("*")],
    }[what]
    for path in doomed:
        path.chmod(path.stat().st_mode & ~0o222)
    before = snapshot(readable)
    command = ["bash", readable / "scripts/apply_patches.sh", *mode, readable / "tree"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", **user)
    if what == "package" and mode == ["--check"]:  # all but the staging folder would work
        assert done.returncode in (0, READ_ONLY)
    else:
        refused(done, READ_ONLY, "writable")
    assert snapshot(readable) == before

    status = [*command[:2], "--status", command[-1]]
    assert subprocess.run(status, capture_output=True, cwd="/", **user).returncode == 0


@pytest.mark.parametrize("broken", ["PIN", "series", "second.diff", "unpinned", "empty"])
def test_an_incomplete_patches_folder(run, release, tree, tmp_path, broken):
    patches = tmp_path / "patches"
    shutil.copytree(release.patches, patches)
    match broken:
        case "unpinned":
            pin = (patches / "PIN").read_text()
            (patches / "PIN").write_text(re.sub(r"file .*many.py\n", "", pin))
        case "empty":
            (patches / "PIN").write_text("")
            (patches / "series").write_text("")
        case _:
            (patches / broken).unlink()
    before = snapshot(tree)
    refused(run("--patches", patches, tree), BAD_SERIES)
    refused(run("--patches", patches, "--status", tree), BAD_SERIES)
    assert snapshot(tree) == before


# --- status ---------------------------------------------------------------------------


def status_of(done: subprocess.CompletedProcess[str]) -> tuple[str, dict[str, str]]:
    head, *rows = done.stdout.splitlines()
    parts = (re.split(r" {2,}", row.strip()) for row in rows)
    return head.rpartition(": ")[2], {path: state for state, path in parts}


@pytest.mark.parametrize(
    ("version", "word", "files"),
    [
        (STOCK, "stock", "stock stock stock stock stock"),
        (CORE, "core applied", "applied stock applied core-applied applied"),
        (ALL, "applied", "applied applied applied applied applied"),
    ],
)
def test_status(run, tmp_path, version, word, files):
    make_package(tmp_path, version)
    before = snapshot(tmp_path)
    done = run("--status", tmp_path)
    ok(done)
    rows = dict(
        zip(
            [
                "srt/added.py",
                "srt/fixed.py",
                "srt/mem cache/spaced.py",
                "srt/many.py",
                "srt/script.py",
            ],
            [name.replace("-", " ") for name in files.split()],
            strict=True,
        )
    )
    assert status_of(done) == (word, rows)
    assert snapshot(tmp_path) == before


def test_status_of_a_partly_applied_and_of_an_unknown_tree(run, tmp_path):
    package = make_package(tmp_path, {**STOCK, "srt/script.py": ALL["srt/script.py"]})
    done = run("--status", tmp_path)
    refused(done, PARTLY, "--reverse")
    word, files = status_of(done)
    assert word == "partly applied"
    assert [path for path, state in files.items() if state == "applied"] == ["srt/script.py"]

    (package / "srt/many.py").write_text("mine\n")
    (package / "srt/fixed.py").unlink()
    spaced = package / "srt/mem cache/spaced.py"
    spaced.write_bytes(spaced.read_bytes().replace(b"\n", b"\r\n"))
    done = run("--status", tmp_path)
    assert done.returncode == DIFFERS
    assert status_of(done) == (
        "unknown",
        {
            "srt/added.py": "stock",
            "srt/fixed.py": "missing",
            "srt/many.py": "differs",
            "srt/mem cache/spaced.py": "CRLF line ends",
            "srt/script.py": "applied",
        },
    )


# --- another series -------------------------------------------------------------------

ALTERNATIVE = ["--series", "alternatives/varlen"]


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_an_alternative_applies_and_reverses(run, tree, tmp_path, tool):
    path = tools(tmp_path / "bin", tool)
    before = snapshot(tree)

    def alternative(*mode: str) -> str:
        return ok(run(*ALTERNATIVE, *mode, tree, path=path))

    assert "would apply: 1 file of" in alternative("--check")
    assert alternative("--status").splitlines()[0].endswith("series alternatives/varlen: stock")
    assert snapshot(tree) == before
    assert "--series alternatives/varlen --reverse takes that back" in alternative()
    assert contents(tree / "sglang") == VARLEN
    assert "already applied" in alternative()
    head, *files = alternative("--status").splitlines()
    assert head.endswith("series alternatives/varlen: applied")
    assert [file.split() for file in files] == [["applied", "srt/many.py"]]
    alternative("--reverse")
    assert snapshot(tree) == before
    assert "nothing to reverse" in alternative("--reverse")


@pytest.mark.parametrize("version", [CORE, ALL], ids=["core", "all"])
@pytest.mark.parametrize("mode", [[], ["--check"], ["--reverse"], ["--status"]])
def test_an_alternative_is_refused_where_the_series_is_in(run, tmp_path, version, mode):
    make_package(tmp_path, version)
    before = snapshot(tmp_path)
    refused(run(*ALTERNATIVE, *mode, tmp_path), HAS_OTHER, "main series", "by --reverse alone")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("mode", [[], ["--core"], ["--check"], ["--reverse"], ["--status"]])
def test_the_series_is_refused_where_an_alternative_is_in(run, tmp_path, mode):
    make_package(tmp_path, VARLEN)
    before = snapshot(tmp_path)
    refused(run(*mode, tmp_path), HAS_OTHER, "by --series alternatives/varlen --reverse")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("mode", [[], ["--check"]])
def test_an_alternative_is_refused_where_the_series_is_partly_in(run, tmp_path, mode):
    """As a killed run may leave it: not in the one file that both touch."""
    make_package(tmp_path, STOCK | {"srt/script.py": ALL["srt/script.py"]})
    before = snapshot(tmp_path)
    refused(run(*ALTERNATIVE, *mode, tmp_path), HAS_OTHER, "main series")
    assert snapshot(tmp_path) == before


def test_an_alternative_names_a_file_of_ones_own(run, tree):
    (tree / "sglang/srt/many.py").write_text("mine\n")
    before = snapshot(tree)
    for mode in ([], ["--reverse"], ["--status"]):
        refused(run(*ALTERNATIVE, *mode, tree), DIFFERS, "srt/many.py differs")
    assert snapshot(tree) == before


@pytest.mark.parametrize("name", ["varlen", "alternatives", "first", "../alternatives/varlen"])
def test_an_unknown_series(run, tree, name):
    refused(run("--series", name, tree), USAGE, f"no series {name}: there is alternatives/varlen")


def test_patches_without_an_alternative(run, release, tree, tmp_path):
    patches = tmp_path / "patches"
    shutil.copytree(release.patches, patches, ignore=shutil.ignore_patterns("alternatives"))
    refused(run("--patches", patches, *ALTERNATIVE, tree), USAGE, "there is none")
    ok(run("--patches", patches, tree))
    assert contents(tree / "sglang") == ALL


@pytest.mark.parametrize("broken", ["PIN", "series"])
def test_an_incomplete_alternative(run, release, tree, tmp_path, broken):
    patches = tmp_path / "patches"
    shutil.copytree(release.patches, patches)
    (patches / "alternatives" / broken).unlink()
    before = snapshot(tree)
    refused(run("--patches", patches, *ALTERNATIVE, tree), BAD_SERIES, "alternatives")
    assert snapshot(tree) == before
    ok(run("--patches", patches, tree))  # the main series needs none of it


# --- all or nothing -------------------------------------------------------------------


def broken_series(release: TinyRelease, folder: Path, how: str) -> Path:
    patches = folder / "patches"
    shutil.copytree(release.patches, patches)
    if how == "hunk":  # the last diff of the series fails
        diff = patches / "fixes_third.diff"
        diff.write_text(diff.read_text().replace(" (12)\n", " (not there)\n"))
    else:  # it applies, to another result
        diff = patches / "fixes_third.diff"
        diff.write_text(diff.read_text().replace("+('fix')", "+('another fix')"))
    return patches


@pytest.mark.parametrize("tool", ["git", "patch"])
@pytest.mark.parametrize("mode", [[], ["--check"], ["--reverse"]])
@pytest.mark.parametrize("how", ["hunk", "result"])
def test_a_failing_hunk_changes_nothing(run, release, tmp_path, tool, mode, how):
    package = make_package(tmp_path / "tree", ALL if mode == ["--reverse"] else STOCK)
    patches = broken_series(release, tmp_path, how)
    before = snapshot(package)
    path = tools(tmp_path / "bin", tool)
    refused(run("--patches", patches, *mode, package, path=path), FAILED, "nothing has changed")
    assert snapshot(package) == before


def mixtures() -> list[tuple[int, ...]]:
    """A level for each touched file: not all the same, and every second one of them."""
    levels = itertools.product(range(3), repeat=len(TOUCHED))
    trees = {tuple(LEVELS[n].get(p) for n, p in zip(c, TOUCHED, strict=True)): c for c in levels}
    for version in LEVELS:
        trees.pop(tuple(version.get(path) for path in TOUCHED), None)
    return sorted(trees.values())[::4]


@pytest.mark.parametrize("levels", mixtures(), ids=lambda levels: "".join(map(str, levels)))
def test_any_partly_applied_tree_is_refused_and_put_right(run, tmp_path, levels):
    stock = snapshot(make_package(tmp_path / "stock"))
    mixed = {
        path: LEVELS[level][path]
        for path, level in zip(TOUCHED, levels, strict=True)
        if path in LEVELS[level]
    }
    package = make_package(tmp_path / "mixed", mixed)
    before = snapshot(package)
    refused(run(package), PARTLY, "--reverse")
    assert snapshot(package) == before
    ok(run("--reverse", package))
    assert snapshot(package) == stock


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["apply", "reverse"])
def test_kill_9_between_two_renames_can_be_put_right(run, tmp_path, nth, when, way):
    """A fake mv kills the script, which nothing can catch, before or after its Nth rename."""
    stock = snapshot(make_package(tmp_path / "stock"))
    package = make_package(tmp_path / "tree", ALL if way == "reverse" else STOCK)
    mode = ["--reverse"] if way == "reverse" else []
    count = tmp_path / "count"
    kill = {"before": "kill -9 $PPID; exit 1", "after": '"$REAL" "$@"; kill -9 $PPID; exit 1'}[when]
    script = (
        f'echo >>"{count}"\nif [ $(wc -l <"{count}") = {nth} ]; then {kill}; fi\nexec "$REAL" "$@"'
    )
    done = run(*mode, package, path=fake(tmp_path / "bin", "mv", script))
    files = 5 if way == "apply" else 4  # to reverse, the added file goes by rm, and first
    if nth > files:
        ok(done)
        return
    assert done.returncode == -signal.SIGKILL
    match (way, nth - (when == "before")):
        case ("apply", 0) | ("reverse", 4):
            assert "stock" in ok(run("--status", package))
        case ("apply", 5):
            assert "applied" in ok(run("--status", package))
        case _:
            refused(run("--status", package), PARTLY)
            refused(run(package), PARTLY, "--reverse")
    ok(run("--reverse", package))
    assert snapshot(package) == stock  # the killed run's staging folder is gone, too


@pytest.mark.parametrize("mode", [[], ["--core"]])
def test_kill_9_while_staging_leaves_what_the_next_run_clears(run, tree, tmp_path, mode):
    before = snapshot(tree)
    holder = f'for f in "{tree}"/sglang/.apply_patches/run-*; do kill -9 "${{f##*-}}"; done; exit 1'
    done = run(*mode, tree, path=fake(tmp_path / "bin", "git", holder))
    assert done.returncode == -signal.SIGKILL
    assert (tree / "sglang/.apply_patches").is_dir()
    assert "stock" in ok(run("--status", tree))
    ok(run(*mode, tree))
    assert contents(tree / "sglang") == (CORE if mode else ALL)
    ok(run("--reverse", tree))
    assert snapshot(tree) == before


def test_a_killed_runs_leftovers_go_even_if_nothing_is_to_do(run, tree):
    ok(run(tree))
    before = snapshot(tree)
    stage = tree / "sglang/.apply_patches"
    (stage / "new").mkdir(parents=True)
    (stage / f"run-{socket.gethostname()}-{dead_pid()}").touch()
    assert "already applied" in ok(run(tree))
    assert snapshot(tree) == before


@pytest.mark.parametrize("mode", [["--reverse"], []])
def test_nothing_of_a_killed_runs_staging_is_used(run, tmp_path, mode):
    package = make_package(tmp_path, ALL if mode else STOCK)
    stage = package / ".apply_patches"
    for folder in ("old", "new", "work/python/sglang/srt"):
        (stage / folder).mkdir(parents=True)
        for name in ("0", "1", "2", "3", "4", "added.py", "many.py"):
            (stage / folder / name).write_text("stale\n")
    (stage / f"run-{socket.gethostname()}-{dead_pid()}").touch()
    ok(run(*mode, tmp_path))
    assert contents(package) == (STOCK if mode else ALL)
    assert not stage.exists()


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


class Blocked:
    """A run that has come to its first call of ``tool``, and waits there until ``go()``."""

    def __init__(
        self, release: TinyRelease, package: Path, tmp_path: Path, tool: str = "git"
    ) -> None:
        ready, self._go = tmp_path / f"{tool} is ready", tmp_path / f"{tool} may go"
        os.mkfifo(ready)
        os.mkfifo(self._go)
        script = f'[ ! -p "{ready}" ] || {{ echo >"{ready}"; rm "{ready}"; read <"{self._go}"; }}'
        path = fake(tmp_path / f"{tool} bin", tool, f'{script}\nexec "$REAL" "$@"')
        self.process = subprocess.Popen(
            ["bash", SCRIPT, "--patches", release.patches, package],
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        ready.read_text()

    def go(self) -> None:
        self._go.write_text("\n")

    def end(self) -> subprocess.CompletedProcess[str]:
        try:
            out, err = self.process.communicate(timeout=60)
        finally:  # bash ignores SIGQUIT, so the tool, which is one, may be left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess([], self.process.returncode, out, err)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("group", [False, True], ids=["script", "group"])
def test_an_interruption_before_the_swap_changes_nothing(release, tree, tmp_path, number, group):
    before = snapshot(tree)
    blocked = Blocked(release, tree / "sglang", tmp_path)
    if group:  # as by Ctrl-C in a terminal: git is hit, too
        os.killpg(blocked.process.pid, number)
    else:
        blocked.process.send_signal(number)
        blocked.go()
    done = blocked.end()
    if group:  # bash itself may say "Terminated" of the child
        done.stderr = "".join(done.stderr.splitlines(True)[-1:])
    refused(done, 128 + number, "interrupted", "nothing has changed")
    assert snapshot(tree) == before


@pytest.mark.parametrize("number", ["TERM", "INT", "HUP", "QUIT"])
def test_a_signal_in_the_swap_is_held(run, tree, tmp_path, number):
    script = f'kill -{number} -- -$PPID; exec "$REAL" "$@"'
    path = fake(tmp_path / "bin", "mv", script)
    ok(run(tree, path=path, start_new_session=True))
    assert contents(tree / "sglang") == ALL
    assert not (tree / "sglang/.apply_patches").exists()


@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_rename_that_fails_is_undone(run, tree, tmp_path, nth):
    before = snapshot(tree)
    count = tmp_path / "count"
    script = f'echo >>"{count}"; [ $(wc -l <"{count}") != {nth} ] || exit 1\nexec "$REAL" "$@"'
    done = run(tree, path=fake(tmp_path / "bin", "mv", script))
    refused(done, FAILED, "could not be replaced", "as it was")
    assert snapshot(tree) == before


# --- more than one run ----------------------------------------------------------------


@pytest.mark.parametrize("mode", [[], ["--reverse"], ["--core"]])
def test_a_second_run_meanwhile_is_refused(run, release, tree, tmp_path, mode):
    blocked = Blocked(release, tree / "sglang", tmp_path)
    refused(run(*mode, tree), BUSY, str(blocked.process.pid), str(tree / "sglang/.apply_patches"))
    assert "stock" in ok(run("--status", tree))
    blocked.go()
    ok(blocked.end())
    assert contents(tree / "sglang") == ALL


def test_another_machines_run_is_not_taken_over(run, tree):
    stage = tree / "sglang/.apply_patches"
    stage.mkdir()
    (stage / f"run-elsewhere-{dead_pid()}").touch()
    before = snapshot(tree)
    refused(run(tree), BUSY, "run-elsewhere", f"remove {stage}")
    assert snapshot(tree) == before


def test_a_dead_runs_lock_is_taken_over_by_one(release, tree, tmp_path):
    """Of two that see the dead run's lock, the slower one finds the other's."""
    stage = tree / "sglang/.apply_patches"
    stage.mkdir()
    (stage / f"run-{socket.gethostname()}-{dead_pid()}").touch()
    slow = Blocked(release, tree / "sglang", tmp_path, "mv")  # as it takes over
    fast = Blocked(release, tree / "sglang", tmp_path, "git")  # has taken over
    slow.go()
    refused(slow.end(), BUSY)
    fast.go()
    ok(fast.end())
    assert contents(tree / "sglang") == ALL
    assert not stage.exists()


@pytest.mark.parametrize("stale", [False, True])
def test_many_at_once(release, tree, stale):
    """Each is refused or finds the tree applied; one does it. With a dead run's lock, too."""
    if stale:
        stage = tree / "sglang/.apply_patches"
        stage.mkdir()
        (stage / f"run-{socket.gethostname()}-{dead_pid()}").touch()
    command = ["bash", SCRIPT, "--patches", release.patches, tree]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen(command, **pipes) for _ in range(8)]
    ends = [(run.communicate(timeout=60), run.returncode) for run in runs]
    assert {code for _, code in ends} <= {0, BUSY}, ends
    assert sum("files of" in out for (out, _), _ in ends) == 1
    assert contents(tree / "sglang") == ALL
    assert not (tree / "sglang/.apply_patches").exists()
