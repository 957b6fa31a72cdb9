"""Every path a request can take gives what it gives alone at page size 1.

References: the same request alone at page size 1 on torch_native, without a prefix cache;
ids exactly, log-probabilities to 1e-4. Pools are poisoned, SGLang's checks are on, and
after every run the KV pool and the request rows are back at their start.
"""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from bed_fixtures import PROMPT, assert_same, audio, image
from tiny_reference import mllama_answer

from pagealign.bed import Bed, Request

CONFIGS = [
    ("torch_native", 64),
    pytest.param("torch_native", 128, marks=pytest.mark.slow),
    ("intel_xpu", 64),
    ("intel_xpu", 128),
]
XPU_64 = ("intel_xpu", 64)

# Whisper with E = 100 (R = 128): speech and text, short and past a page of 64
WHISPER = [
    Request(PROMPT, audio(100, 0), max_new_tokens=40),
    Request((*PROMPT, 12), audio(100, 1), max_new_tokens=70),
    Request(PROMPT, max_new_tokens=40),
    Request((4, *range(20, 80)), audio(100, 2), max_new_tokens=30),
    Request(PROMPT, audio(100, 3), max_new_tokens=1),
    Request((4, *range(20, 170)), max_new_tokens=20),
]
# Mllama with E = 68, 136, 204 and none; of an image's four tiles 1, 2 or all are real
MLLAMA = [
    Request((2, 5, 20, 11), image(1, 0), max_new_tokens=40),
    Request((2, 5, 5, 21), image(2, 1), max_new_tokens=70, tiles=2),
    Request((2, 10, 11), max_new_tokens=40),
    Request((2, 5, 5, 5, *range(20, 80)), image(3, 2), max_new_tokens=30),
    Request((2, 5, 22, 13, 14), image(1, 3), max_new_tokens=1, tiles=1),
    Request((2, *range(20, 170)), max_new_tokens=20),
]
# An empty encoder last, first, between; many arrive while others decode.
ORDERS = [[0, 3, 1, 2], [2, 5, 0, 1, 4], [0, 2, 3, 5, 1, 4, 2]]


@pytest.fixture(scope="module")
def families(whisper, mllama):
    return {"whisper": (whisper(100), WHISPER), "mllama": (mllama, MLLAMA)}


@pytest.fixture(scope="module")
def alone():
    """Answers of a request alone at page size 1, by folder, each computed once."""
    known: dict[tuple, list] = {}

    def get(model, requests):
        new = [r for r in requests if (model, id(r)) not in known]
        if new:
            bed = Bed(model, "torch_native", 1)
            for request in new:
                known[model, id(request)] = request, bed.run_one(request)
            bed.close()
        return [known[model, id(r)][1] for r in requests]

    return get


@pytest.fixture(scope="module")
def references(families, alone):
    return {name: alone(model, requests) for name, (model, requests) in families.items()}


def assert_at_start(bed):
    bed.evict_cached()
    assert bed.free() == bed.start
    assert not bed.scheduler.running_batch.reqs


def assert_all_same(results, references):
    for result, reference in zip(results, references, strict=True):
        assert_same(result, reference.output_ids, reference.output_logprobs)
        assert result.finish == reference.finish


class Batches:
    """Counts what a bed's batches were made of."""

    def __init__(self, bed):
        self.seen: Counter[tuple] = Counter()
        bed.on_batch = self._look

    def _look(self, batch):
        lens = batch.encoder_lens_cpu
        mode = "decode" if batch.forward_mode.is_decode() else "extend"
        self.seen[mode, "mixed" if any(lens) and 0 in lens else "same"] += 1
        self.seen[mode, "different E"] += len(set(lens) - {0}) > 1
        self.seen[mode, "all empty"] += not any(lens)
        self.seen[mode, "texts"] += len(lens) > 1 and not any(lens)


