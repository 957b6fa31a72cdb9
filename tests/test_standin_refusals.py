"""Everything in the stand-in's ``_checks.py``: one test per refusal.

``RuntimeError`` is what the real kernels' host code refuses, with its text;
``StrictnessError`` what they would compute wrongly without a word.
"""

from __future__ import annotations

import re

import pytest
import torch
from standin_cases import Case, arguments
from standin_loader import load_standin

standin = load_standin()
flash_attn = standin.flash_attn
HOST, SILENT = RuntimeError, standin.StrictnessError

DECODE = Case((1, 1), (70, 90))
MIXED = Case((1, 3), (70, 90))
PREFILL = Case((3,), (70,))
RAGGED = Case((3, 5), (70, 90), page_size=0)
RAGGED_DECODE = Case((1, 1), (70, 90), page_size=0)
HALF = {"dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.delenv("PAGEALIGN_KERNELS", raising=False)
    monkeypatch.delenv("PAGEALIGN_POISON", raising=False)


def call(args: dict):
    if "k_cache" in args:
        return flash_attn.flash_attn_with_kvcache(**args)
    return flash_attn.flash_attn_varlen_func(**args)


def refused(case: Case, error: type, text: str, **changes) -> None:
    """The call is fine, and with ``changes`` it is refused, for exactly this reason.

    A change is a value, or a function of the arguments that gives one.
    """
    args = arguments(case)
    call(args)
    args |= {key: value(args) if callable(value) else value for key, value in changes.items()}
    with pytest.raises(error, match=re.escape(text)) as caught:
        call(args)
    assert type(caught.value) is error


def pages_of(size: int):
    """The same caches, seen with another page size."""
    return {
        "k_cache": lambda a: a["k_cache"].reshape(-1, size, *a["k_cache"].shape[2:]),
        "v_cache": lambda a: a["v_cache"].reshape(-1, size, *a["v_cache"].shape[2:]),
    }


def test_every_base_call_is_accepted():
    for case in (DECODE, MIXED, PREFILL, RAGGED, RAGGED_DECODE):
        assert torch.isfinite(call(arguments(case))).all()


# --- refused by the real host code -------------------------------------------------------


@pytest.mark.parametrize("size", [1, 16, 32, 256])
@pytest.mark.parametrize("case", [DECODE, MIXED])
def test_page_size(case, size):
    # Four more pages round the caches up to a whole number of pages of 256.
    args = arguments(case)
    extra = -len(args["k_cache"]) % 4
    for name in ("k_cache", "v_cache"):
        cache = args[name]
        args[name] = torch.cat([cache, cache[:extra]]).reshape(-1, size, *cache.shape[2:])
    with pytest.raises(
        RuntimeError, match=f"^Unsupported page size for decode attention: {size}$"
    ) as caught:
        call(args)
    assert type(caught.value) is RuntimeError


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cache_seqlens", "page_table"])
@pytest.mark.parametrize("case", [DECODE, PREFILL])
def test_int64_metadata(case, name):
    op_name = {"cache_seqlens": "cu_seqlens_k"}.get(name, name)
    refused(
        case, HOST, f"{op_name} must have dtype torch.int32", **{name: lambda a: a[name].long()}
    )


def test_int64_offsets_in_a_mixed_call():
    text = "cu_seqlens_q must be int32."
    refused(MIXED, HOST, text, cu_seqlens_q=lambda a: a["cu_seqlens_q"].long())


def test_int64_ragged_offsets():
    text = "cu_seqlens_k must have dtype torch.int32"
    refused(RAGGED, HOST, text, cu_seqlens_k=lambda a: a["cu_seqlens_k"].long())


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cache_seqlens"])
def test_strided_metadata(name):
    text = "must be contiguous"
    refused(DECODE, HOST, text, **{name: lambda a: a[name].repeat_interleave(2)[::2]})


def test_float64():
    doubled = {name: lambda a, name=name: a[name].double() for name in ("q", "k_cache", "v_cache")}
    refused(DECODE, HOST, "mha_fwd only supports Half and BFloat16, gottorch.float64", **doubled)


def test_key_type():
    text = "query and key must have the same dtype"
    refused(DECODE, HOST, text, k_cache=lambda a: a["k_cache"].half())


def test_value_type():
    text = "query and value must have the same dtype"
    refused(DECODE, HOST, text, v_cache=lambda a: a["v_cache"].half())


def test_fp8_cache_is_not_emulated():
    text = "the CPU stand-in has no fp8 cache"
    to_fp8 = lambda a: a["k_cache"].to(torch.float8_e4m3fn)  # noqa: E731
    refused(DECODE, NotImplementedError, text, k_cache=to_fp8)


def test_other_device():
    text = "page_table must be on cpu"
    refused(DECODE, HOST, text, page_table=lambda a: a["page_table"].to("meta"))


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (DECODE, "paged decode attention: 80"),
        (MIXED, "paged decode attention: 80"),
        (PREFILL, "paged prefill attention: 80"),
        (RAGGED, "non-paged prefill attention: 32"),
        (RAGGED_DECODE, "non-paged decode attention: 32"),
    ],
)
def test_head_size(case, text):
    size = int(text.split()[-1])
    names = ("q", "k", "v") if case.page_size == 0 else ("q", "k_cache", "v_cache")
    resized = {n: lambda a, n=n: a[n].new_ones(*a[n].shape[:-1], size) for n in names}
    refused(case, HOST, f"Unsupported head size for {text}", **resized)


