"""A CPU stand-in for Intel's ``sgl_kernel`` (sgl-kernel-xpu), for SGLang 0.5.23.

Put the folder that holds this package first on ``PYTHONPATH`` and SGLang's own
``xpu_backend.py`` runs unchanged with ``--device cpu --attention-backend intel_xpu`` and
``SGLANG_USE_CPU_ENGINE=1``. What it computes is attention; what it is for is to say no:

* ``_checks.py`` lists what the real kernels refuse, with their texts (``RuntimeError``),
  and what they get silently wrong (``StrictnessError``);
* a request without keys raises ``DeviceLostError``;
* ``PAGEALIGN_KERNELS`` and ``PAGEALIGN_POISON`` choose the mode, see ``_mode.py``.

Names that SGLang merely imports exist and refuse to be called (``_absent.py``). Any other
name is an ``ImportError``, and no torch operator is registered: SGLang takes both as a sign
of what the machine can do.
"""

from ._absent import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    flash_mla_decode,
    flash_mla_decode_get_workspace_size,
    flash_mla_prefill,
    flash_mla_prefill_get_workspace_size,
    merge_state_v2,
    verify_tree_greedy_cpu,
)
from ._errors import DeviceLostError, StrictnessError
from .flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

IS_PAGEALIGN_STANDIN = True

__all__ = [
    "IS_PAGEALIGN_STANDIN",
    "DeviceLostError",
    "StrictnessError",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flash_mla_decode",
    "flash_mla_decode_get_workspace_size",
    "flash_mla_prefill",
    "flash_mla_prefill_get_workspace_size",
    "merge_state_v2",
    "verify_tree_greedy_cpu",
]
