"""Attention in float64, and the one rule that says how close a kernel must come to it.

Written to be read, not to be fast: one request and one query row at a time, keys and
values fetched slot by slot through the page table. It shares no code with the stand-in
that it judges.

Conventions, all of them those of the FlashAttention entry points:

* queries, ragged keys and ragged values are ``(total, heads, head_dim)``;
* a paged cache is ``(num_pages, page_size, kv_heads, head_dim)``; position ``t`` of
  request ``b`` lies in page ``page_table[b, t // page_size]`` at row ``t % page_size``;
* query head ``h`` reads kv head ``h // (heads // kv_heads)``;
* ``causal`` and ``window`` are aligned at the bottom right: with ``off = Sk - Sq``, row
  ``i`` may read key ``j`` when ``i + off - left <= j <= i + off + right``; a negative side
  is unbounded and ``causal`` means ``right = 0``;
* a sink is one more logit per query head in the softmax's denominator, unscaled;
* the log-sum-exp is natural and leaves the sinks out;
* a row that may read no key has the output 0 and the log-sum-exp ``-inf``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Attended:
    """``out`` is ``(total_q, heads, v_head_dim)``, ``lse`` is ``(heads, total_q)``."""

    out: Tensor
    lse: Tensor


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Attended:
    """Attention over packed keys: request ``b`` owns rows ``cu[b] .. cu[b + 1] - 1``.

    Everything is computed in ``dtype``: float64 for the truth, the inputs' own type for
    the plain implementation that the tolerance rule compares with.
    """
    result = _blank(q, v, dtype)
    for b in range(len(cu_seqlens_q) - 1):
        q_rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        k_rows = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        _attend_request(
            result, q_rows, q[q_rows], k[k_rows], v[k_rows], scale, causal, window, sinks, dtype
        )
    return result


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Attended:
    """Attention over a paged cache; ``cache_seqlens[b]`` keys per request."""
    result = _blank(q, v_cache, dtype)
    for b in range(len(cu_seqlens_q) - 1):
        q_rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        length = int(cache_seqlens[b])
        keys = read_slots(k_cache, page_table[b], length)
        values = read_slots(v_cache, page_table[b], length)
        _attend_request(
            result, q_rows, q[q_rows], keys, values, scale, causal, window, sinks, dtype
        )
    return result


def read_slots(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """Positions ``0 .. length - 1`` of one request: ``(length, kv_heads, head_dim)``."""
    page_size = cache.shape[1]
    rows = [cache[int(pages[t // page_size]), t % page_size] for t in range(length)]
    return torch.stack(rows) if rows else cache.new_zeros((0, *cache.shape[2:]))


def _blank(q: Tensor, v: Tensor, dtype: torch.dtype) -> Attended:
    total, heads = q.shape[:2]
    return Attended(
        out=torch.zeros(total, heads, v.shape[-1], dtype=dtype),
        lse=torch.full((heads, total), -math.inf, dtype=dtype),
    )


def _attend_request(
    result: Attended,
    q_rows: slice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Fill one request's rows of ``result``, one query row after another."""
    group = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    left, right = window[0], 0 if causal else window[1]
    offset = len(k) - len(q)
    for i in range(len(q)):
        first = max(0, i + offset - left) if left >= 0 else 0
        last = min(len(k) - 1, i + offset + right) if right >= 0 else len(k) - 1
        if last < first:
            continue
        logits = torch.einsum("khd,hd->hk", keys[first : last + 1], q[i].to(dtype)) * scale
        result.lse[:, q_rows.start + i] = torch.logsumexp(logits, dim=-1)
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(dtype).unsqueeze(1)], dim=1)
        weights = torch.softmax(logits, dim=-1)[:, : last + 1 - first]
        result.out[q_rows.start + i] = torch.einsum("hk,khd->hd", weights, values[first : last + 1])


@dataclass(frozen=True)
class Errors:
    """Distances from the float64 truth, and what the rule allows."""

    max_error: float
    max_allowed: float
    mean_error: float
    mean_allowed: float

    @property
    def ok(self) -> bool:
        return self.max_error <= self.max_allowed and self.mean_error <= self.mean_allowed

    def __str__(self) -> str:
        return (
            f"max {self.max_error:.3e} (allowed {self.max_allowed:.3e}), "
            f"mean {self.mean_error:.3e} (allowed {self.mean_allowed:.3e})"
        )


def twice_plain_error(
    out: Tensor, truth: Tensor, plain: Tensor, *, max_eps: float = 1e-5, mean_eps: float = 1e-6
) -> Errors:
    """FlashAttention's own rule: be about as good as a plain kernel of the same precision.

    The largest error may be twice that of ``plain`` (the same attention computed in the
    inputs' type), the mean error 1.5 times. The epsilons cover cases that ``plain``
    computes exactly, such as a single key, and float32's order of summation.
    A NaN or an infinity in ``out`` is never within the rule.
    """
    error = (out.double() - truth.double()).abs()
    plain_error = (plain.double() - truth.double()).abs()
    if error.numel() == 0:
        return Errors(0.0, max_eps, 0.0, mean_eps)
    return Errors(
        max_error=error.max().item(),
        max_allowed=2 * plain_error.max().item() + max_eps,
        mean_error=error.mean().item(),
        mean_allowed=1.5 * plain_error.mean().item() + mean_eps,
    )
