"""Accuracy of attention: the same batch through each tree's own backend code.

The same queries, keys and values, prefill and decode, self- and cross-attention, over rows
whose pages lie at random places. The truth is attention in float64
(``pagealign.kernels.reference``); beside each error stands that of plain attention in the
inputs' own type. The kernels are the stand-in's, so this shows whether a backend hands them
the right keys; rounding on the hardware it cannot show. All that nobody has written in the
pool is NaN (keys) or 1e4 (values): reading it shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagealign.compare.accuracy_row import Row, errors
from pagealign.compare.batches import Batch, Heads

if TYPE_CHECKING:
    import torch

ENCODER_LENS = (1, 63, 64, 65, 1500, 1601, 6404)
# decoder tokens per request: a prompt's, and those of a decode around page boundaries
PROMPTS, DECODED = (4, 13, 30, 1), (5, 64, 129, 65)
MIXED = ((64, 1500, 63, 1601), (0, 1500, 0, 65), (6404, 0, 1, 0), (0, 0, 0, 0))
MHA, GQA = (4, 4, 64), (8, 2, 128)  # query heads, KV heads, size: of Whisper, of Llama
DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("self", "cross")


@dataclass(frozen=True)
class Case:
    """One batch through a backend: ``dtype`` by torch's name, ``heads`` as in ``MHA``,
    lengths as in ``batches.Batch``."""

    dtype: str
    heads: tuple[int, int, int]
    encoder_lens: tuple[int, ...]
    decoding: bool

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Case:
        """From ``dataclasses.asdict`` after a trip through JSON."""
        lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
        return cls(**(fields | lists))

    @property
    def batch(self) -> Batch:
        size = len(self.encoder_lens)
        if self.decoding:
            return Batch(self.encoder_lens, DECODED[:size])
        return Batch(self.encoder_lens, PROMPTS[:size], PROMPTS[:size])

    @property
    def name(self) -> str:
        heads = "MHA" if self.heads[0] == self.heads[1] else "GQA"
        lens = (
            sorted(set(self.encoder_lens))
            if len(set(self.encoder_lens)) == 1
            else self.encoder_lens
        )
        return f"{heads}, E = {', '.join(map(str, lens))}"


@dataclass(frozen=True)
class Contents:
    """A case's tensors: per kind of attention ``q`` ``(tokens, query heads, size)``, ``k``
    and ``v`` ``(sum of lengths, KV heads, size)``, requests one after the other."""

    q: dict[str, torch.Tensor]
    k: dict[str, torch.Tensor]
    v: dict[str, torch.Tensor]


def cases(quick: bool) -> list[Case]:
    """Every case, for each page size."""
    encoder_lens = (1, 65, 1500) if quick else ENCODER_LENS
    batches = [(e,) * 3 for e in encoder_lens] + list(MIXED[1:2] if quick else MIXED)
    return [
        Case(dtype, heads, batch, decoding)
        for dtype in DTYPES
        for heads in (MHA, GQA)
        for batch in batches
        for decoding in (False, True)
    ]


def contents_of(case: Case) -> Contents:
    """Normal random numbers that depend on the case alone, not on rows or page sizes."""
    import torch

    batch, dtype = case.batch, getattr(torch, case.dtype)
    query, kv, size = case.heads
    generator = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))
    lengths = {"self": sum(batch.seq_lens), "cross": sum(batch.encoder_lens)}

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, size, generator=generator).to(dtype)

    return Contents(
        q={kind: normal(sum(batch.q_lens), query) for kind in KINDS},
        k={kind: normal(lengths[kind], kv) for kind in KINDS},
        v={kind: normal(lengths[kind], kv) for kind in KINDS},
    )


def truth_and_plain(case: Case, contents: Contents, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 and in the inputs' type: ``(tokens, query heads, size)`` each."""
    import torch

    from pagealign.kernels.reference import ragged_attention

    batch = case.batch
    lengths = batch.seq_lens if kind == "self" else batch.encoder_lens
    q, k, v = contents.q[kind], contents.k[kind], contents.v[kind]
    truth, plain = (
        ragged_attention(
            q,
            k,
            v,
            _offsets(batch.q_lens),
            _offsets(lengths),
            scale=case.heads[2] ** -0.5,
            causal=kind == "self",
            dtype=dtype,
        ).out
        for dtype in (torch.float64, q.dtype)
    )
    return truth, plain


def attend(case: Case, page_size: int, aligned: bool) -> dict[str, torch.Tensor]:
    """What the backend of this process's tree makes of a case, per kind of attention:
    ``(tokens, query heads, size)``."""
    import torch

    from pagealign.compare.backend_harness import CROSS, SELF, Rig

    batch, contents = case.batch, contents_of(case)
    heads = Heads(*case.heads)
    # other rows for other cases; the approaches' differ too, in length if in nothing else
    seed = zlib.crc32(repr((case, page_size)).encode())
    rig = Rig(heads, getattr(torch, case.dtype), page_size, batch, aligned=aligned, seed=seed)
    given: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
    for kind, layer, lengths in (
        ("self", SELF, batch.seq_lens),
        ("cross", CROSS, batch.encoder_lens),
    ):
        k, v = contents.k[kind].split(lengths), contents.v[kind].split(lengths)
        if kind == "cross":
            new = lengths if batch.encoder_is_new else (0,) * len(lengths)
        else:
            new = batch.q_lens
        old = [total - n for total, n in zip(lengths, new, strict=True)]
        for request, n in enumerate(old):
            rig.write(layer, request, k[request][:n], v[request][:n])
        some = sum(new) > 0
        given[kind] = (
            torch.cat([x[n:] for x, n in zip(k, old, strict=True)]) if some else None,
            torch.cat([x[n:] for x, n in zip(v, old, strict=True)]) if some else None,
        )
    with torch.no_grad():
        rig.build_metadata()
        return {
            kind: rig.attend(layer, contents.q[kind].flatten(1), *given[kind]).view(
                -1, heads.query, heads.size
            )
            for kind, layer in (("self", SELF), ("cross", CROSS))
        }


def rows(
    cases: Sequence[Case],
    page_sizes: Sequence[int],
    outputs: dict[str, list[dict[str, torch.Tensor]]],
) -> Iterator[Row]:
    """The rows of all cases, from each approach's ``attend``, page size by page size."""
    for n, case in enumerate(cases):
        contents = contents_of(case)
        for kind in KINDS:
            truth, plain = truth_and_plain(case, contents, kind)
            for name, found in outputs.items():
                for p, page_size in enumerate(page_sizes):
                    yield Row(
                        level="attention",
                        approach=name,
                        subject=f"{kind}-attention, {'decode' if case.decoding else 'prefill'}",
                        case=case.name,
                        dtype=case.dtype,
                        page_size=page_size,
                        **errors(found[p * len(cases) + n][kind], truth, plain),
                    )


def _offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.tensor((0, *lengths)).cumsum(0)
