"""FlashInfer's CUDA kernels, through the wrappers that SGLang uses."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

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

DECODE = "BatchDecodeWithPagedKVCacheWrapper"
PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
WORKSPACE = 128 << 20  # bytes, FlashInfer's own recommendation
TENSOR_CORE_GROUP = 4  # from this many query heads per KV head, as SGLang decides


class FlashInfer(Backend):
    """Plans are made once per input set, before timing: SGLang plans once per step, for all
    layers. ``module`` and ``device`` are for tests."""

    name = "flashinfer"

    def __init__(self, module: ModuleType | None = None, device: str = "cuda") -> None:
        self.device = device
        self._module = module
        self._workspace: Tensor | None = None

    def why_not(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device: needs an NVIDIA GPU with its driver, and a CUDA build of torch"
        try:
            self._wrappers()
        except (ImportError, OSError) as error:
            return f"flashinfer does not load: {str(error).splitlines()[0]}"
        return None

    def versions(self) -> dict[str, str]:
        try:
            package = version("flashinfer-python")
        except PackageNotFoundError:
            package = "unknown"
        return {"flashinfer": package, "cuda": torch.cuda.get_device_name()}

    def refuses(self, shape: Shape) -> str | None:
        return "the kernels take 16-bit types only" if shape.dtype == "float32" else None

    def variants(self, shape: Shape, page_sizes: tuple[int, ...]) -> list[Variant]:
        paged = DECODE if shape.q_len == 1 else PREFILL
        return [
            *(Variant(Approach.in_place, size, paged) for size in page_sizes),
            Variant(Approach.page1_view, ROWS_PAGE, paged),
            Variant(Approach.gather_varlen, ROWS_PAGE, RAGGED),
            Variant(Approach.gather, ROWS_PAGE, "index_select"),
        ]

    def paged(self, kernel: str, inputs: Inputs, pool: Pool, q: Tensor, table: Tensor) -> Call:
        shape = inputs.shape
        batch, columns = table.shape
        counts = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
        last = shape.kv_len - (columns - 1) * pool.page_size
        pages = {
            "indptr": counts * columns,
            "indices": table.flatten().contiguous(),
            "last_page_len": torch.full((batch,), last, dtype=torch.int32, device=self.device),
        }
        heads = (shape.heads, shape.kv_heads, shape.head_size, pool.page_size)
        options = {"q_data_type": q.dtype, "kv_data_type": pool.k.dtype, "sm_scale": shape.scale}
        if kernel == DECODE:
            group = shape.heads // shape.kv_heads
            wrapper = self._wrapper(kernel, use_tensor_cores=group >= TENSOR_CORE_GROUP)
            wrapper.plan(*pages.values(), *heads, **options)
        else:
            wrapper = self._wrapper(kernel)
            wrapper.plan(
                inputs.cu_seqlens_q, *pages.values(), *heads, causal=shape.causal, **options
            )
        return lambda: wrapper.run(q, (pool.k, pool.v))

    def ragged(self, kernel: str, inputs: Inputs, q: Tensor, copy: Call) -> Call:
        shape = inputs.shape
        wrapper = self._wrapper(kernel)
        wrapper.plan(
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            shape.heads,
            shape.kv_heads,
            shape.head_size,
            causal=shape.causal,
            sm_scale=shape.scale,
            q_data_type=q.dtype,
            kv_data_type=inputs.k.dtype,
        )

        def call() -> Tensor:
            k, v = copy()
            return wrapper.run(q, k, v)

        return call

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def cache_bytes(self) -> int:
        return torch.cuda.get_device_properties(0).L2_cache_size

    def _wrappers(self) -> ModuleType:
        if self._module is None:
            self._module = import_module("flashinfer")
        return self._module

    def _wrapper(self, name: str, **options: Any) -> Any:
        """One wrapper per plan, on one workspace: their calls come one after another."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=self.device)
        return getattr(self._wrappers(), name)(self._workspace, "NHD", **options)
