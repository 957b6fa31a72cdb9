"""The pin as it is read, and the trees that are built from it: of a tiny release, and the real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_release import (
    ALL,
    CORE,
    RELEASE,
    STOCK,
    TOUCHED,
    UNTOUCHED,
    VARLEN,
    WHEEL,
    TinyRelease,
    make_package,
    make_release,
    sha256,
    sha256_text,
    snapshot,
)

from pagealign.errors import PagealignError
from pagealign.paths import PATCHES, REPO
from pagealign.pin import FilePin, Pin, Series, WheelPin, load_pin, load_series
from pagealign.trees import (
    APPLY,
    TREE_NAMES,
    build_tree,
    copy_tree,
    list_trees,
    prune_trees,
    tree_of,
    wheel,
)

VERSIONS = {"stock": STOCK, "aligned-core": CORE, "aligned": ALL, "varlen": VARLEN}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that reaches nothing."""
    folder = tmp_path / "a cache"
    monkeypatch.setenv("PAGEALIGN_CACHE", str(folder))
    monkeypatch.delenv("PAGEALIGN_WHEEL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "no links"))
    return folder


@pytest.fixture
def release(tmp_path: Path) -> TinyRelease:
    return make_release(tmp_path / "a release")


@pytest.fixture
def given(cache: Path, release: TinyRelease, monkeypatch: pytest.MonkeyPatch) -> TinyRelease:
    """The release, with its wheel given by PAGEALIGN_WHEEL."""
    monkeypatch.setenv("PAGEALIGN_WHEEL", str(release.wheel))
    return release


# --- the pin --------------------------------------------------------------------------


def test_load_pin(release):
    pin = load_pin(release.patches)
    assert (pin.release, pin.tag) == (RELEASE, f"v{RELEASE}")
    assert pin.wheels == (WheelPin(sha256(release.wheel), WHEEL),)
    files = {file.inside: file for file in pin.files}
    assert sorted(files) == [f"sglang/{path}" for path in TOUCHED]
    assert files["sglang/srt/added.py"] == FilePin(
        "python/sglang/srt/added.py",
        None,
        sha256_text(ALL["srt/added.py"]),
        sha256_text(ALL["srt/added.py"]),
    )
    assert files["sglang/srt/mem cache/spaced.py"].before == sha256_text(
        STOCK["srt/mem cache/spaced.py"]
    )


def test_load_series(release):
    series = load_series(release.patches)
    assert series == Series(("first.diff", "second.diff"), ("fixes_third.diff",))
    assert series.all == ("first.diff", "second.diff", "fixes_third.diff")


SHA = "0" * 64
GOOD = f"release 1\ntag v1\nwheel {SHA} a.whl\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "must name"),
        ("release 1\ntag v1\n", "must name"),
        (GOOD.replace("tag v1\n", ""), "must name"),
        (GOOD + "file 1 2 3 a.py\n", "PIN:4"),
        (GOOD + f"file {SHA} {SHA} a.py\n", "PIN:4"),
        (GOOD + "whell\n", "PIN:4"),
        (f"wheel {SHA[1:]} a.whl\n" + GOOD, "PIN:1"),
    ],
)
def test_a_pin_that_cannot_be_read(tmp_path, text, word):
    (tmp_path / "PIN").write_text(text)
    with pytest.raises(PagealignError, match=word):
        load_pin(tmp_path)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("first.diff\nfixes_third.diff\nsecond.diff\n", "come last"),
        ("first.diff\nfirst.diff\n", "twice"),
        ("first.diff\nother.diff\n", "other.diff"),
    ],
)
def test_a_series_that_is_not_in_order(release, text, word):
    (release.patches / "series").write_text(text)
    with pytest.raises(PagealignError, match=word):
        load_series(release.patches)


def test_nothing_pinned(tmp_path):
    for load in (load_pin, load_series):
        with pytest.raises(PagealignError, match="No such file"):
            load(tmp_path)


@pytest.mark.parametrize(("machine", "nth"), [("x86_64", 0), ("aarch64", 1), ("riscv64", 0)])
def test_the_wheel_is_this_machines(monkeypatch, machine, nth):
    monkeypatch.setattr("platform.machine", lambda: machine)
    names = [f"sglang-1-cp311-cp311-manylinux_2_34_{name}.whl" for name in ("x86_64", "aarch64")]
    wheels = tuple(WheelPin(SHA, name) for name in names)
    assert Pin("1", "v1", wheels, ()).wheel is wheels[nth]


# --- the wheel ------------------------------------------------------------------------