@pytest.mark.parametrize(
    ("backend", "page_size", "overlap"),
    [
        ("torch_native", 64, False),
        ("torch_native", 128, True),
        ("intel_xpu", 64, True),
        ("intel_xpu", 128, False),
    ],
)
@pytest.mark.parametrize("family", ["whisper", "mllama"])
def test_mixed_batches(make_bed, families, references, family, backend, page_size, overlap):
    """Speech or images and text in one prefill and one decode, in any order, joining late."""
    (model, requests), expected = families[family], references[family]
    bed = make_bed(model, backend, page_size, overlap=overlap)
    batches = Batches(bed)
    assert_all_same(bed.run(requests), expected)
    for order in ORDERS:
        arriving = [replace(requests[i], arrive_at=3 * n) for n, i in enumerate(order)]
        assert_all_same(bed.run(arriving), [expected[i] for i in order])
    assert_all_same(bed.run([requests[2], requests[5]]), [expected[2], expected[5]])
    for mode in ("extend", "decode"):
        assert batches.seen[mode, "mixed"] and batches.seen[mode, "texts"]
        assert batches.seen[mode, "different E"] or family == "whisper"
    assert_at_start(bed)


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_padded_tiles_equal_transformers(mllama, alone, tiles):
    """The references of images with padded tiles are transformers' answers."""
    request = Request((2, 5, 20, 11), image(1, 0), max_new_tokens=12, tiles=tiles)
    (result,) = alone(mllama, [request])
    assert_same(result, *mllama_answer(mllama, request.features, request.input_ids, 12, tiles))


