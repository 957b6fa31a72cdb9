"""Plain PyTorch: runs anywhere, and says what the others should compute. Not a fast kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagealign.bench.backends.interface import (
    ROWS_PAGE,
    Backend,
    Call,
    Variant,
)
from pagealign.bench.inputs import Inputs, Pool
from pagealign.bench.machine import last_level_cache_bytes
from pagealign.bench.records import Approach
from pagealign.bench.shapes import Shape

KERNEL = "scaled_dot_product_attention"


class Plain(Backend):
    """Every approach in PyTorch's own operators: whole pages are fetched, then attended."""

    name = "torch"
    device = "cpu"

    def why_not(self) -> str | None:
        return None

    def versions(self) -> dict[str, str]:
        return {"instruction set of its kernels": torch.backends.cpu.get_cpu_capability()}

    def refuses(self, shape: Shape) -> str | None:
        return None

    def variants(self, shape: Shape, page_sizes: tuple[int, ...]) -> list[Variant]:
        return [
            *(Variant(Approach.in_place, size, KERNEL) for size in page_sizes),
            Variant(Approach.page1_view, ROWS_PAGE, KERNEL),
            Variant(Approach.gather_varlen, ROWS_PAGE, KERNEL),
            Variant(Approach.gather, ROWS_PAGE, "index_select"),
        ]

    def paged(self, kernel: str, inputs: Inputs, pool: Pool, q: Tensor, table: Tensor) -> Call:
        shape = inputs.shape
        return lambda: attend(shape, q, *_pages(pool, table, shape.kv_len))

    def ragged(self, kernel: str, inputs: Inputs, q: Tensor, copy: Call) -> Call:
        shape = inputs.shape
        size = (2, shape.batch, shape.kv_len, shape.kv_heads, shape.head_size)
        return lambda: attend(shape, q, *copy().view(size))

    def wait(self) -> None:
        pass

    def cache_bytes(self) -> int:
        return last_level_cache_bytes()


def _pages(pool: Pool, table: Tensor, kv_len: int) -> list[Tensor]:
    """Keys and values of ``kv_len`` positions: ``(batch, kv_len, kv_heads, head_size)``."""
    return [cache[table.long()].flatten(1, 2)[:, :kv_len] for cache in (pool.k, pool.v)]


def attend(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``q`` ragged, of equal lengths; ``k``, ``v`` ``(batch, kv_len, kv_heads, head_size)``."""
    out = scaled_dot_product_attention(
        q.view(shape.batch, shape.q_len, shape.heads, -1).transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=shape.causal,
        scale=shape.scale,
        enable_gqa=shape.heads != shape.kv_heads,
    )
    return out.transpose(1, 2).reshape(q.shape)
