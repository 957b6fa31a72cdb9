"""What the API reports and limits does not see the encoder's gap.

The figures are the ones of a prompt of E + text tokens, worked out by hand, and the same
at every page size; where a page size shows in them (whole pages in the prefix cache, the
pool's own limit), the rule is written out. Logprobs are transformers'.
"""

import types

import pytest
import torch
from bed_fixtures import PROMPT, assert_same, audio, image
from tiny_reference import _mllama, _whisper, mllama_answer, whisper_answer

from pagealign.bed import Bed, Request

CONFIGS = [("torch_native", p) for p in (1, 16, 64, 128, 256)] + [
    ("intel_xpu", 64),
    ("intel_xpu", 128),
]
configs = pytest.mark.parametrize(("backend", "page_size"), CONFIGS)
page_sizes = pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])

WHISPER_E = 100
MLLAMA_E = 68  # one image: 4 tiles x 17
QUESTION = (2, 5, 20, 11, 30)


def ceil_to(n: int, page_size: int) -> int:
    return -(-n // page_size) * page_size


def floor_to(n: int, page_size: int) -> int:
    return n // page_size * page_size


@pytest.fixture
def sent():
    """Every batch a bed sends to the detokenizer, with all its fields."""

    def record(bed: Bed) -> list:
        batches: list = []
        sender = bed.scheduler.output_streamer.send_to_detokenizer
        collect = sender.send_output

        def send_output(output, recv=None):
            batches.append(output)
            collect(output, recv)

        sender.send_output = send_output
        return batches

    return record


@torch.inference_mode()
def prompt_logprobs(folder, features, prompt) -> list[float]:
    """Log-probability of each token of the text but its first, from transformers."""
    ids = torch.tensor([prompt])
    if features.ndim == 3:
        logits = _whisper(folder, False)(input_features=features, decoder_input_ids=ids).logits
    else:
        count, tiles = features.shape[1:3]
        logits = _mllama(folder)(
            input_ids=ids,
            use_cache=False,
            pixel_values=features,
            aspect_ratio_ids=torch.full((1, count), tiles),
            aspect_ratio_mask=torch.ones(1, count, tiles, dtype=torch.int64),
            cross_attention_mask=torch.ones(1, len(prompt), count, tiles),
        ).logits
    logprobs = logits[0, :-1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=True)]


def assert_input_logprobs(result, start: int, encoder_len: int, expected: list[float]) -> None:
    """``expected``: of the text's second and later tokens.

    From ``start`` on, a position in the row of E + text, or from the text's first token
    where ``start`` is in the encoder. The first one has no predecessor in the answer.
    """
    if start in (-1, encoder_len + len(expected) + 1):
        assert result.input_logprobs == []
        return
    skip = max(start - encoder_len, 0)
    assert result.input_logprobs[0] is None
    assert result.input_logprobs[1:] == pytest.approx(expected[skip:], abs=1e-4)


@configs
def test_whisper_usage_and_logprobs(make_bed, whisper, backend, page_size):
    model, clip = whisper(WHISPER_E), audio(WHISPER_E, 0)
    text = (*PROMPT, 12, 13)
    ids, logprobs = whisper_answer(model, clip, text, 6)
    expected = prompt_logprobs(model, clip, text)
    bed = make_bed(model, backend, page_size)
    starts = [-1, 0, 1, 99, 100, 101, 103, 104, 105]
    requests = [Request(text, clip, max_new_tokens=6, logprob_start_len=s) for s in starts]
    # each alone, then all in one batch with texts of their own lengths
    alone = [bed.run_one(request) for request in requests]
    together = bed.run([*requests[:5], Request(text, max_new_tokens=6, logprob_start_len=2)])
    for start, result in zip(starts + starts[:5], alone + together[:5], strict=True):
        assert_same(result, ids, logprobs)
        assert_input_logprobs(result, start, WHISPER_E, expected)
        assert result.prompt_tokens == 105
        assert (result.cached_tokens, result.completion_tokens) == (0, 6)
        assert result.finish == {"type": "length", "length": 6}
    assert together[5].prompt_tokens == 5
    assert len(together[5].input_logprobs) == 3
    assert bed.free() == bed.start


