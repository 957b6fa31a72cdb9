"""The varlen gather on a tiny Whisper, with strict kernels: right, at page sizes 64 and 128.

Outputs are short: stock's allocation, which this tree keeps, goes wrong with longer ones.
"""

import pytest
from bed_fixtures import PROMPT, assert_same, audio
from sgl_kernel.flash_attn import calls
from tiny_reference import whisper_answer

from pagealign.bed import Request

PAGE_SIZES = [64, 128]
# With 4 tokens of prompt a row has 23 decoder tokens; a page is freed twice from the 25th
# on (E = 40: position 64) or later.
STEPS = 20


@pytest.mark.parametrize("encoder_len", [40, 64, 100, 200])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_equals_transformers(make_bed, whisper, page_size, encoder_len):
    """Alone, four clips at once, and clips beside text: the same tokens."""
    model = whisper(encoder_len)
    clips = [audio(encoder_len, seed) for seed in range(3)]
    cases = [(clips[0], PROMPT), (clips[1], PROMPT + (12,)), (None, PROMPT), (clips[2], PROMPT)]
    expected = [whisper_answer(model, f, prompt, STEPS) for f, prompt in cases]

    bed = make_bed(model, "intel_xpu", page_size)
    requests = [Request(prompt, f, max_new_tokens=STEPS) for f, prompt in cases]
    for request, (ids, logprobs) in zip(requests, expected, strict=True):
        assert_same(bed.run_one(request), ids, logprobs)
    # The text-only request is first, in the middle and last of its batch.
    for order in ([2, 0, 1, 3], [0, 1, 2, 3], [0, 1, 3, 2]):
        results = bed.run([requests[i] for i in order])
        for i, result in zip(order, results, strict=True):
            assert_same(result, *expected[i])
    assert bed.free() == bed.start


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_text_only_and_late_arrivals(make_bed, alone, whisper, page_size):
    """Nothing but text, as in a server's warm-up; then clips that join a running batch."""
    model = whisper(100)
    text, spoken = Request(PROMPT, max_new_tokens=STEPS), audio(100, 5)
    requests = [
        text,
        Request(PROMPT, spoken, max_new_tokens=STEPS, arrive_at=4),
        Request(PROMPT, max_new_tokens=STEPS, arrive_at=9),
        Request(PROMPT, spoken, max_new_tokens=STEPS, arrive_at=9),
    ]
    expected = alone(model, requests)
    bed = make_bed(model, "intel_xpu", page_size)
    for result in bed.run([text, text]):
        assert_same(result, expected[0].output_ids, expected[0].output_logprobs)
    for result, reference in zip(bed.run(requests), expected, strict=True):
        assert_same(result, reference.output_ids, reference.output_logprobs)
    assert bed.free() == bed.start


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_launches(make_bed, whisper, page_size):
    """Two layers: each asks the ragged kernel for self-attention, and for cross-attention
    where somebody has an encoder, with the queries of those only. The paged one never."""
    bed = make_bed(whisper(100), "intel_xpu", page_size)
    clip, text = (Request(PROMPT, f, max_new_tokens=5) for f in (audio(100, 0), None))
    for requests, per_step, queries in (
        ([clip], 4, 4 * (3 + 4)),
        ([text], 2, 2 * (3 + 4)),
        ([clip, text], 4, (2 + 4) * (3 + 4)),
    ):
        calls.reset()
        bed.run(requests)
        assert (calls.paged, calls.ragged, calls.query_rows) == (0, 5 * per_step, queries)


def test_long_text_beside_an_audio(make_bed, alone, whisper):
    """The slot table's columns stay inside a row: encoder's offset + longest decoder (S4)."""
    model = whisper(200)
    long_text = PROMPT + tuple(10 + i % 900 for i in range(1990))
    requests = [
        Request(PROMPT, audio(200, 1), max_new_tokens=6),
        Request(long_text, max_new_tokens=6),
    ]
    expected = alone(model, requests)
    bed = make_bed(model, "intel_xpu", 64)
    assert 200 + len(long_text) > bed.req_to_token_pool.req_to_token.shape[1]
    for result, reference in zip(bed.run(requests), expected, strict=True):
        assert_same(result, reference.output_ids, reference.output_logprobs)
    assert bed.free() == bed.start
