"""A git repository in which the series can be rebased from the pinned release to another."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pagealign.errors import PagealignError
from pagealign.paths import PATCHES
from pagealign.port.release import Release
from pagealign.series import BASE, commit, git, import_series
from pagealign.trees import unpack

PINNED = "pinned"  # the tag of the release that the series is made for
REBASE = f"git rebase --onto {BASE} {PINNED} main"


def check(repo: Path) -> None:
    """Raises PagealignError unless ``repo`` is an empty folder or can be made."""
    check_writable(repo, "--repo")
    if repo.exists() and any(repo.iterdir()):
        raise PagealignError(f"{repo} is not empty: name a new folder")


def check_writable(folder: Path, option: str) -> None:
    """Raises PagealignError unless ``folder`` is one that we may write, or can be made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise PagealignError(f"{option} {folder}: {there} is a file: name a new folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PagealignError(f"{option} {folder}: {there} can't be written: name another folder")


def make(repo: Path, release: Release, patches: Path = PATCHES) -> None:
    """Make ``repo``, new or empty: branch ``main`` holds the pinned release, tagged
    ``pinned``, and a commit per diff; the tag ``stock`` is ``release``, a commit after
    ``pinned``. REBASE then moves the series over with git's three-way merge, which knows
    both releases, and ``series export`` writes what comes out of it.
    """
    import_series(repo, patches)
    git(repo, "tag", PINNED, BASE)
    git(repo, "checkout", "--quiet", "-b", "other", BASE)
    shutil.rmtree(repo / "python" / "sglang")
    unpack(release.path, repo / "python")
    git(repo, "add", "--all", "--force")
    commit(repo, f"SGLang {release.version}\n")
    git(repo, "tag", "--force", BASE)
    git(repo, "checkout", "--quiet", "main")
    git(repo, "branch", "--quiet", "-D", "other")
