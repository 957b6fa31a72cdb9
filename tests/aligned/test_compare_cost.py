"""The aligned backend's costs, by hand: no sync, no copy, tables of pages."""

import dataclasses

import pytest
from backend_cost import (
    CROSS_KV,
    DECODE,
    NEW_KV,
    OUT,
    PREFILL,
    SELF_KV,
    TOKEN,
    Q,
    assert_layers_add_up,
)

from pagealign.compare.cost import count
from pagealign.compare.cost_cases import cases
from pagealign.compare.counting import Counts


def cost(case):
    return count(case, aligned=True)


def calls(counts: Counts) -> tuple[int, int, int]:
    return counts.syncs, counts.uploads, counts.copied


@pytest.mark.parametrize("case", [c for c in cases(quick=True) if c.text_only != 1], ids=str)
def test_no_sync_and_no_copy(case):
    """In a step where every request has an encoder, or none has."""
    for part, counts in cost(case).items():
        assert part == "table_bytes" or calls(counts) == (0, 0, 0)


def test_decode_of_whisper_large():
    found = cost(DECODE)
    # one page of the decoder's each, and 24 pages of the encoder's; int32
    assert found["table_bytes"] == 4 * (1 + 24) * 4
    layer = found["self"]
    # the attention kernel, and the new keys and values put into the pool
    assert (layer.launches, layer.attention, layer.stored) == (3, 1, NEW_KV)
    slots = 2 * 4 * 8
    assert layer.read == Q + SELF_KV + 4 * 1 * 4 + NEW_KV + slots
    assert layer.written == OUT + NEW_KV
    layer = found["cross"]
    assert (layer.launches, layer.attention, layer.stored) == (1, 1, 0)
    assert (layer.read, layer.written) == (Q + CROSS_KV + 4 * 24 * 4, OUT)


def test_prefill_of_whisper_large():
    found = cost(PREFILL)
    assert found["table_bytes"] == 4 * (1 + 24) * 4
    assert found["self"].stored == 2 * 4 * 4 * TOKEN
    # the encoder's keys and values, once: nothing for the 36 slots of each gap
    assert found["cross"].stored == CROSS_KV
    assert found["cross"].read == 4 * Q + CROSS_KV + 4 * 24 * 4 + CROSS_KV + 2 * 4 * 1500 * 8


def test_layers_add_up():
    assert_layers_add_up(aligned=True)


def test_text_only_batch_launches_no_cross_attention():
    found = cost(dataclasses.replace(DECODE, text_only=4))
    assert found["cross"] == dataclasses.replace(
        Counts(), operators=found["cross"].operators, launches=1, written=OUT
    )
    assert found["table_bytes"] == 4 * 1 * 4


def test_mixed_batch():
    """One request of four without an encoder: its rows are picked out from the host's
    lengths. The device is not waited for, not even by the three lists that are sent to it; each
    cross-attention copies the queries and outputs of the three others."""
    found = cost(dataclasses.replace(DECODE, text_only=1))
    assert calls(found["metadata"]) == (0, 0, 0)
    assert calls(found["self"]) == (0, 0, 0)
    assert calls(found["cross"]) == (0, 0, 2 * 3 * TOKEN)
    assert found["table_bytes"] == (4 * 1 + 3 * 24) * 4


@pytest.mark.parametrize(
    ("field", "values"), [("encoder_len", (64, 1500, 6404)), ("decoded", (1, 65, 448))]
)
def test_metadata_is_as_many_operators_for_any_length(field, values):
    found = [cost(dataclasses.replace(DECODE, **{field: n}))["metadata"] for n in values]
    assert len({(counts.operators, counts.launches) for counts in found}) == 1


@pytest.mark.parametrize("page_size", [64, 128])
def test_tables_shrink_by_the_page_size(page_size):
    """6400 is a multiple of both sizes, 128 too: exactly 1/P of a table of slots."""
    case = dataclasses.replace(DECODE, page_size=page_size, encoder_len=6400, decoded=128)
    assert cost(case)["table_bytes"] == 4 * (6400 + 128) * 4 // page_size


def test_after_a_scheduler_in_the_same_process(make_bed, mllama):
    """Its end takes the configuration away that a backend asks for."""
    before = count(DECODE, aligned=True)
    make_bed(mllama, "torch_native", 64).close()
    assert count(DECODE, aligned=True) == before
