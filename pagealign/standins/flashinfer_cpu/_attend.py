"""What FlashInfer's kernels compute, in float64, request by request."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window_left: int = -1,
    soft_cap: float = 0.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One request's queries ``(Sq, heads, D)`` over keys ``(Sk, kv_heads, D)``.

    The causal mask is aligned with the last key, the window keeps the ``window_left`` keys
    before a query's own, and ``mask`` (bool ``(Sq, Sk)``) takes the place of both. Returns
    the output in ``q``'s type and the log-sum-exp in base 2, float32 ``(Sq, heads)``; a row
    without a key is 0 and ``-inf`` (include/flashinfer/attention/prefill.cuh, state.cuh).
    """
    rows, keys = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    allowed = torch.ones(rows, keys, dtype=torch.bool) if mask is None else mask
    if mask is None:
        own = torch.arange(rows)[:, None] + keys - rows
        if causal:
            allowed = allowed & (torch.arange(keys) <= own)
        if window_left >= 0:
            allowed = allowed & (torch.arange(keys) + window_left >= own)
    scores = scores.masked_fill(~allowed, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = (
        torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
        if keys == 0
        else _weights(scores, lse)
    )
    # A masked key is not read: its value may be anything.
    seen = allowed.any(0)
    out = torch.einsum("hqk,khd->qhd", weights, v.masked_fill(~seen[:, None, None], 0.0))
    return out.to(q.dtype), (lse / math.log(2)).float().transpose(0, 1).contiguous()


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    empty = torch.isneginf(lse).unsqueeze(-1)
    return torch.where(empty, 0.0, torch.exp(scores - lse.unsqueeze(-1)))
