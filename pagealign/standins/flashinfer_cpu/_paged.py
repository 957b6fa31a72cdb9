"""What the two paged wrappers share: plans that are kept, and runs on what was planned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._attend import attend
from ._checks import check, check_dtypes, check_pages, check_queries, check_workspace
from .calls import emit


@dataclass
class Plan:
    """A plan's arguments by name, as given, and copies of its tensors from that moment.

    Tensors that lie on the device are kept as they are by FlashInfer, so a change between
    plan and run reaches the kernel while the schedule was made for the old values.
    """

    arguments: dict[str, Any]
    held: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)

    def hold(self, name: str, tensor: Tensor) -> None:
        self.held[name], self.copies[name] = tensor, tensor.clone()

    def unchanged(self) -> None:
        for name, tensor in self.held.items():
            check(torch.equal(tensor, self.copies[name]), f"silent: {name} changed since the plan")

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


class Paged:
    """A wrapper with its buffers; ``kind`` is ``decode`` or ``prefill``."""

    kind = ""

    def __init__(self, workspace: Tensor, layout: str, use_cuda_graph: bool, backend: str):
        check_workspace(workspace, layout)
        if backend not in ("auto", "fa2"):
            raise NotImplementedError(f"the stand-in has the backend fa2, not {backend!r}")
        self.device = workspace.device
        self._float_workspace_buffer = workspace
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._custom_mask_buf: Tensor | None = None
        self._mask: Tensor | None = None
        self._fixed_batch_size = 0
        self._plan: Plan | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def _need_buffers(self, **buffers: Tensor | None) -> None:
        for name, buffer in buffers.items():
            if not torch.is_tensor(buffer):
                raise ValueError(f"{name} should be a torch.Tensor in cudagraph mode")

    def _planned(self, plan: Plan) -> None:
        """Take a checked plan: from now on runs use it."""
        used = int(plan["kv_indptr"][-1])
        check_pages(plan["kv_indptr"], plan["kv_indices"], plan["last_page_len"], plan["page_size"])
        plan.hold("qo_indptr", plan["qo_indptr"])
        plan.hold("kv_indptr", self._paged_kv_indptr_buf)
        plan.hold("kv_indices", self._paged_kv_indices_buf[:used])
        plan.hold("last_page_len", self._paged_kv_last_page_len_buf)
        self._plan = plan
        emit(f"{self.kind}.plan", self, plan.arguments)

    def _run(
        self,
        q: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        *,
        causal: bool,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        k_scale: float | None,
        v_scale: float | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """``q`` ``(rows, heads, D)``; the caches ``(slots, kv_heads, D)`` or ``(pages,
        page_size, kv_heads, D)``. Output like ``q`` and log-sum-exp ``(rows, heads)``."""
        plan = self._plan
        if plan is None:
            raise ValueError("run before plan")
        plan.unchanged()
        k, v = (self._pages(cache, plan) for cache in kv_cache)
        check_dtypes(q, k, plan["q_data_type"], plan["kv_data_type"])
        check_queries(q, int(plan["qo_indptr"][-1]), plan["num_qo_heads"], plan["head_dim"])
        soft_cap = logits_soft_cap or 0.0
        # The kernel's variant was compiled for what the plan said.
        check((window_left >= 0) == (plan["window_left"] >= 0), "silent: window not planned")
        check((soft_cap > 0) == ((plan["logits_soft_cap"] or 0.0) > 0), "silent: cap not planned")
        scale = 1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
        scale *= 1.0 if k_scale is None else k_scale
        emit(
            f"{self.kind}.run",
            self,
            dict(
                q=q,
                causal=causal,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                k_scale=k_scale,
                v_scale=v_scale,
            ),
        )
        qo, kv = plan.held["qo_indptr"].tolist(), plan.held["kv_indptr"].tolist()
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], -math.inf)
        first_bit = 0
        for i in range(len(qo) - 1):
            rows = slice(qo[i], qo[i + 1])
            slots = self._slots(plan, i, kv)
            count = rows.stop - rows.start
            own_mask = None
            if mask is not None:
                own_mask = mask[first_bit : first_bit + count * len(slots)]
                own_mask = own_mask.view(count, len(slots))
                first_bit += own_mask.numel()
            if count == 0 or len(slots) == 0:
                continue
            check(int(slots.max()) < k.shape[0] * k.shape[1], "silent: a slot outside the cache")
            check(int(slots.min()) >= 0, "silent: a negative slot")
            out[rows], lse[rows] = attend(
                q[rows],
                k.flatten(0, 1)[slots],
                v.flatten(0, 1)[slots],
                scale=scale,
                causal=causal,
                window_left=window_left,
                soft_cap=soft_cap,
                mask=own_mask,
            )
        if mask is not None:
            check(first_bit == len(mask), f"silent: {len(mask)} bits of mask, {first_bit} used")
        return (out if v_scale is None else out * v_scale), lse

    def _pages(self, cache: Tensor, plan: Plan) -> Tensor:
        if cache.dim() not in (3, 4):
            raise ValueError("x must be 3D or 4D")
        pages = cache.unsqueeze(-3) if cache.dim() == 3 else cache
        check(pages.shape[1] == plan["page_size"], "silent: the cache has other pages than planned")
        heads = plan["num_kv_heads"], plan["head_dim"]
        check(pages.shape[2:] == heads, f"silent: the cache has heads {list(pages.shape[2:])}")
        return pages

    def _slots(self, plan: Plan, i: int, kv: list[int]) -> Tensor:
        pages = plan.held["kv_indices"][kv[i] : kv[i + 1]].long()
        size = plan["page_size"]
        if len(pages) == 0:
            return pages
        length = (len(pages) - 1) * size + int(plan.held["last_page_len"][i])
        return (pages[:, None] * size + torch.arange(size)).flatten()[:length]
