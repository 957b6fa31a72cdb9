"""A tiny MossVL through the shared path, against a second implementation in float64.

The release takes FlashInfer alone for MossVL's prefill, for its mask by frames: no other
backend reads ``cross_attention_custom_mask``. Decoding has no mask and may run on any.
"""

import fa3_on_cpu
import flashinfer_on_cpu
import pytest
import torch
from bed_fixtures import assert_same
from moss_vl_reference import moss_vl_answer

from pagealign.bed import Request
from pagealign.moss_vl import Media
from pagealign.tiny_models import MOSS_VL_PATCH_VALUES, tiny_moss_vl

IMAGE = 5
STEPS = 134  # past the text's first page of 128


def media(seed: int, *grid: tuple[int, int, int]) -> Media:
    """Random images and videos of ``grid`` frames, patches down and patches across."""
    generator = torch.Generator().manual_seed(seed)
    patches = sum(t * h * w for t, h, w in grid)
    values = torch.randn(patches, MOSS_VL_PATCH_VALUES, generator=generator)
    return Media(values, torch.tensor(grid))


# Each frame of h x w patches has h * w / 4 + 1 encoder tokens, a separator among them.
SMALL = (media(0, (1, 4, 4)), (2, IMAGE, 20, 11))  # E = 5
WIDE = (media(1, (1, 8, 12)), (IMAGE, 21, 12, 13))  # E = 25
WHOLE_PAGE = (media(2, (1, 14, 18)), (2, IMAGE, 22))  # E = 64
LARGE = (media(3, (1, 20, 28)), (2, 30, IMAGE, 23, 14))  # E = 141
TEXT = (None, (2, 10, 11))
SHORT_TEXT = (None, (2, 30))
# Text before, between and behind the frames, which each token sees from its own on.
TWO_IMAGES = (media(4, (1, 6, 4), (1, 8, 12)), (2, IMAGE, 24, 15, IMAGE, 16))  # E = 7 + 25
VIDEO = (media(5, (3, 4, 8)), (2, IMAGE, 25, IMAGE, 26, IMAGE, 27))  # E = 3 * 9
CASES = [SMALL, TEXT, LARGE, TWO_IMAGES, SHORT_TEXT, WHOLE_PAGE, VIDEO, WIDE]
# One frame each, so that the mask is the row gates and may be left out.
ONE_FRAME = [SMALL, TEXT, LARGE, SHORT_TEXT, WHOLE_PAGE, WIDE]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


OTHERS = [
    ("torch_native", 16),
    ("intel_xpu", 64),
    slow("torch_native", 1),
    slow("fa3", 64),
    slow("intel_xpu", 128),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_moss_vl(tmp_path_factory.mktemp("moss_vl"))


@pytest.fixture(scope="module")
def answers(model):
    return {id(case): moss_vl_answer(model, *case, STEPS) for case in CASES}


def check(bed, answers, cases, steps):
    """Each case alone, for some tokens, then all in one batch."""
    for count in (6, steps):
        requests = [Request(prompt, f, max_new_tokens=count) for f, prompt in cases]
        alone = count < steps
        results = [bed.run_one(r) for r in requests] if alone else bed.run(requests)
        for case, result in zip(cases, results, strict=True):
            ids, logprobs = answers[id(case)]
            assert_same(result, ids[:count], logprobs[:count])
            assert result.prompt_tokens == prompt_tokens(case)
    assert bed.free() == bed.start


def prompt_tokens(case) -> int:
    """As stock counts them: the prompt's and the encoder's."""
    features, prompt = case
    encoder = 0 if features is None else sum(t * (h * w // 4 + 1) for t, h, w in features.grid_thw)
    return len(prompt) + int(encoder)


@pytest.mark.parametrize("page_size", [1, 64, slow(16), slow(128)])
def test_flashinfer(make_bed, model, answers, monkeypatch, page_size):
    flashinfer_on_cpu.install(monkeypatch)
    bed = make_bed(model, "flashinfer", page_size)
    check(bed, answers, CASES, max(20, page_size + 6))


@pytest.mark.parametrize(
    ("decode", "page_size"),
    OTHERS,
)
def test_decode_on_another_backend(make_bed, model, answers, monkeypatch, decode, page_size):
    flashinfer_on_cpu.install(monkeypatch)
    fa3_on_cpu.install(monkeypatch)
    bed = make_bed(
        model,
        None,
        page_size,
        prefill_attention_backend="flashinfer",
        decode_attention_backend=decode,
    )
    check(bed, answers, CASES, max(20, page_size + 6))


@pytest.mark.parametrize(
    ("backend", "page_size"),
    OTHERS,
)
def test_prefill_on_another_backend(make_bed, model, answers, monkeypatch, backend, page_size):
    """Refused by the release; without that, right for requests of one frame."""
    from sglang.srt.arg_groups import model_override_base

    fa3_on_cpu.install(monkeypatch)
    with pytest.raises(AssertionError, match="requires flashinfer prefill"):
        make_bed(model, backend, page_size)
    monkeypatch.delitem(model_override_base._MODEL_OVERRIDE_FNS, "MossVLForConditionalGeneration")
    bed = make_bed(model, backend, page_size)
    check(bed, answers, ONE_FRAME, max(20, page_size + 6))


@pytest.mark.parametrize(("page_size", "cached"), [(1, 32 + 23), (16, 32 + 16), (64, 32)])
def test_prefix_cache(make_bed, model, monkeypatch, page_size, cached):
    """The same images and another last word; E = 32. The mask starts at the cached text's
    end, by pages of the decoder's region."""
    flashinfer_on_cpu.install(monkeypatch)
    images = TWO_IMAGES[0]
    prompt = (2, IMAGE, *range(100, 120), IMAGE)
    bed = make_bed(model, "flashinfer", page_size, radix=True)
    for word, expected in ((16, 0), (17, cached)):
        question = (*prompt, word)
        result = bed.run_one(Request(question, images))
        assert_same(result, *moss_vl_answer(model, images, question, 8))
        assert result.cached_tokens == expected
    bed.evict_cached()
    assert bed.free() == bed.start


@pytest.mark.parametrize("page_size", [1, 64])
def test_retraction(make_bed, model, answers, monkeypatch, page_size):
    """A retracted request encodes again, and extends over tokens that it generated."""
    flashinfer_on_cpu.install(monkeypatch)
    cases, steps = [LARGE, TEXT, TWO_IMAGES, VIDEO], page_size + 6
    bed = make_bed(model, "flashinfer", page_size, retract_every=3)
    results = bed.run([Request(prompt, f, max_new_tokens=steps) for f, prompt in cases])
    for case, result in zip(cases, results, strict=True):
        ids, logprobs = answers[id(case)]
        assert_same(result, ids[:steps], logprobs[:steps])
    assert sum(r.retractions for (f, _), r in zip(cases, results, strict=True) if f) > 1
    assert bed.free() == bed.start
