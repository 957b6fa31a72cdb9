"""What is attended: the shapes of Whisper's and Llama-Vision's attention in SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cross", "self"]
Phase = Literal["decode", "prefill"]
ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Model:
    """Attention of a decoder: ``layers`` that attend to the encoder and as many to the text.

    From the models' config.json. ``encoder_len`` and ``prompt_len`` in tokens.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    encoder_len: int
    prompt_len: int


BASE = Model("whisper-base", 6, 8, 8, 64, 1500, 4)
LARGE = Model("whisper-large-v3", 32, 20, 20, 64, 1500, 4)
# the same attention as large-v3, in fewer layers: its kernels are not timed twice
TURBO = Model("whisper-large-v3-turbo", 4, 20, 20, 64, 1500, 4)
# 8 layers of cross-attention; 1601 patches per tile, at most 4 tiles
LLAMA_1 = Model("llama-3.2-11b-vision, 1 tile", 8, 32, 8, 128, 1601, 32)
LLAMA_4 = Model("llama-3.2-11b-vision, 4 tiles", 8, 32, 8, 128, 6404, 32)


@dataclass(frozen=True)
class Shape:
    """One call of a kernel: ``batch`` requests of ``q_len`` queries over ``kv_len`` keys.

    A prefill of self-attention is causal. A decode step has one query per request, which
    may read all keys, causal or not.
    """

    model: str
    kind: Kind
    phase: Phase
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"

    @property
    def causal(self) -> bool:
        return self.kind == "self" and self.q_len > 1

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that one call has to read."""
        row = self.kv_heads * self.head_size * ITEMSIZE[self.dtype]
        return 2 * self.batch * self.kv_len * row

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.kind} {self.phase}, batch {self.batch}, {self.q_len} x "
            f"{self.kv_len}, {self.dtype}"
        )


def cross(model: Model, phase: Phase, batch: int, dtype: str = "bfloat16") -> Shape:
    q_len = 1 if phase == "decode" else model.prompt_len
    return _shape(model, "cross", phase, batch, q_len, model.encoder_len, dtype)


def self_decode(model: Model, batch: int, decoded: int) -> Shape:
    return _shape(model, "self", "decode", batch, 1, decoded, "bfloat16")


def self_prefill(model: Model, batch: int) -> Shape:
    return _shape(model, "self", "prefill", batch, model.prompt_len, model.prompt_len, "bfloat16")


def _shape(
    model: Model, kind: Kind, phase: Phase, batch: int, q_len: int, kv_len: int, dtype: str
) -> Shape:
    return Shape(
        model=model.name,
        kind=kind,
        phase=phase,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        dtype=dtype,
    )


HEADLINE = cross(LARGE, "decode", 8)
PAGE_SIZES = (1, 16, 32, 64, 128)


def grid(quick: bool) -> tuple[list[Shape], tuple[int, ...]]:
    """The shapes to measure, the headline first, and the pool's page sizes."""
    if quick:
        return list(_quick()), (64, 128)
    return list(_full()), PAGE_SIZES


def _quick() -> Iterator[Shape]:
    yield HEADLINE
    yield cross(BASE, "decode", 8)
    for model in (LARGE, BASE):
        for decoded in (8, 448):
            yield self_decode(model, 8, decoded)
    yield cross(LARGE, "decode", 1)
    yield cross(LARGE, "prefill", 8)
    yield cross(LLAMA_1, "decode", 4)


def _full() -> Iterator[Shape]:
    """What matters most first: a slow machine may not get to the end."""
    yield HEADLINE
    yield cross(BASE, "decode", 8)
    for batch in (8, 1, 32):
        for model in (LARGE, BASE):
            if batch != 8:
                yield cross(model, "decode", batch)
            for decoded in (8, 64, 224, 448):
                yield self_decode(model, batch, decoded)
    for model in (LLAMA_1, LLAMA_4):
        for batch in (1, 4):
            yield cross(model, "decode", batch)
        yield cross(model, "prefill", 1)
    for model in (LARGE, BASE):
        yield cross(model, "prefill", 8)
        yield self_prefill(model, 8)
        yield cross(model, "decode", 8, "float32")
    for batch in (2, 4, 16):
        yield cross(LARGE, "decode", batch)
    yield cross(LLAMA_1, "decode", 16)
    yield cross(LLAMA_1, "decode", 4, "float32")
