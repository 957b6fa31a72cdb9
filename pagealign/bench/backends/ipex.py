"""Intel Extension for PyTorch's CPU kernels.

What was found by trying version 2.8.0, and is not in its documentation:

* ``flash_attn_varlen_func`` takes ``is_causal=False`` and aligns a causal mask with the last
  key; its caches have to be packed as ``(pages, kv_heads, page_size, head_size)``: other
  strides are misread without an error;
* ``varlen_attention`` pads and masks in Python, then calls PyTorch's attention, and aligns a
  causal mask with the *first* key. So a decode step must not ask for one.

SGLang's pool is ``(pages, page_size, kv_heads, head_size)``. The paged kernels get a copy in
their own order, made before anything is timed; at page size 1 the two orders are the same.
"""

from __future__ import annotations

import functools
import logging
import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from pagealign.bench.backends.interface import (
    ROWS_PAGE,
    Backend,
    Call,
    Variant,
)
from pagealign.bench.backends.plain import attend
from pagealign.bench.inputs import Inputs, Pool
from pagealign.bench.machine import last_level_cache_bytes
from pagealign.bench.records import Approach
from pagealign.bench.shapes import Shape

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # of a missing CUDA

PACKAGE = "intel-extension-for-pytorch"
PAGED = "flash_attn_varlen_func"
SINGLE = "single_query_cached_kv_attention"
VARLEN = "varlen_attention"
SDPA = "scaled_dot_product_attention"


class Ipex(Backend):
    name = "ipex"
    device = "cpu"

    def why_not(self) -> str | None:
        if platform.machine() != "x86_64":
            return f"{PACKAGE} is for x86_64, this is {platform.machine()}"
        if find_spec("intel_extension_for_pytorch") is None:
            return f"{PACKAGE} is not installed: scripts/setup_bench_env.sh"
        if not torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512")):
            return f"{PACKAGE} needs a CPU with AVX2"
        try:
            _library()
        except Exception as error:  # another torch than its own: whatever the loader raises
            return f"{PACKAGE} does not load: {str(error).splitlines()[0]}"
        return None

    def versions(self) -> dict[str, str]:
        found = {PACKAGE: _version(PACKAGE)}
        core = __import__("intel_extension_for_pytorch._C", fromlist=["_C"])
        found["instruction set of its kernels"] = core._get_current_isa_level()
        return found

    def refuses(self, shape: Shape) -> str | None:
        return None

    def variants(self, shape: Shape, page_sizes: tuple[int, ...]) -> list[Variant]:
        paged = [PAGED, SINGLE] if shape.q_len == 1 else [PAGED]
        return [
            *(Variant(Approach.in_place, size, name) for size in page_sizes for name in paged),
            *(Variant(Approach.page1_view, ROWS_PAGE, name) for name in paged),
            Variant(Approach.gather_varlen, ROWS_PAGE, VARLEN),
            Variant(Approach.gather_varlen, ROWS_PAGE, SDPA),
            Variant(Approach.gather, ROWS_PAGE, "index_select"),
        ]

    def own_order(self, pool: Pool) -> Pool:
        k, v = (cache.transpose(1, 2).contiguous() for cache in (pool.k, pool.v))
        return replace(pool, k=k, v=v)

    def paged(self, kernel: str, inputs: Inputs, pool: Pool, q: Tensor, table: Tensor) -> Call:
        return (_paged if kernel == PAGED else _single)(inputs, pool, q, table)

    def ragged(self, kernel: str, inputs: Inputs, q: Tensor, copy: Call) -> Call:
        return (_varlen if kernel == VARLEN else _padded)(inputs, q, copy)

    def wait(self) -> None:
        pass

    def cache_bytes(self) -> int:
        return last_level_cache_bytes()


@functools.cache
def _library():
    import intel_extension_for_pytorch

    return intel_extension_for_pytorch


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _paged(inputs: Inputs, pool: Pool, q: Tensor, table: Tensor) -> Call:
    kernel = _library().llm.modules.PagedAttention.flash_attn_varlen_func
    shape, out = inputs.shape, torch.empty_like(q)

    def call() -> Tensor:
        kernel(
            out,
            q,
            pool.k,
            pool.v,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            shape.q_len,
            shape.kv_len,
            shape.scale,
            shape.causal,
            table,
            None,
        )
        return out

    return call


def _single(inputs: Inputs, pool: Pool, q: Tensor, table: Tensor) -> Call:
    kernel = _library().llm.modules.PagedAttention.single_query_cached_kv_attention
    shape, out = inputs.shape, torch.empty_like(q)
    kv_heads = torch.arange(shape.kv_heads, dtype=torch.int32)
    head_mapping = kv_heads.repeat_interleave(shape.heads // shape.kv_heads)

    def call() -> Tensor:
        kernel(
            out,
            q,
            pool.k,
            pool.v,
            head_mapping,
            shape.scale,
            table,
            inputs.seqlens_k,
            pool.page_size,
            shape.kv_len,
            None,
        )
        return out

    return call


def _varlen(inputs: Inputs, q: Tensor, copy: Call) -> Call:
    kernel = _library().llm.functional.varlen_attention
    shape, out = inputs.shape, torch.empty_like(q)

    def call() -> Tensor:
        k, v = copy()
        return kernel(
            q,
            k,
            v,
            out,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            None,
            shape.q_len,
            shape.kv_len,
            0.0,
            shape.scale,
            False,
            shape.causal,
            False,
            None,
        )

    return call


def _padded(inputs: Inputs, q: Tensor, copy: Call) -> Call:
    """PyTorch's attention on the copy, which for equal lengths needs no padding: what
    ``varlen_attention`` could reach at best."""
    shape = inputs.shape
    size = (2, shape.batch, shape.kv_len, shape.kv_heads, shape.head_size)
    return lambda: attend(shape, q, *copy().view(size))
