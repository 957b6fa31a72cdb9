"""A stand-in for FlashInfer's wrappers on a CPU, as SGLang 0.5.23 uses them.

SGLang imports FlashInfer on CUDA only (``is_flashinfer_available``), so a package of
FlashInfer's name on the path would never be asked for, and on a machine that has the real
one it would hide it. ``replacements`` names what the real ``flashinfer_backend`` module
lacks on a CPU instead, and puts the CPU where that module has ``device="cuda"`` written
in. All else is SGLang's own, with the Triton kernel that packs the indices in Triton's
interpreter (``TRITON_INTERPRET=1`` before SGLang is imported).

The wrappers refuse what FlashInfer 0.7.2 refuses, raise where it would go on with
something else (``_checks``), compute in float64 (``_attend``), and tell ``calls.listening``
of every plan and run.
"""

from __future__ import annotations

from typing import Any

from .decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    merge_state,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "fast_decode_plan",
    "merge_state",
    "replacements",
]


class TorchOnCpu:
    """The module ``torch`` with the CPU where a factory is asked for the device "cuda"."""

    def __init__(self, torch: Any):
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in ("empty", "zeros"):
            return found

        def factory(*args, device=None, **kwargs):
            return found(*args, device="cpu" if device == "cuda" else device, **kwargs)

        return factory


def replacements() -> list[tuple[Any, str, Any]]:
    """``(module, name, value)`` to set so that SGLang's FlashInfer backend runs on a CPU."""
    import torch
    from sglang.srt.layers.attention import flashinfer_backend

    wrappers = (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
    )
    return [
        (flashinfer_backend, "torch", TorchOnCpu(torch)),
        *((flashinfer_backend, wrapper.__name__, wrapper) for wrapper in wrappers),
        (flashinfer_backend, "fast_decode_plan", fast_decode_plan),
        (flashinfer_backend, "_safe_merge_state", merge_state),
    ]
