"""The two prefill wrappers, as SGLang calls them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._attend import attend
from ._checks import (
    check,
    check_dtypes,
    check_heads,
    check_indptr,
    check_queries,
    check_workspace,
    dtype_of,
)
from ._paged import Paged, Plan
from .calls import emit


class BatchPrefillWithPagedKVCacheWrapper(Paged):
    kind = "prefill"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        if use_cuda_graph:
            self._need_buffers(
                qo_indptr_buf=qo_indptr_buf,
                paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            )
            raise NotImplementedError("the stand-in has no prefill under a graph")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        batch = len(paged_kv_last_page_len)
        check_indptr("qo_indptr", qo_indptr, batch)
        check_indptr("paged_kv_indptr", paged_kv_indptr, batch)
        check_heads(num_qo_heads, num_kv_heads, head_dim_qk)
        for name, value in (
            ("packed_custom_mask", packed_custom_mask),
            ("prefix_len_ptr", prefix_len_ptr),
            ("token_pos_in_items_ptr", token_pos_in_items_ptr),
            ("max_item_len_ptr", max_item_len_ptr),
        ):
            if value is not None:
                raise NotImplementedError(f"the stand-in has no {name}")
        if head_dim_vo not in (None, head_dim_qk):
            raise NotImplementedError("the stand-in has one head size for keys and values")
        self._paged_kv_indptr_buf = paged_kv_indptr
        self._paged_kv_indices_buf = paged_kv_indices
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len
        self._mask = None
        if custom_mask is not None:
            self._mask = custom_mask.reshape(-1).bool()
        self._custom_mask_buf = self._mask
        q_type = dtype_of(q_data_type)
        self._planned(
            Plan(
                dict(
                    qo_indptr=qo_indptr,
                    kv_indptr=paged_kv_indptr,
                    kv_indices=paged_kv_indices,
                    last_page_len=paged_kv_last_page_len,
                    num_qo_heads=num_qo_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim_qk,
                    page_size=page_size,
                    custom_mask=custom_mask,
                    causal=causal,
                    sm_scale=sm_scale,
                    window_left=window_left,
                    logits_soft_cap=logits_soft_cap,
                    q_data_type=q_type,
                    kv_data_type=dtype_of(kv_data_type or q_type),
                    non_blocking=non_blocking,
                    token_pos_in_items_len=token_pos_in_items_len,
                    fixed_split_size=fixed_split_size,
                    disable_split_kv=disable_split_kv,
                )
            )
        )

    begin_forward = plan

    def forward(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], **options) -> Tensor:
        return self.forward_return_lse(q, paged_kv_cache, **options)[0]

    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        causal: bool = False,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A custom mask takes the place of the causal one."""
        return self._run(
            q,
            paged_kv_cache,
            causal=causal,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            mask=self._mask,
        )


class BatchPrefillWithRaggedKVCacheWrapper:
    """Attention over keys that are not in a cache: a chunk's own, for decoder-only models."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        check_workspace(float_workspace_buffer, kv_layout)
        if use_cuda_graph or backend not in ("auto", "fa2"):
            raise NotImplementedError("the stand-in's ragged wrapper is eager and fa2")
        self._plan: Plan | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        batch = len(qo_indptr) - 1
        check_indptr("qo_indptr", qo_indptr, batch)
        if len(kv_indptr) != batch + 1:
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        check_indptr("kv_indptr", kv_indptr, batch)
        check_heads(num_qo_heads, num_kv_heads, head_dim_qk)
        q_type = dtype_of(q_data_type)
        self._plan = Plan(
            dict(
                qo_indptr=qo_indptr,
                kv_indptr=kv_indptr,
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim_qk,
                q_data_type=q_type,
                kv_data_type=dtype_of(kv_data_type or q_type),
            )
        )
        self._plan.hold("qo_indptr", qo_indptr)
        self._plan.hold("kv_indptr", kv_indptr)
        emit("ragged.plan", self, self._plan.arguments)

    begin_forward = plan

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return self.forward_return_lse(q, k, v, **options)[0]

    def forward_return_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        plan = self._plan
        if plan is None:
            raise ValueError("run before plan")
        plan.unchanged()
        check_dtypes(q, k, plan["q_data_type"], plan["kv_data_type"])
        qo, kv = plan["qo_indptr"].tolist(), plan["kv_indptr"].tolist()
        check_queries(q, qo[-1], plan["num_qo_heads"], plan["head_dim"])
        check(len(k) == len(v) == kv[-1], f"silent: {len(k)} keys, kv_indptr ends at {kv[-1]}")
        check(window_left < 0 and not logits_soft_cap, "silent: no window and no cap planned")
        scale = 1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
        options = dict(causal=causal, sm_scale=sm_scale, window_left=window_left)
        emit("ragged.run", self, dict(q=q, k=k, v=v, logits_soft_cap=logits_soft_cap, **options))
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf)
        for i in range(len(qo) - 1):
            rows, keys = slice(qo[i], qo[i + 1]), slice(kv[i], kv[i + 1])
            if rows.start < rows.stop and keys.start < keys.stop:
                out[rows], lse[rows] = attend(q[rows], k[keys], v[keys], scale=scale, causal=causal)
        return out, lse


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two results over parts of the keys as one; ``v`` ``(rows, heads, D)``, ``s`` the
    log-sum-exps in base 2 (flashinfer/cascade.py)."""
    top = torch.maximum(s_a, s_b)
    finite = torch.where(torch.isneginf(top), 0.0, top)
    w_a, w_b = torch.exp2(s_a - finite), torch.exp2(s_b - finite)
    total = w_a + w_b
    share_a, share_b = (torch.where(total > 0, w / total, 0.0) for w in (w_a, w_b))
    out = v_a * share_a.unsqueeze(-1) + v_b * share_b.unsqueeze(-1)
    return out.to(v_a.dtype), finite + torch.log2(total)