def test_head_counts():
    text = "Number of heads in key/value must divide number of heads in query"
    refused(DECODE, HOST, text, q=lambda a: a["q"][:, :3].contiguous())


@pytest.mark.parametrize("case", [DECODE, MIXED, RAGGED_DECODE])
def test_group_size_in_decode(case):
    text = "Unsupported q_group_size for decode attention: 17"
    refused(case, HOST, text, q=lambda a: a["q"].new_ones(len(a["q"]), 4 * 17, 64))


def test_group_size_is_free_in_prefill():
    args = arguments(PREFILL)
    args["q"] = args["q"].new_ones(3, 4 * 17, 64)
    assert torch.isfinite(call(args)).all()


def test_query_rank():
    text = "query must be in ragged format (total_q, h, d)"
    refused(DECODE, HOST, text, q=lambda a: a["q"].unsqueeze(0))


def test_paged_key_shape():
    text = "k must have shape (num_pages, page_size, num_heads_k, head_size)"
    refused(DECODE, HOST, text, k_cache=lambda a: a["k_cache"].flatten(0, 1))


def test_paged_value_shape():
    text = "v must have shape (num_pages, page_size, num_heads_k, head_size_v)"
    refused(DECODE, HOST, text, v_cache=lambda a: a["v_cache"][1:])
    refused(
        DECODE, HOST, text, v_cache=lambda a: a["v_cache"].new_ones(*a["v_cache"].shape[:3], 128)
    )


def test_table_rank():
    text = "page_table must have two dimensions"
    refused(DECODE, HOST, text, page_table=lambda a: a["page_table"].flatten())


def test_table_batch():
    text = "batch_size must be equal to batch_size_k"
    refused(DECODE, HOST, text, page_table=lambda a: a["page_table"][:1])


def test_a_cache_without_a_table():
    text = "key must be in ragged format (total_k, h_k, d)"
    refused(DECODE, HOST, text, page_table=None)


def test_ragged_value_shape():
    refused(RAGGED, HOST, "value must be in ragged format", v=lambda a: a["v"][1:])


def test_ragged_batch():
    text = "cu_seqlens_q and cu_seqlens_k must describe the same batch"
    refused(RAGGED, HOST, text, cu_seqlens_k=lambda a: a["cu_seqlens_k"][:-1])


def test_ragged_last_dimension():
    text = "query must be contiguous at last dimension"
    refused(RAGGED, HOST, text, q=lambda a: a["q"].transpose(1, 2).contiguous().transpose(1, 2))


def test_cache_last_dimension():
    for name in ("k_cache", "v_cache"):
        text = f"{name} must have contiguous last dimension"
        strided = {name: lambda a, n=name: a[n].transpose(2, 3).contiguous().transpose(2, 3)}
        refused(DECODE, AssertionError, text, **strided)


def test_lengths_for_another_batch():
    args = arguments(DECODE)
    args["cache_seqlens"] = args["cache_seqlens"][:1]
    with pytest.raises(AssertionError):
        call(args)


def test_lengths_are_required():
    refused(DECODE, HOST, "cache_seqlens is required", cache_seqlens=None)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_lengths_that_are_none(name):
    refused(DECODE, HOST, f"expected an int for {name}, got NoneType", **{name: None})


def test_softcap_that_is_none():
    refused(DECODE, HOST, "expected a float for softcap, got NoneType", softcap=None)


