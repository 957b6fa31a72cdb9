"""Random queries, keys and values, and pools that hold them on random physical pages."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from pagealign.bench.shapes import Shape

T = TypeVar("T")
FOREIGN = 1000.0  # in slots that nobody owns: a kernel that reads one is far off


@dataclass(frozen=True)
class Pool:
    """A paged KV pool as SGLang lays it out, the rows of every input set in it.

    ``k``, ``v``: ``(pages, page_size, kv_heads, head_size)``. ``page_table``: int32
    ``(sets, batch, columns)``. ``slots``: int64 ``(sets, batch, kv_len)``.
    """

    page_size: int
    k: Tensor
    v: Tensor
    page_table: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Inputs:
    """``sets`` batches of one shape, to be called in turn.

    ``q``: ``(sets, batch * q_len, heads, head_size)``. ``k``, ``v``: what the pools hold, in
    order: ``(sets, batch, kv_len, kv_heads, head_size)``. ``cu_seqlens_q``,
    ``cu_seqlens_k``: int32 ``(batch + 1,)``; ``seqlens_k``: int32 ``(batch,)``.
    """

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqlens_k: Tensor
    seed: int
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def sets(self) -> int:
        return len(self.q)

    def pool(self, page_size: int) -> Pool:
        """The pool of that page size."""
        return self.once(page_size, lambda: _fill_pool(self, page_size))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returned when ``key`` was asked for first: pools are large."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def make_inputs(shape: Shape, sets: int, device: str = "cpu", seed: int = 0) -> Inputs:
    """Normally distributed; the same for the same arguments and device."""
    dtype, generator = getattr(torch, shape.dtype), torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        # one set at a time: in float32 all of them may not fit
        out = torch.empty(sets, *size, dtype=dtype, device=device)
        for one in out:
            one.copy_(torch.randn(size, generator=generator, device=device))
        return out

    kv_size = (shape.batch, shape.kv_len, shape.kv_heads, shape.head_size)
    counts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    return Inputs(
        shape=shape,
        q=normal(shape.batch * shape.q_len, shape.heads, shape.head_size),
        k=normal(*kv_size),
        v=normal(*kv_size),
        cu_seqlens_q=counts * shape.q_len,
        cu_seqlens_k=counts * shape.kv_len,
        seqlens_k=torch.full((shape.batch,), shape.kv_len, dtype=torch.int32, device=device),
        seed=seed,
    )


def _fill_pool(inputs: Inputs, page_size: int) -> Pool:
    shape, device = inputs.shape, inputs.k.device
    columns = -(-shape.kv_len // page_size)
    owned = inputs.sets * shape.batch * columns
    generator = torch.Generator().manual_seed(inputs.seed)
    pages = 1 + torch.randperm(owned, generator=generator)  # page 0 is padding, as in SGLang
    table = pages.view(inputs.sets, shape.batch, columns).to(device)
    position = torch.arange(shape.kv_len, device=device)
    slots = table[:, :, position // page_size] * page_size + position % page_size

    def filled(values: Tensor) -> Tensor:
        size = ((owned + 1) * page_size, shape.kv_heads, shape.head_size)
        out = torch.full(size, FOREIGN, dtype=values.dtype, device=device)
        for where, what in zip(slots, values, strict=True):
            out[where.flatten()] = what.flatten(0, 1)
        return out.view(-1, page_size, *size[1:])

    return Pool(page_size, filled(inputs.k), filled(inputs.v), table.int(), slots)


def as_single_slots(pool: Pool) -> Pool:
    """The same pool seen as pages of one slot, as stock SGLang's XPU backend sees it."""
    return Pool(
        page_size=1,
        k=pool.k.flatten(0, 1).unsqueeze(1),
        v=pool.v.flatten(0, 1).unsqueeze(1),
        page_table=pool.slots.int(),
        slots=pool.slots,
    )
