"""The faults of the stock release, each as it shows; the aligned group has the cures."""

import math

import pytest
from bed_fixtures import PROMPT, assert_same, audio, image, pool_checks_off
from tiny_reference import mllama_answer, whisper_answer

from pagealign.bed import Request
from pagealign.tiny_models import tiny_llama


def test_intel_xpu_calls_the_kernel_at_page_size_1(make_bed, whisper):
    """The stock backend needs a kernel that takes single slots as pages."""
    bed = make_bed(whisper(100), "intel_xpu", 64)
    with pytest.raises(RuntimeError, match="Unsupported page size .*: 1"):
        bed.run_one(Request(PROMPT, audio(100, 0)))


def without(monkeypatch, *checks):
    for check in checks:
        monkeypatch.setenv(f"SGLANG_{check}", "0")


def test_decode_slots_leave_the_pools_books(make_bed, whisper):
    """38840 (S1): after some decode tokens at page size 64 the busy check finds a leak."""
    bed = make_bed(whisper(100), "torch_native", 64)
    with pytest.raises(AssertionError, match="Full Pool Mem Leak Detected"):
        bed.run_one(Request(PROMPT, audio(100, 0), max_new_tokens=70))


def test_pages_are_freed_twice(make_bed, whisper, monkeypatch):
    """38840 (S1): without the busy check the request ends, and frees a page twice."""
    without(monkeypatch, "ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "CHECK_KV_PAGE_INVARIANTS")
    bed = make_bed(whisper(100), "torch_native", 64)
    with pytest.raises(AssertionError) as fault:
        bed.run_one(Request(PROMPT, audio(100, 0), max_new_tokens=70))
    assert fault.traceback[-1].name == "free_segment"


def test_a_text_longer_than_the_encoder_is_wrong(make_bed, whisper, monkeypatch):
    """38840 (S2): decode slots alias earlier decode slots; wrong tokens, and no word of it."""
    pool_checks_off(monkeypatch)
    model, clip = whisper(40), audio(40, 0)
    ids, _ = whisper_answer(model, clip, PROMPT, 90)
    bed = make_bed(model, "torch_native", 64, poison=False)
    result = bed.run_one(Request(PROMPT, clip, max_new_tokens=90))
    assert len(result.output_ids) == 90
    assert result.output_ids != ids


def test_a_chunk_inside_the_encoder_kills(make_bed, whisper):
    """38627 (S5): three clips of 1503 tokens against the default budget."""
    bed = make_bed(
        whisper(1500), "torch_native", 1, chunked_prefill_size=4096, max_total_tokens=16384
    )
    clips = [Request(PROMPT, audio(1500, seed), max_new_tokens=4) for seed in range(3)]
    with pytest.raises(AssertionError, match="Expected .*, got -"):
        bed.run(clips)


def test_a_long_text_beside_an_audio_kills(make_bed, whisper, monkeypatch):
    """S4: the encoder's offset plus the longest decoder passes the row's width."""
    monkeypatch.setenv("PAGEALIGN_KERNELS", "page1,faithful")
    bed = make_bed(whisper(200), "intel_xpu", 64)
    long_text = PROMPT + tuple(10 + i % 900 for i in range(1990))
    with pytest.raises(IndexError):
        bed.run(
            [
                Request(PROMPT, audio(200, 1), max_new_tokens=6),
                Request(long_text, max_new_tokens=6),
            ]
        )


def test_rows_of_a_mixed_mllama_batch(make_bed, mllama):
    """40476 (S6): image, text, image, text in one prefill; page size 1."""
    cases = [
        (image(1, 0), (2, 5, 20, 11)),
        (None, (2, 10, 11)),
        (image(2, 1), (2, 5, 5, 21)),
        (None, (2, 30)),
    ]
    bed = make_bed(mllama, "torch_native", 1)
    requests = [Request(prompt, f, max_new_tokens=20) for f, prompt in cases]
    expected = [mllama_answer(mllama, f, prompt, 20) for f, prompt in cases]
    for request, answer in zip(requests, expected, strict=True):
        assert_same(bed.run_one(request), *answer)
    together = bed.run(requests)
    assert [r.output_ids for r in together] != [ids for ids, _ in expected]


def test_a_decoder_only_model_reads_what_its_last_owner_left(make_bed, tmp_path):
    """The paged kernel multiplies the values behind a length by zero, for every model: a text
    is NaN where the slots that it is given held NaN. The series leaves these models alone."""
    model = tiny_llama(tmp_path)
    text = Request(tuple(range(5, 15)), max_new_tokens=4)
    sound = make_bed(model, "intel_xpu", 64, poison=False).run_one(text)
    assert all(math.isfinite(value) for value in sound.output_logprobs)
    spoilt = make_bed(model, "intel_xpu", 64).run_one(text)
    assert not all(math.isfinite(value) for value in spoilt.output_logprobs)


def test_a_text_behind_an_image_is_wrong_whatever_the_image_holds(make_bed, mllama):
    """40476 (S6): a NaN in the image has no part in it; page size 1."""
    sound, spoilt = image(1, 0), image(1, 0)
    spoilt[0, 0, 0, 0, 0, 0] = math.nan
    ids, _ = mllama_answer(mllama, None, (2, 10, 11), 6)
    bed = make_bed(mllama, "torch_native", 1, poison=False)
    texts = []
    for features in (sound, spoilt):
        picture = Request((2, 5, 20, 11), features, max_new_tokens=6)
        texts.append(bed.run([picture, Request((2, 10, 11), max_new_tokens=6)])[1])
    assert texts[0].output_ids != ids
    assert_same(texts[1], texts[0].output_ids, texts[0].output_logprobs)