@pytest.mark.parametrize(
    "server_args",
    [
        {"num_continuous_decode_steps": 4},
        {"chunked_prefill_size": 192, "enable_mixed_chunk": True},
        {"chunked_prefill_size": 64, "max_prefill_tokens": 100},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["whisper", "mllama"])
def test_admission(make_bed, families, references, family, server_args):
    """Chunks below E, budgets below R, more waiting requests than rows: nobody is cut."""
    (model, requests), expected = families[family], references[family]
    bed = make_bed(model, *XPU_64, max_running_requests=4, **server_args)
    assert_all_same(
        bed.run([*requests, requests[3], requests[0]]), [*expected, expected[3], expected[0]]
    )
    assert_at_start(bed)


@pytest.mark.parametrize(
    ("backend", "page_size", "overlap"),
    [("torch_native", 64, False), ("intel_xpu", 64, True), ("intel_xpu", 128, False)],
)
@pytest.mark.parametrize("family", ["whisper", "mllama"])
def test_retraction(make_bed, families, alone, family, backend, page_size, overlap):
    """A pool for two or three requests: the others are retracted, resumed and not changed."""
    model, _ = families[family]
    expected = alone(model, LONGER[family])
    bed = make_bed(
        model,
        backend,
        page_size,
        overlap=overlap,
        max_total_tokens=512 if page_size == 64 else 768,
        overcommit=True,
    )
    results = bed.run(LONGER[family])
    assert_all_same(results, expected)
    assert sum(result.retractions for result in results)
    assert_at_start(bed)


# long enough to open two pages of 64 and one of 128
LONGER = {
    "whisper": [replace(WHISPER[i], max_new_tokens=135, ignore_eos=False) for i in (0, 1, 2, 3)],
    "mllama": [replace(MLLAMA[i], max_new_tokens=135, ignore_eos=False) for i in (0, 1, 2, 4)],
}


@pytest.mark.parametrize("family", ["whisper", "mllama"])
def test_retraction_at_every_third_step(make_bed, families, references, family):
    """Retracted whether or not the pool is full, again and again."""
    (model, requests), expected = families[family], references[family]
    bed = make_bed(model, *XPU_64, retract_every=3)
    results = bed.run(requests)
    assert_all_same(results, expected)
    assert sum(result.retractions for result in results) > 10
    assert_at_start(bed)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("family", ["whisper", "mllama"])
def test_aborts(make_bed, families, references, family, overlap):
    """Clients go away while they wait, right after their prefill, and while they decode."""
    (model, requests), expected = families[family], references[family]
    bed = make_bed(model, *XPU_64, overlap=overlap, max_running_requests=4)
    gone = [
        replace(requests[0], abort_at=1),
        replace(requests[1], arrive_at=2, abort_at=3),
        replace(requests[2], abort_at=12),
        replace(requests[3], arrive_at=5, abort_at=5),
        replace(requests[1], abort_at=25),
        replace(requests[0], arrive_at=6, abort_at=8),
    ]
    of = [0, 1, 2, 3, 1, 0]
    # Two that stay come in between.
    results = bed.run([gone[0], requests[1], *gone[1:], replace(requests[2], arrive_at=4)])
    stayed = results.pop(1), results.pop(-1)
    assert_all_same(stayed, [expected[1], expected[2]])
    for result, i in zip(results, of, strict=True):
        assert result.finish["type"] == "abort"
        done = len(result.output_ids)
        assert done < len(expected[i].output_ids)
        assert_same(result, expected[i].output_ids[:done], expected[i].output_logprobs[:done])
    assert max(len(result.output_ids) for result in results) > 0
    assert_at_start(bed)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("family", ["whisper", "mllama"])
def test_stop_tokens(make_bed, families, references, family, overlap):
    """One request stops at a token of its own while its batch goes on."""
    (model, requests), expected = families[family], references[family]
    ids = expected[1].output_ids
    stop = next(i for i in range(20, 70) if ids[i] not in ids[:i])
    stopping = replace(requests[1], ignore_eos=False, stop_token_ids=(ids[stop],))
    bed = make_bed(model, *XPU_64, overlap=overlap)
    first, stopped, last = bed.run([requests[0], stopping, requests[2]])
    assert_all_same([first, last], [expected[0], expected[2]])
    assert stopped.finish == {"type": "stop", "matched": ids[stop]}
    assert_same(stopped, ids[: stop + 1], expected[1].output_logprobs[: stop + 1])
    assert_at_start(bed)


@pytest.mark.parametrize(("backend", "page_size"), CONFIGS)
def test_texts_longer_than_the_encoder(make_bed, alone, whisper, backend, page_size):
    """E = 40 and up to 190 tokens of text, prompted and decoded (S2)."""
    model = whisper(40)
    expected = alone(model, LONG_TEXTS)
    bed = make_bed(model, backend, page_size)
    assert_all_same([bed.run_one(request) for request in LONG_TEXTS], expected)
    assert_all_same(bed.run(LONG_TEXTS), expected)
    assert_at_start(bed)


LONG_TEXTS = [
    Request(PROMPT, audio(40, 0), max_new_tokens=150),
    Request((4, *range(20, 120)), audio(40, 1), max_new_tokens=90),
    Request((4, *range(20, 81)), audio(40, 2), max_new_tokens=70),
]


def test_a_full_pool(make_bed, alone, whisper):
    """The books agree when the last page is taken: SGLang retracts (S3)."""
    model = whisper(40)
    expected = alone(model, FULL_POOL)
    bed = make_bed(model, *XPU_64, max_total_tokens=512, overcommit=True)
    fewest = []
    bed.probe = lambda step: fewest.append(bed.free()[0])
    results = bed.run(FULL_POOL)
    assert_all_same(results, expected)
    assert min(fewest) == 0
    assert sum(result.retractions for result in results)
    assert_at_start(bed)


FULL_POOL = [
    Request(PROMPT, audio(40, seed), max_new_tokens=140, ignore_eos=False) for seed in range(3)
]


@pytest.mark.parametrize("family", ["whisper", "mllama"])
def test_a_request_that_never_fits(make_bed, families, references, family):
    """It is told so; those before and behind it are answered."""
    (model, requests), expected = families[family], references[family]
    prompts = {
        "encoder": replace(requests[0], input_ids=(*requests[0].input_ids, *range(20, 420))),
        "text": Request(tuple(range(20, 620))),
    }
    # Pages of 64: 128 of the encoder and 404 of text, or 600, do not fit 448.
    bed = make_bed(model, *XPU_64, max_total_tokens=448)
    for request in prompts.values():
        first, refused, last = bed.run([requests[4], request, requests[4]], max_steps=300)
        assert_all_same([first, last], [expected[4]] * 2)
        assert refused.finish["type"] == "abort"
        assert re.search("too long|exceeds", refused.finish["message"])
    assert_at_start(bed)


@pytest.mark.parametrize("ignore_eos", [False, True], ids=["", "ignore_eos"])
def test_prompts_around_the_pools_size(make_bed, whisper, ignore_eos):
    """E = 100 in a pool of 448: answered or refused, never left waiting for ever.

    SGLang admits by whole pages and one to spare, and refuses by single tokens.
    """
    bed = make_bed(whisper(100), *XPU_64, max_total_tokens=448)
    # 128 of the encoder and up to 255 of text leave the page to spare; the length check
    # allows for two pages that a token each uses up, and refuses from 322 tokens on.
    for text_len in (100, 191, 192, 193, 250, 255, 256, 257, 290, 313, 314, 320):
        text = tuple(20 + i for i in range(text_len))
        request = Request(text, audio(100, 0), max_new_tokens=2, ignore_eos=ignore_eos)
        result = bed.run([request], max_steps=30)[0]
        assert result.finish["type"] == ("length" if 100 + text_len < 322 else "abort")
    assert_at_start(bed)


@pytest.mark.parametrize(
    ("config", "why"),
    [(XPU_64, "requires --page-size 1"), (("torch_native", 1), "encoder-decoder models")],
)
@pytest.mark.parametrize("family", ["whisper", "mllama"])
def test_beam_search_is_refused(make_bed, families, references, family, config, why):
    (model, requests), expected = families[family], references[family]
    bed = make_bed(model, *config)
    beam = replace(requests[0], beam_width=2, return_logprob=False)
    first, refused, last = bed.run([requests[0], beam, requests[2]])
    assert_all_same([first, last], [expected[0], expected[2]])
    assert refused.finish["type"] == "abort"
    assert why in refused.finish["message"]
    assert_at_start(bed)


# --- prefix cache, Mllama -------------------------------------------------------------

PHOTO, OTHER = image(1, 10), image(2, 11)
QUESTION, ANOTHER = (2, 5, *range(20, 60)), (2, 5, *range(30, 75))
CONVERSATION = {
    "first": Request(QUESTION, PHOTO, max_new_tokens=24),
    "again": Request(QUESTION, PHOTO, max_new_tokens=24),
    "another question": Request(ANOTHER, PHOTO, max_new_tokens=24),
    "another image": Request(QUESTION, OTHER, max_new_tokens=24),
    "no image": Request(QUESTION, max_new_tokens=24),
}


def vision_calls(bed):
    """Images that the vision model computed, as they come: a list of batch sizes."""
    calls = []
    bed.model.vision_model.register_forward_pre_hook(
        lambda module, args: calls.append(args[0].shape[0])
    )
    return calls


CACHED = [("torch_native", 16), *CONFIGS]


@pytest.mark.parametrize(("backend", "page_size"), CACHED)
def test_prefix_cache(make_bed, mllama, alone, backend, page_size):
    """The image is computed once for all that ask about it; nothing else changes."""
    requests = list(CONVERSATION.values())
    expected = dict(zip(CONVERSATION, alone(mllama, requests), strict=True))
    # A follow-up turn: its prompt holds the first answer.
    turn = Request((*QUESTION, *expected["first"].output_ids, 40, 41), PHOTO, max_new_tokens=24)
    (expected["turn"],) = alone(mllama, [turn])
    bed = make_bed(mllama, backend, page_size, radix=True)
    calls = vision_calls(bed)
    reserve = -(-68 // page_size) * page_size

    def ask(name, request, images):
        before = len(calls)
        result = bed.run_one(request)
        assert_same(result, expected[name].output_ids, expected[name].output_logprobs)
        assert sum(calls[before:]) == images
        return result

    assert ask("first", CONVERSATION["first"], 1).cached_tokens == 0
    assert ask("again", CONVERSATION["again"], 0).cached_tokens > 0
    assert ask("another question", CONVERSATION["another question"], 0).cached_tokens > 0
    assert ask("another image", CONVERSATION["another image"], 1).cached_tokens == 0
    assert ask("no image", CONVERSATION["no image"], 0).cached_tokens == 0

    ask("turn", turn, 0)

    # Together, cached and not, images and none, in one prefill
    names = [*CONVERSATION, "turn"]
    batches = Batches(bed)
    results = bed.run([*requests, turn])
    assert_all_same(results, [expected[name] for name in names])
    assert batches.seen["extend", "mixed"]
    before = len(calls)

    # Evicted as a whole, it is computed again.
    bed.evict_cached()
    assert bed.free() == bed.start
    assert ask("first", CONVERSATION["first"], 1).cached_tokens == 0
    assert len(calls) == before + 1
    # The answer's pages go, the image's stay: no part of an encoder is ever reused.
    for wanted in range(page_size, 2 * reserve + 2 * page_size, page_size):
        evict(bed, wanted)
        cached = bed.scheduler.tree_cache.evictable_size()
        ask("another question", CONVERSATION["another question"], 0 if cached >= reserve else 1)
    assert_at_start(bed)


@pytest.fixture
def fresh_memory_is_nan():
    """torch fills what it allocates and does not write."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize(
    ("backend", "page_size"), [("torch_native", 1), ("torch_native", 16), ("intel_xpu", 64)]
)
def test_cached_text_beside_a_cached_image(make_bed, mllama, alone, backend, page_size):
    """An empty encoder gives zeros also where a prefix is cached and its queries are padding."""
    question = (2, *range(20, 100))
    pair = [Request(question, PHOTO, max_new_tokens=8), Request(question, max_new_tokens=8)]
    expected = alone(mllama, pair)
    bed = make_bed(mllama, backend, page_size, radix=True)
    for request in pair:
        bed.run_one(request)
    batches = Batches(bed)
    results = bed.run(pair)
    assert batches.seen["extend", "mixed"]
    assert all(result.cached_tokens for result in results)
    assert_all_same(results, expected)
    assert_at_start(bed)


def evict(bed, tokens):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    bed.scheduler.tree_cache.evict(EvictParams(num_tokens=tokens))


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("backend", "page_size"), [("torch_native", 16), ("intel_xpu", 64)])
def test_prefix_cache_under_pressure(make_bed, mllama, alone, backend, page_size, overlap):
    """A small pool: entries are evicted between requests, requests retracted into the tree."""
    expected = alone(mllama, PRESSED)
    bed = make_bed(
        mllama,
        backend,
        page_size,
        radix=True,
        overlap=overlap,
        max_total_tokens=1024,
        overcommit=True,
    )
    for order in (PRESSED, PRESSED[::-1]):
        results = bed.run(order)
        assert_all_same(results, expected if order is PRESSED else expected[::-1])
    assert_at_start(bed)


PRESSED = [
    replace(request, max_new_tokens=60, ignore_eos=False)
    for request in [*CONVERSATION.values(), *MLLAMA]
]


@pytest.mark.parametrize("family", ["whisper"])
def test_whispers_prefix_cache_stays_off(make_bed, families, references, family):
    """Its encoder ids are zeros, which would match across clips; SGLang turns it off."""
    (model, requests), expected = families[family], references[family]
    bed = make_bed(model, *XPU_64, radix=True)
    assert bed.scheduler.tree_cache.disable
    assert_all_same(bed.run(requests), expected)
    assert_at_start(bed)
