"""Attention of one request, dense: the arithmetic and nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: tuple[int, int],
    sinks: Tensor | None = None,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``q`` ``(Sq, H, D)`` over ``k`` and ``v`` ``(Sk, Hk, D)``, ``Sk >= 1``.

    Returns ``(Sq, H, Dv)`` in ``q``'s type and, if wanted, the log-sum-exp ``(H, Sq)`` in
    float32. Rows without an allowed key hold anything: the caller sets them.
    """
    allowed = allowed_keys(len(q), len(k), window, q.device)
    if sinks is None and not want_lse:
        return _fused(q, k, v, scale, allowed), None
    return _spelled_out(q, k, v, scale, allowed, sinks)


def allowed_keys(sq: int, sk: int, window: tuple[int, int], device: torch.device) -> Tensor | None:
    """``(Sq, Sk)`` bool, bottom-right aligned; None when every key is allowed."""
    left, right = window
    offset = sk - sq
    cuts_left = 0 <= left < sk - 1  # the last row stands at sk - 1
    cuts_right = 0 <= right < sk - 1 - offset
    if not cuts_left and not cuts_right:
        return None
    rows = torch.arange(offset, sk, device=device).unsqueeze(1)
    keys = torch.arange(sk, device=device)
    allowed = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if cuts_left:
        allowed &= keys >= rows - left
    if cuts_right:
        allowed &= keys <= rows + right
    return allowed


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def _spelled_out(
    q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if allowed is not None:
        scores.masked_fill_(~allowed, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.float().unsqueeze(1))
    weights = torch.exp(scores - total.unsqueeze(-1)).to(q.dtype).float()
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype), lse
