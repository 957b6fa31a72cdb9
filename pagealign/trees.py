"""SGLang trees in the cache: the pinned wheel unpacked, with and without a series.

A tree is a folder that holds ``sglang/`` and goes on ``PYTHONPATH``; what pip installed is
never touched. Trees share their unchanged files by hard links, so these are read-only:
change a copy. Bytecode goes into each tree's own ``__pycache__`` folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock

from pagealign.errors import PagealignError
from pagealign.fetch import Package, fetch, sha256_of
from pagealign.paths import PATCHES, REPO, cache_dir
from pagealign.pin import Pin, load_pin, load_series

APPLY = REPO / "scripts" / "apply_patches.sh"

TreeName = Literal["stock", "aligned", "aligned-core", "varlen"]
TREE_NAMES: tuple[TreeName, ...] = get_args(TreeName)

_FORMAT = b"1"  # goes into the keys; raise it when trees come to be built in another way


def wheel(patches: Path = PATCHES) -> Path:
    """The pinned wheel: ``$PAGEALIGN_WHEEL`` if set, else the cached one, else downloaded.

    Verified by SHA-256 each time. PagealignError where it can't be had or is another file.
    """
    pin = load_pin(patches).wheel
    if given := os.environ.get("PAGEALIGN_WHEEL"):
        path = Path(given).expanduser()
        if not path.is_file():
            raise PagealignError(f"PAGEALIGN_WHEEL: no such file: {path}")
        if sha256_of(path) != pin.sha256:
            raise PagealignError(
                f"PAGEALIGN_WHEEL: {path} is not the pinned {pin.filename}: its SHA-256 is another"
            )
        return path
    wheels = cache_dir("wheels")
    path = wheels / pin.filename
    with FileLock(wheels / ".lock"):
        if path.is_file() and sha256_of(path) == pin.sha256:
            return path
        with tempfile.TemporaryDirectory(dir=wheels, prefix=".tmp-") as folder:
            package = Package("sglang", load_pin(patches).release, pin.filename, pin.sha256)
            try:
                fetched = fetch(package, Path(folder))
            except PagealignError as error:
                raise PagealignError(
                    f"{error}; or download {pin.filename} elsewhere and set "
                    "PAGEALIGN_WHEEL=/path/to/it"
                ) from error
            return fetched.replace(path)


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack the wheel's ``sglang/`` into ``folder``, with the files' executable bits."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith("sglang/"):
                path = archive.extract(member, folder)
                if not member.is_dir():
                    os.chmod(path, 0o755 if member.external_attr >> 16 & 0o111 else 0o644)


def build_tree(name: TreeName, patches: Path = PATCHES) -> Path:
    """The tree ``name``, built if missing: a folder for ``PYTHONPATH`` that holds ``sglang/``.

    ``stock`` is the wheel, ``aligned`` has the whole series, ``aligned-core`` the series
    without the fixes, ``varlen`` the alternative to it. Any number of processes may ask at
    once; a tree appears by a rename, complete and verified. PagealignError where it can't be
    built or was edited since.
    """
    if name == "varlen":  # the alternative is a series of its own, with its own pin
        patches = patches / "alternatives"
    pin = load_pin(patches)
    tree = _folder(name, patches, pin)
    if not tree.is_dir():
        with FileLock(_trees(to_write=True) / ".lock"):
            _build(name, patches, pin)
    _verify(tree, name, pin)
    return tree


def copy_tree(name: TreeName, folder: Path, patches: Path = PATCHES) -> Path:
    """A copy of a tree to try changes on: ``folder``, which must not exist, for ``PYTHONPATH``.

    The files that the series touches are copies of their own and writable; the others, and
    the bytecode that is there, are hard links and must not be written to.
    """
    source = build_tree(name, patches)
    pinned = load_pin(patches / "alternatives" if name == "varlen" else patches)
    shutil.copytree(source, folder, copy_function=_link)
    for file in pinned.files:
        if (folder / file.inside).is_file():
            _unlink_copy(folder / file.inside)
    return folder


def list_trees() -> list[Path]:
    """The trees in the cache, whatever wheel and series they were built from."""
    return sorted(path for path in _trees().iterdir() if not path.name.startswith("."))


def prune_trees(keep: Collection[Path]) -> list[Path]:
    """Delete the trees that are not in ``keep`` and return them.

    Nothing is known of who runs on them: another clone's trees have other keys.
    """
    with FileLock(_trees(to_write=True) / ".lock"):
        doomed = [tree for tree in list_trees() if tree not in keep]
        for tree in doomed:
            _delete(tree)
    return doomed


def tree_of(path: Path) -> Path:
    """The ``PYTHONPATH`` entry for a user's own SGLang.

    ``path`` is a git checkout's root, its ``python/`` folder, a folder that holds
    ``sglang/``, or that folder itself. PagealignError where there is no SGLang.
    """
    path = Path(os.path.abspath(path.expanduser()))
    if not path.exists():
        raise PagealignError(f"no such path: {path}")
    for package in (path / "python" / "sglang", path / "sglang", path):
        found = (package / "version.py").is_file() and (package / "srt").is_dir()
        if found and package.name == "sglang":
            return package.parent
    raise PagealignError(
        f"no SGLang in {path}: give a checkout's root, its python/ folder, or the folder "
        "that holds sglang/"
    )


def _trees(*, to_write: bool = False) -> Path:
    return cache_dir("trees", to_write=to_write)


def _diffs(name: TreeName, patches: Path) -> tuple[str, ...]:
    match name:
        case "stock":
            return ()
        case "aligned-core":
            return load_series(patches).core
        case "aligned" | "varlen":
            return load_series(patches).all
    raise PagealignError(f"no tree {name!r}: use one of {', '.join(TREE_NAMES)}")


def _folder(name: TreeName, patches: Path, pin: Pin) -> Path:
    key = hashlib.sha256(_FORMAT + pin.wheel.sha256.encode())
    for diff in _diffs(name, patches):
        key.update(f"\0{diff}\0".encode() + (patches / diff).read_bytes())
    return _trees() / f"{name}-{key.hexdigest()[:16]}"


def _build(name: TreeName, patches: Path, pin: Pin) -> None:
    """Build the tree unless it is there; the caller holds the lock."""
    tree = _folder(name, patches, pin)
    if tree.is_dir():
        return
    for stale in _trees().glob(".tmp-*"):  # a killed builder's: we hold the lock
        shutil.rmtree(stale)
    if name == "stock":
        with _staged(tree) as work:
            unpack(wheel(patches), work)
            _make_read_only(work)
        return
    _build("stock", patches, pin)
    with _staged(tree) as work:
        _link_tree(_folder("stock", patches, pin), work)
        for file in pin.files:  # the ones to be replaced: own and writable copies
            if file.before is not None:
                _unlink_copy(work / file.inside)
        flags = ["--core"] if name == "aligned-core" else []
        command = [str(APPLY), *flags, "--patches", str(patches), str(work)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PagealignError(f"the tree {name} could not be built: {done.stderr.strip()}")
        _make_read_only(work)


@contextlib.contextmanager
def _staged(tree: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``tree`` when the block ends without an error."""
    work = Path(tempfile.mkdtemp(dir=tree.parent, prefix=".tmp-"))
    try:
        work.chmod(0o755)
        yield work
        work.rename(tree)
    except BaseException:
        shutil.rmtree(work)
        raise


def _delete(tree: Path) -> None:
    doomed = tree.rename(tree.with_name(f".tmp-{tree.name}"))
    shutil.rmtree(doomed)


def _link_tree(source: Path, target: Path) -> None:
    """Copy a tree by hard links (by copies where the filesystem has none)."""
    shutil.copytree(
        source,
        target,
        copy_function=_link,
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _unlink_copy(path: Path) -> None:
    """Replace a hard link by a writable copy of its own."""
    content, mode = path.read_bytes(), path.stat().st_mode
    path.unlink()
    path.write_bytes(content)
    path.chmod(mode | 0o200)


def _make_read_only(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            path.chmod(path.stat().st_mode & ~0o222)


def _verify(tree: Path, name: TreeName, pin: Pin) -> None:
    """Compare the touched files with the pin: the quick part of a tree that could be wrong."""
    for file in pin.files:
        want = {"stock": file.before, "aligned-core": file.core}.get(name, file.after)
        path = tree / file.inside
        if (sha256_of(path) if path.is_file() else None) != want:
            raise PagealignError(
                f"{path} is not what its PIN says: if the tree was edited, delete {tree} and "
                "it is built again; if the series was, run python -m pagealign.series pin"
            )
