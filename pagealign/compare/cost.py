"""Cost: what each approach's backend makes a device and its host do, counted.

Each tree's real ``XPUAttentionBackend`` runs one step on the counted device (see
``counting``) at a real model's head counts, with one self- and one cross-attention layer;
a step of the model is its metadata once and each kind of layer as often as the model has it
(``tests/aligned/test_compare_cost.py`` counts a whole step layer by layer and gets the same).
What is outside the backend's attention path (projections, the scheduler, allocation) is the
same for all three and isn't counted.

The wall time of the metadata code is measured apart, on plain CPU tensors, see
``metadata_time``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagealign.compare.approaches import Approach
from pagealign.compare.batches import Heads
from pagealign.compare.cost_cases import Case, batch_of, cases, model
from pagealign.compare.tree_worker import Workers, call_all

if TYPE_CHECKING:
    from pagealign.compare.counting import Counts
    from pagealign.compare.metadata_time import Time


@dataclass(frozen=True)
class Row:
    """The counts of one approach in one case, bf16.

    ``part`` is ``metadata``, ``self`` or ``cross`` (one layer of the kind), or ``step``: the
    whole step, with ``layers`` the layers of both kinds. The counts are those of
    ``counting.Counts``; ``table_bytes`` is the size of the step's page or slot tables.
    ``time_ratio``, for ``metadata`` where it was measured: its wall time over the aligned
    tree's, and ``microseconds`` that time.
    """

    approach: str
    model: str
    phase: str
    page_size: int
    batch: int
    encoder_len: int
    decoded: int
    text_only: int
    part: str
    layers: int
    syncs: int
    uploads: int
    operators: int
    launches: int
    attention: int
    read: int
    written: int
    copied: int
    stored: int
    table_bytes: int
    microseconds: float | None = None
    time_ratio: float | None = None


def count(case: Case, aligned: bool, self_layers: int = 1, cross_layers: int = 1) -> dict[str, Any]:
    """In a tree: the ``Counts`` of a step's metadata and of so many layers, and ``table_bytes``."""
    import torch

    from pagealign.compare.backend_harness import CROSS, SELF, Rig, counted_kernels
    from pagealign.compare.counting import Counter

    m, batch = model(case.model), batch_of(case)
    counter = Counter()
    heads = Heads(m.query_heads, m.kv_heads, m.head_size)
    rig = Rig(heads, torch.bfloat16, case.page_size, batch, aligned=aligned, counter=counter)
    tokens, encoder_tokens = sum(batch.q_lens), sum(batch.encoder_lens)

    def zeros(count: int, *shape: int) -> torch.Tensor:
        return counter.put(torch.zeros(count, *shape, dtype=torch.bfloat16))

    q = zeros(tokens, m.query_heads * m.head_size)
    kv = [zeros(tokens, m.kv_heads, m.head_size) for _ in "kv"]
    encoder_kv: list[torch.Tensor | None] = [None, None]
    if batch.encoder_is_new and encoder_tokens:
        encoder_kv = [zeros(encoder_tokens, m.kv_heads, m.head_size) for _ in "kv"]

    def step() -> dict[str, Counts]:
        found = {}
        rig.build_metadata()
        found["metadata"] = counter.take()
        for _ in range(self_layers):
            rig.attend(SELF, q, *kv)
        found["self"] = counter.take()
        for _ in range(cross_layers):
            rig.attend(CROSS, q, *encoder_kv)
        found["cross"] = counter.take()
        return found

    with torch.no_grad(), counted_kernels(counter), counter:
        step()  # SGLang imports modules in a first step, and those make tensors
        return step() | {"table_bytes": rig.table_bytes}


def measure(approach: Approach, arguments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the approach's tree: the counts of each case, as plain numbers."""
    found = []
    for fields in arguments:
        counts = count(Case(**fields), approach.name == "aligned")
        tables = counts.pop("table_bytes")
        found.append(
            {part: dataclasses.asdict(c) for part, c in counts.items()} | {"table_bytes": tables}
        )
    return found


def run(trees: Workers, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """The rows of every approach and case."""
    from pagealign.compare import metadata_time

    wanted = cases(quick)
    say("cost: counts")
    arguments = [dataclasses.asdict(case) for case in wanted]
    counts = call_all(trees, __name__, "measure", dict.fromkeys(trees, (arguments,)))
    say("cost: wall time of the metadata")
    times = metadata_time.measure(trees, wanted, rounds=10 if quick else 40)
    return [
        row
        for name, found in counts.items()
        for case, counted in zip(wanted, found, strict=True)
        for row in rows_of(name, case, counted, times[name, case])
    ]


def rows_of(approach: str, case: Case, counted: dict[str, Any], time: Time) -> list[Row]:
    """A case's rows, from what ``measure`` gives for it."""
    from pagealign.compare.counting import Counts

    m = model(case.model)
    parts = {part: Counts(**counted[part]) for part in ("metadata", "self", "cross")}
    step = parts["metadata"] + parts["self"] * m.self_layers + parts["cross"] * m.cross_layers
    layers = {"metadata": 0, "self": 1, "cross": 1, "step": m.self_layers + m.cross_layers}
    shared = {
        "approach": approach,
        "model": case.model,
        "phase": "decode" if case.decoding else "prefill",
        "page_size": case.page_size,
        "batch": case.batch,
        "encoder_len": case.encoder_len,
        "decoded": case.decoded,
        "text_only": case.text_only,
        "table_bytes": counted["table_bytes"],
    }
    rows = [
        Row(**shared, part=part, layers=layers[part], **dataclasses.asdict(counts))
        for part, counts in (parts | {"step": step}).items()
    ]
    timed = {"microseconds": time.microseconds, "time_ratio": time.ratio}
    return [dataclasses.replace(rows[0], **timed), *rows[1:]]
