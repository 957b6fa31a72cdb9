"""The varlen gather on a tiny Mllama: grouped heads, and E that differ within a batch."""

import pytest
from bed_fixtures import assert_same, image
from tiny_reference import mllama_answer

from pagealign.bed import Request


@pytest.mark.parametrize("page_size", [64, 128])
def test_equals_transformers(make_bed, mllama, page_size):
    """E = 68, 136 and 204, alone and together. (Text among images is wrong on stock: 40476.)"""
    cases = [(image(n, n), (2, *[5] * n, 20, 11)) for n in (1, 2, 3)]
    expected = [mllama_answer(mllama, f, prompt, 20) for f, prompt in cases]
    requests = [Request(prompt, f, max_new_tokens=20) for f, prompt in cases]
    bed = make_bed(mllama, "intel_xpu", page_size)
    for results in (bed.run(requests), [bed.run_one(request) for request in requests]):
        for result, answer in zip(results, expected, strict=True):
            assert_same(result, *answer)
    assert bed.free() == bed.start