@pytest.mark.parametrize(
    ("page_size", "heads", "head_size", "most"),
    [(64, (4, 4), 64, 64), (128, (4, 4), 64, 128), (128, (16, 1), 256, 64)],
)
def test_num_splits(page_size, heads, head_size, most):
    case = Case((1, 1), (70, 90), page_size, heads, head_size)
    call(arguments(case) | {"num_splits": most})
    text = (
        f"num_splits ({most + 1}) exceeds the maximum the split-KV decode kernel supports "
        f"for page_size {page_size} ({most})"
    )
    refused(case, HOST, text, num_splits=most + 1)


def test_num_splits_is_ignored_by_prefill():
    call(arguments(PREFILL) | {"num_splits": 1000})


def test_sink_head_size():
    case = Case((1, 1), (70, 90), head_size=128)
    text = "sink is only supported for head_size == 64, got 128"
    refused(case, HOST, text, sinks=torch.ones(4))


def test_sink_without_pages():
    refused(RAGGED, HOST, "No-page attention does not support sink logits", sinks=torch.ones(4))


def test_sink_with_lse():
    case = Case((1, 1), (70, 90), sinks=True)
    text = "return_softmax_lse is only supported without sink"
    refused(case, HOST, text, return_softmax_lse=True)


def test_out():
    q = arguments(DECODE)["q"]
    refused(DECODE, HOST, "out dtype must match q dtype", out=q.half())
    text = "out shape must be [total_q, num_heads, head_size_v]"
    refused(DECODE, HOST, text, out=q[:1].clone())
    refused(DECODE, HOST, "out must be on the same device as q", out=q.to("meta"))
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    refused(DECODE, HOST, "out must have a contiguous last dimension", out=strided)


def test_unknown_argument():
    with pytest.raises(TypeError, match="ver"):
        call(arguments(DECODE) | {"ver": 3})


def test_bidirectional_blocks_are_not_emulated():
    args = arguments(PREFILL)
    call(args | {"bidirectional_block_ids": None})
    with pytest.raises(NotImplementedError, match="bidirectional_block_ids"):
        call(args | {"bidirectional_block_ids": torch.zeros(70, dtype=torch.int32)})


# --- silently wrong on the real kernels ---------------------------------------------------


@pytest.mark.parametrize("size", [1, 16, 32])
def test_page_size_in_prefill(size):
    text = f"Unsupported page size for prefill attention: {size}"
    refused(PREFILL, SILENT, text, **pages_of(size))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, name)
        for case, names in [
            (DECODE, ("q", "k_cache", "v_cache", "page_table")),
            (PREFILL, ("q", "k_cache", "v_cache")),
            (RAGGED, ("q", "k", "v")),
        ]
        for name in names
    ],
)
def test_outer_strides(case, name):
    """Cut out of something wider, as q out of a fused qkv or columns out of a table."""
    shown = name.removesuffix("_cache")
    cut = lambda a: torch.cat([a[name]] * 2, dim=1)[:, : a[name].shape[1]]  # noqa: E731
    refused(case, SILENT, f"{shown} is not contiguous", **{name: cut})


def test_outer_strides_of_out():
    q = arguments(DECODE)["q"]
    text = "out is not contiguous"
    refused(DECODE, SILENT, text, out=torch.cat([q, q], dim=1)[:, : q.shape[1]])


def test_length_beyond_the_table():
    text = "request 0 has 70 keys, its row of the page table holds 64"
    refused(DECODE, SILENT, text, page_table=lambda a: a["page_table"][:, :1].contiguous())


@pytest.mark.parametrize("page", [-1, 7])
def test_page_ids(page):
    def wrong(args: dict) -> torch.Tensor:
        assert len(args["k_cache"]) == 7
        table = args["page_table"].clone()
        table[1, 1] = page
        return table

    refused(DECODE, SILENT, "request 1: page ids", page_table=wrong)


def test_page_ids_beyond_the_length_do_not_matter():
    args = arguments(DECODE)
    assert (args["page_table"][:, 2:] == 10**6).all()
    assert torch.isfinite(call(args)).all()


def test_max_seqlen_q_too_small():
    text = "max_seqlen_q=2 is smaller than the 3 queries of request 1"
    refused(MIXED, SILENT, text, max_seqlen_q=2)
    refused(PREFILL, SILENT, "max_seqlen_q=0 is smaller", max_seqlen_q=0)


def test_decode_with_more_than_one_query():
    text = "max_seqlen_q=1 but request 1 has 3 queries"
    refused(MIXED, SILENT, text, max_seqlen_q=1)


