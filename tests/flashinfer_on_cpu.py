"""SGLang's FlashInfer backend on a CPU: its metadata and plans, another kernel.

The Triton kernel that packs the KV indices runs in Triton's interpreter:
``TRITON_INTERPRET=1`` before SGLang is imported.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


class _Paged:
    """FlashInfer's paged wrappers as SGLang plans them, with pages of one slot.

    What a plan says is checked, and rows attend as FlashInfer documents: zeros without a
    key, a causal mask aligned with the last key, a custom mask in place of the causal one.
    """

    # Eager decode allocates its indices on "cuda"; a graph's buffer is anywhere.
    is_cuda_graph_enabled = True
    _custom_mask_buf = None

    def __init__(self, workspace: torch.Tensor, layout: str, **tuning):
        assert layout == "NHD"
        # -1 is no slot: a plan that reads past what was packed shows.
        self._paged_kv_indices_buf = torch.full((1 << 16,), -1, dtype=torch.int32)

    def _plan(self, qo_indptr, kv_indptr, kv_indices, last_page_len, page_size, mask=None):
        for bounds in (qo_indptr, kv_indptr, kv_indices):
            assert bounds.dtype == torch.int32
        assert page_size == 1 and (last_page_len == 1).all()
        self.qo, self.kv = qo_indptr.tolist(), kv_indptr.tolist()
        self.slots = kv_indices[: self.kv[-1]].long()
        assert len(self.slots) == self.kv[-1] and (self.slots > 0).all()  # 0 is padding
        self.mask = None if mask is None else mask.bool()

    def forward(
        self,
        q: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        causal: bool = False,
        sm_scale: float,
        logits_soft_cap: float | None = None,
        window_left: int = -1,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> torch.Tensor:
        """``q`` ``[total_q, heads, D]``, the caches ``[slots, kv_heads, D]``."""
        assert not logits_soft_cap and window_left == -1 and k_scale is v_scale is None
        assert self.qo[-1] == len(q)
        out, mask_start = torch.zeros_like(q), 0
        for i, (first, end) in enumerate(zip(self.qo, self.qo[1:], strict=False)):
            slots = self.slots[self.kv[i] : self.kv[i + 1]]
            shape = (end - first, len(slots))
            mask = None
            if self.mask is not None:
                mask = self.mask[mask_start : mask_start + shape[0] * shape[1]].view(shape)
                mask_start += mask.numel()
            elif causal:
                mask = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
            if 0 in shape:
                continue
            k, v = (cache[slots].transpose(0, 1)[None] for cache in kv_cache)
            rows = scaled_dot_product_attention(
                q[first:end].transpose(0, 1)[None],
                k,
                v,
                attn_mask=mask,
                scale=sm_scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
            if mask is not None:
                rows = rows.masked_fill(~mask.any(1)[:, None, None], 0)
            out[first:end] = rows
        if self.mask is not None:
            assert mask_start == len(self.mask)
        return out


class _Prefill(_Paged):
    def begin_forward(
        self, qo_indptr, kv_indptr, kv_indices, last_page_len, heads, kv_heads, dim, page_size,
        *, custom_mask=None, **tuning,
    ):  # fmt: skip
        self._plan(qo_indptr, kv_indptr, kv_indices, last_page_len, page_size, custom_mask)


class _Decode(_Paged):
    def begin_forward(
        self, kv_indptr, kv_indices, last_page_len, heads, kv_heads, dim, page_size, **tuning
    ):
        one_each = torch.arange(len(kv_indptr), dtype=torch.int32)
        self._plan(one_each, kv_indptr, kv_indices, last_page_len, page_size)


class _Unused:
    """The ragged wrapper, which a multimodal model never plans."""

    def __init__(self, *args, **kwargs):
        pass


def install(monkeypatch) -> None:
    """Make the backend ``flashinfer`` start on a CPU."""
    from sglang.srt.layers.attention import flashinfer_backend

    for name, value in {
        "BatchDecodeWithPagedKVCacheWrapper": _Decode,
        "BatchPrefillWithPagedKVCacheWrapper": _Prefill,
        "BatchPrefillWithRaggedKVCacheWrapper": _Unused,
        "fast_decode_plan": None,
    }.items():
        monkeypatch.setattr(flashinfer_backend, name, value, raising=False)
