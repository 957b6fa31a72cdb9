"""Where the series may differ from stock at page size 1: by name, with the proof asked for.

Two kinds. ENTRIES: the aligned tree calls a kernel in another way, or not at all, and what
it computes is the same; all that is not named stays compared byte by byte. ANSWERS: stock
answers wrongly or dies; the aligned tree's answers have to be those of each request alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from pagealign.parity.difference import Difference
from pagealign.parity.recording import Recording
from pagealign.parity.workloads import Workload


@dataclass(frozen=True)
class Expected:
    """``diffs``: those of the series that may show it; ``why``: for the report."""

    name: str
    diffs: tuple[str, ...]
    why: str


ANSWERS = {
    e.name: e
    for e in (
        Expected(
            "mllama-row-mask",
            ("fixes_mllama_row_mask.diff",),
            "images beside texts in one prefill: stock masks the wrong rows (40476)",
        ),
        Expected(
            "cut-encoder",
            ("fixes_chunked_prefill.diff",),
            "a chunk that ends inside an encoder kills stock (38627)",
        ),
        Expected(
            "logprob-in-encoder",
            ("fixes_logprob_start_len.diff",),
            "a logprob_start_len inside a cached encoder kills stock",
        ),
        Expected(
            "fa3-graph-tables",
            ("attention_backends.diff",),
            "under a graph stock's FA3 tables of encoder-decoder models pass the end of the row",
        ),
    )
}
NO_KEYS = Expected(
    "no-kernel-without-keys",
    ("model_skip_cross_attention.diff",),
    "Whisper launches no cross-attention in a batch without any encoder; stock's is all zeros",
)
XPU_TABLES = Expected(
    "xpu-page-tables",
    ("xpu_backend.diff",),
    "intel_xpu calls the paged kernel, for the requests that have an encoder or, under a graph, "
    "for all; every request reads the same slots in the same order",
)
ENTRIES = {e.name: e for e in (NO_KEYS, XPU_TABLES)}

_KERNEL_EVENTS = ("cross", "read", "flash_attn_with_kvcache", "decode.run", "prefill.run")
# What intel_xpu's metadata no longer has, or has for the requests with an encoder alone; and
# under a graph what lies behind a request's own columns.
_XPU_METADATA = {
    *(
        f"{event}.{name}"
        for event in ("metadata", "graph")
        for name in (
            "encoder_lens_int32",
            "encoder_cu_seqlens_k",
            "encoder_max_seq_len_k",
            "encoder_page_table",
        )
    ),
    "graph.page_table",
}


class Explainer:
    """Names the differences of one workload that are expected of a tree with ``diffs``."""

    def __init__(self, workload: Workload, stock: Recording, diffs: Collection[str]):
        self._active = {e.name for e in ENTRIES.values() if set(e.diffs) & set(diffs)}
        self._xpu = workload.backend == "intel_xpu" and workload.model != "llama"
        self._whisper = workload.model == "whisper"
        zeros = defaultdict(bool)
        encoders: dict[int, bool] = {}  # none yet while graphs are captured
        for entry in stock.entries:
            if (entry.event, entry.name) == ("batch", "encoder_lens_cpu"):
                encoders[entry.step] = any(entry.value)
            if (entry.event, entry.name) == ("cross", "out") and not encoders.get(entry.step, True):
                values = stock.tensor(entry.value)
                zeros[entry.step, entry.layer] = not values.any().item()
        self._empty = zeros

    def __call__(self, difference: Difference) -> str | None:
        """The name of the expectation, or None: then it is a fault."""
        name = self._name(difference)
        return name if name in self._active else None

    def _name(self, difference: Difference) -> str | None:
        if (
            self._whisper
            and difference.event in _KERNEL_EVENTS
            and difference.other == "nothing"
            and self._empty[difference.step, difference.layer]
        ):
            return NO_KEYS.name
        if self._xpu and (
            difference.event == "flash_attn_with_kvcache" or difference.where in _XPU_METADATA
        ):
            return XPU_TABLES.name
        if (
            self._xpu
            and difference.event == "read"
            and difference.stock == "nothing"
            and self._empty[difference.step, difference.layer]
        ):
            return XPU_TABLES.name
        return None