@configs
def test_mllama_usage_and_logprobs(make_bed, mllama, backend, page_size):
    """Two requests in a batch with encoders of 68 and 136 tokens."""
    one, two = image(1, 0), image(2, 1)
    expected = {1: prompt_logprobs(mllama, one, QUESTION), 2: prompt_logprobs(mllama, two, (2, 5))}
    bed = make_bed(mllama, backend, page_size)
    for start in (-1, 0, 30, 67, 68, 69, 72, 73):
        first, second, text = bed.run(
            [
                Request(QUESTION, one, max_new_tokens=4, logprob_start_len=start),
                Request((2, 5), two, max_new_tokens=4, logprob_start_len=start),
                Request(QUESTION, max_new_tokens=4),
            ]
        )
        assert_input_logprobs(first, start, 68, expected[1])
        assert_input_logprobs(second, start, 136, expected[2])
        assert (first.prompt_tokens, second.prompt_tokens, text.prompt_tokens) == (73, 138, 5)
        assert [r.completion_tokens for r in (first, second, text)] == [4, 4, 4]
        assert [r.cached_tokens for r in (first, second, text)] == [0, 0, 0]
    assert bed.free() == bed.start


@configs
def test_prefix_cache(make_bed, sent, mllama, backend, page_size):
    """``cached_tokens`` are the client's tokens that were not computed again.

    The whole encoder, E and not its reserve, or nothing of it; then the text in common,
    whose pages are counted from its own first token.
    """
    p = page_size
    bed = make_bed(mllama, backend, p, radix=True)
    batches = sent(bed)

    def ask(features, text, **kwargs):
        result = bed.run_one(Request(text, features, max_new_tokens=4, **kwargs))
        details = [d for b in batches for d in b.cached_tokens_details]
        batches.clear()
        cached = result.cached_tokens
        assert details == [{"device": cached, "host": 0} if cached else None]
        return result

    scene = tuple(10 + i % 900 for i in range(148))
    first_text, second_text = (2, 5, *scene, 20), (2, 5, *scene, 21, 22)
    first = ask(image(1, 0), first_text)
    assert (first.prompt_tokens, first.cached_tokens) == (68 + 151, 0)
    # the same image, another question: 150 text tokens in common
    second = ask(image(1, 0), second_text)
    assert (second.prompt_tokens, second.cached_tokens) == (68 + 152, 68 + floor_to(150, p))
    # again: the last token is always computed
    again = ask(image(1, 0), first_text)
    assert (again.prompt_tokens, again.cached_tokens) == (68 + 151, 68 + floor_to(150, p))
    assert_same(again, first.output_ids, first.output_logprobs)
    # a follow-up turn: the last answered token was never put into the pool
    turn = ask(image(1, 0), (*first_text, *first.output_ids, 23))
    assert (turn.prompt_tokens, turn.cached_tokens) == (68 + 156, 68 + floor_to(154, p))
    # another image: nothing; and neither is a text an image's
    other = ask(image(1, 1), first_text)
    assert (other.prompt_tokens, other.cached_tokens) == (68 + 151, 0)
    assert ask(None, first_text).cached_tokens == 0
    text = ask(None, first_text)
    assert (text.prompt_tokens, text.cached_tokens) == (151, floor_to(150, p))


@configs
def test_logprobs_with_a_cached_image(make_bed, mllama, backend, page_size):
    """A match is cut where the logprobs begin; inside the encoder, to nothing (S8)."""
    bed = make_bed(mllama, backend, page_size, radix=True)
    picture = image(1, 0)
    text = (2, 5, *(10 + i for i in range(38)))
    expected = prompt_logprobs(mllama, picture, text)
    plain = bed.run_one(Request(text, picture, max_new_tokens=4))
    for start in (0, 1, 30, 64, 67, 68, 69, 88, 107, 108, -1):
        result = bed.run_one(Request(text, picture, max_new_tokens=4, logprob_start_len=start))
        assert_same(result, plain.output_ids, plain.output_logprobs)
        assert_input_logprobs(result, start, 68, expected)
        # of 40 text tokens at most 39 are taken from the cache
        common = min(39, (start if start >= 0 else 108) - 68)
        assert result.cached_tokens == (68 + floor_to(common, page_size) if common >= 0 else 0)
        assert (result.prompt_tokens, result.completion_tokens) == (108, 4)


