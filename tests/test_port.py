"""``pagealign port`` on releases whose differences are known by construction."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from tiny_release import (
    ALL,
    RELEASE,
    STOCK,
    UNTOUCHED,
    TinyRelease,
    lines,
    make_release,
    sha256,
    snapshot,
)
from typer.testing import CliRunner

from pagealign.cli import app
from pagealign.errors import PagealignError
from pagealign.pin import WheelPin, load_pin
from pagealign.port import release as releases
from pagealign.port.beside import MOST, beside
from pagealign.port.release import Release, all_wheels, find
from pagealign.port.repo import REBASE
from pagealign.port.run import hunk_cell
from pagealign.port.trial import FileTrial, Hunk, Outcome, Trial, split, try_series
from pagealign.series import check, export_series, git, load_diff, load_diffs

OTHER = "0.5.24"


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch) -> TinyRelease:
    made = make_release(tmp_path / "a release")
    monkeypatch.setenv("PAGEALIGN_WHEEL", str(made.wheel))
    return made


def other_wheel(folder: Path, version: dict[str, str | None], release: str = OTHER) -> Path:
    """A wheel of another release: the stock files with ``version`` over them, None to leave
    one out."""
    path = folder / f"sglang-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**UNTOUCHED, **STOCK, **version}.items():
            if content is not None:
                archive.writestr(f"sglang/{name}", content)
    return path


def tried(pinned: TinyRelease, version: dict[str, str | None]) -> Trial:
    wheel = other_wheel(pinned.wheel.parent, version)
    return try_series(load_diffs(pinned.patches), pinned.wheel, wheel, (RELEASE, OTHER))


def by_file(trial: Trial) -> dict[tuple[str, str], FileTrial]:
    return {(f.diff, f.path.removeprefix("python/sglang/srt/")): f for f in trial.files}


def port(*line: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["port", *map(str, line)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


# --- the trial ----------------------------------------------------------------------------


def test_the_pinned_release_applies_exactly(pinned):
    trial = tried(pinned, {})
    assert {hunk.outcome for hunk in trial.hunks} == {Outcome.APPLIES}
    assert [f.diff for f in trial.files] == [
        "first.diff", "first.diff", "second.diff", "second.diff", "second.diff",
        "fixes_third.diff", "fixes_third.diff",
    ]  # fmt: skip
    assert trial.applies and trial.broken == ()


def test_lines_above_are_an_offset(pinned):
    trial = tried(pinned, {"srt/many.py": "# new\n" * 3 + lines()})
    found = by_file(trial)
    for diff in ("first.diff", "second.diff", "fixes_third.diff"):
        (hunk,) = found[diff, "many.py"].hunks
        assert (hunk.outcome, hunk.offset) == (Outcome.OFFSET, 3)
    assert trial.count(Outcome.OFFSET) == 3 and trial.applies


def test_another_line_fails_and_is_shown(pinned):
    """Line 18 of script.py is within the hunk's context; the hunk begins at 18, seven old
    lines long: (17) .. (23)."""
    trial = tried(pinned, {"srt/script.py": lines({0: "('executable')", 18: "('theirs')"})})
    (hunk,) = by_file(trial)["first.diff", "script.py"].hunks
    assert hunk.outcome is Outcome.FAILS and not hunk.there
    assert not trial.applies and trial.count(Outcome.FAILS) == 1
    shown = [(r.mark, r.old_line, r.old, r.new_line, r.new) for r in hunk.rows]
    assert shown[:2] == [(">", None, None, 16, "(15)"), (">", None, None, 17, "(16)")]
    assert (" ", 18, "(17)", 18, "(17)") in shown
    assert ("|", 19, "(18)", 19, "('theirs')") in shown
    assert (" ", 20, "(19)", 20, "(19)") in shown


def test_a_failing_hunk_takes_what_builds_on_it_along(pinned):
    """first.diff changes line 5 of many.py, which is context of second.diff's hunk."""
    trial = tried(pinned, {"srt/many.py": lines({4: "('theirs')"})})
    found = by_file(trial)
    assert found["first.diff", "many.py"].hunks[0].outcome is Outcome.FAILS
    (second,) = found["second.diff", "many.py"].hunks
    assert second.outcome is Outcome.FAILS
    # what it was made for is the pinned file with the first diff
    assert [r.old for r in second.rows if r.old_line == 6] == ["('one')"]


def test_a_result_that_is_there_is_said(pinned):
    trial = tried(pinned, {"srt/fixed.py": ALL["srt/fixed.py"]})
    (hunk,) = by_file(trial)["fixes_third.diff", "fixed.py"].hunks
    assert (hunk.outcome, hunk.there) == (Outcome.FAILS, True)


