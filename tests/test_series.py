"""python -m pagealign.series: import, export, pin and check, on a tiny release and the real one."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_release import (
    ALL,
    CORE,
    DIFFS,
    ONE,
    STOCK,
    TOUCHED,
    UNTOUCHED,
    VARLEN,
    TinyRelease,
    make_diff,
    make_release,
    snapshot,
)

from pagealign.errors import PagealignError
from pagealign.paths import PATCHES
from pagealign.pin import load_pin, load_series
from pagealign.series import (
    BASE,
    check,
    check_all,
    export_series,
    import_series,
    load_diff,
    load_diffs,
    main,
    series_folders,
    write_pin,
)


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRelease:
    """The release, with its wheel given, and a user whose git settings are of their own kind."""
    made = make_release(tmp_path / "a release")
    monkeypatch.setenv("PAGEALIGN_WHEEL", str(made.wheel))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(
        "[diff]\n noprefix = true\n context = 9\n algorithm = patience\n external = /bin/false\n"
        "[core]\n autocrlf = true\n[commit]\n gpgsign = true\n[color]\n ui = always\n"
    )
    return made


@pytest.fixture
def repo(release: TinyRelease, tmp_path: Path) -> Path:
    """A repository imported from the release."""
    folder = tmp_path / "a repo"
    import_series(folder, release.patches)
    return folder


def git(repo: Path, *args: str) -> str:
    who = {"NAME": "me", "EMAIL": "me@x"}
    env = {f"GIT_{role}_{key}": v for role in ("AUTHOR", "COMMITTER") for key, v in who.items()}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "PATH": os.environ["PATH"]}
    done = subprocess.run(["git", *args], cwd=repo, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(repo: Path, path: str, content: str, message: str) -> None:
    file = repo / "python/sglang" / path
    file.write_text(content)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", message)


# --- import and export ----------------------------------------------------------------


def test_import_makes_one_commit_per_diff(repo):
    subjects = git(repo, "log", "--reverse", "--format=%s").splitlines()
    assert subjects == [
        "SGLang 0.5.23",
        "Do the first thing",
        "Do the second thing",
        "Fix the third thing",
    ]
    for depth, version in enumerate((ALL, CORE, ONE, STOCK)):
        names = git(repo, "ls-tree", "-r", "--name-only", "-z", f"HEAD~{depth}").split("\0")[:-1]
        assert {name.removeprefix("python/sglang/") for name in names} == {*version, *UNTOUCHED}
        for path, content in version.items():
            assert git(repo, "show", f"HEAD~{depth}:python/sglang/{path}") == content
    assert git(repo, "rev-parse", BASE) == git(repo, "rev-parse", "HEAD~3")
    assert git(repo, "log", "-1", "--format=%B", "HEAD~1").strip() == (
        "Do the second thing\n\nAs above.\n\nUpstream: issue 1\n\nDiff: second.diff"
    )
    assert git(repo, "ls-files", "-s", "python/sglang/srt/script.py").startswith("100755")


def test_export_of_an_import_changes_nothing(release, repo):
    before = snapshot(release.patches)
    assert export_series(repo, release.patches) == []
    assert snapshot(release.patches) == before


def test_a_diff_file_is_its_commit(release):
    """By hand: the header's text, then git's diff without its index lines."""
    diff = load_diff(release.patches / "second.diff")
    assert diff.header == "Do the second thing\n\nAs above.\n\nUpstream: issue 1"
    assert diff.body == make_diff(ONE, CORE)
    assert diff.text == (release.patches / "second.diff").read_text()
    assert diff.paths == tuple(
        f"python/sglang/srt/{name}" for name in ("added.py", "many.py", "mem cache/spaced.py")
    )


def test_export_writes_a_new_commit_and_an_edited_one(release, repo):
    git(repo, "reset", "-q", "--hard", "HEAD~1")  # the fixes must come last
    other = {"srt/other.py": UNTOUCHED["srt/other.py"].replace("(3)", "('new')")}
    message = "Do one more\n\nWhy not.\n\nDiff: more.diff"
    commit(repo, "srt/other.py", other["srt/other.py"], message)
    assert export_series(repo, release.patches) == [
        "added more.diff",
        "changed series",
        "removed fixes_third.diff",
    ]
    assert (release.patches / "more.diff").read_text() == (
        f"Do one more\n\nWhy not.\n\n{make_diff(UNTOUCHED, {**UNTOUCHED, **other})}"
    )
    names = ["first.diff", "second.diff", "more.diff"]
    assert (release.patches / "series").read_text().splitlines() == ["# the order", *names]
    assert not (release.patches / "fixes_third.diff").exists()

    git(repo, "commit", "-q", "--amend", "-m", "Do it in another way\n\nBetter.\n\nDiff: more.diff")
    assert export_series(repo, release.patches) == ["changed more.diff"]
    assert (release.patches / "more.diff").read_text().startswith("Do it in another way\n\nBetter.")

    assert check(release.patches) == ["PIN is not up to date: run python -m pagealign.series pin"]
    write_pin(release.patches)
    assert check(release.patches) == []


def merge(repo: Path) -> None:
    git(repo, "checkout", "-qb", "side", "HEAD~1")
    commit(repo, "srt/other.py", "(1)\n", "A side\n\nWhy.\n\nDiff: side.diff")
    git(repo, "merge", "-q", "-m", "A merge\n\nDiff: merge.diff", "main")


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda repo: commit(repo, "srt/other.py", "", "No trailer"), "(No trailer) must end with"),
        (
            lambda repo: commit(repo, "srt/other.py", "", "Up\n\nDiff: ../../x.diff"),
            "(Up) must end with",
        ),
        (lambda repo: commit(repo, "srt/other.py", "", "A\n\nDiff: first.diff"), "squash"),
        (lambda repo: commit(repo, "srt/other.py", "", "A\n\nDiff: core.diff"), "come last"),
        (lambda repo: (repo / "python/sglang/srt/other.py").write_text(""), "not committed"),
        (merge, "merge"),
        (lambda repo: git(repo, "tag", "-d", BASE), "stock"),
    ],
)
def test_export_refuses_and_writes_nothing(release, repo, spoil: Callable, word):
    spoil(repo)
    before = snapshot(release.patches)
    with pytest.raises(PagealignError, match=re.escape(word)):
        export_series(repo, release.patches)
    assert snapshot(release.patches) == before


def test_import_needs_an_empty_folder(release, repo):
    with pytest.raises(PagealignError, match="not empty"):
        import_series(repo, release.patches)


# --- pin ------------------------------------------------------------------------------


def test_pin_finds_the_hashes_that_the_release_was_made_with(release):
    by_hand = load_pin(release.patches)
    text = (release.patches / "PIN").read_text()
    (release.patches / "PIN").write_text(re.sub(r"^file .*\n", "", text, flags=re.MULTILINE))
    assert load_pin(release.patches).files == ()
    write_pin(release.patches)
    assert load_pin(release.patches) == by_hand
    assert len(by_hand.files) == len(TOUCHED)


def test_pin_can_start_from_wheels_alone(release, tmp_path):
    by_hand = load_pin(release.patches)
    (release.patches / "PIN").unlink()
    other = tmp_path / "sglang-0.5.23-cp311-cp311-manylinux_2_34_aarch64.whl"
    other.write_bytes(b"another processor's")
    write_pin(release.patches, [release.wheel, other])
    pin = load_pin(release.patches)
    assert [wheel.filename for wheel in pin.wheels] == [release.wheel.name, other.name]
    assert replace(pin, wheels=by_hand.wheels) == by_hand

    later = tmp_path / "sglang-0.5.24-py3-none-any.whl"
    later.touch()
    with pytest.raises(PagealignError, match="more than one release"):
        write_pin(release.patches, [release.wheel, later])


# --- check ----------------------------------------------------------------------------


def test_check_finds_nothing(release):
    assert check(release.patches) == []
    assert check_all(release.patches) == []


def test_check_finds_what_is_wrong_with_an_alternative(release):
    edit("alternatives/varlen.diff", "+('varlen')", "+('other')")(release.patches)
    edit("fixes_third.diff", "+('fix')", "+('other')")(release.patches)
    (release.patches / "alternatives/stray.diff").touch()
    assert check_all(release.patches) == [
        "PIN is not up to date: run python -m pagealign.series pin",
        "alternatives/stray.diff is not in the series: list it or delete it",
    ]
    (release.patches / "alternatives/stray.diff").unlink()
    assert check_all(release.patches)[1].startswith("alternatives/PIN is not up to date")
    assert main(["--patches", str(release.patches), "pin"]) == 0
    assert check_all(release.patches) == []


def test_pin_of_another_release_leaves_an_alternatives_alone(release, tmp_path):
    before = snapshot(release.patches / "alternatives")
    wheel = ["--wheel", str(release.wheel)]
    assert main(["--patches", str(release.patches), "pin", *wheel]) == 0
    assert snapshot(release.patches / "alternatives") == before


def test_an_alternative_is_a_series_of_its_own(release, tmp_path):
    patches = release.patches / "alternatives"
    repo = tmp_path / "another repo"
    import_series(repo, patches)
    assert git(repo, "log", "--reverse", "--format=%s").splitlines() == [
        "SGLang 0.5.23",
        "Do it in another way",
    ]
    assert git(repo, "show", "HEAD:python/sglang/srt/many.py") == VARLEN["srt/many.py"]
    assert export_series(repo, patches) == []


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def spoil(patches: Path) -> None:
        text = (patches / name).read_text()
        assert old in text
        (patches / name).write_text(text.replace(old, new, 1))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (edit("first.diff", "\n\nIt was never done.", ""), "first.diff has no paragraph"),
        (edit("first.diff", "\n\nIt was", "\nIt was"), "first.diff has no paragraph"),
        (edit("first.diff", "Do the first thing\n\nIt was never done.", ""), "no subject line"),
        (edit("first.diff", "never done.", "x.\n--- a/x"), "would misread: '--- a/x'"),
        (edit("first.diff", "never done.", "x.\nIndex: x"), "would misread: 'Index: x'"),
        (
            edit("first.diff", "@@ -3,7 +3,7 @@", "@@ -4,7 +4,7 @@"),
            "first.diff does not apply exactly",
        ),
        (edit("second.diff", " (10)\n", " (11)\n"), "second.diff does not apply exactly by git"),
        (edit("second.diff", "+('two')", "+('two'"), "added.py after second.diff does not compile"),
        (edit("first.diff", "+('one')", "+('One')"), "second.diff does not apply exactly by git"),
        (
            edit("second.diff", "diff --git", "diff --git a/README b/README\ndiff --git"),
            "touches README, outside python/sglang/",
        ),
        (edit("second.diff", "+++ b/", "index 123..456 100644\n+++ b/"), "second.diff"),
        (edit("fixes_third.diff", "@@ -28,7", "@@ -28,7 @@ -28,7"), "fixes_third.diff"),
        (edit("fixes_third.diff", "+('fix')", "+('other')"), "PIN is not up to date"),
        (edit("PIN", "file - ", f"file {'0' * 64} "), "PIN is not up to date"),
        (lambda patches: (patches / "stray.diff").touch(), "stray.diff is not in the series"),
    ],
)
def test_check_finds(release, spoil, problem):
    spoil(release.patches)
    problems = check(release.patches)
    assert len(problems) >= 1
    assert problem in problems[0]


def test_check_reads_past_the_header(release):
    """patch echoes the header; its words are not patch's own."""
    first = release.patches / "first.diff"
    first.write_text(first.read_text().replace("\n\n", "\n\nThe offset moves, with no fuzz.\n", 1))
    assert check(release.patches) == []


