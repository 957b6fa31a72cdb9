"""Inputs for the attention entry points: random, deterministic, hostile where allowed.

Page tables are random permutations, their unused columns are out of range, and slots that
no request owns hold NaN in K and large values in V: none of it may matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pagealign.kernels.reference import Attended, paged_attention, ragged_attention


@dataclass(frozen=True)
class Case:
    """One call: per request ``q_lens[b]`` queries over ``k_lens[b]`` keys.

    ``page_size`` 0 means ragged keys.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    page_size: int = 64
    heads: tuple[int, int] = (4, 4)  # query heads, kv heads
    head_size: int = 64
    v_head_size: int | None = None
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    sinks: bool = False
    seed: int = 0

    def __str__(self) -> str:
        mask = "causal" if self.causal else f"window{self.window}" * (self.window != (-1, -1))
        pages = f"p{self.page_size}" if self.page_size else "ragged"
        parts = [pages, f"{self.heads[0]}x{self.heads[1]}x{self.head_size}", mask]
        parts += ["sinks" * self.sinks, str(self.dtype).removeprefix("torch.")]
        parts += [f"q{'.'.join(map(str, self.q_lens))}", f"k{'.'.join(map(str, self.k_lens))}"]
        return "-".join(filter(None, parts))


def arguments(case: Case) -> dict:
    """Keyword arguments for ``flash_attn_with_kvcache`` or ``flash_attn_varlen_func``."""
    generator = torch.Generator().manual_seed(case.seed)
    heads, kv_heads = case.heads
    v_head_size = case.v_head_size or case.head_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    args = {
        "q": normal(sum(case.q_lens), heads, case.head_size),
        "cu_seqlens_q": offsets(case.q_lens),
        "max_seqlen_q": max(case.q_lens),
        "softmax_scale": 1 / math.sqrt(case.head_size),
        "causal": case.causal,
        "window_size": case.window,
        "sinks": normal(heads) if case.sinks else None,
    }
    if case.page_size == 0:
        return args | {
            "k": normal(sum(case.k_lens), kv_heads, case.head_size),
            "v": normal(sum(case.k_lens), kv_heads, v_head_size),
            "cu_seqlens_k": offsets(case.k_lens),
            "max_seqlen_k": max(case.k_lens),
        }
    need = [-(-n // case.page_size) for n in case.k_lens]
    num_pages = sum(need) + 3
    free = (1 + torch.randperm(num_pages - 1, generator=generator)).tolist()  # page 0 is padding
    table = torch.full((len(need), max(need) + 2), 10**6, dtype=torch.int32)
    k_cache = normal(num_pages, case.page_size, kv_heads, case.head_size)
    v_cache = normal(num_pages, case.page_size, kv_heads, v_head_size)
    owned = torch.zeros(num_pages * case.page_size, dtype=torch.bool)
    for b, length in enumerate(case.k_lens):
        for column in range(need[b]):
            page = free.pop()
            table[b, column] = page
            used = min(case.page_size, length - column * case.page_size)
            owned[page * case.page_size : page * case.page_size + used] = True
    k_cache.flatten(0, 1)[~owned] = math.nan
    v_cache.flatten(0, 1)[~owned] = 1000.0
    return args | {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": table,
        "cache_seqlens": torch.tensor(case.k_lens, dtype=torch.int32),
    }


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def expected(args: dict, dtype: torch.dtype = torch.float64) -> Attended:
    """The reference's answer to the same arguments, computed in ``dtype``."""
    options = {
        "scale": args["softmax_scale"],
        "causal": args["causal"],
        "window": args["window_size"],
        "sinks": args["sinks"],
        "dtype": dtype,
    }
    if "page_table" not in args:
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        return ragged_attention(*(args[name] for name in names), **options)
    names = ("q", "k_cache", "v_cache", "page_table", "cache_seqlens", "cu_seqlens_q")
    return paged_attention(*(args[name] for name in names), **options)