def test_a_file_gone_is_looked_for(pinned):
    name = "srt/mem cache/spaced.py"
    moved = {name: None, "srt/moved/spaced.py": STOCK[name]}
    trial = tried(pinned, moved)
    file = by_file(trial)["second.diff", "mem cache/spaced.py"]
    assert [hunk.outcome for hunk in file.hunks] == [Outcome.GONE]
    assert file.elsewhere == ("python/sglang/srt/moved/spaced.py",)
    assert [row.mark for row in file.hunks[0].rows] == ["<"] * len(file.hunks[0].rows)
    assert not trial.applies


def test_a_file_to_be_made_that_is_there(pinned):
    trial = tried(pinned, {"srt/added.py": "('theirs')\n"})
    (hunk,) = by_file(trial)["second.diff", "added.py"].hunks
    assert hunk.outcome is Outcome.FAILS
    assert trial.count(Outcome.FAILS) == 1


def test_what_applies_and_does_not_compile(pinned):
    trial = tried(pinned, {"srt/fixed.py": "(\n" + lines({0: "('a fix alone')"})})
    assert trial.count(Outcome.FAILS) == 0
    assert not trial.applies
    assert [line.partition(":")[0] for line in trial.broken] == ["python/sglang/srt/fixed.py"]


def test_a_series_that_is_not_the_pinned_releases(pinned):
    first = pinned.patches / "first.diff"
    first.write_text(first.read_text().replace(" (3)", " (none)"))
    with pytest.raises(PagealignError, match="first.diff doesn't apply to the pinned release"):
        tried(pinned, {})


def test_split_keeps_every_byte(pinned):
    for name in ("first.diff", "second.diff", "fixes_third.diff"):
        diff = load_diff(pinned.patches / name)
        parts = dict(split(diff.body))
        assert "".join(parts.values()) == diff.body
        assert tuple(parts) == diff.paths


# --- side by side -------------------------------------------------------------------------


def test_beside_finds_moved_code():
    old = [f"a{n}\n" for n in range(50)]
    new = [f"b{n}\n" for n in range(30)] + old[:20] + ["in\n"] + old[20:]
    rows = beside(old, new, line=19, size=4)
    assert [(r.mark, r.old, r.new) for r in rows if r.old or r.new == "in"] == [
        (" ", "a18", "a18"),
        (" ", "a19", "a19"),
        (">", None, "in"),
        (" ", "a20", "a20"),
        (" ", "a21", "a21"),
    ]
    assert [(r.old_line, r.new_line) for r in rows if r.old == "a20"] == [(21, 52)]


def test_beside_shortens_what_only_the_new_code_has():
    old = [f"a{n}\n" for n in range(10)]
    new = [*old[:5], *[f"b{n}\n" for n in range(500)], *old[5:]]
    rows = beside(old, new, line=4, size=4)
    assert len(rows) <= MOST + 1
    assert [r.old for r in rows if r.old] == ["a3", "a4", "a5", "a6"]
    (cut,) = [r.new for r in rows if r.new and r.new.startswith("...")]
    kept = sum(r.new is not None and r.new.startswith("b") for r in rows)
    assert cut == f"... {500 - kept} more lines"


def test_hunk_cell():
    hunks = [
        Hunk(1, 1, Outcome.APPLIES), Hunk(2, 9, Outcome.APPLIES), Hunk(3, 20, Outcome.OFFSET, -7),
        Hunk(4, 30, Outcome.FAILS), Hunk(5, 40, Outcome.FAILS, there=True),
    ]  # fmt: skip
    assert hunk_cell(hunks) == "1-2 ok  3 -7  4 fails  5 fails (its result is there)"


# --- the command --------------------------------------------------------------------------


def test_the_report(pinned, tmp_path):
    version = {"srt/many.py": "#\n" + lines(), "srt/script.py": lines({0: "(", 19: "('theirs')"})}
    wheel = other_wheel(tmp_path, version)
    code, said = port(wheel, "--patches", pinned.patches)
    assert code == 1
    assert "first.diff: hunk 1 of sglang/srt/script.py: fails" in said
    assert "('theirs')" in said
    assert "7 hunks (applies 3, applies with offset 3, fails 1): the series has to be mended" in (
        " ".join(said.split())
    )
    code, brief = port(wheel, "--patches", pinned.patches, "--brief")
    assert code == 1 and "('theirs')" not in brief


def test_the_report_as_json(pinned, tmp_path):
    wheel = other_wheel(tmp_path, {"srt/many.py": "#\n" + lines()})
    result = CliRunner().invoke(
        app, ["port", str(wheel), "--patches", str(pinned.patches), "--json"]
    )
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["pinned"], found["release"], found["applies"]) == (RELEASE, OTHER, True)
    offsets = [hunk["offset"] for file in found["files"] for hunk in file["hunks"]]
    assert sorted(offsets) == [0, 0, 0, 0, 1, 1, 1]


