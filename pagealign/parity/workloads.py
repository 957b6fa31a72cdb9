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
        if model != "mllama":  # stock masks the wrong rows: 40476
            bursts.append(Burst("mixed", (several[1], texts[0], several[2])))
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


def of_model(
    model: str, backend: str, page_size: int = 1, names: Sequence[str] = ()
) -> Iterator[Workload]:
    """The workloads of a model on a backend that have to be the same in both trees; those
    of ``names`` only, if any are given."""
    found = _bursts(model)
    every = [name for name in found if name != "short"]  # a beginning of "plain"
    if backend == "torch_native":
        every.remove("graph")  # it has none
    for name in names or every:
        bursts, options = found[name]
        graph = name == "graph"
        pages = "" if page_size == 1 else f"/page {page_size}"
        options = {"max_total_tokens": 2048, **options}
        if "chunked_prefill_size" in options:
            options["chunked_prefill_size"] = max(64, page_size)
        full = f"{model}/{backend}{pages}/{name}"
        fault = None
        if graph and backend == "fa3" and model != "llama":
            fault = "fa3-graph-tables"
        yield Workload(full, model, backend, tuple(bursts), page_size, graph, fault, options)


def _bursts(model: str) -> dict[str, tuple[Sequence[Burst], dict]]:
    """By name: bursts and what the Bed is told besides."""
    plain = _plain(model)
    long = tuple(replace(r, max_new_tokens=24) for r in plain[1].requests)
    found = {
        "short": (plain[:2], {}),
        "plain": (plain, {}),
        "graph": (plain, {}),
        "overlap": (plain, dict(overlap=True)),
        "retraction": ((Burst("batched", long),), _tight(model)),
        "walk": ((walk(model, WALK_STEPS),), _tight(model)),
    }
    if model == "llama":
        rng = random.Random(2)
        prompts = tuple(request(model, text(rng, n), max_new_tokens=6) for n in (150, 40, 90))
        again = tuple(replace(p, input_ids=(*p.input_ids, 77)) for p in prompts)
        found["chunked"] = (Burst("chunked prefill", prompts),), dict(chunked_prefill_size=64)
        found["radix"] = (Burst("first", prompts), Burst("cached", again)), dict(radix=True)
    if model == "mllama":
        found["radix"] = _asked_again(model), dict(radix=True)
        found["radix overlap"] = _asked_again(model), dict(radix=True, overlap=True)
    return found


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


def with_faults(backend: str) -> Iterator[Workload]:
    """Where stock is wrong at page size 1 too: ``expected.ANSWERS`` has the names."""

    def make(fault: str, model: str, bursts: Sequence[Burst], **options) -> Workload:
        options = {"max_total_tokens": 2048, **options}
        name = f"{model}/{backend}/{fault}"
        return Workload(name, model, backend, tuple(bursts), expected=fault, options=options)

    rng = random.Random(4)
    steps = dict(max_new_tokens=8)
    photos = [request("mllama", text(rng, 4), seed, **steps) for seed in (0, 1)]
    questions = [request("mllama", text(rng, n), **steps) for n in (2, 9)]
    mixed = (photos[0], questions[0], photos[1], questions[1])
    yield make("mllama-row-mask", "mllama", (Burst("mixed", mixed),))
    clips = tuple(request("whisper", text(rng, 5), seed, **steps) for seed in range(3))
    budget = dict(chunked_prefill_size=64)
    yield make("cut-encoder", "whisper", (Burst("clips in chunks", clips),), **budget)
    scored = replace(photos[0], logprob_start_len=30)
    again = (Burst("first", (photos[0],)), Burst("scored", (scored,)))
    yield make("logprob-in-encoder", "mllama", again, radix=True)


def select(form: str) -> list[Workload]:
    """The workloads of a form: ``full``, ``quick``, ``prefix`` (per prefix of the series),
    ``pages`` (FlashInfer at page sizes above 1), or ``short``, for planted faults."""
    found: list[Workload] = []
    match form:
        case "full":
            for backend in BACKENDS:
                found += of_model("whisper", backend)
                found += of_model("mllama", backend)
                found += of_model("llama", backend)
                for page_size in (64,) if backend == "intel_xpu" else (16, 64):
                    names = ("plain", "retraction", "chunked", "radix")
                    found += of_model("llama", backend, page_size, names)
                found += with_faults(backend)
        case "quick":
            for backend in BACKENDS:
                found += of_model("whisper", backend, names=("plain",))
            found += of_model("mllama", "flashinfer", names=("plain",))
            found += of_model("llama", "flashinfer", 16, names=("chunked", "radix"))
            found += with_faults("flashinfer")
        case "prefix":
            found += of_model("whisper", "flashinfer", names=("plain",))
            found += of_model("mllama", "torch_native", names=("plain", "radix"))
            found += of_model("whisper", "fa3", names=("retraction",))
            found += of_model("whisper", "intel_xpu", names=("retraction",))
            found += of_model("llama", "flashinfer", 16, names=("radix",))
            found += with_faults("torch_native")
        case "pages":
            for model in ("whisper", "mllama"):
                for page_size in (1, 16, 64):
                    names = ("plain", "retraction")
                    found += of_model(model, "flashinfer", page_size, names)
        case "short":
            found += of_model("whisper", "flashinfer", names=("short",))
            found += of_model("whisper", "fa3", names=("short",))
        case _:
            raise ValueError(form)
    return found
