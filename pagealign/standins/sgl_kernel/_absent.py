"""Names that SGLang 0.5.23 imports on the way to a CPU run of its XPU backend.

The ``*_cpu`` functions belong to speculative decoding, the ``flash_mla_*`` ones to models
with latent attention, ``merge_state_v2`` to cascade attention. No encoder-decoder model
reaches any of them, so they exist to be imported and say so when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def _absent(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: the CPU stand-in has attention for encoder-decoder models only"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


# xpu_backend.py, flashattention_backend.py
flash_mla_decode = _absent("flash_mla_decode")
flash_mla_decode_get_workspace_size = _absent("flash_mla_decode_get_workspace_size")
flash_mla_prefill = _absent("flash_mla_prefill")
flash_mla_prefill_get_workspace_size = _absent("flash_mla_prefill_get_workspace_size")
merge_state_v2 = _absent("merge_state_v2")

# Wanted at import time when SGLANG_USE_CPU_ENGINE=1
assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _absent("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
