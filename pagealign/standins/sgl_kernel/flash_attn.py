"""``flash_attn_with_kvcache`` and ``flash_attn_varlen_func``, as SGLang 0.5.23 calls them.

Signatures and preparation follow sgl-kernel-xpu's Python wrapper; the arguments' order
and defaults are its own. ``calls`` counts what has been launched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._call import Call
from ._checks import check_dropped_arguments, check_scalars
from ._launch import launch


@dataclass
class Calls:
    """Launches since the last ``reset``; tests and benchmarks read it."""

    paged: int = 0
    ragged: int = 0
    query_rows: int = 0
    ragged_single_query: int = 0  # SGLang 0.5.23 says that the real kernel hangs on these
    poisoned_slots: int = 0

    def reset(self) -> None:
        self.__init__()


calls = Calls()


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    bidirectional_block_ids: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ``q`` over a paged cache.

    ``q`` is ``(total_q, heads, D)`` with ``cu_seqlens_q`` (batch + 1, int32), or
    ``(batch, Sq, heads, D)`` without. ``k_cache`` and ``v_cache`` are ``(num_pages,
    page_size, kv_heads, D)``, ``page_table`` is ``(batch, columns)`` int32 and
    ``cache_seqlens`` ``(batch,)`` int32. fp16 and bf16 as the real kernels, and float32
    besides, which they lack: the server of a machine without an XPU runs in it.

    Returns ``(total_q, heads, D)`` in ``q``'s type, or with ``return_softmax_lse`` the pair
    with the natural log-sum-exp, float32 ``(heads, total_q)``.
    ``k_descale``/``v_descale`` act on an fp8 cache only, which there is none of here;
    ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` only tune.
    """
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    check_dropped_arguments(
        k=k,
        v=v,
        qv=qv,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_seqlens=rotary_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        q_descale=q_descale,
    )
    if bidirectional_block_ids is not None:
        raise NotImplementedError("bidirectional_block_ids: no encoder-decoder model passes them")
    q, cu_seqlens_q, max_seqlen_q = _as_ragged_queries(q, cu_seqlens_q, max_seqlen_q)
    if cache_seqlens is None:
        raise RuntimeError("cache_seqlens is required")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full(
            (k_cache.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device
        )
    assert cache_seqlens.shape[0] + 1 == cu_seqlens_q.shape[0]
    return _run(
        _last_dim_packed(q),
        k_cache,
        v_cache,
        cu_seqlens_q,
        cache_seqlens,
        None if page_table is None else _last_dim_packed(page_table),
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        softcap,
        sinks,
        num_splits,
        return_softmax_lse,
        out,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged ``q`` over ragged ``k`` and ``v``, ``(total, heads, D)`` each.

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are ``(batch + 1,)`` int32. Returns as
    ``flash_attn_with_kvcache`` does. The real function also refuses devices older than
    Battlemage; this one has no device to refuse.
    """
    check_dropped_arguments(seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale)
    q, cu_seqlens_q, max_seqlen_q = _as_ragged_queries(q, cu_seqlens_q, max_seqlen_q)
    return _run(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        softcap,
        sinks,
        num_splits,
        return_softmax_lse,
        None,
    )


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    page_table: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    num_splits: int,
    want_lse: bool,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    check_scalars(
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=scale, softcap=softcap
    )
    left, right = (max(-1, int(side)) for side in window_size)
    call = Call(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        page_table=page_table,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=scale,
        window=(left, 0 if causal else right),
        sinks=sinks,
        num_splits=num_splits,
        want_lse=want_lse,
        out=out,
    )
    result = launch(call)
    calls.query_rows += q.shape[0]
    calls.poisoned_slots += result.poisoned_slots
    if page_table is not None:
        calls.paged += 1
    else:
        calls.ragged += 1
        calls.ragged_single_query += max_seqlen_q == 1
    return (result.out, result.lse) if want_lse else result.out


def _as_ragged_queries(
    q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor, int]:
    if cu_seqlens_q is not None:
        return q, cu_seqlens_q, max_seqlen_q
    assert q.dim() == 4, "q must be (batch, seqlen_q, heads, D) when cu_seqlens_q is None"
    batch, seqlen_q = q.shape[:2]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    return q.reshape(batch * seqlen_q, *q.shape[2:]).contiguous(), offsets, seqlen_q


def _last_dim_packed(x: Tensor) -> Tensor:
    """The wrapper copies only when the last stride is not 1; outer strides stay as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()
