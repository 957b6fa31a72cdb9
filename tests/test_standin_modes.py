"""``PAGEALIGN_KERNELS``, ``PAGEALIGN_POISON``, and what lies behind a request's length."""

from __future__ import annotations

import math

import pytest
import torch
from standin_cases import Case, arguments, expected
from standin_loader import load_standin

from pagealign.kernels.reference import twice_plain_error

standin = load_standin()
flash_attn = standin.flash_attn


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("PAGEALIGN_KERNELS", raising=False)
    monkeypatch.delenv("PAGEALIGN_POISON", raising=False)


@pytest.fixture
def faithful(monkeypatch):
    monkeypatch.setenv("PAGEALIGN_KERNELS", "faithful")


@pytest.fixture
def poison(monkeypatch):
    monkeypatch.setenv("PAGEALIGN_POISON", "1")


def run(args: dict, **more):
    function = "flash_attn_with_kvcache" if "page_table" in args else "flash_attn_varlen_func"
    return getattr(flash_attn, function)(**args, **more)


def emptied(case: Case) -> dict:
    """The case's arguments with the first request's keys gone."""
    args = arguments(case)
    if "page_table" in args:
        args["cache_seqlens"][0] = 0
    else:
        first = int(args["cu_seqlens_k"][1])
        args["k"], args["v"] = args["k"][first:], args["v"][first:]
        args["cu_seqlens_k"][1:] -= first
    return args


# --- the switches ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["lenient", "strict,page1", "page64"])
def test_unknown_mode(monkeypatch, value):
    monkeypatch.setenv("PAGEALIGN_KERNELS", value)
    with pytest.raises(ValueError, match="use strict, faithful, page1 or faithful,page1"):
        run(arguments(Case((1,), (5,))))


def test_unknown_poison(monkeypatch):
    monkeypatch.setenv("PAGEALIGN_POISON", "yes")
    with pytest.raises(ValueError, match="use 0 or 1"):
        run(arguments(Case((1,), (5,))))


@pytest.mark.parametrize("value", ["", "strict"])
def test_strict_is_the_default(monkeypatch, value):
    monkeypatch.setenv("PAGEALIGN_KERNELS", value)
    with pytest.raises(standin.DeviceLostError):
        run(emptied(Case((1, 1), (5, 5))))


# --- faithful: rows without keys -------------------------------------------------------------

PLAIN, CAUSAL, WINDOW = {}, {"causal": True}, {"window": (3, 3)}


@pytest.mark.parametrize(
    ("q_lens", "page_size", "mask", "left"),
    [
        ((1, 1), 64, PLAIN, "nan"),
        ((1, 1), 64, CAUSAL, "unwritten"),
        ((1, 1), 64, WINDOW, "unwritten"),
        ((4, 4), 64, PLAIN, "nan"),
        ((4, 4), 128, PLAIN, "nan"),
        ((4, 4), 64, CAUSAL, "zero"),
        ((4, 4), 64, WINDOW, "unwritten"),
        ((1, 4), 64, CAUSAL, "unwritten"),  # mixed: the decode kernel takes the first
        ((1, 1), 0, PLAIN, "nan"),
        ((1, 1), 0, CAUSAL, "zero"),
        ((4, 4), 0, PLAIN, "nan"),
        ((4, 4), 0, CAUSAL, "zero"),
        ((4, 4), 0, WINDOW, "zero"),
    ],
)
def test_what_an_empty_request_leaves(faithful, q_lens, page_size, mask, left):
    args = emptied(Case(q_lens, (70, 90), page_size, **mask))
    first = q_lens[0]
    out, lse = run(args, return_softmax_lse=True)
    if left == "zero":
        assert torch.count_nonzero(out[:first]) == 0
        assert torch.isneginf(lse[:, :first]).all()
    else:
        assert torch.isnan(out[:first]).all()
        assert torch.isnan(lse[:, :first]).all()
    truth, plain = expected(args), expected(args, torch.float32)
    assert twice_plain_error(out[first:], truth.out[first:], plain.out[first:]).ok
    if page_size:
        old = torch.full_like(out, 3.0)
        run(args, out=old)
        assert (old[:first] == 3.0).all() == (left == "unwritten")


def test_an_empty_request_with_sinks(faithful):
    assert torch.count_nonzero(run(emptied(Case((1, 1), (5, 5), sinks=True)))[0]) == 0
    assert torch.isnan(run(emptied(Case((2, 2), (5, 5), sinks=True)))[:2]).all()


