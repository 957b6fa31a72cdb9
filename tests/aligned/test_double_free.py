"""Upstream 38840 is gone: no page is freed twice, at any decoded length."""

import pytest
from double_free import ENCODER_LEN, HARMLESS, TWICE, free_twice, serve

from pagealign.layout import ceil_align


@pytest.mark.parametrize("page_size", [64, 128])
def test_no_page_is_freed_twice(make_bed, whisper, page_size):
    """Every length up to 300 is looked at; requests end at three of them."""
    bed = make_bed(whisper(ENCODER_LEN), "intel_xpu", page_size)
    for decoder_tokens in (HARMLESS, TWICE, 300):
        _, twice = serve(bed, decoder_tokens, decoder_at=ceil_align(ENCODER_LEN, page_size))
        assert twice == free_twice(bed) == []
        assert bed.free() == bed.start
