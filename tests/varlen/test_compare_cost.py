"""The costs of gathering, by hand: every layer copies all the keys and values it reads."""

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

from pagealign.compare.cost import count


def test_decode_of_whisper_large():
    found = count(DECODE, aligned=False)
    # stock's two tables of slots, and the slots once more as a list
    assert found["table_bytes"] == 2 * 4 * (64 + 1500) * 4
    for part, keys, tokens, stored, slots in (
        ("self", SELF_KV, 64, NEW_KV, 2 * 4 * 8),
        ("cross", CROSS_KV, 1500, 0, 0),
    ):
        layer = found[part]
        assert (layer.syncs, layer.uploads, layer.stored) == (0, 0, stored)
        assert layer.copied == keys
        assert (layer.launches, layer.attention) == (1 + 2 + 2 * (stored > 0), 1)
        gathered = keys + 2 * 4 * tokens * 4  # out of the pool, by int32 slots
        assert layer.read == Q + keys + gathered + stored + slots
        assert layer.written == OUT + keys + stored


def test_gather_of_one_request_and_layer():
    assert CROSS_KV // 4 == 1500 * 20 * 64 * 2 * 2


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_syncs(case):
    """Once per step: the longest encoder, and for both regions the number of slots and
    whether a request has none."""
    found = count(case, aligned=False)
    syncs = {part: found[part].syncs for part in ("metadata", "self", "cross")}
    assert syncs == {"metadata": 5, "self": 0, "cross": 0}


def test_layers_add_up():
    assert_layers_add_up(aligned=False)