def test_windowed_rows_before_the_first_key(faithful):
    # 300 queries over 20 keys: rows 0 .. 279 have no key. Two whole tiles of 128 rows stay
    # unwritten, the rest of the third is zero.
    args = arguments(Case((300,), (20,), window=(4, 0)))
    out = run(args, out=torch.full_like(args["q"], 3.0))
    assert (out[:256] == 3.0).all()
    assert torch.count_nonzero(out[256:280]) == 0
    truth, plain = expected(args), expected(args, torch.float32)
    assert twice_plain_error(out[280:], truth.out[280:], plain.out[280:]).ok


def test_faithful_still_refuses_the_rest(faithful):
    args = arguments(Case((1, 1), (70, 90)))
    args["page_table"] = args["page_table"][:, :2]
    with pytest.raises(standin.StrictnessError, match="not contiguous"):
        run(args)
    with pytest.raises(RuntimeError, match="Unsupported page size for decode attention: 16"):
        run(arguments(Case((1, 1), (70, 90), page_size=16)))


# --- page size 1 -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_lens", "causal"), [((1, 1), False), ((1, 1), True), ((3, 1), True), ((3,), True)]
)
def test_page_size_1(monkeypatch, q_lens, causal):
    args = arguments(Case(q_lens, (70, 90)[: len(q_lens)], page_size=1, causal=causal))
    with pytest.raises(RuntimeError, match="Unsupported page size"):
        run(args)
    monkeypatch.setenv("PAGEALIGN_KERNELS", "page1")
    truth, plain = expected(args), expected(args, torch.float32)
    out, lse = run(args, return_softmax_lse=True)
    assert twice_plain_error(out, truth.out, plain.out).ok
    torch.testing.assert_close(lse.double(), truth.lse, atol=1e-4, rtol=1e-4)


def test_page1_stays_strict(monkeypatch):
    monkeypatch.setenv("PAGEALIGN_KERNELS", "page1")
    with pytest.raises(standin.DeviceLostError):
        run(emptied(Case((1, 1), (5, 5), page_size=1)))
    with pytest.raises(RuntimeError, match="Unsupported page size for decode attention: 16"):
        run(arguments(Case((1, 1), (70, 90), page_size=16)))
    with pytest.raises(RuntimeError, match="sink is not supported for page_size 1"):
        run(arguments(Case((1, 1), (5, 5), page_size=1, sinks=True)))


@pytest.mark.parametrize("causal", [False, True])
def test_empty_rows_at_page_size_1_are_nan(monkeypatch, causal):
    """What SGLang 0.5.23 says of the kernel and zeroes itself."""
    monkeypatch.setenv("PAGEALIGN_KERNELS", "faithful,page1")
    out = run(emptied(Case((1, 1), (5, 5), page_size=1, causal=causal)))
    assert torch.isnan(out[0]).all()
    assert torch.isfinite(out[1]).all()


# --- the tail of the last page ---------------------------------------------------------------


def with_tail(case: Case, name: str, slot: int, value: float) -> dict:
    """One element of request 0's last page set, ``slot`` slots after its last key."""
    args = arguments(case)
    length, page_size = case.k_lens[0], case.page_size
    column, row = divmod(length + slot, page_size)
    args[name][args["page_table"][0, column], row, 1, 5] = value
    return args


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("q_lens", [(1, 1), (3, 3), (3,)])
def test_nan_behind_v_shows(q_lens, value):
    case = Case(q_lens, (70, 90)[: len(q_lens)], heads=(8, 4))
    clean = run(arguments(case))
    out = run(with_tail(case, "v_cache", 57, value))  # slot 127, the last of its page
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[: q_lens[0], 2:4, 5] = True  # kv head 1 serves query heads 2 and 3
    assert torch.isnan(out[hit]).all()
    assert torch.equal(out[~hit], clean[~hit])


@pytest.mark.parametrize("q_lens", [(1, 1), (3, 3), (3,)])
def test_nan_behind_k_does_not_show(q_lens):
    case = Case(q_lens, (70, 90)[: len(q_lens)])
    out = run(with_tail(case, "k_cache", 57, math.nan))
    assert torch.equal(out, run(arguments(case)))


def test_finite_garbage_behind_v_does_not_show():
    case = Case((1, 1), (70, 90))
    out = run(with_tail(case, "v_cache", 0, 6.0e4))
    assert torch.equal(out, run(arguments(case)))


@pytest.mark.parametrize(
    ("q_lens", "head_size", "loaded"), [((1,), 64, 128), ((3,), 64, 64), ((3,), 128, 32)]
)
def test_prefill_loads_tiles_and_decode_whole_pages(q_lens, head_size, loaded):
    """Page 128 with 10 keys in it: the tile, or the page, ends at ``loaded``."""
    case = Case(q_lens, (10,), 128, head_size=head_size)
    assert torch.isnan(run(with_tail(case, "v_cache", loaded - 11, math.nan))).any()
    if loaded < 128:
        assert torch.isfinite(run(with_tail(case, "v_cache", loaded - 10, math.nan))).all()