@configs
def test_context_length(make_bed, whisper, backend, page_size):
    """The answer ends where it ends at page size 1, also where R alone fills the context.

    Context 160: stock answers until prompt + answer = 158.
    """
    model, clip = whisper(WHISPER_E), audio(WHISPER_E, 0)
    bed = make_bed(model, backend, page_size, context_length=160)
    assert bed.scheduler.model_config.context_len == 160
    # stock's 4 spare columns, and a gap of at most page_size - 1
    assert bed.req_to_token_pool.req_to_token.shape[1] == 160 + 4 + page_size - 1
    spoken = whisper_answer(model, clip, PROMPT, 55)
    text = (*PROMPT, *range(20, 70))
    longest = whisper_answer(model, clip, text, 5)
    first, last, only_text = bed.run(
        [
            Request(PROMPT, clip, max_new_tokens=1000),
            Request(text, clip, max_new_tokens=1000),
            Request(text, max_new_tokens=1000),
        ]
    )
    assert_same(first, *spoken)
    assert_same(last, *longest)
    assert (first.prompt_tokens, first.completion_tokens) == (103, 55)
    assert (last.prompt_tokens, last.completion_tokens) == (153, 5)
    assert (only_text.prompt_tokens, only_text.completion_tokens) == (53, 105)
    assert first.finish == {"type": "length", "length": 55}
    assert last.finish == {"type": "length", "length": 5}
    assert bed.free() == bed.start


@page_sizes
def test_mllama_context_length(make_bed, mllama, page_size):
    """Context 120, E = 68: 119 - 73 - 1 tokens beside a full batch of them."""
    bed = make_bed(mllama, "torch_native", page_size, context_length=120)
    alone = bed.run_one(Request(QUESTION, image(1, 0), max_new_tokens=1000))
    assert (alone.prompt_tokens, alone.completion_tokens) == (73, 45)
    for result in bed.run([Request(QUESTION, image(1, 0), max_new_tokens=1000)] * 3):
        assert_same(result, alone.output_ids, alone.output_logprobs)
    assert bed.free() == bed.start


@page_sizes
def test_too_long(make_bed, whisper, page_size):
    """Refused from the same length on with the same words; the others go on."""
    bed = make_bed(whisper(WHISPER_E), "torch_native", page_size, context_length=160)
    assert bed.scheduler.max_req_input_len == 154
    clip = audio(WHISPER_E, 0)
    text = tuple(10 + i for i in range(200))
    good, spoken, written, start, good_text, edge = bed.run(
        [
            Request(text[:53], clip, max_new_tokens=2),
            Request(text[:54], clip, max_new_tokens=2),
            Request(text[:154], max_new_tokens=2),
            Request(PROMPT, clip, max_new_tokens=2, logprob_start_len=104),
            Request(text[:153], max_new_tokens=2),
            Request(PROMPT, clip, max_new_tokens=2, logprob_start_len=103),
        ]
    )
    assert good.finish == good_text.finish == edge.finish == {"type": "length", "length": 2}
    assert (good.prompt_tokens, good_text.prompt_tokens, edge.prompt_tokens) == (153, 153, 103)
    assert spoken.finish["message"] == (
        "Multimodal prompt is too long after expanding multimodal tokens. After expanding "
        "len(req.origin_input_ids_unpadded)=54 => 154 >= 154."
    )
    assert written.finish["message"].startswith(
        "Input length (154 tokens) exceeds the maximum allowed length (154 tokens)."
    )
    assert start.finish["message"] == (
        "req.logprob_start_len=104 is higher than the number of input tokens "
        "len(req.origin_input_ids)=103. Please use a smaller logprob_start_len."
    )
    for refused in (spoken, written, start):
        assert refused.finish["status_code"] == 400
        assert refused.prompt_tokens == 1  # stock replaces a refused prompt by one token
    assert bed.free() == bed.start


