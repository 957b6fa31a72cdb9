"""The arithmetic: WER and CER counts, ANLS, bootstrap intervals, paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagealign.wer import normalise

ANLS_THRESHOLD = 0.5
RESAMPLES = 10_000
_AT_ONCE = 1_000_000  # draws in memory


@dataclass(frozen=True)
class Errors:
    """One transcript against its reference, both normalised: edits and the reference's size."""

    words: int
    word_errors: int
    chars: int
    char_errors: int


def count_errors(reference: str, hypothesis: str, language: str = "en") -> Errors:
    """Substitutions, deletions and insertions of words and of characters, by jiwer, after
    Whisper's own normalisation. Against an empty reference all are insertions."""
    import jiwer

    spoken, heard = normalise(reference, language), normalise(hypothesis, language)
    by_word, by_char = jiwer.process_words(spoken, heard), jiwer.process_characters(spoken, heard)
    return Errors(
        words=len(spoken.split()),
        word_errors=by_word.substitutions + by_word.deletions + by_word.insertions,
        chars=len(spoken),
        char_errors=by_char.substitutions + by_char.deletions + by_char.insertions,
    )


def anls(answer: str, references: Sequence[str], threshold: float = ANLS_THRESHOLD) -> float:
    """One question's score, 0 to 1, as the DocVQA challenge defines it (Mathew et al., 2021).

    With NL the Levenshtein distance over the longer string's length, a reference gives
    1 - NL if NL < ``threshold`` and else 0; the best reference counts. Case doesn't matter,
    nor white space at the ends, nor how much of it is between words: both strings are taken
    as ``" ".join(text.strip().lower().split())``, as far as we know like in the challenge's
    own script. Two empty strings are equal.
    """
    from rapidfuzz.distance import Levenshtein

    found = _words(answer)
    best = 0.0
    for reference in references:
        distance = Levenshtein.normalized_distance(found, _words(reference))
        if distance < threshold:
            best = max(best, 1.0 - distance)
    return best


def _words(text: str) -> str:
    return " ".join(text.lower().split())


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Sum over sum: a corpus' WER from its clips' errors and words; NaN without a word."""
    total = float(np.sum(denominators))
    return float(np.sum(numerators)) / total if total else float("nan")


def bootstrap(
    numerators: Sequence[float],
    denominators: Sequence[float],
    seed: int,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """The 95 % percentile interval of ``ratio``, by drawing items with replacement.

    A mean's: give ones as the denominators. NaN twice without an item.
    """
    top, bottom = (np.asarray(x, dtype=np.float64) for x in (numerators, denominators))
    if not len(top):
        return float("nan"), float("nan")
    draw = np.random.default_rng(seed)
    values: list[float] = []
    chunk = max(1, _AT_ONCE // len(top))
    for done in range(0, resamples, chunk):
        drawn = draw.integers(0, len(top), (min(chunk, resamples - done), len(top)))
        totals = bottom[drawn].sum(axis=1)
        values += list(top[drawn].sum(axis=1)[totals > 0] / totals[totals > 0])
    if not values:
        return float("nan"), float("nan")
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """A run's score less the first run's on the same items, with its standard error.

    ``error`` is NaN for fewer than two items. ``identical`` of ``items`` answers are equal,
    character by character.
    """

    value: float
    error: float
    identical: int
    items: int


def paired(
    first: Sequence[float],
    second: Sequence[float],
    weights: Sequence[float],
    same: Sequence[bool],
) -> Difference:
    """``sum(second - first) / sum(weights)`` over items that both runs answered.

    The standard error is the ratio estimator's: of the differences per item about
    ``value * weight``. With weights of one it is the mean difference's.
    """
    gap = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    weight = np.asarray(weights, dtype=np.float64)
    count, total = len(gap), float(weight.sum())
    if not total:
        return Difference(float("nan"), float("nan"), int(sum(same)), count)
    value = float(gap.sum()) / total
    error = float("nan")
    if count > 1:
        spread = float(((gap - value * weight) ** 2).sum())
        error = float(np.sqrt(count / (count - 1) * spread)) / total
    return Difference(value, error, int(sum(same)), count)


def percentiles(values: Sequence[float], at: Sequence[float] = (50, 90, 99)) -> tuple[float, ...]:
    """Percentiles, linear between neighbours; NaN without values."""
    if not len(values):
        return tuple(float("nan") for _ in at)
    return tuple(float(x) for x in np.percentile(values, at))


def busy_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the ``(started, ended)`` spans ran: a pause between them,
    such as that of a run that was interrupted and resumed, is left out."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
