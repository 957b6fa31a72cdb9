"""What the wrappers refuse, and what the real ones would silently get wrong.

FlashInfer raises ValueError for the first kind; the second kind, marked "silent", raises
``Misuse`` here. Read off flashinfer-python 0.7.2: decode.py, prefill.py, utils.py, page.py
and csrc/batch_decode.cu, csrc/batch_prefill_paged.cuh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Misuse(AssertionError):
    """A call that the real wrapper takes and answers with something else than was meant."""


def check(condition: Any, message: str) -> None:
    if not condition:
        raise Misuse(message)


def check_workspace(workspace: Tensor, layout: str) -> None:
    if workspace.data_ptr() % 16:
        raise ValueError("float_workspace_buffer must be 16-byte aligned")
    if layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {layout}")
    if layout != "NHD":
        raise NotImplementedError("the stand-in has the layout NHD alone")


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """The scheduler's own check, and the head sizes that have a kernel."""
    if heads % kv_heads:
        raise ValueError(f"num_qo_heads {heads} should be divisible by num_kv_heads {kv_heads}")
    if head_dim not in (64, 128, 256, 512):
        raise ValueError(f"Unsupported head_dim: {head_dim}")


def check_indptr(name: str, indptr: Tensor, batch: int) -> None:
    """Kernels are built for int32 and read it row-major."""
    if indptr.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, not {indptr.dtype}")
    check(indptr.dim() == 1 and indptr.is_contiguous(), f"silent: {name} is not a plain vector")
    check(len(indptr) == batch + 1, f"silent: {name} has {len(indptr)} entries for {batch} rows")
    values = indptr.tolist()
    check(values[0] == 0, f"silent: {name} starts at {values[0]}")
    check(values == sorted(values), f"silent: {name} decreases")


def check_pages(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
    for name, tensor in (("indices", indices), ("last_page_len", last_page_len)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, not {tensor.dtype}")
        check(tensor.dim() == 1 and tensor.is_contiguous(), f"silent: {name} is no plain vector")
    used = int(indptr[-1])
    check(len(indices) >= used, f"silent: {len(indices)} indices, indptr ends at {used}")
    inside = (last_page_len >= 1) & (last_page_len <= page_size)
    check(inside.all(), "silent: last_page_len outside 1 .. page_size")


def check_dtypes(q: Tensor, k: Tensor, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if q.dtype != q_dtype:
        raise ValueError(
            f"The dtype of q {q.dtype} does not match the q_data_type {q_dtype} specified in "
            "plan function."
        )
    if k.dtype != kv_dtype:
        raise ValueError(
            f"The dtype of k {k.dtype} does not match the kv_data_type {kv_dtype} specified in "
            "plan function."
        )


def check_queries(q: Tensor, rows: int, heads: int, head_dim: int) -> None:
    if q.shape[0] != rows:
        raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({rows}).")
    check(
        q.shape[1:] == (heads, head_dim),
        f"silent: q is {list(q.shape)}, planned for {heads} heads of {head_dim}",
    )
    check(q.stride(-1) == 1, "silent: q's last dimension is strided")


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    return getattr(torch, name) if isinstance(name, str) else name
