"""Where things live: the repository's own folders and the one cache outside it."""

from __future__ import annotations

import os
from pathlib import Path

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


def cache_dir(*parts: str) -> Path:
    """``cache_root()/parts``, created if missing."""
    path = cache_root().joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path
