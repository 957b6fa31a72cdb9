"""One launch of the attention operator, and the requests in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Path(Enum):
    """Which kernel runs. The host decides by ``max_seqlen_q``, not by the real lengths."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"  # decode kernel for rows of one query, prefill kernel for the others


@dataclass(frozen=True)
class Call:
    """The operator's arguments after the Python wrapper's preparation.

    Paged: ``k`` and ``v`` are ``(num_pages, page_size, kv_heads, D)``, ``page_table`` is
    ``(batch, columns)`` and ``cu_seqlens_k`` holds ``batch`` lengths. Ragged: ``k`` and
    ``v`` are ``(total_k, kv_heads, D)``, there is no table and ``cu_seqlens_k`` holds
    ``batch + 1`` offsets. ``q`` is ``(total_q, heads, D)`` either way.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    page_table: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    window: tuple[int, int]  # causal is already folded in: right = 0
    sinks: Tensor | None
    num_splits: int
    want_lse: bool
    out: Tensor | None

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def paged(self) -> bool:
        return self.page_table is not None

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q.shape[1] // self.k.shape[-2]

    @property
    def masked(self) -> bool:
        return self.window != (-1, -1)

    @property
    def causal_only(self) -> bool:
        return self.window == (-1, 0)

    @property
    def path(self) -> Path:
        if self.max_seqlen_q == 1:
            return Path.DECODE
        return Path.MIXED if self.paged and self.batch > 1 else Path.PREFILL


@dataclass(frozen=True)
class Request:
    """One request's part of a call; ``pages`` are the table entries that the kernel needs."""

    index: int
    q_start: int
    q_len: int
    k_start: int  # ragged only
    k_len: int
    decode: bool
    pages: list[int] | None

    @property
    def offset(self) -> int:
        """Query row ``i`` stands at key position ``i + offset``."""
        return self.k_len - self.q_len

    def rows_without_keys(self, right: int) -> int:
        """The first so many query rows may read no key at all."""
        if self.k_len == 0:
            return self.q_len
        return min(self.q_len, max(0, -(self.offset + right))) if right >= 0 else 0


def requests_of(call: Call) -> list[Request]:
    """The requests of a call whose shapes and types have been checked."""
    q_offsets = call.cu_seqlens_q.tolist()
    k_numbers = call.cu_seqlens_k.tolist()
    table = None if call.page_table is None else call.page_table.tolist()
    path = call.path
    requests = []
    for b in range(call.batch):
        q_len = q_offsets[b + 1] - q_offsets[b]
        if table is not None:
            k_start, k_len = 0, k_numbers[b]
            pages = table[b][: max(0, -(-k_len // call.page_size))]
        else:
            k_start, k_len = k_numbers[b], k_numbers[b + 1] - k_numbers[b]
            pages = None
        decode = path is Path.DECODE or (path is Path.MIXED and q_len <= 1)
        requests.append(Request(b, q_offsets[b], q_len, k_start, k_len, decode, pages))
    return requests
