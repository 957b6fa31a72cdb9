"""Write the series, with a PIN, for a release to which all of it applies."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from pagealign.errors import PagealignError
from pagealign.paths import PATCHES
from pagealign.pin import Pin, WheelPin
from pagealign.port.release import Release
from pagealign.port.repo import check_writable
from pagealign.series import compute_files, export_series, import_series, load_diffs, pin_text


def check(folder: Path) -> None:
    """Raises PagealignError unless ``folder`` is new, empty, or a series' folder."""
    check_writable(folder, "--write-pin")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "series").is_file():
        raise PagealignError(f"{folder} is not empty and holds no series: name a new folder")


def write(
    release: Release, wheels: tuple[WheelPin, ...], folder: Path, patches: Path = PATCHES
) -> list[str]:
    """Write diffs, ``series`` and PIN for ``release`` into ``folder``; the files' names.

    The diffs get the release's line numbers, so that they apply to it without an offset.
    ``folder`` is new, empty or a series' folder, such as ``patches`` itself, whose diffs are
    replaced, the PIN last; anything else in it stays. All is made and applied in a scratch
    folder first: PagealignError leaves ``folder`` as it was.
    """
    check(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        repo, new = Path(scratch, "repo"), Path(scratch, "new")
        new.mkdir()
        import_series(repo, patches, whole=False, source=release.path)
        shutil.copyfile(patches / "series", new / "series")
        for diff in load_diffs(patches):
            (new / diff.name).write_bytes(diff.text.encode())
        export_series(repo, new)
        files = compute_files(load_diffs(new), release.path)
        pin = Pin(release.version, f"v{release.version}", wheels, files)
        (new / "PIN").write_bytes(pin_text(pin).encode())
        names = sorted((path.name for path in new.iterdir()), key=lambda name: name == "PIN")
        if not folder.is_dir() or not any(folder.iterdir()):
            new.replace(folder)
            return names
        for name in names:
            (new / name).replace(folder / name)
    return names
