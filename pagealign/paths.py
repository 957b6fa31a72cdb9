"""Where things live: the repository's own folders and the one cache outside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pagealign.errors import PagealignError

REPO = Path(__file__).resolve().parents[1]
PATCHES = REPO / "patches"
STANDINS = Path(__file__).resolve().parent / "standins"


def cache_root() -> Path:
    """The folder for weights, audio, trees and environments.

    ``$PAGEALIGN_CACHE`` if set, else ``$XDG_CACHE_HOME/pagealign``, else
    ``~/.cache/pagealign``.
    """
    if explicit := os.environ.get("PAGEALIGN_CACHE"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "pagealign"


def cache_dir(*parts: str, to_write: bool = True) -> Path:
    """``cache_root()/parts``, created if missing.

    PagealignError where it can't be made, or, with ``to_write``, can't be written to.
    """
    path = cache_root().joinpath(*parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if to_write and not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise PagealignError(
            f"the cache folder {path} can't be used ({error.strerror}): move the cache by "
            "PAGEALIGN_CACHE=/a/folder/that/you/may/write"
        ) from error
    return path
