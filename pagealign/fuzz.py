"""Burst fuzz: random mixes of requests, each compared with itself alone at page size 1.

A *catalogue* is a fixed list of distinct requests to one tiny model. Each is answered
once, alone, at page size 1 on ``torch_native`` without a prefix cache: its reference. A
*burst* sends random entries at random steps through one configuration of the scheduler,
some of them aborted; every answer has to be its reference, an aborted one a beginning of
it. Everything follows from a seed.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from pagealign.bed import Bed, Request, Result

LOGPROB_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Setting:
    """One configuration of the scheduler. ``tight``: a small pool, and retractions."""

    backend: str
    page_size: int
    overlap: bool = False
    radix: bool = False
    tight: bool = False

    def bed(self, model: Path) -> Bed:
        return Bed(
            model,
            self.backend,
            self.page_size,
            overlap=self.overlap,
            radix=self.radix,
            overcommit=self.tight,
            retract_every=11 if self.tight else None,
            # room for the longest request of the catalogues and little else, or for all
            max_total_tokens=640 + self.page_size if self.tight else 8192,
        )


ALIGNED_SETTINGS = tuple(
    Setting(backend, page_size, overlap, radix=not tight or overlap, tight=tight)
    for backend, page_size in (
        ("torch_native", 1),
        ("torch_native", 64),
        ("torch_native", 128),
        ("intel_xpu", 64),
        ("intel_xpu", 128),
    )
    for overlap in (False, True)
    for tight in (False, True)
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A request whose answer is not its reference; ``burst`` is the seed that shows it."""

    setting: Setting
    burst: int
    entry: int
    got: Result
    expected: Result

    def __str__(self) -> str:
        ids = zip(self.got.output_ids, self.expected.output_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(ids) if a != b), None)
        return (
            f"{self.setting}, burst {self.burst}, entry {self.entry}: first other token at "
            f"{first}, {len(self.got.output_ids)} of {len(self.expected.output_ids)} tokens, "
            f"finish {self.got.finish}"
        )


@dataclasses.dataclass
class Tally:
    """What a fuzz did. ``requests`` were compared; a crash ended its burst, and after a leak
    the pool was not at its start.
    """

    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    with_encoder: int = 0
    cached_tokens: int = 0
    mixed_extends: int = 0
    mixed_decodes: int = 0
    seconds: float = 0.0
    differences: list[Difference] = dataclasses.field(default_factory=list)
    crashes: list[str] = dataclasses.field(default_factory=list)
    leaks: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests compared ({self.with_encoder} with an encoder, "
            f"{self.aborted} aborted, {self.retractions} retractions, {self.cached_tokens} "
            f"cached tokens; mixed batches: {self.mixed_extends} in prefill, "
            f"{self.mixed_decodes} in decode): {len(self.differences)} differ, "
            f"{len(self.crashes)} crashes, {len(self.leaks)} leaks; {self.seconds:.0f} s"
        )


def whisper_catalogue(encoder_len: int, size: int, seed: int = 0) -> list[Request]:
    """Requests to a tiny Whisper of ``encoder_len``; every third is text only."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    clips = [torch.randn(1, 80, 2 * encoder_len, generator=generator) for _ in range(6)]
    return [
        dataclasses.replace(
            _request(rng, [4, *_text(rng, rng.choice([2, 5, 40]))]),
            features=None if i % 3 == 2 else rng.choice(clips),
        )
        for i in range(size)
    ]


def mllama_catalogue(size: int, seed: int = 0) -> list[Request]:
    """Requests to the tiny Mllama: one to three images of which tiles are padding, or none.

    Few images and few beginnings of questions, so that a prefix cache finds some.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    images = [
        (torch.randn(1, count, 4, 3, 56, 56, generator=generator), tiles)
        for count, tiles in ((1, 4), (1, 2), (1, 1), (2, 4), (2, 1), (3, 3))
    ]
    beginnings = [_text(rng, n) for n in (3, 20, 70)]
    requests = []
    for i in range(size):
        features, tiles = (None, 4) if i % 3 == 2 else rng.choice(images)
        marks = [5] * (0 if features is None else features.shape[1])
        text = [2, *marks, *rng.choice(beginnings), *_text(rng, rng.choice([1, 4, 30]))]
        requests.append(dataclasses.replace(_request(rng, text), features=features, tiles=tiles))
    return requests


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 1000) for _ in range(length)]


