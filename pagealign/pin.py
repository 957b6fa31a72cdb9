"""What the series is pinned to: ``patches/PIN`` and ``patches/series``, read and checked."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from pagealign.errors import PagealignError
from pagealign.paths import PATCHES

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FilePin:
    """A file that the series touches, by its SHA-256 (hex) at each level of the series.

    ``path`` is as in a checkout (``python/sglang/...``). None means that the file doesn't
    exist at that level: a module that the series adds.
    """

    path: str
    before: str | None
    core: str | None
    after: str | None

    @property
    def inside(self) -> str:
        """The path inside the package's parent folder: ``sglang/...``."""
        return self.path.removeprefix("python/")


@dataclass(frozen=True)
class WheelPin:
    """A wheel of the release. The wheels differ in compiled modules only."""

    sha256: str
    filename: str


@dataclass(frozen=True)
class Pin:
    """One release of SGLang and the files that one series touches in it."""

    release: str
    tag: str
    wheels: tuple[WheelPin, ...]
    files: tuple[FilePin, ...]

    @property
    def wheel(self) -> WheelPin:
        """The wheel for this machine's processor, or else the first."""
        machine = platform.machine()
        fitting = [wheel for wheel in self.wheels if wheel.filename.endswith(f"_{machine}.whl")]
        return (fitting or self.wheels)[0]


@dataclass(frozen=True)
class Series:
    """The diffs' file names in the order in which they apply: core, then fixes."""

    core: tuple[str, ...]
    fixes: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return self.core + self.fixes


def load_pin(patches: Path = PATCHES) -> Pin:
    """Read ``patches/PIN``; PagealignError where it is missing or malformed."""
    path = patches / "PIN"
    release = tag = ""
    wheels: list[WheelPin] = []
    files: list[FilePin] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        match line.split(maxsplit=4):
            case []:
                pass
            case [word, *_] if word.startswith("#"):
                pass
            case ["release", release]:
                pass
            case ["tag", tag]:
                pass
            case ["wheel", sha, filename] if _SHA256.fullmatch(sha):
                wheels.append(WheelPin(sha, filename))
            case ["file", *shas, file] if len(shas) == 3 and all(map(_is_sha, shas)):
                before, core, after = (None if sha == "-" else sha for sha in shas)
                files.append(FilePin(file.rstrip(), before, core, after))
            case _:
                raise PagealignError(f"{path}:{number} can't be read: restore the file")
    if not (release and tag and wheels):
        raise PagealignError(f"{path} must name a release, a tag and a wheel: restore the file")
    return Pin(release, tag, tuple(wheels), tuple(files))


def load_series(patches: Path = PATCHES) -> Series:
    """Read ``patches/series``; PagealignError where it is not in order."""
    path = patches / "series"
    names = [line.split()[0] for line in _read(path).splitlines() if line.split()]
    names = [name for name in names if not name.startswith("#")]
    fixes = [name for name in names if name.startswith("fixes_")]
    core = names[: len(names) - len(fixes)]
    if names[len(core) :] != fixes:
        raise PagealignError(f"{path}: the fixes_* diffs must come last")
    if len(set(names)) != len(names):
        raise PagealignError(f"{path} names a diff twice")
    for name in names:
        if not (patches / name).is_file():
            raise PagealignError(f"{path} names {name}, which isn't there")
    return Series(tuple(core), tuple(fixes))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise PagealignError(f"{path} can't be read: {error.strerror}") from error


def _is_sha(text: str) -> bool:
    return text == "-" or bool(_SHA256.fullmatch(text))