def test_a_new_pin_in_a_new_folder(pinned, tmp_path, monkeypatch):
    """The diffs get the release's line numbers: the new series is in order by its own check."""
    wheel = other_wheel(tmp_path, {"srt/many.py": "#\n" * 4 + lines()})
    before = snapshot(pinned.patches)
    out = tmp_path / "patches for it"
    code, said = port(wheel, "--patches", pinned.patches, "--write-pin", out)
    assert code == 0, said
    assert snapshot(pinned.patches) == before
    pin = load_pin(out)
    assert (pin.release, pin.tag) == (OTHER, f"v{OTHER}")
    assert pin.wheels == (WheelPin(sha256(wheel), wheel.name),)
    assert sorted(p.name for p in out.iterdir()) == [
        "PIN", "first.diff", "fixes_third.diff", "second.diff", "series",
    ]  # fmt: skip
    assert "@@ -7,7 +7,7 @@" in (out / "first.diff").read_text()  # was at 3
    monkeypatch.setenv("PAGEALIGN_WHEEL", str(wheel))
    assert check(out) == []


def test_a_new_pin_in_place(pinned, tmp_path, monkeypatch):
    wheel = other_wheel(tmp_path, {"srt/many.py": "#\n" * 4 + lines()})
    (pinned.patches / "NOTES").write_text("mine")
    alternatives = snapshot(pinned.patches / "alternatives")
    code, _ = port(wheel, "--patches", pinned.patches, "--write-pin", pinned.patches)
    assert code == 0
    assert (pinned.patches / "NOTES").read_text() == "mine"
    assert snapshot(pinned.patches / "alternatives") == alternatives
    monkeypatch.setenv("PAGEALIGN_WHEEL", str(wheel))
    assert load_pin(pinned.patches).release == OTHER
    assert check(pinned.patches) == []


def test_no_pin_for_a_series_that_fails(pinned, tmp_path):
    wheel = other_wheel(tmp_path, {"srt/many.py": lines({4: "('theirs')"})})
    out = tmp_path / "out"
    code, said = port(wheel, "--patches", pinned.patches, "--write-pin", out)
    assert code == 2 and "no PIN written" in said and not out.exists()


def test_no_pin_into_a_folder_of_something_else(pinned, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").touch()
    wheel = other_wheel(tmp_path, {})
    code, said = port(wheel, "--patches", pinned.patches, "--write-pin", out)
    assert code == 2 and "is not empty and holds no series" in said
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]


def test_a_repository_to_mend_the_series_in(pinned, tmp_path):
    """A line between two hunks' context, which git apply refuses and a rebase merges; what is
    exported then applies to the other release alone."""
    changed = {"srt/many.py": lines({11: "('theirs')"})}  # context of the fix, (6) to (12)
    wheel = other_wheel(tmp_path, changed)
    repo, out = tmp_path / "repo", tmp_path / "out"
    code, said = port(wheel, "--patches", pinned.patches, "--repo", repo, "--brief")
    assert code == 1 and "git rebase --onto stock pinned main" in said
    git(repo, *REBASE.split()[1:])
    assert export_series(repo, out) == [
        "added first.diff", "added second.diff", "added fixes_third.diff", "changed series",
    ]  # fmt: skip
    assert (repo / "python/sglang/srt/many.py").read_text() == lines(
        {5: "('one')", 7: "('two')", 9: "('fix')", 11: "('theirs')"}
    )
    trial = try_series(load_diffs(out), wheel, wheel, (OTHER, OTHER))
    assert {hunk.outcome for hunk in trial.hunks} == {Outcome.APPLIES}
    code, said = port(wheel, "--patches", pinned.patches, "--repo", repo)
    assert code == 2 and "is not empty" in said


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("latest", "'latest' is no release of SGLang: give one such as 0.5.22"),
        ("0.5.22; rm", "is no release of SGLang"),
        ("none.whl", "none.whl isn't a wheel of SGLang"),
        ("WHEEL", "can't be read as a wheel"),
    ],
)
def test_bad_input(pinned, tmp_path, version, message):
    (tmp_path / f"sglang-{OTHER}-py3-none-any.whl").write_text("no zip")
    if version == "WHEEL":
        version = tmp_path / f"sglang-{OTHER}-py3-none-any.whl"
    code, said = port(version, "--patches", pinned.patches)
    assert code == 2
    assert message in " ".join(said.split())


