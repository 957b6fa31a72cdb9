"""Upstream 38840 stays: another way to read what stock allocates does not allocate better."""

import pytest
from bed_fixtures import pool_checks_off
from double_free import ENCODER_LEN, HARMLESS, TWICE, free_twice, serve


@pytest.mark.parametrize("page_size", [64, 128])
def test_the_37th_decoder_token_frees_a_page_twice(make_bed, whisper, monkeypatch, page_size):
    pool_checks_off(monkeypatch)
    bed = make_bed(whisper(ENCODER_LEN), "intel_xpu", page_size)
    assert serve(bed, HARMLESS)[1] == free_twice(bed) == []
    assert bed.free() == bed.start

    first_page, at = serve(bed, TWICE)
    assert at == [TWICE]
    assert free_twice(bed) == [first_page]
    assert bed.free() == (bed.start[0] + page_size, bed.start[1])
