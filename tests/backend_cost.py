"""What any tree's backend has to cost, worked out by hand for one step of Whisper-large-v3.

Four requests, E = 1500, 64 decoder tokens each, page size 64; 20 heads of size 64 in bf16:
2560 bytes per token for the keys, and as many for the values, the queries and the outputs.
"""

from __future__ import annotations

import dataclasses

from pagealign.compare.cost import count
from pagealign.compare.cost_cases import Case

DECODE = Case("Whisper-large-v3", 64, 4, 1500, 64, decoding=True)
PREFILL = dataclasses.replace(DECODE, decoded=4, decoding=False)
TOKEN = 20 * 64 * 2  # bytes
Q = OUT = 4 * TOKEN
NEW_KV = 2 * 4 * TOKEN
SELF_KV, CROSS_KV = 2 * 4 * 64 * TOKEN, 2 * 4 * 1500 * TOKEN


def assert_layers_add_up(aligned: bool) -> None:
    """Three self- and two cross-attention layers cost three and two times one of each."""
    for case in (DECODE, PREFILL, dataclasses.replace(DECODE, text_only=1)):
        one, more = count(case, aligned), count(case, aligned, self_layers=3, cross_layers=2)
        assert more["metadata"] == one["metadata"]
        assert more["self"] == one["self"] * 3
        assert more["cross"] == one["cross"] * 2
