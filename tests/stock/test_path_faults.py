"""Faults of the stock release on the paths of production; the aligned group has the cures."""

import math

import flashinfer_on_cpu
import pytest
import torch
from bed_fixtures import PROMPT, assert_same, audio, image, pool_checks_off

from pagealign.bed import Request
from pagealign.moss_vl import Media
from pagealign.tiny_models import MOSS_VL_PATCH_VALUES, tiny_moss_vl


def test_a_full_pool_kills(make_bed, whisper, monkeypatch):
    """S3: the memory check counts the whole row, the allocation the decoder alone."""
    pool_checks_off(monkeypatch)
    requests = [
        Request(PROMPT, audio(40, seed), max_new_tokens=140, ignore_eos=False) for seed in range(3)
    ]
    bed = make_bed(
        whisper(40), "torch_native", 64, max_total_tokens=320, overcommit=True, poison=False
    )
    with pytest.raises(RuntimeError, match="Decode out of memory"):
        bed.run(requests)


def test_same_image_another_question_kills(make_bed, mllama):
    """S7: with the prefix cache at page size 64 the match ends inside the image."""
    photo = image(1, 10)
    bed = make_bed(mllama, "torch_native", 64, radix=True)
    bed.run_one(Request((2, 5, 20, 21), photo, max_new_tokens=1))  # no decode step: no S1
    with pytest.raises(AssertionError) as fault:
        bed.run_one(Request((2, 5, 30, 31), photo, max_new_tokens=1))
    assert fault.traceback[-1].name == "prepare_encoder_info_extend"
    assert "req.prefix_len == 0" in str(fault.traceback[-1].statement)


def test_the_same_at_page_size_1_is_right(make_bed, alone, mllama):
    """S7 is a fault of pages alone: stock reuses the image at page size 1."""
    photo = image(1, 10)
    requests = [
        Request((2, 5, 20, 21), photo, max_new_tokens=6),
        Request((2, 5, 30, 31), photo, max_new_tokens=6),
    ]
    expected = alone(mllama, requests)
    bed = make_bed(mllama, "torch_native", 1, radix=True)
    for request, reference in zip(requests, expected, strict=True):
        assert_same(bed.run_one(request), reference.output_ids, reference.output_logprobs)


@pytest.mark.parametrize("ignore_eos", [False, True], ids=["", "ignore_eos"])
def test_a_prompt_that_never_fits_waits_for_ever(make_bed, whisper, ignore_eos):
    """Text alone, 400 tokens in a pool of 448: neither admitted nor refused, and all wait.

    Admission asks for whole pages and one to spare; the length check counts tokens.
    """
    bed = make_bed(whisper(40), "torch_native", 64, max_total_tokens=448)
    too_long = Request(tuple(range(20, 420)), max_new_tokens=2, ignore_eos=ignore_eos)
    with pytest.raises(TimeoutError, match="not idle after 100 steps"):
        bed.run([too_long, Request(PROMPT, max_new_tokens=2)], max_steps=100)
    assert [req.rid for req in bed.scheduler.waiting_queue] == ["r000000", "r000001"]


def test_cached_text_beside_a_cached_image_is_nan(make_bed, mllama):
    """torch_native, any page size: no keys, and queries of the cached prefix never written."""
    question = (2, *range(20, 100))
    pair = [Request(question, image(1, 10), max_new_tokens=2), Request(question, max_new_tokens=2)]
    bed = make_bed(mllama, "torch_native", 1, radix=True)
    for request in pair:
        bed.run_one(request)
    # What torch allocates and does not write is NaN here, and anything elsewhere.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        _, text = bed.run(pair)
    finally:
        torch.use_deterministic_algorithms(False)
    assert math.isnan(text.output_logprobs[0])


def test_a_retracted_moss_vl_request_kills(make_bed, tmp_path, monkeypatch):
    """Any page size: its pixels were dropped after its first prefill."""
    flashinfer_on_cpu.install(monkeypatch)
    frame = Media(torch.zeros(16, MOSS_VL_PATCH_VALUES), torch.tensor([(1, 4, 4)]))
    bed = make_bed(tiny_moss_vl(tmp_path), "flashinfer", 1, retract_every=2)
    with pytest.raises(IndexError) as fault:
        bed.run([Request((2, 5, 20, 11), frame, max_new_tokens=8) for _ in range(2)])
    assert fault.traceback[-1].name == "_build_cross_attention_custom_mask"
