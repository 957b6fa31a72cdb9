"""The XPU's stand-in against Intel's own CPU kernels, on inputs saved with their results.

``python -m pagealign.bench --fixtures tests/fixtures/ipex`` in the benchmarks' environment
makes them.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from standin_loader import load_standin

from pagealign.kernels.reference import paged_attention, ragged_attention, twice_plain_error
from pagealign.paths import REPO

SAVED = sorted((REPO / "tests" / "fixtures" / "ipex").glob("*.safetensors"))
BF16_STEP = 2.0**-8  # relative distance of neighbours, at most


def load(path):
    with safe_open(path, "pt") as saved:
        case = json.loads(saved.metadata()["case"])
        return case, {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118


def test_every_path_of_the_stand_in_is_there():
    sizes = {load(path)[0]["page_size"] for path in SAVED}
    assert sizes == {0, 1, 64, 128}
    assert sum(path.stat().st_size for path in SAVED) < 600_000


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_the_stand_in_agrees_with_intels_kernel(path, monkeypatch):
    case, saved = load(path)
    monkeypatch.setenv("PAGEALIGN_KERNELS", "page1" if case["page_size"] == 1 else "strict")
    intel, flash_attn = saved.pop("out"), load_standin().flash_attn
    longest = {"max_seqlen_q": max(case["q_lens"])}
    if case["page_size"]:
        kernel, reference = flash_attn.flash_attn_with_kvcache, paged_attention
        names = ("q", "k_cache", "v_cache", "page_table", "cache_seqlens", "cu_seqlens_q")
    else:
        kernel, reference = flash_attn.flash_attn_varlen_func, ragged_attention
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        longest["max_seqlen_k"] = max(case["k_lens"])
    ours = kernel(**saved, **longest, causal=case["causal"])

    options = {"scale": case["head_size"] ** -0.5, "causal": case["causal"]}
    truth, plain = (
        reference(*(saved[name] for name in names), **options, dtype=dtype).out
        for dtype in (torch.float64, torch.bfloat16)
    )
    for result in (ours, intel):
        assert result.dtype == torch.bfloat16
        error = twice_plain_error(result, truth, plain)
        assert error.ok, error
    # each rounds P or the sum at another place: two steps of the largest value
    step = BF16_STEP * truth.abs().max().item()
    assert (ours.double() - intel.double()).abs().max().item() <= 2 * step
    # and what agrees is no constant
    assert truth.std() > 50 * step or truth.numel() == 1
