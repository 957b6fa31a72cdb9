"""intel_xpu's metadata under a graph: beside the eager builder's, at every decode step."""

import pytest
from bed_fixtures import PROMPT, assert_same, audio, image
from graph_decode import GraphDecode
from tiny_reference import mllama_answer, whisper_answer

from pagealign.bed import Request

STEPS = 70
PAGE_SIZES = [64, 128]


def run_and_compare(bed, answer, cases, orders, steps=STEPS):
    graph = GraphDecode(bed)
    requests = [Request(prompt, f, max_new_tokens=steps) for f, prompt in cases]
    for order in orders:
        for i, result in zip(order, bed.run([requests[i] for i in order]), strict=True):
            assert_same(result, *answer(*cases[i], steps))
    # One number is read on the host: the longest text, from the host's own lengths.
    assert graph.host_reads == {1}
    assert bed.free() == bed.start
    return graph.sizes


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("encoder_len", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_whisper(make_bed, whisper, page_size, encoder_len):
    """Full and padded sizes; an empty encoder first, in the middle, last; none at all."""
    model = whisper(encoder_len)
    clips = [audio(encoder_len, seed) for seed in range(3)]
    cases = [(clips[0], PROMPT), (clips[1], PROMPT + (12,)), (None, PROMPT), (clips[2], PROMPT)]
    sizes = run_and_compare(
        make_bed(model, "intel_xpu", page_size),
        lambda *case: whisper_answer(model, *case),
        cases,
        [[0], [0, 1, 3], [2, 2, 2], [2, 0, 1, 3], [0, 1, 3, 2, 0]],
    )
    assert sizes >= {(1, 1), (3, 4), (4, 4), (5, 8)}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_mllama(make_bed, mllama, page_size):
    """Encoders of 68 and 136 tokens and none, in one batch; capture with length 0."""
    cases = [
        (image(1, 0), (2, 5, 20, 11)),
        (None, (2, 10, 11)),
        (image(2, 1), (2, 5, 5, 21)),
    ]
    sizes = run_and_compare(
        make_bed(mllama, "intel_xpu", page_size),
        lambda *case: mllama_answer(mllama, *case),
        cases,
        [[0], [1, 1, 1], [1, 2], [2, 0, 1, 1, 0]],
        steps=30,
    )
    assert sizes >= {(1, 1), (2, 2), (3, 4), (5, 8)}


def test_a_text_at_the_end_of_its_row(make_bed, alone, whisper):
    """A text of 1990 tokens beside a clip: the clip's columns pass the end of its row."""
    model = whisper(200)
    long_text = PROMPT + tuple(10 + i % 900 for i in range(1990))
    requests = [
        Request(PROMPT, audio(200, 1), max_new_tokens=6),
        Request(long_text, max_new_tokens=6),
    ]
    expected = alone(model, requests)
    bed = make_bed(model, "intel_xpu", 64)
    GraphDecode(bed)
    for result, reference in zip(bed.run(requests), expected, strict=True):
        assert_same(result, reference.output_ids, reference.output_logprobs)


def test_what_the_padding_page_holds_does_not_matter(make_bed, whisper):
    """NaN in page 0, which an empty encoder's one token is read from."""
    model = whisper(64)
    bed = make_bed(model, "intel_xpu", 64)
    graph = GraphDecode(bed)
    pool = graph.model_runner.token_to_kv_pool

    def poison(step):
        for layer in pool.v_buffer:
            layer[:64] = float("nan")

    bed.probe = poison
    cases = [(None, PROMPT), (audio(64, 0), PROMPT), (None, PROMPT + (12,))]
    results = bed.run([Request(prompt, f, max_new_tokens=8) for f, prompt in cases])
    for case, result in zip(cases, results, strict=True):
        assert_same(result, *whisper_answer(model, *case, 8))
