"""``pagealign eval compare``: two evaluations of the same data, item by item."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagealign import report
from pagealign.errors import PagealignError
from pagealign.evals import outcome
from pagealign.evals.scores import Difference, paired

# By evaluation: the score's name, where its items are, and what each adds.
SCORES = {
    "whisper": ("WER", "clips", lambda item: item["errors"]["word_errors"]),
    "docvqa": ("ANLS", "answers", lambda item: item["score"]),
}


@dataclass(frozen=True)
class Pair:
    """One run of each evaluation: the second's score less the first's, the items whose texts
    differ, each with both texts, and those that only one of the two answered."""

    first: str
    second: str
    difference: Difference
    differing: tuple[tuple[str, str, str], ...]
    apart: tuple[str, ...]


def run(first: Path, second: Path) -> int:
    """Print each run of ``second`` beside the first run of ``first``; 0 if all texts are
    identical, else 1. Raises PagealignError where a folder has no results, or other ones."""
    console = report.console()
    one, two = _load(first), _load(second)
    if one["eval"] != two["eval"]:
        raise PagealignError(f"{first} is of {one['eval']}, {second} of {two['eval']}")
    pairs = [_pair(one, one["runs"][0], two, found) for found in two["runs"]]
    if not all(pair.difference.items for pair in pairs):
        raise PagealignError(f"{first} and {second} have no answered item in common")
    name = SCORES[one["eval"]][0]
    outcome.name_some(console, "settings that differ", _differing_settings(one, two))
    console.print(report.table(pairs, _columns(name)))
    only = [
        f"{pair.second}: {len(pair.apart)}, {', '.join(pair.apart[:3])}"
        for pair in pairs
        if pair.apart
    ]
    outcome.name_some(console, "runs with items that only one of the two answered", only)
    for pair in pairs:
        lines = [f"{item}: {a!r} / {b!r}" for item, a, b in pair.differing]
        outcome.name_some(console, f"differ, {pair.second}", lines)
    return 1 if any(pair.differing for pair in pairs) else 0


def _load(folder: Path) -> dict[str, Any]:
    path = folder / "results.json" if folder.is_dir() else folder
    try:
        found = json.loads(path.read_text("utf-8"))
        if not found["runs"]:
            raise ValueError
        for each in found["runs"]:  # whatever is read later is read of each here
            _pair(found, each, found, each)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise PagealignError(
            f"{path} isn't the results.json of an evaluation: name the folder given as --out"
        ) from None
    return found


def _differing_settings(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """All but the answers: the data, the model, what was asked for. A name that only one
    has differs too."""
    names = [name for name in {**one, **two} if name not in ("runs", "skipped", "eval")]
    return [
        f"{name}: {one.get(name)!r} / {two.get(name)!r}"
        for name in names
        if one.get(name) != two.get(name)
    ]


def _pair(one: dict, first: dict, two: dict, second: dict) -> Pair:
    _, items, score = SCORES[one["eval"]]
    ours = {item["name"]: item for item in first[items] if item["text"] is not None}
    theirs = {item["name"]: item for item in second[items] if item["text"] is not None}
    both = [(name, ours[name], theirs[name]) for name in ours if name in theirs]
    difference = paired(
        [score(a) for _, a, _ in both],
        [score(b) for _, _, b in both],
        [a["errors"]["words"] if "errors" in a else 1.0 for _, a, _ in both],
        [a["text"] == b["text"] for _, a, b in both],
    )
    differing = tuple((n, a["text"], b["text"]) for n, a, b in both if a["text"] != b["text"])
    apart = tuple(name for name in {**ours, **theirs} if (name in ours) != (name in theirs))
    return Pair(_label(one, first), _label(two, second), difference, differing, apart)


def _label(evaluation: dict, run: dict) -> str:
    """A peer's run isn't the server's."""
    peer = run["concurrency"] is None
    return run["label"] if peer else f"{evaluation['server']}, {run['label']}"


def _columns(name: str) -> tuple[report.Column, ...]:
    return (
        report.Column("first", lambda p: p.first),
        report.Column("second", lambda p: p.second),
        report.Column(f"{name}, difference", lambda p: f"{p.difference.value:+.4f}", right=True),
        report.Column("SE", lambda p: outcome.number(p.difference.error, ".4f"), right=True),
        report.Column("identical", lambda p: outcome.identical(p.difference), right=True),
    )
