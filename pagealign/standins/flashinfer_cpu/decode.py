"""``BatchDecodeWithPagedKVCacheWrapper`` and ``fast_decode_plan``, as SGLang calls them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check, check_heads, check_indptr, dtype_of
from ._paged import Paged, Plan

# DISPATCH_GQA_GROUP_SIZE in include/flashinfer/utils.cuh
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)


class BatchDecodeWithPagedKVCacheWrapper(Paged):
    kind = "decode"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self._need_buffers(
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Arguments after ``page_size`` by keyword: by position they are deprecated."""
        plan = self._checked(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
            non_blocking=non_blocking,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
        )
        if self.is_cuda_graph_enabled:
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf = indptr
            self._paged_kv_indices_buf = indices
            self._paged_kv_last_page_len_buf = last_page_len
        self._planned(plan)

    begin_forward = plan

    def _checked(
        self, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, **options
    ) -> Plan:
        batch = len(last_page_len)
        check_indptr("indptr", indptr, batch)
        check_heads(heads, kv_heads, head_dim)
        if not self._use_tensor_cores:
            if options["fixed_split_size"] is not None:
                raise ValueError(
                    "fixed_split_size is only supported by tensor core decode for now."
                )
            if heads // kv_heads not in CUDA_CORE_GROUPS:
                raise ValueError(f"Unsupported group_size: {heads // kv_heads}")
        if self.is_cuda_graph_enabled:
            if batch != self._fixed_batch_size:
                raise ValueError(
                    "The batch size should be fixed in cudagraph mode, the runtime batch size "
                    f"{batch} mismatches the batch size set during initialization "
                    f"{self._fixed_batch_size}"
                )
            if len(indices) > len(self._paged_kv_indices_buf):
                raise ValueError(
                    "The size of indices should be less than or equal to the allocated buffer"
                )
        data_type = options.pop("data_type")
        q_type = dtype_of(options.pop("q_data_type") or data_type or "float16")
        kv_type = dtype_of(options.pop("kv_data_type") or data_type or q_type)
        arguments = dict(
            qo_indptr=torch.arange(batch + 1, dtype=torch.int32),
            kv_indptr=indptr,
            kv_indices=indices,
            last_page_len=last_page_len,
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_data_type=q_type,
            kv_data_type=kv_type,
            **options,
        )
        return Plan(arguments)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> Tensor:
        return self._run(
            q,
            paged_kv_cache,
            causal=False,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            mask=None,
        )[0]


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    q_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """A plan that copies nothing: under a graph the kernel reads the wrapper's buffers,
    whatever it is given here, and the schedule follows the host's ``indptr``."""
    plan = self._checked(
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type=q_data_type,
        kv_data_type=None,
        data_type=data_type,
        sm_scale=None,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
    )
    if self.is_cuda_graph_enabled:
        for name, given, buffer in (
            ("indptr", indptr, self._paged_kv_indptr_buf),
            ("indices", indices, self._paged_kv_indices_buf),
            ("last_page_len", last_page_len, self._paged_kv_last_page_len_buf),
        ):
            check(given.data_ptr() == buffer.data_ptr(), f"silent: {name} is not the graph's")
    else:
        self._paged_kv_indptr_buf = indptr
        self._paged_kv_indices_buf = indices
        self._paged_kv_last_page_len_buf = last_page_len
    if global_override_indptr_cpu is not None:
        check(
            torch.equal(global_override_indptr_cpu, indptr),
            f"silent: the host's indptr {global_override_indptr_cpu.tolist()} is not the "
            f"device's {indptr.tolist()}",
        )
        plan.arguments["indptr_cpu"] = global_override_indptr_cpu
    self._planned(plan)
