"""SGLang's FlashAttention 3 backend on a CPU: its metadata and calls, another kernel.

The backend's Triton kernel (lengths and page tables under a graph) runs in Triton's
interpreter: ``TRITON_INTERPRET=1`` before SGLang is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    **tuning,
) -> torch.Tensor:
    """FA3's paged attention as FA3 defines it, for any page size: zeros without keys,
    a causal mask aligned with the last key. ``q`` is ``(total_q, heads, D)``, the caches
    ``(num_pages, page_size, kv_heads, D)``; raises where FA3 would read foreign memory."""
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    num_pages, page_size = k_cache.shape[:2]
    out = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    bounds = cu_seqlens_q.tolist()
    for pages, length, start, end in zip(
        page_table, cache_seqlens.tolist(), bounds, bounds[1:], strict=False
    ):
        pages = pages[: -(-length // page_size)].long()
        if length > len(pages) * page_size:
            raise IndexError(f"{length} keys in a page table of {len(pages)} pages")
        if length == 0:
            continue
        if pages.max() >= num_pages:
            raise IndexError(f"page {int(pages.max())} of a pool of {num_pages} pages")
        k, v = (cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        mask = None
        if causal:
            last_key = torch.arange(end - start) + length - (end - start)
            mask = torch.arange(length) <= last_key.unsqueeze(1)
        out[start:end] = scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=mask,
            scale=softmax_scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out


def replacements() -> list[tuple[Any, str, Any]]:
    """``(owner, name, value)`` to set so that ``attention_backend="fa3"`` starts on a CPU; an
    owner that is a dict gets an item."""
    import sgl_kernel.flash_attn
    from sglang.srt.layers.attention import attention_registry, flashattention_backend

    backend = flashattention_backend.FlashAttentionBackend
    return [
        # Tuning only; the backend takes None for "not precomputed".
        (sgl_kernel.flash_attn, "get_scheduler_metadata", lambda **_: None),
        (flashattention_backend, "get_device_capability", lambda: (9, 0)),
        (flashattention_backend, "flash_attn_with_kvcache", flash_attn_with_kvcache),
        (attention_registry.ATTENTION_BACKENDS, "fa3", backend),
    ]
