"""The mode, read from the environment at every call, so that tests can change it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

KERNELS = "PAGEALIGN_KERNELS"
POISON = "PAGEALIGN_POISON"
_WORDS = {"strict", "faithful", "page1"}


@dataclass(frozen=True)
class Mode:
    """How to behave where the real kernels do not simply compute.

    ``PAGEALIGN_KERNELS`` is one of these words, or both of the last two with a comma:

    * ``strict`` (default): refuse everything in ``_checks.py``;
    * ``faithful``: a request without keys gets what the real kernel leaves behind, NaN for
      what it computes as 0/0 and for rows that it never writes, instead of an exception;
    * ``page1``: accept page size 1 too, as kernels newer than SGLang 0.5.19 do.

    ``PAGEALIGN_POISON=1`` fills unwritten slots before each paged call, see ``_poison.py``.
    """

    faithful: bool = False
    page_sizes: tuple[int, ...] = (64, 128)
    poison: bool = False


def current_mode() -> Mode:
    return _parse(os.environ.get(KERNELS, ""), os.environ.get(POISON, ""))


@lru_cache
def _parse(kernels: str, poison: str) -> Mode:
    words = {word.strip() for word in kernels.split(",") if word.strip()}
    if words - _WORDS or ("strict" in words and len(words) > 1):
        raise ValueError(f"{KERNELS}={kernels!r}: use strict, faithful, page1 or faithful,page1")
    if poison not in ("", "0", "1"):
        raise ValueError(f"{POISON}={poison!r}: use 0 or 1")
    return Mode(
        faithful="faithful" in words,
        page_sizes=(1, 64, 128) if "page1" in words else (64, 128),
        poison=poison == "1",
    )
