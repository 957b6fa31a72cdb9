"""Trees of the series' prefixes, on a tiny release whose every version is known."""

from __future__ import annotations

import pytest
from tiny_release import DIFFS, LEVELS, ONE, make_release

from pagealign.errors import PagealignError
from pagealign.parity.prefixes import build_prefixes, check_reversible, touched_modules
from pagealign.trees import build_tree


@pytest.fixture
def release(tmp_path, monkeypatch):
    made = make_release(tmp_path / "release")
    monkeypatch.setenv("PAGEALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PAGEALIGN_WHEEL", str(made.wheel))
    return made


def test_prefixes(release, tmp_path):
    prefixes = list(build_prefixes(tmp_path / "work", release.patches))
    names = tuple(DIFFS)
    assert [p.diffs for p in prefixes] == [names[:1], names[:2]]
    assert [p.name for p in prefixes] == ["1: first", "2: second"]
    for prefix, version in zip(prefixes, (ONE, LEVELS[1]), strict=True):
        for path, content in version.items():
            assert (prefix.tree / "sglang" / path).read_text() == content
    # and the cached tree is what it was
    stock = build_tree("stock", release.patches)
    for path, content in LEVELS[0].items():
        assert (stock / "sglang" / path).read_text() == content


def test_inside_a_repository(release, tmp_path):
    """git would look for the paths from the repository's root."""
    (tmp_path / "work" / ".git").mkdir(parents=True)
    [first, _] = build_prefixes(tmp_path / "work", release.patches)
    assert (first.tree / "sglang" / "srt" / "many.py").read_text() == ONE["srt/many.py"]


def test_touched_modules(release, tmp_path):
    first, second = build_prefixes(tmp_path, release.patches)
    assert "sglang.srt.added" not in touched_modules(first.tree, release.patches)
    assert {"sglang.srt.added", "sglang.srt.many"} <= set(
        touched_modules(second.tree, release.patches)
    )


def test_reversible(release, tmp_path):
    check_reversible(tmp_path, release.patches)


def test_a_diff_that_does_not_apply_is_named(release, tmp_path):
    diff = release.patches / "second.diff"
    diff.write_text(diff.read_text().replace("(39)", "(38.5)"))
    with pytest.raises(PagealignError, match="second.diff does not apply"):
        check_reversible(tmp_path, release.patches)
