"""The float64 reference against rows worked out by hand and against PyTorch's own."""

from __future__ import annotations

import math

import pytest
import torch
from standin_cases import Case, arguments, expected

from pagealign.kernels.reference import paged_attention, ragged_attention, twice_plain_error


def test_two_keys_by_hand():
    # Scores 0 and ln 3: weights 1/4 and 3/4.
    q = torch.tensor([[[1.0, 0.0]]])
    k = torch.tensor([[[0.0, 5.0]], [[2 * math.log(3), 7.0]]])
    v = torch.tensor([[[4.0, 8.0]], [[0.0, 16.0]]])
    got = ragged_attention(q, k, v, torch.tensor([0, 1]), torch.tensor([0, 2]), scale=0.5)
    assert got.out[0, 0].tolist() == pytest.approx([1.0, 14.0])
    assert got.lse[0, 0].item() == pytest.approx(math.log(4))


def test_sink_by_hand():
    # One key with score 0 and a sink of ln 3: the key keeps a quarter of the weight.
    ones = torch.ones(1, 1, 1)
    got = ragged_attention(
        0 * ones,
        ones,
        8 * ones,
        torch.tensor([0, 1]),
        torch.tensor([0, 1]),
        scale=1.0,
        sinks=torch.tensor([math.log(3)]),
    )
    assert got.out.item() == pytest.approx(2.0)
    assert got.lse.item() == pytest.approx(0.0)


def which_keys(q_len: int, k_len: int, **options) -> list[list[int]]:
    """The keys that each row reads: with equal scores and one-hot values they show."""
    k = torch.zeros(k_len, 1, 1)
    v = torch.eye(k_len).unsqueeze(1)
    cu_q, cu_k = torch.tensor([0, q_len]), torch.tensor([0, k_len])
    got = ragged_attention(torch.ones(q_len, 1, 1), k, v, cu_q, cu_k, scale=1.0, **options)
    return [row.nonzero().flatten().tolist() for row in got.out[:, 0]]


@pytest.mark.parametrize(
    ("q_len", "k_len", "options", "rows"),
    [
        (2, 3, {}, [[0, 1, 2], [0, 1, 2]]),
        (2, 3, {"causal": True}, [[0, 1], [0, 1, 2]]),
        (3, 2, {"causal": True}, [[], [0], [0, 1]]),
        (3, 3, {"window": (1, 0)}, [[0], [0, 1], [1, 2]]),
        (3, 3, {"window": (0, 1)}, [[0, 1], [1, 2], [2]]),
        (2, 4, {"window": (1, -1)}, [[1, 2, 3], [2, 3]]),
        (2, 4, {"window": (1, 3), "causal": True}, [[1, 2], [2, 3]]),
    ],
)
def test_masks_are_aligned_at_the_bottom_right(q_len, k_len, options, rows):
    assert which_keys(q_len, k_len, **options) == rows


def test_a_row_without_keys_is_zero():
    got = ragged_attention(
        torch.ones(1, 1, 1),
        torch.ones(0, 1, 1),
        torch.ones(0, 1, 1),
        torch.tensor([0, 1]),
        torch.tensor([0, 0]),
        scale=1.0,
    )
    assert got.out.item() == 0
    assert got.lse.item() == -math.inf


def test_pages_by_hand():
    # Page size 2, table [2, 0]: positions 0, 1, 2 are slots 4, 5, 0.
    v_cache = torch.arange(6.0).reshape(3, 2, 1, 1)
    got = paged_attention(
        torch.ones(1, 1, 1),
        torch.zeros(3, 2, 1, 1),
        v_cache,
        torch.tensor([[2, 0]]),
        torch.tensor([3]),
        torch.tensor([0, 1]),
        scale=1.0,
    )
    assert got.out.item() == pytest.approx((4 + 5 + 0) / 3)


def test_grouped_heads_equal_torch():
    args = arguments(Case((5,), (7,), page_size=0, heads=(8, 2), causal=False))
    q, k, v = (args[name].double().transpose(0, 1) for name in ("q", "k", "v"))
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(4, 0), v.repeat_interleave(4, 0)
    )
    torch.testing.assert_close(expected(args).out, want.transpose(0, 1))


def test_the_rule_rejects_what_is_wrong():
    truth = torch.zeros(100)
    plain = truth + 1e-3
    assert twice_plain_error(truth + 1.4e-3, truth, plain).ok
    assert not twice_plain_error(truth + 1.6e-3, truth, plain).ok  # the mean
    one_off = truth.clone()
    one_off[0] = 2.1e-3
    assert not twice_plain_error(one_off, truth, plain).ok  # the maximum
    one_off[0] = math.nan
    assert not twice_plain_error(one_off, truth, plain).ok