def serve(release: TinyRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find the release's wheel (its option doesn't bear a space in the path)."""
    links = tmp_path / "links"
    links.mkdir()
    shutil.copy(release.wheel, links)
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))


def test_the_wheel_is_downloaded_once_and_kept(cache, release, tmp_path, monkeypatch):
    serve(release, tmp_path, monkeypatch)
    path = wheel(release.patches)
    assert path == cache / "wheels" / WHEEL
    assert sha256(path) == sha256(release.wheel)
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache / "nothing here"))
    assert wheel(release.patches) == path


def test_a_damaged_wheel_in_the_cache_is_replaced(cache, release, tmp_path, monkeypatch):
    serve(release, tmp_path, monkeypatch)
    path = wheel(release.patches)
    path.write_bytes(path.read_bytes()[:-1])
    assert sha256(wheel(release.patches)) == sha256(release.wheel)


def test_without_a_network_the_error_says_what_to_do(cache, release):
    with pytest.raises(PagealignError) as error:
        wheel(release.patches)
    assert "PAGEALIGN_WHEEL=" in str(error.value) and WHEEL in str(error.value)
    assert "\n" not in str(error.value)
    assert [path.name for path in (cache / "wheels").iterdir() if path.name != ".lock"] == []


def test_another_file_is_never_taken_for_the_wheel(cache, release, tmp_path, monkeypatch):
    release.wheel.write_bytes(release.wheel.read_bytes() + b"\0")
    serve(release, tmp_path, monkeypatch)
    with pytest.raises(PagealignError, match="SHA-256"):
        wheel(release.patches)
    monkeypatch.setenv("PAGEALIGN_WHEEL", str(release.wheel))
    with pytest.raises(PagealignError, match=f"not the pinned {WHEEL}"):
        wheel(release.patches)
    monkeypatch.setenv("PAGEALIGN_WHEEL", str(cache / "nowhere.whl"))
    with pytest.raises(PagealignError, match="no such file"):
        wheel(release.patches)
    assert not (cache / "wheels" / WHEEL).exists()


# --- the trees ------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREE_NAMES)
def test_a_tree_is_its_version_of_the_package(given, cache, tmp_path, name):
    tree = build_tree(name, given.patches)
    assert tree.parent == cache / "trees" and tree.name.startswith(f"{name}-")
    expected = snapshot(make_package(tmp_path / "expected", VERSIONS[name]).parent)
    found = snapshot(tree)
    assert {path: content for path, (_, content) in found.items()} == {
        path: content for path, (_, content) in expected.items()
    }
    for path, (mode, _) in found.items():
        if (tree / path).is_file():
            assert mode & 0o777 == expected[path][0] & 0o555, path
    assert (tree / "sglang/srt/script.py").stat().st_mode & 0o777 == 0o555


def test_trees_share_what_the_series_leaves_alone(given):
    stock, aligned = (build_tree(name, given.patches) for name in ("stock", "aligned"))
    for path in UNTOUCHED:
        assert (stock / "sglang" / path).samefile(aligned / "sglang" / path)
    for path in STOCK:
        assert not (stock / "sglang" / path).samefile(aligned / "sglang" / path)


def test_a_tree_is_built_once(given, cache, monkeypatch):
    tree = build_tree("aligned", given.patches)
    inode = tree.stat().st_ino
    given.wheel.unlink()
    monkeypatch.setenv("PATH", "")  # neither wheel nor bash is asked for
    assert build_tree("aligned", given.patches) == tree
    assert tree.stat().st_ino == inode


def test_a_tree_is_keyed_by_wheel_and_series(given):
    before = {name: build_tree(name, given.patches) for name in TREE_NAMES}
    diff = given.patches / "fixes_third.diff"
    diff.write_text("Another subject\n" + diff.read_text())
    after = {name: build_tree(name, given.patches) for name in TREE_NAMES}
    assert after["stock"] == before["stock"]
    assert after["aligned-core"] == before["aligned-core"]
    assert after["varlen"] == before["varlen"]
    assert after["aligned"] != before["aligned"]

    diff = given.patches / "alternatives/varlen.diff"
    diff.write_text("Another subject\n" + diff.read_text())
    assert build_tree("varlen", given.patches) != before["varlen"]
    assert build_tree("aligned", given.patches) == after["aligned"]


@pytest.mark.parametrize("name", TREE_NAMES)
def test_an_edited_tree_is_noticed(given, name):
    tree = build_tree(name, given.patches)
    file = tree / "sglang/srt/many.py"
    file.chmod(0o644)
    file.write_text("edited\n")
    with pytest.raises(PagealignError, match=f"many.py.*delete {tree}"):
        build_tree(name, given.patches)


def test_a_copy_to_change(given, tmp_path):
    """What the series touches is the copy's own; the rest, and bytecode, is shared."""
    aligned = build_tree("aligned", given.patches)
    (aligned / "sglang" / "__pycache__").mkdir()
    (aligned / "sglang" / "__pycache__" / "version.pyc").touch()
    copy = copy_tree("aligned", tmp_path / "copy", given.patches)
    assert snapshot(copy).keys() == snapshot(aligned).keys()
    touched = Path("sglang/srt/many.py")
    (copy / touched).write_text("changed")
    assert "changed" not in (aligned / touched).read_text()
    other = Path("sglang/srt/other.py")
    assert (copy / other).samefile(aligned / other)