@pytest.mark.parametrize("case", [DECODE, MIXED, RAGGED])
def test_request_without_queries(case):
    total = sum(case.q_lens)
    cu = torch.tensor([0, 0, total], dtype=torch.int32)
    more = {"max_seqlen_q": total} if case is not DECODE else {}
    refused(case, SILENT, "request 0 has no query", cu_seqlens_q=cu, **more)


def test_offsets_that_decrease():
    cu = torch.tensor([0, 3, 2], dtype=torch.int32)
    refused(MIXED, SILENT, "cu_seqlens_q decreases at request 1", cu_seqlens_q=cu, max_seqlen_q=5)


def test_offsets_that_start_late():
    cu = torch.tensor([1, 2, 3], dtype=torch.int32)
    refused(MIXED, SILENT, "cu_seqlens_q must start at 0", cu_seqlens_q=cu)


def test_more_offsets_than_rows():
    cu = torch.tensor([0, 1, 5], dtype=torch.int32)
    text = "cu_seqlens_q reaches 5, q has 4 rows"
    refused(MIXED, SILENT, text, cu_seqlens_q=cu, max_seqlen_q=4)


def test_more_ragged_keys_than_rows():
    cu = torch.tensor([0, 70, 161], dtype=torch.int32)
    text = "cu_seqlens_k reaches 161, k has 160 rows"
    refused(RAGGED, SILENT, text, cu_seqlens_k=cu, max_seqlen_k=91)


def test_max_seqlen_k_too_small():
    call(arguments(DECODE) | {"causal": True, "max_seqlen_k": 90})
    text = "max_seqlen_k=89 is smaller than the 90 keys of request 1"
    refused(DECODE, SILENT, text, causal=True, max_seqlen_k=89)
    refused(RAGGED, SILENT, text, max_seqlen_k=89)
    refused(RAGGED, SILENT, "max_seqlen_k=0 is smaller", max_seqlen_k=0)


def test_negative_length():
    text = "request 0 has -1 keys"
    refused(DECODE, SILENT, text, cache_seqlens=torch.tensor([-1, 90], dtype=torch.int32))


def test_windowed_rows_without_keys():
    # Three queries over two keys: the first row stands before the first key.
    case = Case((3, 3), (2, 90), window=(5, -1))
    text = "request 0: 1 row(s) have no key in the window"
    refused(case, SILENT, text, window_size=(5, 0))


@pytest.mark.parametrize(
    "name",
    [
        "k",
        "v",
        "qv",
        "cu_seqlens_k_new",
        "rotary_cos",
        "rotary_sin",
        "rotary_seqlens",
        "cache_batch_idx",
        "cache_leftpad",
        "q_descale",
    ],
)
def test_dropped_argument(name):
    refused(DECODE, SILENT, f"silently ignored by the kernels: {name}", **{name: torch.ones(2)})


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k", "qv", "q_descale"])
def test_dropped_argument_of_the_ragged_call(name):
    refused(RAGGED, SILENT, f"silently ignored by the kernels: {name}", **{name: torch.ones(2)})


def test_softcap():
    refused(DECODE, SILENT, "softcap=30.0 has no effect", softcap=30.0)


def test_scale():
    refused(DECODE, SILENT, "softmax_scale must be > 0", softmax_scale=0.0)


def test_sink_shape():
    refused(DECODE, SILENT, "sinks are read as (4,) of torch.float32", sinks=torch.ones(3))
    refused(DECODE, SILENT, "sinks are read as (4,) of torch.float32", sinks=torch.ones(4).half())


def test_no_requests():
    args = arguments(DECODE)
    args["q"] = args["q"][:0]
    args["cu_seqlens_q"] = args["cu_seqlens_q"][:1]
    args["cache_seqlens"] = args["cache_seqlens"][:0]
    args["page_table"] = args["page_table"][:0]
    with pytest.raises(SILENT, match="a call without requests"):
        call(args)


# --- an empty key set ----------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[0, 90], [0, 0]])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", [DECODE, MIXED])
def test_empty_keys_lose_the_device(case, causal, lengths):
    empty = [b for b, n in enumerate(lengths) if n == 0]
    text = f"UR_RESULT_ERROR_DEVICE_LOST: attention over an empty key set, request(s) {empty} of 2"
    refused(
        case,
        standin.DeviceLostError,
        text,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        causal=causal,
    )


def test_empty_ragged_keys_lose_the_device():
    refused(
        RAGGED,
        standin.DeviceLostError,
        "UR_RESULT_ERROR_DEVICE_LOST",
        cu_seqlens_k=torch.tensor([0, 0, 90], dtype=torch.int32),
    )
