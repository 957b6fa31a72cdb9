"""A tiny Whisper through the real scheduler against transformers with its weights."""

import pytest
from bed_fixtures import PROMPT, assert_same, audio
from tiny_reference import whisper_answer

from pagealign.bed import Request

slow = pytest.mark.slow
CONFIGS = [
    ("torch_native", 1),
    ("torch_native", 16),
    pytest.param("torch_native", 64, marks=slow),
    pytest.param("torch_native", 128, marks=slow),
    ("intel_xpu", 64),
    ("intel_xpu", 128),
]
# below, at and above a page of 64, and one that spans two pages of 128
ENCODER_LENS = [40, 100, pytest.param(64, marks=slow), pytest.param(200, marks=slow)]
# long enough to open decoder pages of 64, and longer than the shortest encoder
STEPS = 70


@pytest.mark.parametrize("encoder_len", ENCODER_LENS)
@pytest.mark.parametrize(("backend", "page_size"), CONFIGS)
def test_equals_transformers(make_bed, whisper, backend, page_size, encoder_len):
    """Alone, four clips at once, and clips beside text: the same tokens."""
    model = whisper(encoder_len)
    clips = [audio(encoder_len, seed) for seed in range(3)]
    cases = [(clips[0], PROMPT), (clips[1], PROMPT + (12,)), (None, PROMPT), (clips[2], PROMPT)]
    expected = [whisper_answer(model, f, prompt, STEPS) for f, prompt in cases]

    bed = make_bed(model, backend, page_size)
    requests = [Request(prompt, f, max_new_tokens=STEPS) for f, prompt in cases]
    for request, (ids, logprobs) in zip(requests, expected, strict=True):
        assert_same(bed.run_one(request), ids, logprobs)
    # The text-only request is first, in the middle and last of its batch.
    for order in ([2, 0, 1, 3], [0, 1, 2, 3], [0, 1, 3, 2]):
        results = bed.run([requests[i] for i in order])
        for i, result in zip(order, results, strict=True):
            assert_same(result, *expected[i])
    assert bed.free() == bed.start


@pytest.mark.parametrize(("backend", "page_size"), [("torch_native", 64), ("intel_xpu", 64)])
def test_text_only_and_late_arrivals(make_bed, whisper, backend, page_size):
    """Nothing but text, as in a server's warm-up; then clips that join a running batch."""
    model = whisper(100)
    text = whisper_answer(model, None, PROMPT, 20)
    clip = audio(100, 5)
    spoken = whisper_answer(model, clip, PROMPT, 20)
    bed = make_bed(model, backend, page_size)
    for result in bed.run([Request(PROMPT, max_new_tokens=20)] * 2):
        assert_same(result, *text)
    results = bed.run(
        [
            Request(PROMPT, max_new_tokens=20),
            Request(PROMPT, clip, max_new_tokens=20, arrive_at=4),
            Request(PROMPT, max_new_tokens=20, arrive_at=9),
            Request(PROMPT, clip, max_new_tokens=20, arrive_at=9),
        ]
    )
    for result, expected in zip(results, [text, spoken, text, spoken], strict=True):
        assert_same(result, *expected)
    assert bed.free() == bed.start


def test_chunk_budget_below_three_clips(make_bed, whisper):
    """Three clips in one round and a chunk size that cuts the third (38627)."""
    model = whisper(1500)
    clips = [audio(1500, seed) for seed in range(3)]
    bed = make_bed(model, "intel_xpu", 64, chunked_prefill_size=4096, max_total_tokens=16384)
    results = bed.run([Request(PROMPT, clip, max_new_tokens=4) for clip in clips])
    for clip, result in zip(clips, results, strict=True):
        assert_same(result, *whisper_answer(model, clip, PROMPT, 4))
    assert bed.free() == bed.start


def test_long_text_beside_an_audio(make_bed, alone, whisper):
    """The page table's columns stay inside a row: encoder's offset + longest decoder (S4)."""
    model = whisper(200)
    clip = audio(200, 1)
    long_text = PROMPT + tuple(10 + i % 900 for i in range(1990))
    requests = [Request(PROMPT, clip, max_new_tokens=6), Request(long_text, max_new_tokens=6)]
    expected = alone(model, requests)
    bed = make_bed(model, "intel_xpu", 64)
    assert 256 + len(long_text) > bed.req_to_token_pool.req_to_token.shape[1]
    for result, reference in zip(bed.run(requests), expected, strict=True):
        assert_same(result, reference.output_ids, reference.output_logprobs)
    assert bed.free() == bed.start
