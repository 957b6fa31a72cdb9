"""The series diff by diff: a tree for each prefix of it, and back again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagealign.errors import PagealignError
from pagealign.fetch import sha256_of
from pagealign.paths import PATCHES
from pagealign.pin import load_pin, load_series
from pagealign.trees import copy_tree


@dataclass(frozen=True)
class Prefix:
    """The tree in which the first ``len(diffs)`` diffs of the series are applied."""

    diffs: tuple[str, ...]
    tree: Path

    @property
    def name(self) -> str:
        return f"{len(self.diffs)}: {self.diffs[-1].removesuffix('.diff')}"


def build_prefixes(folder: Path, patches: Path = PATCHES) -> Iterator[Prefix]:
    """A tree under ``folder`` for each prefix that is neither stock nor the whole series."""
    series = load_series(patches).all
    for count in range(1, len(series)):
        tree = copy_tree("stock", folder / f"prefix-{count:02}", patches)
        for name in series[:count]:
            apply(tree, patches / name)
        yield Prefix(series[:count], tree)


def check_reversible(folder: Path, patches: Path = PATCHES) -> None:
    """Apply the series on a copy of stock and take it back, last diff first: after each step
    back the files are what they were. PagealignError names the diff with which they aren't."""
    tree = copy_tree("stock", folder / "reversed", patches)
    series = load_series(patches).all
    states = [_state(tree, patches)]
    for name in series:
        apply(tree, patches / name)
        states.append(_state(tree, patches))
    for name, before in zip(reversed(series), reversed(states[:-1]), strict=True):
        apply(tree, patches / name, "--reverse")
        if _state(tree, patches) != before:
            raise PagealignError(f"{name} can't be taken back: other files than before it")


def apply(tree: Path, diff: Path, *flags: str) -> None:
    """``git apply`` a diff of the series to a tree, exactly; PagealignError if it won't."""
    # Inside someone's repository git would look for the paths there.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(
        ["git", "apply", "-p2", *flags, str(diff.resolve())],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise PagealignError(f"{diff.name} does not apply to {tree}: {done.stderr.strip()}")


def _state(tree: Path, patches: Path) -> dict[str, str | None]:
    files = (tree / file.inside for file in load_pin(patches).files)
    return {str(path): sha256_of(path) if path.is_file() else None for path in files}


def touched_modules(tree: Path, patches: Path = PATCHES) -> list[str]:
    """The Python modules of a tree that the series touches, by their import names."""
    files = (Path(file.inside) for file in load_pin(patches).files)
    return [".".join(f.with_suffix("").parts) for f in files if (tree / f).is_file()]
