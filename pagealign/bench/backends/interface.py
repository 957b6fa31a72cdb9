"""What a backend is: a device, kernels for the approaches, and whether it can run here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagealign.bench.inputs import Inputs, Pool, as_single_slots
from pagealign.bench.records import BASE_PAGE, Approach
from pagealign.bench.shapes import Shape

Call = Callable[[], Tensor]
ROWS_PAGE = BASE_PAGE  # pages of the rows that the other approaches start from


@dataclass(frozen=True)
class Variant:
    """One thing to time. ``page_size`` is the pool's: for ``in_place`` also the kernel's."""

    approach: Approach
    page_size: int
    kernel: str


class Backend(ABC):
    """Kernels of one library on one device.

    What ``prepare`` returns is timed: everything that a server does once per step, such as
    tables and plans, is done before.
    """

    name: str
    device: str

    @abstractmethod
    def why_not(self) -> str | None:
        """Why it can't run here, in one line; None if it can."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """What its figures depend on: packages, instruction set, device."""

    @abstractmethod
    def refuses(self, shape: Shape) -> str | None:
        """Why this shape can't be run; None if it can."""

    @abstractmethod
    def variants(self, shape: Shape, page_sizes: tuple[int, ...]) -> list[Variant]:
        """What it can run of this shape, the copy alone included."""

    @abstractmethod
    def paged(self, kernel: str, inputs: Inputs, pool: Pool, q: Tensor, table: Tensor) -> Call:
        """A kernel on one input set, in place: ``q`` ``(batch * q_len, heads, head_size)``,
        ``table`` int32 ``(batch, columns)``."""

    @abstractmethod
    def ragged(self, kernel: str, inputs: Inputs, q: Tensor, copy: Call) -> Call:
        """``copy``, then a kernel on what it returns."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the device has done everything it was given."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Size of the device's last-level cache; 0 if unknown."""

    def own_order(self, pool: Pool) -> Pool:
        """The pool as the paged kernels want it, if not as SGLang lays it out."""
        return pool

    def prepare(self, variant: Variant, inputs: Inputs) -> list[Call]:
        """A call per input set. It returns ``(batch * q_len, heads, head_size)``, or for the
        copy alone keys and values, ``(2, batch * kv_len, kv_heads, head_size)``."""
        if variant.approach is Approach.gather:
            return gathers(inputs, variant.page_size)
        if variant.approach is Approach.gather_varlen:
            copies = gathers(inputs, variant.page_size)
            return [
                self.ragged(variant.kernel, inputs, q, copy)
                for q, copy in zip(inputs.q, copies, strict=True)
            ]
        pool = inputs.once(
            (self.name, variant.approach, variant.page_size), lambda: self._pool(variant, inputs)
        )
        return [
            self.paged(variant.kernel, inputs, pool, q, table)
            for q, table in zip(inputs.q, pool.page_table, strict=True)
        ]

    def _pool(self, variant: Variant, inputs: Inputs) -> Pool:
        pool = inputs.pool(variant.page_size)
        view = variant.approach is Approach.page1_view
        return self.own_order(as_single_slots(pool) if view else pool)


def gathers(inputs: Inputs, page_size: int) -> list[Call]:
    """Copies of the keys and values of each set, in order, as the varlen approach makes them.

    Into one buffer that is there already: an allocator's page faults are no part of the
    approach, and on a device its allocator keeps the buffer too.
    """
    pool = inputs.pool(page_size)
    k, v = pool.k.flatten(0, 1), pool.v.flatten(0, 1)
    out = torch.empty(
        (2, inputs.shape.batch * inputs.shape.kv_len, *k.shape[1:]), dtype=k.dtype, device=k.device
    )

    def gather(slots: Tensor) -> Tensor:
        torch.index_select(k, 0, slots, out=out[0])
        torch.index_select(v, 0, slots, out=out[1])
        return out

    return [lambda slots=slots: gather(slots) for slots in pool.slots.flatten(1)]
