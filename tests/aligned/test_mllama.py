"""A tiny Mllama through the shared path: image, text and both, against transformers."""

import pytest
from bed_fixtures import assert_same, image
from tiny_reference import mllama_answer

from pagealign.bed import Request

STEPS = 20


@pytest.mark.parametrize(
    ("backend", "page_size"),
    [("torch_native", 1), ("torch_native", 64), ("intel_xpu", 64), ("intel_xpu", 128)],
)
def test_equals_transformers(make_bed, mllama, backend, page_size):
    cases = [
        (image(1, 0), (2, 5, 20, 11)),
        (None, (2, 10, 11)),
        (image(2, 1), (2, 5, 5, 21)),
        (None, (2, 30)),
        (image(1, 2), (2, 5, 22, 13, 14)),
    ]
    expected = [mllama_answer(mllama, f, prompt, STEPS) for f, prompt in cases]
    bed = make_bed(mllama, backend, page_size)
    requests = [Request(prompt, f, max_new_tokens=STEPS) for f, prompt in cases]
    for request, (ids, logprobs) in zip(requests, expected, strict=True):
        assert_same(bed.run_one(request), ids, logprobs)
    results = bed.run(requests)
    for result, (ids, logprobs) in zip(results, expected, strict=True):
        assert_same(result, ids, logprobs)
    assert bed.free() == bed.start
