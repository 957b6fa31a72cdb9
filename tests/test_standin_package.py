"""The package as SGLang sees it: names, signatures, and nothing more than that."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from standin_loader import load_standin

from pagealign.paths import STANDINS

standin = load_standin()

# Every name that importing SGLang 0.5.23's scheduler, model runner, Whisper, Mllama, MossVL
# and xpu_backend takes from sgl_kernel with SGLANG_USE_CPU_ENGINE=1.
IMPORTED = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "flash_mla_decode",
    "flash_mla_decode_get_workspace_size",
    "flash_mla_prefill",
    "flash_mla_prefill_get_workspace_size",
    "merge_state_v2",
    "verify_tree_greedy_cpu",
]


@pytest.mark.parametrize("name", IMPORTED)
def test_a_merely_imported_name_says_so_when_called(name):
    with pytest.raises(NotImplementedError, match=f"sgl_kernel.{name}: the CPU stand-in"):
        getattr(standin, name)(1, key=2)


def test_unknown_names_fail():
    with pytest.raises(AttributeError):
        _ = standin.convert_weight_packed
    with pytest.raises(AttributeError):
        _ = standin.flash_attn.get_scheduler_metadata


def test_by_its_own_name_in_a_fresh_process():
    """Importable as ``sgl_kernel``; unknown submodules fail; no operator is registered."""
    program = """
import sgl_kernel, sgl_kernel.flash_attn, torch
assert sgl_kernel.IS_PAGEALIGN_STANDIN
for name in ("scalar_type", "utils", "allreduce", "kvcacheio"):
    try:
        __import__(f"sgl_kernel.{name}")
    except ImportError:
        continue
    raise SystemExit(f"sgl_kernel.{name} should not exist")
for name in ("convert_weight_packed", "gdn_attention", "fwd"):
    assert not hasattr(torch.ops.sgl_kernel, name), name
"""
    env = {"PYTHONPATH": str(STANDINS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


PAGED = (
    "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
    "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=0, max_seqlen_k=0, "
    "rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
    "sinks=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
    "return_softmax_lse=False, out=None, bidirectional_block_ids=None"
)
RAGGED = (
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    "seqused_k=None, softmax_scale=None, sinks=None, causal=False, qv=None, q_descale=None, "
    "k_descale=None, v_descale=None, window_size=(-1, -1), softcap=0.0, num_splits=0, "
    "pack_gqa=None, sm_margin=0, return_softmax_lse=False"
)


@pytest.mark.parametrize(
    ("function", "want"), [("flash_attn_with_kvcache", PAGED), ("flash_attn_varlen_func", RAGGED)]
)
def test_signature(function, want):
    parameters = inspect.signature(getattr(standin.flash_attn, function)).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(map(str, bare)).replace(" = ", "=") == want
