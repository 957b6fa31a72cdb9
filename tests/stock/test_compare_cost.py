"""The costs of stock's page-size-1 view, by hand: slot tables, two syncs a layer."""

import dataclasses

import pytest
from backend_cost import (
    CROSS_KV,
    DECODE,
    NEW_KV,
    OUT,
    PREFILL,
    SELF_KV,
    Q,
    assert_layers_add_up,
)

from pagealign.compare.approaches import approach
from pagealign.compare.cost import count


@pytest.fixture(autouse=True)
def kernels_of_page_size_1(monkeypatch):
    monkeypatch.setenv("PAGEALIGN_KERNELS", approach("page1").kernels)


def test_decode_of_whisper_large():
    found = count(DECODE, aligned=False)
    assert found["table_bytes"] == 4 * (64 + 1500) * 4
    assert found["metadata"].syncs == 1  # the longest encoder
    lengths = 4 * 4  # int32
    for part, keys, table, stored, slots in (
        ("self", SELF_KV, 4 * 64 * 4, NEW_KV, 2 * 4 * 8),
        ("cross", CROSS_KV, 4 * 1500 * 4, 0, 0),
    ):
        layer = found[part]
        assert (layer.syncs, layer.uploads, layer.copied) == (2, 0, 0)  # is one empty? are all?
        assert (layer.attention, layer.stored) == (1, stored)
        # the kernel, the store of keys and of values, the largest and the smallest length
        assert layer.launches == 1 + 2 * (stored > 0) + 2
        read = Q + keys + table + stored + slots
        assert layer.read == read + 2 * lengths + 2 * 4  # and both answers
        assert layer.written == OUT + stored + 2 * 4


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_two_syncs_a_layer_and_one_a_step(case):
    found = count(case, aligned=False)
    syncs = {part: found[part].syncs for part in ("metadata", "self", "cross")}
    assert syncs == {"metadata": 1, "self": 2, "cross": 2}


def test_mixed_batch_waits_two_times_more_in_cross_attention():
    """For the number of rows to repeat the mask to, and for where the mask is true."""
    found = count(dataclasses.replace(DECODE, text_only=1), aligned=False)
    assert (found["self"].syncs, found["cross"].syncs) == (2, 4)


def test_layers_add_up():
    assert_layers_add_up(aligned=False)