@page_sizes
def test_tokenizer_does_not_see_the_gap(make_bed, whisper, page_size):
    """The length checks before the scheduler: the client's text against the context."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    bed = make_bed(whisper(WHISPER_E), "torch_native", page_size, context_length=160)
    manager = object.__new__(TokenizerManager)
    manager.model_config = bed.scheduler.model_config
    manager.context_len = bed.scheduler.model_config.context_len
    manager.num_reserved_tokens = 0
    manager.allow_auto_truncate = False
    manager.validate_total_tokens = True
    manager.is_generation = True

    def check(text_len: int, max_new_tokens: int) -> None:
        params = {"max_new_tokens": max_new_tokens}
        request = GenerateReqInput(input_ids=[7] * text_len, sampling_params=params)
        manager._validate_one_request(request, request.input_ids)

    check(60, 100)
    check(159, 1)
    with pytest.raises(ValueError, match=r"total of 161 tokens: 60 tokens"):
        check(60, 101)
    with pytest.raises(ValueError, match=r"\(160 tokens\) is longer"):
        check(160, 0)


# capacity 1024: min(limit - prompt - 1, 1024 - whole pages of (R + text) - page - 1)
MAX_NEW = {1: 919, 16: 879, 64: 767, 128: 639, 256: 255}
# 1024 - 2 (page - 1) - 1: the gap's page and the page that admission adds
MAX_LEN = {1: 1023, 16: 993, 64: 897, 128: 769, 256: 513}


@page_sizes
def test_pool_limit(make_bed, whisper, page_size):
    """What fits the pool is served; what never can is refused and doesn't block."""
    bed = make_bed(whisper(WHISPER_E), "torch_native", page_size, max_total_tokens=1024)
    assert bed.scheduler.max_req_len == MAX_LEN[page_size]
    limit = bed.scheduler.max_req_input_len
    assert limit == MAX_LEN[page_size] - 5
    clip = audio(WHISPER_E, 0)
    text = tuple(10 + i % 900 for i in range(1024))

    clamped = set()
    bed.probe = lambda step: clamped.update(
        req.sampling_params.max_new_tokens for req in bed.scheduler.running_batch.reqs
    )
    bed.run_one(Request(PROMPT, clip, max_new_tokens=5000, ignore_eos=False, abort_at=6))
    assert clamped == {MAX_NEW[page_size]}
    for ignore_eos in (True, False):
        cases = [
            Request(text[: limit - 1 - WHISPER_E], clip, max_new_tokens=1, ignore_eos=ignore_eos),
            Request(text[: limit - 1], max_new_tokens=1, ignore_eos=ignore_eos),
            Request(text[: limit - WHISPER_E], clip, max_new_tokens=1, ignore_eos=ignore_eos),
            Request(text[:limit], max_new_tokens=1, ignore_eos=ignore_eos),
            Request(PROMPT, clip, max_new_tokens=1, ignore_eos=ignore_eos),
        ]
        spoken, written, long_spoken, long_written, after = bed.run(cases, max_steps=100)
        assert spoken.prompt_tokens == written.prompt_tokens == limit - 1
        assert spoken.finish["type"] == written.finish["type"] == "length"
        assert f"=> {limit} >= {limit}." in long_spoken.finish["message"]
        assert f"({limit} tokens)" in long_written.finish["message"]
        assert after.prompt_tokens == 103
    assert bed.free() == bed.start