def test_check_finds_another_form_than_exports(release):
    """A hunk with two lines of context applies, but isn't what export writes."""
    path = release.patches / "fixes_third.diff"
    text = path.read_text()
    short = text.replace("@@ -28,7 +28,7 @@\n (27)\n", "@@ -29,6 +29,6 @@\n")
    assert short != text
    path.write_text(short)
    assert check(release.patches) == [
        "fixes_third.diff is not as export writes it: import, then export"
    ]


# --- the command line -----------------------------------------------------------------


def test_the_commands(release, tmp_path, capsys):
    patches = ["--patches", str(release.patches)]
    repo = ["--repo", str(tmp_path / "repo")]
    assert main([*patches, "import", *repo]) == 0
    assert main([*patches, "export", *repo]) == 0
    assert main([*patches, "pin"]) == 0
    assert main([*patches, "check"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "nothing has changed"
    assert out[2:4] == [f"wrote {release.patches / name}" for name in ("PIN", "alternatives/PIN")]
    assert out[4] == "4 diffs in order"


def test_the_commands_fail_with_a_line_for_each_problem(release, tmp_path, capsys):
    patches = ["--patches", str(release.patches)]
    (release.patches / "stray.diff").touch()
    (release.patches / "other.diff").touch()
    assert main([*patches, "check"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "series: other.diff is not in the series: list it or delete it",
        "series: stray.diff is not in the series: list it or delete it",
    ]
    assert main([*patches, "export", "--repo", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("series: git status failed in ")
    (release.patches / "PIN").unlink()
    assert main([*patches, "pin"]) == 1
    assert "PIN can't be read" in capsys.readouterr().err


# --- the real series ------------------------------------------------------------------


def test_the_real_series_and_its_alternative_are_in_order():
    assert check_all() == []
    assert [folder.name for folder in series_folders()] == ["patches", "alternatives"]


def test_the_real_headers_say_why():
    assert load_series().core
    for diff in (*load_diffs(), *load_diffs(PATCHES / "alternatives")):
        subject, empty, *why = diff.header.splitlines()
        assert len(subject) <= 72 and empty == "", diff.name
        assert len(" ".join(why)) > 80, diff.name


def test_the_tiny_diffs_are_the_tests_own(release):
    assert tuple(DIFFS) == load_series(release.patches).all
