"""The stand-in against float64 over the matrix of sgl-kernel-xpu's own attention tests.

Shapes, heads, masks and types are those of its ``tests/test_flash_attention.py``, with fewer
and shorter sequences: each group is a fixed sample of its full product.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from standin_cases import Case, arguments, expected
from standin_loader import load_standin

from pagealign.kernels.reference import twice_plain_error

flash_attn = load_standin().flash_attn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = ((4, 4), (8, 2), (16, 1))


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.delenv("PAGEALIGN_KERNELS", raising=False)
    monkeypatch.delenv("PAGEALIGN_POISON", raising=False)


def run(args: dict, **more):
    function = "flash_attn_with_kvcache" if "page_table" in args else "flash_attn_varlen_func"
    return getattr(flash_attn, function)(**args, **more)


def check(case: Case) -> None:
    args = arguments(case)
    truth, plain = expected(args), expected(args, case.dtype)
    errors = twice_plain_error(run(args), truth.out, plain.out)
    assert errors.ok, str(errors)
    if not case.sinks:
        out, lse, *_ = run(args, return_softmax_lse=True)
        errors = twice_plain_error(out, truth.out, plain.out)
        assert errors.ok, str(errors)
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), truth.lse, atol=1e-4, rtol=1e-4)


def sample(count: int, seed: int, *axes) -> list[tuple]:
    """``count`` of the product of the axes, the same ones each time."""
    everything = list(itertools.product(*axes))
    return random.Random(seed).sample(everything, min(count, len(everything)))


def shorter(rng: random.Random, longest: int) -> int:
    return rng.randint(max(1, longest - 20), longest)


def prefill_cases() -> list[Case]:
    """Batch 1: the prefill kernel alone."""
    cases = []
    lengths = ((3, 200), (64, 256), (64, 130), (128, 128), (50, 300), (100, 257))
    masks = ("none", "causal", "window")
    for i, (dtype, heads, head_size, page_size, (sq, sk), mask) in enumerate(
        sample(24, 1, DTYPES, HEADS, (64, 128), (64, 128), lengths, masks)
    ):
        rng = random.Random(i)
        q_len = max(2, shorter(rng, sq))
        window = (rng.randrange(sk), rng.randrange(sk)) if mask == "window" else (-1, -1)
        cases.append(
            Case(
                (q_len,),
                (rng.randint(max(q_len, sk - 70), sk),),
                page_size,
                heads,
                head_size,
                dtype=dtype,
                causal=mask == "causal",
                window=window,
                seed=i,
            )
        )
    return cases


def mixed_cases() -> list[Case]:
    """Batch 5, rows of one query and of several: both kernels into one output."""
    cases = []
    lengths = ((3, 300), (3, 65), (40, 128), (64, 256))
    masks = ("none", "causal", "window")
    for i, (dtype, heads, head_size, page_size, (sq, sk), mask) in enumerate(
        sample(24, 2, DTYPES, HEADS, (64, 128), (64, 128), lengths, masks)
    ):
        rng = random.Random(i)
        q_lens = (1, *(shorter(rng, sq) for _ in range(3)), max(2, sq))
        k_lens = tuple(rng.randint(sq, sk) for _ in q_lens)
        window = (rng.randrange(sk), rng.randrange(sk)) if mask == "window" else (-1, -1)
        cases.append(
            Case(
                q_lens,
                k_lens,
                page_size,
                heads,
                head_size,
                dtype=dtype,
                causal=mask == "causal",
                window=window,
                sinks=head_size == 64 and i % 2 == 0,
                seed=i,
            )
        )
    return cases


def decode_cases() -> list[Case]:
    cases = []
    longest = (2, 63, 64, 65, 129, 512, 1024)
    for i, (dtype, heads, head_size, page_size, sk, batch, mask) in enumerate(
        sample(40, 3, DTYPES, HEADS, (64, 128), (64, 128), longest, (1, 4), ("none", "window"))
    ):
        rng = random.Random(i)
        window = (rng.randrange(sk), rng.randrange(sk)) if mask == "window" else (-1, -1)
        cases.append(
            Case(
                (1,) * batch,
                tuple(rng.randint(1, sk) for _ in range(batch)),
                page_size,
                heads,
                head_size,
                dtype=dtype,
                causal=mask == "none" and i % 2 == 0,
                window=window,
                sinks=head_size == 64 and i % 3 == 0,
                seed=i,
            )
        )
    return cases


def ragged_cases() -> list[Case]:
    """More queries than keys among them: causal rows that must be exactly zero."""
    cases = []
    lengths = ((1, 1), (1, 3), (2, 1), (100, 1), (3, 130), (64, 128), (50, 113), (108, 54))
    masks = ("none", "causal", "window")
    for i, (dtype, heads, head_size, (sq, sk), mask) in enumerate(
        sample(30, 4, DTYPES, HEADS, (64, 80, 128), lengths, masks)
    ):
        rng = random.Random(i)
        batch = 2
        cases.append(
            Case(
                tuple(shorter(rng, sq) for _ in range(batch)),
                tuple(shorter(rng, sk) for _ in range(batch)),
                0,
                heads,
                head_size,
                dtype=dtype,
                causal=mask == "causal",
                window=(rng.randrange(sk), rng.randrange(sk)) if mask == "window" else (-1, -1),
                seed=i,
            )
        )
    return cases


WHISPER = [
    Case((1,) * 3, (1500,) * 3, 64, (8, 8)),
    Case((1,) * 3, (1500,) * 3, 128, (8, 8)),
    Case((4, 4), (1500, 1500), 64, (8, 8)),
    Case((4,), (1500,), 128, (8, 8)),
    Case((4, 4), (4, 4), 64, (8, 8), causal=True),
]


@pytest.mark.parametrize("case", prefill_cases(), ids=str)
def test_paged_prefill(case):
    check(case)


@pytest.mark.parametrize("case", mixed_cases(), ids=str)
def test_mixed(case):
    check(case)


@pytest.mark.parametrize("case", decode_cases(), ids=str)
def test_decode(case):
    check(case)


@pytest.mark.parametrize("case", ragged_cases(), ids=str)
def test_ragged(case):
    check(case)


@pytest.mark.parametrize("case", WHISPER, ids=str)
def test_whisper_shapes(case):
    check(case)


def test_ragged_with_other_value_size():
    check(Case((5, 9), (7, 20), 0, head_size=192, v_head_size=128, dtype=torch.bfloat16))


@pytest.mark.parametrize("page_size", [0, 64])
def test_causal_rows_before_the_first_key_are_exactly_zero(page_size):
    args = arguments(Case((100, 70), (64, 130), page_size, causal=True))
    out, lse = run(args, return_softmax_lse=True)
    assert torch.count_nonzero(out[:36]) == 0
    assert torch.isneginf(lse[:, :36]).all()
    assert torch.isfinite(lse[:, 36:]).all()
    assert torch.equal(run(args)[:36], out[:36])


def test_a_wrong_page_is_outside_the_rule():
    """The check can fail: one page swapped with a foreign one, both fully written."""
    args = arguments(Case((1, 1), (128, 128)))
    truth, plain = expected(args), expected(args, torch.float32)
    args["page_table"][0, 1] = args["page_table"][1, 1]
    assert not twice_plain_error(run(args), truth.out, plain.out).ok


def test_adjoining_and_scattered_pages_agree():
    args = arguments(Case((1,), (300,)))
    pages = args["page_table"][0, :5].long()
    scattered = run(args)
    args["k_cache"][1:6] = args["k_cache"][pages].clone()
    args["v_cache"][1:6] = args["v_cache"][pages].clone()
    args["page_table"][0, :5] = torch.arange(1, 6)
    torch.testing.assert_close(run(args), scattered, atol=0, rtol=0)


def test_four_dimensional_queries_come_back_ragged():
    args = arguments(Case((2, 2), (70, 90)))
    want = run(args)
    del args["cu_seqlens_q"], args["max_seqlen_q"]
    args["q"] = args["q"].unflatten(0, (2, 2))
    assert torch.equal(run(args), want)


def test_default_scale_is_one_over_the_root_of_the_head_size():
    args = arguments(Case((1,), (70,)))
    want = run(args)
    del args["softmax_scale"]
    assert torch.equal(run(args), want)


def test_an_int_length_holds_for_every_page():
    args = arguments(Case((1,), (70,)))
    args["k_cache"] = args["k_cache"][args["page_table"][:, 0].long()].clone()
    args["v_cache"] = args["v_cache"][args["page_table"][:, 0].long()].clone()
    args["page_table"] = torch.zeros(1, 1, dtype=torch.int32)
    args["cache_seqlens"] = torch.tensor([30], dtype=torch.int32)
    want = run(args)
    args["cache_seqlens"] = 30
    assert torch.equal(run(args), want)


def test_out_is_written_and_returned():
    args = arguments(Case((1, 1), (64, 64), heads=(8, 2), dtype=torch.bfloat16))
    want = run(args)
    out = torch.full_like(want, 3.0)
    assert run(args, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, want)


def test_rows_that_no_request_owns_are_not_written():
    args = arguments(Case((1, 1), (64, 64)))
    args["q"] = torch.cat([args["q"], args["q"][:1]])
    assert torch.isnan(run(args)[2:]).all()
    out = torch.full_like(args["q"], 3.0)
    assert (run(args, out=out)[2:] == 3.0).all()
    assert torch.isfinite(out[:2]).all()


def test_calls_are_counted():
    calls = flash_attn.calls
    calls.reset()
    run(arguments(Case((3, 1), (64, 64))))
    run(arguments(Case((1, 1), (5, 6), 0)))
    assert (calls.paged, calls.ragged, calls.query_rows) == (1, 1, 6)
    assert calls.ragged_single_query == 1
    calls.reset()
    assert (calls.paged, calls.query_rows) == (0, 0)