@page_sizes
@pytest.mark.parametrize("overlap", [False, True])
def test_abort(make_bed, sent, whisper, page_size, overlap):
    """In the queue and while decoding."""
    bed = make_bed(whisper(WHISPER_E), "torch_native", page_size, overlap=overlap)
    batches = sent(bed)
    in_queue = []
    send = bed.scheduler.send_abort_output

    def send_abort_output(abort, req):
        in_queue.append((req.prompt_len, req.cached_tokens))
        send(abort, req)

    bed.scheduler.send_abort_output = send_abort_output
    clip = audio(WHISPER_E, 0)
    running, queued, other = bed.run(
        [
            Request(PROMPT, clip, max_new_tokens=100, abort_at=7),
            Request((*PROMPT, 12), clip, abort_at=0),
            Request(PROMPT, clip, max_new_tokens=20),
        ]
    )
    assert running.finish["type"] == "abort"
    assert running.prompt_tokens == 103
    assert running.completion_tokens == len(running.output_ids) < 20
    assert queued.finish["type"] == "abort"
    assert in_queue == [(104, 0)]
    assert (other.prompt_tokens, other.completion_tokens) == (103, 20)
    assert {tokens for b in batches for tokens in b.prompt_tokens} == {103}
    assert bed.free() == bed.start


@page_sizes
def test_streaming(make_bed, sent, mllama, page_size):
    """Every chunk of a stream says the same."""
    bed = make_bed(mllama, "torch_native", page_size, radix=True)
    batches = sent(bed)
    tokenized = bed._tokenized

    def stream(rid, request):
        recv = tokenized(rid, request)
        recv.stream = True
        return recv

    bed._tokenized = stream
    for cached in (0, MLLAMA_E + floor_to(len(QUESTION) - 1, page_size)):
        result = bed.run_one(Request(QUESTION, image(1, 0), max_new_tokens=5))
        assert [n for b in batches for n in b.prompt_tokens] == [73] * 5
        assert [n for b in batches for n in b.cached_tokens] == [cached] * 5
        assert [n for b in batches for n in b.completion_tokens] == [1, 2, 3, 4, 5]
        assert len(result.output_ids) == 5
        batches.clear()


@page_sizes
@pytest.mark.parametrize("radix", [False, True])
def test_retraction(make_bed, mllama, page_size, radix):
    """Retracted at every third step: counted once, and nothing of it taken for cached."""
    bed = make_bed(mllama, "torch_native", page_size, radix=radix, retract_every=3)
    starts = [68, 0, 70, 30, -1, 69]
    results = bed.run(
        Request(QUESTION, image(1, seed), max_new_tokens=20, logprob_start_len=start)
        for seed, start in enumerate(starts)
    )
    assert sum(r.retractions for r in results) > 5
    for seed, (start, result) in enumerate(zip(starts, results, strict=True)):
        assert (result.prompt_tokens, result.cached_tokens) == (73, 0)
        assert_same(result, *mllama_answer(mllama, image(1, seed), QUESTION, 20))
        assert result.completion_tokens == 20
        assert result.finish == {"type": "length", "length": 20}
        expected = prompt_logprobs(mllama, image(1, seed), QUESTION)
        assert_input_logprobs(result, start, MLLAMA_E, expected)


# turn: its text before the new one, and the tokens of it that the cache can hold
SESSION = [
    ({}, 4 + 4, 4 + 3),
    ({"drop_previous_output": True}, 4, 4),
    ({"offset": MLLAMA_E + 2}, 2, 2),
    ({"offset": -1}, 4 + 3, 4 + 3),
    ({"streaming": True}, 4 + 4, None),
]


