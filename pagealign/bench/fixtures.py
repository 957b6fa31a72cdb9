"""Small inputs with the results of Intel's CPU kernels, for the XPU stand-in's tests.

A safetensors file per case: the arguments of ``flash_attn_with_kvcache`` or
``flash_attn_varlen_func`` as tensors, the others and where the result is from as metadata.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pagealign import report
from pagealign.bench import machine
from pagealign.bench.backends.ipex import Ipex
from pagealign.errors import PagealignError

FOREIGN = 100.0  # in slots that nobody owns


@dataclass(frozen=True)
class Case:
    """``page_size`` 0: ragged keys and values instead of a paged cache."""

    name: str
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    page_size: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool
    kernel: str


PAGED = "flash_attn_varlen_func"
SINGLE = "single_query_cached_kv_attention"
CASES = (
    Case("cross_decode_64", (1, 1), (100, 67), 64, 2, 1, 64, False, PAGED),
    Case("cross_decode_64_single", (1, 1), (65, 1), 64, 2, 1, 64, False, SINGLE),
    Case("cross_decode_128_grouped", (1,), (130,), 128, 4, 1, 64, False, PAGED),
    Case("cross_prefill_64_wide", (3, 1), (40, 20), 64, 4, 1, 128, False, PAGED),
    Case("self_prefill_64", (5, 3), (66, 3), 64, 2, 1, 64, True, PAGED),
    Case("page_size_1", (1, 1), (70, 33), 1, 2, 2, 64, False, PAGED),
    Case("ragged", (4, 2), (70, 33), 0, 2, 1, 64, False, "varlen_attention"),
)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def inputs(case: Case) -> dict[str, Tensor]:
    """Random bf16 arguments; pages in random order, page 0 nobody's."""
    generator = torch.Generator().manual_seed(len(case.name))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).bfloat16()

    kv = (case.kv_heads, case.head_size)
    out = {
        "q": normal(sum(case.q_lens), case.heads, case.head_size),
        "cu_seqlens_q": offsets(case.q_lens),
    }
    if not case.page_size:
        k, v = (normal(sum(case.k_lens), *kv) for _ in "kv")
        return out | {"k": k, "v": v, "cu_seqlens_k": offsets(case.k_lens)}
    need = [-(-n // case.page_size) for n in case.k_lens]
    pages = (1 + torch.randperm(sum(need), generator=generator)).int().split(need)
    table = torch.zeros(len(need), max(need), dtype=torch.int32)
    k_cache, v_cache = (
        torch.full((1 + sum(need), case.page_size, *kv), FOREIGN).bfloat16() for _ in "kv"
    )
    for b, (own, length) in enumerate(zip(pages, case.k_lens, strict=True)):
        table[b, : len(own)] = own
        for cache in (k_cache, v_cache):
            kept = cache[own.long()].flatten(0, 1)
            kept[:length] = normal(length, *kv)
            cache[own.long()] = kept.view(-1, *cache.shape[1:])
    return out | {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": table,
        "cache_seqlens": torch.tensor(case.k_lens, dtype=torch.int32),
    }


def attend(case: Case, given: dict[str, Tensor]) -> Tensor:
    """Intel's result: ``(total_q, heads, head_size)``."""
    import intel_extension_for_pytorch as ipex

    q, out = given["q"], torch.empty_like(given["q"])
    scale, longest = case.head_size**-0.5, (max(case.q_lens), max(case.k_lens))
    if not case.page_size:
        ipex.llm.functional.varlen_attention(
            q, given["k"], given["v"], out, given["cu_seqlens_q"], given["cu_seqlens_k"], None,
            *longest, 0.0, scale, False, case.causal, False, None,
        )  # fmt: skip
        return out
    k, v = (given[name].transpose(1, 2).contiguous() for name in ("k_cache", "v_cache"))
    paged = ipex.llm.modules.PagedAttention
    if case.kernel == SINGLE:
        head_mapping = torch.arange(case.kv_heads, dtype=torch.int32)
        paged.single_query_cached_kv_attention(
            out, q, k, v, head_mapping.repeat_interleave(case.heads // case.kv_heads), scale,
            given["page_table"], given["cache_seqlens"], case.page_size, longest[1], None,
        )  # fmt: skip
        return out
    paged.flash_attn_varlen_func(
        out, q, k, v, given["cu_seqlens_q"], offsets(case.k_lens), *longest, scale, case.causal,
        given["page_table"], None,
    )  # fmt: skip
    return out


def run(folder: Path) -> int:
    """Write every case to ``folder``. Returns 0; PagealignError without Intel's kernels."""
    backend = Ipex()
    if why := backend.why_not():
        raise PagealignError(f"no results of Intel's kernels here: {why}")
    origin = backend.versions() | machine.processor()
    for case in CASES:
        given = inputs(case)
        tensors = given | {"out": attend(case, given)}
        path = folder / f"{case.name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        save_file(tensors, new, {"case": json.dumps(asdict(case)), "origin": json.dumps(origin)})
        new.chmod(0o644)
        new.replace(path)
        report.console().print(f"written: {path}", soft_wrap=True)
    return 0