def test_a_series_that_fails_leaves_no_tree(given, cache):
    diff = given.patches / "second.diff"
    diff.write_text(diff.read_text().replace(" (38)\n", " (not there)\n"))
    with pytest.raises(PagealignError, match=r"aligned could not be built.*second\.diff"):
        build_tree("aligned", given.patches)
    assert list_trees() == [build_tree("stock", given.patches)]
    assert [path.name for path in (cache / "trees").glob(".tmp*")] == []


def test_a_killed_builders_leftovers_go(given, cache):
    stale = cache / "trees/.tmp-stale/sglang"
    stale.mkdir(parents=True)
    build_tree("aligned", given.patches)
    assert not stale.parent.exists()


def test_an_unknown_tree(given):
    with pytest.raises(PagealignError, match="stock, aligned, aligned-core, varlen"):
        build_tree("other", given.patches)


def test_many_builders_at_once(given, cache, tmp_path):
    code = (
        "import sys; from pathlib import Path; from pagealign.trees import build_tree;"
        "print(build_tree(sys.argv[1], Path(sys.argv[2])))"
    )
    env = os.environ | {"PYTHONPATH": str(REPO)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    builders = [
        subprocess.Popen([sys.executable, "-c", code, name, given.patches], env=env, **pipes)
        for name in TREE_NAMES * 2
    ]
    ends = [(*builder.communicate(timeout=120), builder.returncode) for builder in builders]
    assert [(err, code) for _, err, code in ends] == [("", 0)] * len(builders)
    assert {Path(out.strip()) for out, _, _ in ends} == set(list_trees())
    assert [build_tree(name, given.patches) for name in TREE_NAMES] == [
        Path(out.strip()) for out, _, _ in ends[: len(TREE_NAMES)]
    ]


def test_prune_trees(given):
    trees = {name: build_tree(name, given.patches) for name in TREE_NAMES}
    others = [tree for name, tree in trees.items() if name != "aligned"]
    assert prune_trees({trees["aligned"]}) == sorted(others)
    assert list_trees() == [trees["aligned"]]
    package = trees["aligned"] / "sglang"
    assert {path: (package / path).read_text() for path in TOUCHED} == ALL


# --- a user's own ---------------------------------------------------------------------


def test_tree_of(tmp_path, monkeypatch):
    root = tmp_path / "my checkout"
    package = make_package(root / "python")
    (tmp_path / "link").symlink_to(root)
    for path in (root, root / "python", package):
        assert tree_of(path) == root / "python"
    assert tree_of(tmp_path / "link").samefile(root / "python")
    monkeypatch.chdir(package)
    assert tree_of(Path()) == root / "python"
    assert tree_of(Path("..")) == root / "python"


def test_tree_of_nothing(tmp_path):
    with pytest.raises(PagealignError, match="no such path"):
        tree_of(tmp_path / "nowhere")
    with pytest.raises(PagealignError, match="no SGLang in .*checkout's root"):
        tree_of(tmp_path)
    make_package(tmp_path).rename(tmp_path / "renamed")  # can't be imported as sglang
    with pytest.raises(PagealignError, match="no SGLang"):
        tree_of(tmp_path / "renamed")


# --- the real ones --------------------------------------------------------------------


@pytest.mark.parametrize("name", TREE_NAMES)
def test_the_real_trees_are_what_the_script_says(name):
    tree = build_tree(name)
    series = ["--series", "alternatives/varlen"] if name == "varlen" else []
    done = subprocess.run([APPLY, *series, "--status", tree], capture_output=True, text=True)
    end = {
        "stock": ": stock",
        "aligned-core": ": core applied",
        "aligned": ": applied",
        "varlen": ", series alternatives/varlen: applied",
    }[name]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].endswith(f"SGLang 0.5.23 (pinned: 0.5.23){end}")


def test_the_real_alternative_touches_one_backend():
    """Nothing of what the release allocates, counts or asks of the models is another."""
    (file,) = load_pin(PATCHES / "alternatives").files
    assert file.inside == "sglang/srt/layers/attention/xpu_backend.py"
    assert load_series(PATCHES / "alternatives") == Series(("varlen.diff",), ())


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_the_real_series_applies_and_reverses_by_either_tool(tmp_path, tool):
    """On the touched files of the real package, in a checkout's layout."""
    stock, aligned = build_tree("stock"), build_tree("aligned")
    pin = load_pin()
    python = tmp_path / "my checkout/python"
    for inside in ["sglang/version.py", "sglang/_version.py", *(file.inside for file in pin.files)]:
        (python / inside).parent.mkdir(parents=True, exist_ok=True)
        if (stock / inside).exists():
            shutil.copy(stock / inside, python / inside)
            (python / inside).chmod(0o644)
    before = snapshot(python)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in f"bash cat cp dirname env mkdir mv rm sha256sum {tool}".split():
        (tools / name).symlink_to(shutil.which(name))

    def run(*args: str | Path) -> None:
        done = subprocess.run(
            [APPLY, *args, python.parent], env={"PATH": str(tools)}, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")

    run()
    for file in pin.files:
        assert (python / file.inside).read_bytes() == (aligned / file.inside).read_bytes()
    run("--reverse")
    assert snapshot(python) == before
    assert load_series(PATCHES).core