@page_sizes
@pytest.mark.parametrize(("params", "kept", "common"), SESSION, ids=lambda v: str(v))
def test_session(make_bed, mllama, page_size, params, kept, common):
    """A second turn counts, and cuts at an offset, the client's tokens of the first."""
    from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams

    bed = make_bed(mllama, "torch_native", page_size, radix=True)
    sessions = bed.scheduler.session_controller
    streaming = "streaming" in params
    sessions.open(
        OpenSessionReqInput(capacity_of_str_len=1000, session_id="s", streaming=streaming)
    )
    tokenized = bed._tokenized

    def in_session(rid, request):
        recv = tokenized(rid, request)
        turns = list(sessions.get("s").req_nodes)
        rest = {} if streaming or not turns else {"rid": turns[-1], **params}
        recv.session_params = SessionParams(id="s", **rest)
        return recv

    bed._tokenized = in_session
    text, more = (2, 5, 20, 11), (30, 31, 32)
    picture = image(1, 0)
    first = bed.run_one(Request(text, picture, max_new_tokens=4, return_logprob=False))
    turn = bed.run_one(Request(more, max_new_tokens=6, return_logprob=False))
    before = (*text, *first.output_ids)[:kept]
    assert turn.output_ids == mllama_answer(mllama, picture, (*before, *more), 6)[0]
    assert (first.prompt_tokens, first.cached_tokens) == (72, 0)
    assert turn.prompt_tokens == 68 + kept + 3
    # a streaming session keeps its row, with all that was written into it
    assert turn.cached_tokens == 68 + (7 if streaming else floor_to(common, page_size))


@page_sizes
def test_embedding(make_bed, sent, mllama, page_size):
    """The embedding path's usage, of a request that came in as one."""
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    bed = make_bed(mllama, "torch_native", page_size)
    batches = sent(bed)
    scheduler = bed.scheduler
    recv = bed._tokenized("e", Request(QUESTION, image(1, 0)))
    names = ("rid", "input_text", "input_ids", "mm_inputs", "token_type_ids", "sampling_params")
    recv = TokenizedEmbeddingReqInput(**{name: getattr(recv, name) for name in names})
    scheduler.handle_embedding_request(recv)
    (req,) = scheduler.waiting_queue
    scheduler.waiting_queue.clear()
    assert len(req.origin_input_ids) == ceil_to(MLLAMA_E, page_size) + len(QUESTION)
    req.finished_reason = FINISH_LENGTH(0)
    scheduler.output_streamer._stream_output_embedding([req])
    assert batches[-1].prompt_tokens == [73]
    assert batches[-1].cached_tokens == [0]


@page_sizes
@pytest.mark.parametrize(("limit", "refused"), [(74, False), (73, True)])
def test_embedding_length(make_bed, mllama, page_size, limit, refused):
    """A prompt of 73 is refused from a limit of 73 on, whatever its gap."""
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput

    bed = make_bed(mllama, "torch_native", page_size)
    scheduler = bed.scheduler
    scheduler.max_req_input_len = limit
    recv = bed._tokenized("e", Request(QUESTION, image(1, 0)))
    names = ("rid", "input_text", "input_ids", "mm_inputs", "token_type_ids", "sampling_params")
    recv = TokenizedEmbeddingReqInput(**{name: getattr(recv, name) for name in names})
    scheduler.handle_embedding_request(recv)
    (req,) = scheduler.waiting_queue
    scheduler.waiting_queue.clear()
    assert (req.to_finish is not None) == refused


def test_tiers():
    """The gap is taken off the tier that holds the encoder; the tiers add up."""
    from sglang.srt.managers.schedule_batch import Req, split_cached_prefix_by_tier

    # E = 68 at page 64: a gap of 60, then 64 text tokens
    req = types.SimpleNamespace(encoder_gap_len=60)
    prefix = Req.without_encoder_gap(req, 192)
    assert prefix == 132
    assert Req.without_encoder_gap(req, 0) == 0
    # all on the device; the text, or all of it, loaded back from the host
    assert split_cached_prefix_by_tier(prefix, 0, 0) == (132, 0, 0)
    assert split_cached_prefix_by_tier(prefix, 64, 0) == (68, 64, 0)
    assert split_cached_prefix_by_tier(prefix, 192, 0) == (0, 132, 0)
    # the host's text tokens came from storage; so did the encoder
    assert split_cached_prefix_by_tier(prefix, 64, 64) == (68, 0, 64)
    assert split_cached_prefix_by_tier(prefix, 192, 192) == (0, 0, 132)
