"""Intel's XPU kernels: ``sgl_kernel`` from sgl-kernel-xpu, called as SGLang calls them."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch
from torch import Tensor

from pagealign.bench.backends.interface import (
    ROWS_PAGE,
    Backend,
    Call,
    Variant,
)
from pagealign.bench.inputs import Inputs, Pool
from pagealign.bench.records import Approach
from pagealign.bench.shapes import Shape

PAGED = "flash_attn_with_kvcache"
VARLEN = "flash_attn_varlen_func"
PAGE_SIZES = (64, 128)
SINGLE_ROW = "PAGEALIGN_BENCH_SINGLE_ROW"


class SglKernel(Backend):
    """``module`` and ``device`` are for tests: the stand-in serves on a CPU, untimed.

    SGLang 0.5.23 says that the varlen kernel hangs on a single query row on some versions,
    so decode shapes get it only when ``PAGEALIGN_BENCH_SINGLE_ROW=1``.
    """

    name = "sgl_kernel"

    def __init__(self, module: ModuleType | None = None, device: str = "xpu") -> None:
        self.device = device
        self._module = module

    def why_not(self) -> str | None:
        if not (hasattr(torch, "xpu") and torch.xpu.is_available()):
            return "no XPU: needs an Intel GPU with its driver, and an XPU build of torch"
        try:
            module = self._kernels()
        except (ImportError, OSError) as error:
            return f"sgl_kernel (sgl-kernel-xpu) does not load: {str(error).splitlines()[0]}"
        if getattr(module, "IS_PAGEALIGN_STANDIN", False):
            return "sgl_kernel is this project's stand-in: take pagealign/standins off PYTHONPATH"
        return None

    def versions(self) -> dict[str, str]:
        try:
            package = version("sgl-kernel-xpu")
        except PackageNotFoundError:
            package = "unknown"
        return {"sgl-kernel-xpu": package, "xpu": torch.xpu.get_device_name()}

    def refuses(self, shape: Shape) -> str | None:
        return "the kernels take 16-bit types only" if shape.dtype == "float32" else None

    def variants(self, shape: Shape, page_sizes: tuple[int, ...]) -> list[Variant]:
        found = [Variant(Approach.in_place, s, PAGED) for s in page_sizes if s in PAGE_SIZES]
        found.append(Variant(Approach.page1_view, ROWS_PAGE, PAGED))
        if shape.q_len > 1 or os.environ.get(SINGLE_ROW) == "1":
            found.append(Variant(Approach.gather_varlen, ROWS_PAGE, VARLEN))
        return [*found, Variant(Approach.gather, ROWS_PAGE, "index_select")]

    def paged(self, kernel: str, inputs: Inputs, pool: Pool, q: Tensor, table: Tensor) -> Call:
        attend, shape = self._function(kernel), inputs.shape
        return lambda: attend(
            q=q,
            k_cache=pool.k,
            v_cache=pool.v,
            page_table=table,
            cache_seqlens=inputs.seqlens_k,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=shape.q_len,
            softmax_scale=shape.scale,
            causal=shape.causal,
        )

    def ragged(self, kernel: str, inputs: Inputs, q: Tensor, copy: Call) -> Call:
        attend, shape = self._function(kernel), inputs.shape

        def call() -> Tensor:
            k, v = copy()
            return attend(
                q=q,
                k=k,
                v=v,
                cu_seqlens_q=inputs.cu_seqlens_q,
                cu_seqlens_k=inputs.cu_seqlens_k,
                max_seqlen_q=shape.q_len,
                max_seqlen_k=shape.kv_len,
                softmax_scale=shape.scale,
                causal=shape.causal,
            )

        return call

    def wait(self) -> None:
        if self.device == "xpu":
            torch.xpu.synchronize()

    def cache_bytes(self) -> int:
        return 0  # torch does not say

    def _kernels(self) -> ModuleType:
        if self._module is None:
            self._module = import_module("sgl_kernel")
            import_module("sgl_kernel.flash_attn")
        return self._module

    def _function(self, name: str) -> Callable[..., Tensor]:
        return getattr(self._kernels().flash_attn, name)