def damaged(wheel: Path, name: str) -> None:
    """Changes bytes of a member that was packed, so that its stream is broken."""
    with zipfile.ZipFile(wheel) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in content.items():
            archive.writestr(member, data)
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(name)
    data = bytearray(wheel.read_bytes())
    start = info.header_offset + 30 + len(name)
    data[start : start + info.compress_size] = b"\xff" * info.compress_size
    wheel.write_bytes(data)


def test_a_damaged_wheel(pinned, tmp_path):
    """Of a file that the series touches, and of one that only a repository would hold."""
    wheel = other_wheel(tmp_path, {})
    damaged(wheel, "sglang/srt/many.py")
    with pytest.raises(PagealignError, match="can't be read as a wheel"):
        try_series(load_diffs(pinned.patches), pinned.wheel, wheel, (RELEASE, OTHER))
    untouched = next(iter(UNTOUCHED))
    for name in ("srt/many.py", untouched):
        damaged(other_wheel(tmp_path, {}), f"sglang/{name}")
        code, said = port(wheel, "--patches", pinned.patches, "--repo", tmp_path / "repo")
        assert code == 2 and "can't be read as a wheel" in said
        assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize(
    ("option", "folder", "message"),
    [
        ("--repo", "FILE", "--repo FILE: FILE is a file: name a new folder"),
        ("--repo", "FILE/inner/repo", "FILE is a file: name a new folder"),
        ("--repo", "FULL", "FULL is not empty: name a new folder"),
        ("--write-pin", "FILE", "--write-pin FILE: FILE is a file: name a new folder"),
        ("--write-pin", "FILE/inner", "FILE is a file: name a new folder"),
        ("--write-pin", "FULL", "FULL is not empty and holds no series: name a new folder"),
    ],
)
def test_folders_are_looked_at_before_the_trial(
    pinned, tmp_path, monkeypatch, option, folder, message
):
    (tmp_path / "FILE").touch()
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL/thesis.tex").touch()
    wheel = other_wheel(tmp_path, {})

    def tried(*_):
        raise AssertionError("the series is tried")

    monkeypatch.setattr("pagealign.port.run.try_series", tried)
    code, said = port(wheel, "--patches", pinned.patches, option, tmp_path / folder)
    assert code == 2
    assert message in " ".join(said.split()).replace(f"{tmp_path}/", "")


# --- the package index --------------------------------------------------------------------


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of files, and no other; an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PAGEALIGN_CACHE", str(tmp_path / "cache"))
    return folder


def real_wheel(folder: Path) -> Path:
    """A wheel that pip takes."""
    path = other_wheel(folder, {})
    info = f"sglang-{OTHER}.dist-info"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: sglang\nVersion: {OTHER}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_a_release_is_fetched_once_and_verified(pinned, index, tmp_path):
    made = real_wheel(index)
    found = find(f"v{OTHER}", pinned.patches)
    assert found.wheel == WheelPin(sha256(made), made.name)
    assert found.path == tmp_path / "cache/wheels" / made.name
    assert found.path.read_bytes() == made.read_bytes()
    found.path.write_bytes(b"damaged")
    assert find(OTHER, pinned.patches).path.read_bytes() == made.read_bytes()


def test_a_release_that_is_not_there(pinned, index):
    real_wheel(index)
    with pytest.raises(PagealignError, match="no wheel of SGLang 0.5.99 for this.*0.5.24"):
        find("0.5.99", pinned.patches)
    (index / f"sglang-{OTHER}-py3-none-any.whl").unlink()
    with pytest.raises(PagealignError, match="give a wheel's path in place of the version"):
        find(OTHER, pinned.patches)


def test_the_pinned_release_needs_no_index(pinned, index):
    found = find(RELEASE, pinned.patches)
    assert (found.path, found.wheel) == (pinned.wheel, load_pin(pinned.patches).wheel)


def test_a_pin_names_the_wheel_of_each_processor(pinned, monkeypatch):
    asked = []

    def ask(version, platform=None):
        asked.append((version, platform))
        return WheelPin("2" * 64, f"sglang-{version}-cp311-cp311-{platform}.whl")

    monkeypatch.setattr(releases, "_ask_index", ask)
    ours = WheelPin("1" * 64, f"sglang-{OTHER}-cp311-cp311-manylinux_2_34_x86_64.whl")
    release = Release(OTHER, Path(ours.filename), ours)
    wheels = all_wheels(release, load_pin(pinned.patches))
    assert asked == [(OTHER, "manylinux_2_34_aarch64")]
    assert wheels == (
        ours, WheelPin("2" * 64, f"sglang-{OTHER}-cp311-cp311-manylinux_2_34_aarch64.whl")
    )  # fmt: skip