def _request(rng: random.Random, ids: Sequence[int]) -> Request:
    return Request(
        tuple(ids),
        # mostly short; some past a page of 64
        max_new_tokens=rng.choice([1, 2, 6, 10, 16, 24, 40, 90, 90]),
        ignore_eos=False,
        # ordinary tokens of the vocabulary, so that some answers end early
        stop_token_ids=tuple(rng.randrange(10, 1000) for _ in range(rng.choice([0, 0, 20]))),
    )


def references(model: Path, catalogue: Iterable[Request]) -> list[Result]:
    """Each request alone, at page size 1 on torch_native without a prefix cache."""
    bed = Setting("torch_native", 1).bed(model)
    try:
        return [bed.run_one(request) for request in catalogue]
    finally:
        bed.close()


def burst(catalogue: Sequence[Request], seed: int, size: int) -> list[tuple[int, Request]]:
    """``size`` entries of the catalogue with the steps at which each comes and goes."""
    rng = random.Random(seed)
    entries = []
    # Some bursts come at once, others drop by drop.
    spread = rng.choice([0, 3, 60])
    for _ in range(size):
        entry = rng.randrange(len(catalogue))
        arrive = rng.randint(0, spread)
        abort = arrive + rng.randint(0, 30) if rng.random() < 0.15 else None
        request = dataclasses.replace(catalogue[entry], arrive_at=arrive, abort_at=abort)
        entries.append((entry, request))
    return entries


def fuzz(
    model: Path,
    catalogue: Sequence[Request],
    expected: Sequence[Result],
    settings: Iterable[Setting],
    *,
    bursts: int,
    size: int = 20,
    seed: int = 0,
) -> Tally:
    """Send ``bursts`` bursts of ``size`` requests through each of ``settings``."""
    tally = Tally()
    started = time.monotonic()
    for number, setting in enumerate(settings):
        seeds = [seed + 1000 * number + i for i in range(bursts)]
        bed = None
        for burst_seed in seeds:
            bed = bed or setting.bed(model)
            _watch(bed, tally)
            entries = burst(catalogue, burst_seed, size)
            try:
                results = bed.run(request for _, request in entries)
            except Exception as fault:  # what kills a scheduler, whatever it is
                tally.crashes.append(f"{setting}, burst {burst_seed}: {fault!r}")
                bed.close()
                bed = None
                continue
            for (entry, request), result in zip(entries, results, strict=True):
                _compare(tally, setting, burst_seed, entry, request, result, expected[entry])
            bed.evict_cached()
            if bed.free() != bed.start:
                tally.leaks.append(f"{setting}, burst {burst_seed}: {bed.free()}, not {bed.start}")
        if bed is not None:
            bed.close()
    tally.seconds = time.monotonic() - started
    return tally


def _watch(bed: Bed, tally: Tally) -> None:
    def on_batch(batch):
        lens = batch.encoder_lens_cpu
        if any(lens) and not all(lens):
            if batch.forward_mode.is_decode():
                tally.mixed_decodes += 1
            else:
                tally.mixed_extends += 1

    bed.on_batch = on_batch


def _compare(
    tally: Tally,
    setting: Setting,
    seed: int,
    entry: int,
    request: Request,
    result: Result,
    expected: Result,
) -> None:
    tally.requests += 1
    tally.with_encoder += request.features is not None
    tally.retractions += result.retractions
    tally.cached_tokens += result.cached_tokens
    aborted = request.abort_at is not None and result.finish["type"] == "abort"
    tally.aborted += aborted
    if not same(result, expected, beginning=aborted):
        tally.differences.append(Difference(setting, seed, entry, result, expected))


def same(result: Result, expected: Result, beginning: bool = False) -> bool:
    """Equal ids, log-probabilities within 1e-4 and the same end; or a beginning of that."""
    count = len(result.output_ids)
    if not beginning and result.finish != expected.finish:
        return False
    if not beginning and count != len(expected.output_ids):
        return False
    if result.output_ids != expected.output_ids[:count]:
        return False
    pairs = list(_pairs(result.output_logprobs, expected.output_logprobs))
    # A NaN compares as different.
    return len(pairs) == count and all(abs(a - b) <= LOGPROB_TOLERANCE for a, b in pairs)


def _pairs(a: Sequence[float], b: Sequence[float]) -> Iterator[tuple[float, float]]:
    return zip(a, b, strict=False)