def test_ragged_keys_have_no_tail():
    args = arguments(Case((1, 1), (70, 90), page_size=0))
    args["v"][70:] = math.nan  # the neighbour's rows
    out = run(args)
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1]).all()


# --- poison ----------------------------------------------------------------------------------


def pool(case: Case) -> tuple[dict, dict]:
    """Arguments over a pool as a server has it, zero where nothing was written; and a copy."""
    args = arguments(case)
    k, v = args["k_cache"], args["v_cache"]
    unwritten = k.isnan()
    k[unwritten], v[unwritten] = 0.0, 0.0
    return args, {name: x.clone() if torch.is_tensor(x) else x for name, x in args.items()}


CASES = [
    Case((1, 1), (70, 90)),
    Case((3, 1), (70, 128), dtype=torch.float16),
    Case((3,), (200,), 128, causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_poison_leaves_a_right_answer_alone(poison, monkeypatch, case):
    args, copy = pool(case)
    out = run(args)
    monkeypatch.setenv("PAGEALIGN_POISON", "0")
    assert torch.equal(out, run(copy))
    tail = args["page_table"][0, (case.k_lens[0] - 1) // case.page_size]
    row = case.k_lens[0] % case.page_size
    assert torch.isnan(args["k_cache"][tail, row:]).all()
    assert (args["v_cache"][tail, row:] == 1.0e4).all()
    assert torch.equal(args["k_cache"][tail, :row], copy["k_cache"][tail, :row])


def test_a_table_wrong_by_one_page_shows(poison):
    args, _ = pool(Case((1, 1), (128, 90)))
    free = set(range(1, len(args["k_cache"]))) - set(args["page_table"][:, :2].flatten().tolist())
    args["page_table"][0, 1] = min(free)
    out = run(args)
    assert torch.isnan(out[0]).all()
    assert torch.isfinite(out[1]).all()


def test_a_length_that_takes_in_the_gap_shows(poison):
    """An encoder of 70 slots whose reserve of 128 is read: zeros would pass for keys."""
    args, copy = pool(Case((1, 1), (70, 90)))
    args["cache_seqlens"][0] = 128
    assert torch.isnan(run(args)[0]).all()


def test_stale_values_behind_the_length_are_overwritten(poison):
    args, _ = pool(Case((1,), (70,)))
    last = args["page_table"][0, 1]
    args["k_cache"][last, 6:] = 0.5  # what a finished request left
    args["v_cache"][last, 6:] = 0.5
    run(args)
    args["cache_seqlens"][0] = 71
    args["k_cache"][last, 6] = 0.25  # the next token is written, the rest is not
    args["v_cache"][last, 6] = 0.25
    assert torch.isfinite(run(args)).all()
    args["cache_seqlens"][0] = 72
    assert torch.isnan(run(args)).all()


def test_page_0_is_left_alone(poison):
    args, _ = pool(Case((1, 1), (70, 90)))
    args["page_table"][0, :2] = 0
    before = args["k_cache"][0].clone(), args["v_cache"][0].clone()
    out = run(args)
    assert torch.isfinite(out).all()
    assert torch.equal(args["k_cache"][0], before[0])
    assert torch.equal(args["v_cache"][0], before[1])


def test_only_pages_that_are_read_are_touched(poison):
    args, copy = pool(Case((1, 1), (70, 90)))
    run(args)
    read = set(args["page_table"][:, :2].flatten().tolist())
    for page in set(range(len(args["k_cache"]))) - read:
        assert torch.equal(args["k_cache"][page], copy["k_cache"][page])


def test_poisoned_slots_are_counted_once(poison):
    flash_attn.calls.reset()
    args, _ = pool(Case((1, 1), (70, 90)))
    run(args)
    assert flash_attn.calls.poisoned_slots == (128 - 70) + (128 - 90)
    run(args)
    assert flash_attn.calls.poisoned_slots == (128 - 70) + (128 - 90)


def test_a_pool_made_under_inference_mode(poison):
    with torch.inference_mode():
        args, _ = pool(Case((1, 1), (70, 90)))
    assert torch.isfinite(run(args)).all()


def test_no_poison_without_the_switch():
    args, copy = pool(Case((1, 1), (70, 90)))
    run(args)
    assert torch.equal(args["k_cache"], copy["k_cache"])
    assert torch.equal(args["v_cache"], copy["v_cache"])
