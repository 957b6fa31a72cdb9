"""FA3's eager and graph metadata against transformers and against each other."""

import fa3_on_cpu
import pytest
from bed_fixtures import PROMPT, assert_same, audio, image
from graph_decode import GraphDecode
from tiny_reference import mllama_answer, whisper_answer

from pagealign.bed import Request

PAGE_SIZES = [1, 16, 64, 128]


def run(bed, cases, answer, steps):
    requests = [Request(prompt, f, max_new_tokens=steps) for f, prompt in cases]
    for case, result in zip(cases, bed.run(requests), strict=True):
        assert_same(result, *answer(*case, steps))
    assert bed.free() == bed.start


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_whisper(make_bed, whisper, monkeypatch, page_size):
    fa3_on_cpu.install(monkeypatch)
    model = whisper(40)
    cases = [(audio(40, 0), PROMPT), (None, PROMPT), (audio(40, 1), PROMPT + (12,))]
    bed = make_bed(model, "fa3", page_size)
    steps = max(20, page_size + 6)  # past the text's first page
    # once through the eager tables, once through the graph's: three rows padded to four
    for _ in range(2):
        run(bed, cases, lambda *case: whisper_answer(model, *case), steps)
        graph = GraphDecode(bed)
    run(bed, [(None, PROMPT)] * 3, lambda *case: whisper_answer(model, *case), 4)
    assert (3, 4) in graph.sizes
    # Neither FA3's own lengths nor the encoder's are read on the host.
    assert graph.host_reads == {0}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_mllama(make_bed, mllama, monkeypatch, page_size):
    """Encoders of 68 and 136 tokens beside a text; the second image is two tokens more."""
    fa3_on_cpu.install(monkeypatch)
    cases = [(image(1, 0), (2, 5, 20, 11)), (None, (2, 10, 11)), (image(2, 1), (2, 5, 5, 21))]
    bed = make_bed(mllama, "fa3", page_size)
    for _ in range(2):
        run(bed, cases, lambda *case: mllama_answer(mllama, *case), 20)
        GraphDecode(bed)


def test_a_long_text_beside_an_audio(make_bed, alone, whisper, monkeypatch):
    """S4 in FA3's tables: the offset plus the longest text passes the row's width."""
    fa3_on_cpu.install(monkeypatch)
    model = whisper(200)
    long_text = PROMPT + tuple(10 + i % 900 for i in range(1990))
    requests = [
        Request(PROMPT, audio(200, 1), max_new_tokens=6),
        Request(long_text, max_new_tokens=6),
    ]
    expected = alone(model, requests)
    bed = make_bed(model, "fa3", 64)
    for _ in range(2):
        for result, reference in zip(bed.run(requests), expected, strict=True):
            assert_same(result, reference.output_ids, reference.output_logprobs)
        GraphDecode(bed)
