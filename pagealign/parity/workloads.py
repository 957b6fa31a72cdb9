"""The workloads: which requests, in which configuration of the scheduler.

Everything follows from seeds. A workload is a series of *bursts* through one scheduler,
each served until it is idle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from pagealign.bed import Request

BACKENDS = ("torch_native", "flashinfer", "fa3", "intel_xpu")
MODELS = ("whisper", "mllama", "llama")
PROMPT = (4, 10, 11)
WHISPER_LEN = 40
WALK_STEPS = 200


@dataclass(frozen=True)
class Burst:
    """Requests with the steps at which they come and go, counted from the burst's start."""

    name: str
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Workload:
    """Bursts through one scheduler; ``options`` are the Bed's. ``graph``: decode through the
    graph's metadata. ``expected``: the name in ``expected.ANSWERS`` of the fault of stock
    that this workload meets, if it is there for one."""

    name: str
    model: str
    backend: str
    bursts: tuple[Burst, ...]
    page_size: int = 1
    graph: bool = False
    expected: str | None = None
    options: dict = field(default_factory=dict)


def audio(seed: int, encoder_len: int = WHISPER_LEN) -> torch.Tensor:
    """Random input features float32 ``[1, 80, 2E]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 80, 2 * encoder_len, generator=generator)


def image(seed: int, count: int = 1) -> torch.Tensor:
    """Random images of four tiles, float32 ``[1, count, 4, 3, 56, 56]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, 4, 3, 56, 56, generator=generator)


def request(model: str, text: Sequence[int], seed: int | None = None, **fields) -> Request:
    """A request to one of the tiny models; without a ``seed`` it has no encoder.

    Mllama: two images where the seed is odd, so that lengths of encoders differ.
    """
    if model == "whisper":
        return Request((4, *text), None if seed is None else audio(seed), **fields)
    if model == "mllama" and seed is not None:
        pictures = image(seed, 1 + seed % 2)
        return Request((2, *[5] * pictures.shape[1], *text), pictures, **fields)
    return Request((2, *text), **fields)


def text(rng: random.Random, length: int) -> list[int]:
    """Ordinary tokens of the tiny models' vocabulary."""
    return [rng.randrange(10, 1000) for _ in range(length)]


def _plain(model: str) -> tuple[Burst, ...]:
    """Alone, together, one after another, without encoders, and clients that go away."""
    rng = random.Random(1)
    encoders = [None] * 4 if model == "llama" else [0, 1, 2, 3]
    several = [
        request(model, text(rng, 3 + 9 * i), seed, max_new_tokens=5 + 2 * i)
        for i, seed in enumerate(encoders)
    ]
    bursts = [
        Burst("single", (replace(several[0], max_new_tokens=12, logprob_start_len=0),)),
        Burst("batched", tuple(several)),
        Burst("one by one", tuple(replace(r, arrive_at=2 * i) for i, r in enumerate(several))),
        Burst("abort", tuple(replace(r, abort_at=1 + i) for i, r in enumerate(several))),
    ]
    if model != "llama":
        texts = tuple(request(model, text(rng, n), max_new_tokens=6) for n in (2, 30))
        bursts.append(Burst("text only", texts))
        # Two rows: with three, stock masks the wrong rows of Mllama (40476).
        bursts.append(Burst("mixed", (several[1], texts[0])))
        late = tuple(replace(t, arrive_at=2 + i) for i, t in enumerate(texts))
        bursts.append(Burst("text beside encoders", (*several[:2], *late)))
    return tuple(bursts)


def walk(model: str, steps: int, seed: int = 0) -> Burst:
    """Random arrivals over ``steps`` steps, some aborted, some ended by a stop token.

    To Mllama all of them send images, since stock is wrong where they mix (40476).
    """
    rng = random.Random(seed)
    requests = []
    arrive = 0
    while arrive < steps:
        encoder = None if model == "llama" else rng.choice([0, 1, 2, 3])
        if model == "whisper" and rng.random() < 0.3:
            encoder = None
        tokens = rng.choice([1, 3, 8, 20])
        requests.append(
            request(
                model,
                text(rng, rng.choice([1, 5, 30])),
                encoder,
                max_new_tokens=tokens,
                ignore_eos=False,
                stop_token_ids=tuple(text(rng, rng.choice([0, 20]))),
                arrive_at=arrive,
                abort_at=arrive + rng.randrange(8) if rng.random() < 0.15 else None,
            )
        )
        arrive += rng.randrange(8)
    return Burst(f"walk of {steps} steps", tuple(requests))


def _tight(model: str) -> dict:
    """A pool that holds the longest request and little else, so that some are retracted."""
    pool = 640 if model == "mllama" else 256
    return dict(overcommit=True, retract_every=7, max_total_tokens=pool)


def of_model(model: str, backend: str, page_size: int = 1) -> Iterator[Workload]:
    """The workloads of a model on a backend that have to be the same in both trees."""

    def make(name: str, bursts: Sequence[Burst], **options) -> Workload:
        pages = "" if page_size == 1 else f"/page {page_size}"
        options = {"max_total_tokens": 2048, **options}
        full = f"{model}/{backend}{pages}/{name}"
        return Workload(full, model, backend, tuple(bursts), page_size, options=options)

    plain = _plain(model)
    yield make("plain", plain)
    yield make("overlap", plain, overlap=True)
    long = tuple(replace(r, max_new_tokens=24) for r in plain[1].requests)
    yield make("retraction", (Burst("batched", long),), **_tight(model))
    yield make("walk", (walk(model, WALK_STEPS),), **_tight(model))
    if model == "llama":
        rng = random.Random(2)
        lengths = (150, 40, 90)
        prompts = tuple(request(model, text(rng, n), max_new_tokens=6) for n in lengths)
        again = tuple(replace(p, input_ids=(*p.input_ids, 77)) for p in prompts)
        yield make("chunked", (Burst("chunked prefill", prompts),), chunked_prefill_size=64)
        yield make("radix", (Burst("first", prompts), Burst("cached", again)), radix=True)
    if model == "mllama":
        asked = _asked_again(model)
        yield make("radix", asked, radix=True)
        yield make("radix overlap", asked, radix=True, overlap=True)


def _asked_again(model: str) -> tuple[Burst, ...]:
    """The same images, other questions: the prefix cache has the encoder."""
    rng = random.Random(3)
    first = [request(model, text(rng, 6), seed, max_new_tokens=4) for seed in (0, 1)]
    again = [request(model, text(rng, 9), seed, max_new_tokens=4) for seed in (0, 1)]
    return (
        Burst("first", tuple(first)),
        Burst("same images", (again[0],)),
        Burst("same images together", tuple(again)),
    )
