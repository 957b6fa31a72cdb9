"""The poison shows a read of the gap, and an aligned tree makes none.

Every other test of this group runs poisoned too: a bed fills what nobody owns.
"""

import math

import pytest
from bed_fixtures import PROMPT, assert_same, audio
from tiny_reference import whisper_answer

from pagealign.bed import Request


@pytest.mark.parametrize(
    ("backend", "module"),
    [("torch_native", "torch_native_backend"), ("intel_xpu", "flashattention_backend")],
)
def test_a_decoder_read_at_the_encoders_length_shows(
    make_bed, whisper, monkeypatch, backend, module
):
    """Give the backend the unaligned offset: it reads the gap, and the answer is not the same.

    intel_xpu takes its table of the decoder's pages from FA3's module.
    """
    model, clip = whisper(100), audio(100, 0)
    ids, logprobs = whisper_answer(model, clip, PROMPT, 8)
    bed = make_bed(model, backend, 64)
    assert_same(bed.run_one(Request(PROMPT, clip)), ids, logprobs)
    monkeypatch.setattr(
        f"sglang.srt.layers.attention.{module}.get_encoder_reserve_len",
        lambda encoder_lens, page_size: encoder_lens,
    )
    result = bed.run_one(Request(PROMPT, clip))
    differs = [
        abs(a - b) > 0.1 or math.isnan(a)
        for a, b in zip(result.output_logprobs, logprobs, strict=True)
    ]
    assert any(differs) or result.output_ids != ids


def test_the_gap_holds_zero_values_and_is_never_written(make_bed, whisper):
    """E = 100 at page 64: in positions 100 to 127 of the row the values are zeroed, since the
    kernel multiplies them by zero; the keys, which it masks, keep the poison to the end."""
    bed = make_bed(whisper(100), "intel_xpu", 64)
    pool = bed.allocator.get_kvcache()
    seen = []

    def look(step):
        for req in bed.scheduler.running_batch.reqs:
            if req.finished():
                continue
            row = bed.req_to_token_pool.req_to_token[req.kv.req_pool_idx].long()
            for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True):
                assert k[row[100:128]].isnan().all()
                assert (v[row[100:128]] == 0).all()
            # decoder layers 2 and 3 write self-attention, 4 and 5 the encoder's K and V
            assert not pool.k_buffer[4][row[:100]].isnan().any()
            assert not pool.k_buffer[2][row[128 : 128 + len(PROMPT)]].isnan().any()
            seen.append(step)

    bed.probe = look
    bed.run([Request(PROMPT, audio(100, s), max_new_tokens=70, arrive_at=s) for s in range(3)])
    assert len(seen) > 70


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_recording_reaches_nobody_else(make_bed, whisper, page_size, bad):
    """First, beside and aborted: what it leaves in the pool changes no other answer.

    The free slots are not poisoned, so that they hold what the bad request left there.
    """
    model, spoilt = whisper(100), audio(100, 9)
    spoilt[0, 0, 0] = bad
    sound = [Request(PROMPT, audio(100, s), max_new_tokens=70) for s in range(3)]
    expected = [whisper_answer(model, r.features, PROMPT, 70) for r in sound]
    bed = make_bed(model, "intel_xpu", page_size, poison=False, max_total_tokens=1024)
    bed.run_one(Request(PROMPT, spoilt, max_new_tokens=40))
    beside = Request(PROMPT, spoilt, max_new_tokens=20)
    gone = Request(PROMPT, spoilt, max_new_tokens=60, abort_at=30)
    for results in (bed.run(sound[:1]), bed.run([beside, *sound, gone])[1:4], bed.run(sound)):
        for result, (ids, logprobs) in zip(results, expected, strict=False):
            assert_same(result, ids, logprobs)
