"""A tree's backend against float64, on batches small enough for a test."""

from __future__ import annotations

import torch

from pagealign.compare.attention_accuracy import (
    GQA,
    KINDS,
    MHA,
    Case,
    attend,
    contents_of,
    truth_and_plain,
)
from pagealign.kernels.reference import twice_plain_error

CASES = [
    Case(dtype, heads, encoder_lens, decoding)
    for dtype, heads in (("float32", MHA), ("bfloat16", GQA), ("float16", MHA))
    for encoder_lens in ((1, 63, 64, 65), (0, 150, 0, 65), (0, 0))
    for decoding in (False, True)
]


def outputs_within(case: Case, page_size: int, aligned: bool) -> dict[str, bool]:
    """Per kind of attention, whether the backend is as good as plain attention."""
    contents, found = contents_of(case), attend(case, page_size, aligned)
    return {
        kind: twice_plain_error(found[kind], *truth_and_plain(case, contents, kind)).ok
        for kind in KINDS
    }


def assert_right(case: Case, page_size: int, aligned: bool) -> None:
    assert outputs_within(case, page_size, aligned) == {"self": True, "cross": True}
    empty = [n for n, e in enumerate(case.encoder_lens) if e == 0]
    rows = attend(case, page_size, aligned)["cross"].split(case.batch.q_lens)
    assert all(torch.equal(rows[n], torch.zeros_like(rows[n])) for n in empty)
