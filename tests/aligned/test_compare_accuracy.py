"""The aligned backend's attention and models, against float64."""

import dataclasses

import pytest
import torch
from backend_accuracy import CASES, assert_right, outputs_within

from pagealign.compare import model_accuracy


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case, page_size):
    assert_right(case, page_size, aligned=True)


@pytest.mark.parametrize("decoding", [False, True])
def test_rows_of_another_layout_show(decoding):
    """Rows as stock lays them out, the decoder right behind the encoder: self-attention
    reads the wrong slots, cross-attention stays right."""
    case = dataclasses.replace(CASES[0], encoder_lens=(65, 65), decoding=decoding)
    assert outputs_within(case, 64, aligned=False) == {"self": False, "cross": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_mllama_logits(tmp_path, dtype):
    subject = model_accuracy.tiny_mllama_subject(tmp_path)
    requests = tmp_path / "requests.pt"
    torch.save(list(subject.requests.values()), requests)
    job = model_accuracy.Job(subject, dtype, requests).arguments(tmp_path / "unused.pt")
    answers = model_accuracy.answers(job)
    rows = list(model_accuracy.rows(subject, dtype, {"aligned": answers}))
    assert [row.case for row in rows] == ["1 image", "2 images"]
    for row in rows:
        assert row.within
        assert row.tokens == model_accuracy.IMAGE_TOKENS
        assert dtype != "float32" or row.tokens_same == row.tokens
        assert row.compared == model_accuracy.IMAGE_TOKENS * 1000  # vocabulary
    # a logit that is off shows
    answers[1]["logits"][0, 0] += 1
    first, second = model_accuracy.rows(subject, dtype, {"aligned": answers})
    assert first.within and not second.within
