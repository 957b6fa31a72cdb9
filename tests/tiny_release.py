"""A tiny SGLang release of one's own, with a series for it: contents known by construction.

Every version of every file is spelled out here, and the diffs and hashes are made from
those with difflib and hashlib, so that nothing under test has a part in what is expected.
Each line of a file is ``(N)``: Python, and without the function names that git would put
into a hunk's header.
"""

from __future__ import annotations

import difflib
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RELEASE = "0.5.23"
WHEEL = f"sglang-{RELEASE}-py3-none-any.whl"

Version = Mapping[str, str]  # path inside sglang/ -> content


def lines(changes: Mapping[int, str] | None = None) -> str:
    """Forty lines ``(0)`` to ``(39)``, some replaced."""
    return "".join(f"{(changes or {}).get(i, f'({i})')}\n" for i in range(40))


# What the series touches, after each diff. `many.py` changes with all three.
STOCK: Version = {
    "srt/many.py": lines(),
    "srt/mem cache/spaced.py": lines({0: "('a name with a space')"}),
    "srt/script.py": lines({0: "('executable')"}),
    "srt/fixed.py": lines({0: "('a fix alone')"}),
}
ONE: Version = STOCK | {
    "srt/many.py": lines({5: "('one')"}),
    "srt/script.py": lines({0: "('executable')", 20: "('one')", 21: "(21)\n('more')"}),
}
CORE: Version = ONE | {
    "srt/many.py": lines({5: "('one')", 7: "('two')"}),
    "srt/mem cache/spaced.py": lines({0: "('a name with a space')", 39: "('two')"}),
    "srt/added.py": "('two')\n",
}
ALL: Version = CORE | {
    "srt/many.py": lines({5: "('one')", 7: "('two')", 9: "('fix')"}),
    "srt/fixed.py": lines({0: "('a fix alone')", 30: "('fix')"}),
}
LEVELS = (STOCK, CORE, ALL)
# The alternative, on stock: one of the files that the series touches too.
VARLEN: Version = STOCK | {"srt/many.py": lines({6: "('varlen')"})}
TOUCHED = sorted(ALL)

UNTOUCHED: Version = {
    "__init__.py": "",
    "version.py": "try:\n    from sglang._version import __version__\nexcept ImportError: pass\n",
    "_version.py": f"__version__: str\n__version__ = version = '{RELEASE}'\n",
    "srt/__init__.py": "",
    "srt/other.py": lines(),
}

DIFFS = {
    "first.diff": (STOCK, ONE, "Do the first thing\n\nIt was never done."),
    "second.diff": (ONE, CORE, "Do the second thing\n\nAs above.\n\nUpstream: issue 1"),
    "fixes_third.diff": (CORE, ALL, "Fix the third thing\n\nWrong at any page size."),
}


@dataclass(frozen=True)
class TinyRelease:
    """A wheel and the folder of its series, as they are in the repository."""

    wheel: Path
    patches: Path


def make_release(folder: Path) -> TinyRelease:
    """Write the wheel, the series and its alternative, each with a PIN, into ``folder``."""
    patches = folder / "patches"
    patches.mkdir(parents=True)
    wheel = make_wheel(folder)
    for name, (old, new, header) in DIFFS.items():
        (patches / name).write_text(f"{header}\n\n{make_diff(old, new)}")
    (patches / "series").write_text("# the order\n" + "".join(f"{name}\n" for name in DIFFS))
    write_pin(patches, wheel, LEVELS)
    alternative = patches / "alternatives"
    alternative.mkdir()
    header = "Do it in another way\n\nTo compare."
    (alternative / "varlen.diff").write_text(f"{header}\n\n{make_diff(STOCK, VARLEN)}")
    (alternative / "series").write_text("varlen.diff\n")
    write_pin(alternative, wheel, (STOCK, VARLEN, VARLEN))
    return TinyRelease(wheel, patches)


def write_pin(patches: Path, wheel: Path, levels: Sequence[Version]) -> None:
    pinned = [f"release {RELEASE}", f"tag v{RELEASE}", f"wheel {sha256(wheel)} {wheel.name}"]
    for path in TOUCHED:
        shas = [sha256_text(version.get(path)) for version in levels]
        if len(set(shas)) == 1:
            continue
        pinned.append(" ".join(["file", *shas, f"python/sglang/{path}"]))
    (patches / "PIN").write_text("# a tiny release\n" + "".join(f"{line}\n" for line in pinned))


def make_diff(old: Version, new: Version) -> str:
    """The unified diff from one version to another, in git's form."""
    text = ""
    for path in sorted(new):
        before, after = old.get(path), new[path]
        if before == after:
            continue
        name = f"python/sglang/{path}"
        space = "\t" if " " in name else ""  # as git marks such names
        source, added = f"a/{name}{space}", ""
        if before is None:
            source, added = "/dev/null", "new file mode 100644\n"
        hunks = difflib.unified_diff(
            (before or "").splitlines(True), after.splitlines(True), source, f"b/{name}{space}"
        )
        text += f"diff --git a/{name} b/{name}\n{added}" + "".join(hunks)
    return text


def make_wheel(folder: Path, name: str = WHEEL) -> Path:
    """A wheel that pip takes, with the stock files."""
    info = f"sglang-{RELEASE}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: sglang\nVersion: {RELEASE}\n"
    form = "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, content in {**UNTOUCHED, **STOCK}.items():
            member = zipfile.ZipInfo(f"sglang/{path}")
            mode = 0o755 if path == "srt/script.py" else 0o644
            member.external_attr = (0o100000 | mode) << 16
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", form)
        archive.writestr(f"{info}/RECORD", "")
    return folder / name


def make_package(parent: Path, version: Version = STOCK) -> Path:
    """Write the package ``parent/sglang`` at a version of the touched files."""
    package = parent / "sglang"
    for path, content in {**UNTOUCHED, **version}.items():
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        file.chmod(0o755 if path == "srt/script.py" else 0o644)
    return package


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Every path under ``folder`` with its mode and its content or what it points to."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            content = f"-> {path.readlink()}"
        else:
            content = "" if path.is_dir() else sha256(path)
        found[str(path.relative_to(folder))] = (path.lstat().st_mode, content)
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sha256_text(text: str | None) -> str:
    return "-" if text is None else hashlib.sha256(text.encode()).hexdigest()
