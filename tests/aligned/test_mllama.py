"""A tiny Mllama through the shared path: image, text and both, against transformers."""

import math

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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("backend", "page_size"),
    [("torch_native", 1), ("torch_native", 64), ("intel_xpu", 64), ("intel_xpu", 128)],
)
def test_a_bad_image_reaches_nobody_else(make_bed, mllama, backend, page_size, bad):
    """First, beside and aborted, in front of a text and behind it.

    The text behind an image needs its rows masked (fixes_mllama_row_mask), whatever the
    image holds. The free slots are not poisoned, so that they hold what the bad request
    left there: intel_xpu zeroes the values of a page that it opens.
    """
    spoilt = image(1, 9)
    spoilt[0, 0, 0, 0, 0, 0] = bad
    sound = [
        Request((2, 10, 11), max_new_tokens=70),
        Request((2, 5, 20, 11), image(1, 0), max_new_tokens=70),
        Request((2, 30), max_new_tokens=70),
    ]
    expected = [mllama_answer(mllama, r.features, r.input_ids, 70) for r in sound]
    bed = make_bed(mllama, backend, page_size, poison=False, max_total_tokens=1280)
    first = bed.run_one(Request((2, 5, 21, 7), spoilt, max_new_tokens=40))
    assert all(math.isnan(logprob) for logprob in first.output_logprobs)
    beside = Request((2, 5, 21, 7), spoilt, max_new_tokens=20)
    gone = Request((2, 5, 21, 7), spoilt, max_new_tokens=60, abort_at=30)
    for results in (bed.run(sound), bed.run([beside, *sound, gone])[1:4], bed.run(sound)):
        for result, (ids, logprobs) in zip(results, expected, strict=True):
            assert_same(result, ids, logprobs)
    assert bed.free() == bed.start
