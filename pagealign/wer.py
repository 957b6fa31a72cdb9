"""Word error rate, over words normalised as Whisper's own evaluation does."""

from __future__ import annotations

from functools import cache


@cache
def _normaliser(language: str):
    from transformers.models.whisper.english_normalizer import (
        BasicTextNormalizer,
        EnglishTextNormalizer,
    )

    # the mapping of British to American spellings isn't needed for what is compared here
    return EnglishTextNormalizer({}) if language == "en" else BasicTextNormalizer()


def normalise(text: str, language: str = "en") -> str:
    """Lower case, no punctuation, contractions and "Mr." spelled out."""
    return _normaliser(language)(text).strip()


def word_error_rate(reference: str, hypothesis: str, language: str = "en") -> float:
    """(substitutions + deletions + insertions) / words of ``reference``, both normalised.

    An empty reference gives 0 for an empty hypothesis and 1 for any other.
    """
    import jiwer

    spoken, heard = normalise(reference, language), normalise(hypothesis, language)
    if not spoken:
        return 1.0 if heard else 0.0
    return float(jiwer.wer(spoken, heard))
