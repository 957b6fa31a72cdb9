"""SGLang 0.5.23's paged KV pool in numpy: its free list, its rows, and what each tree does
with them, slot for slot.

The sources, under ``sglang/srt/mem_cache/``: ``allocator/paged.py`` (``alloc_extend``,
``alloc_decode``, ``free_segment``), ``allocation.py`` (``alloc_for_decode_default``) and
``common.py`` (``release_kv_cache``). ``tests/{stock,aligned}/test_pool_model.py`` serve the same
traces with the real ones and compare every step. At page size 1 the real allocator reuses
slots in another order, which no figure here depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Layout = Literal["stock", "aligned"]


class OutOfPages(Exception):
    """Where SGLang raises "Decode out of memory", which ends its scheduler."""


@dataclass(frozen=True)
class Batch:
    """Requests that hold a row, in the order of SGLang's batch: ``columns`` is int64 ``[7, B]``,
    one array because requests come and go at every other step."""

    columns: np.ndarray

    def __len__(self) -> int:
        return self.columns.shape[1]

    @property
    def request(self) -> np.ndarray:
        """Its number in the trace."""
        return self.columns[0]

    @property
    def row(self) -> np.ndarray:
        return self.columns[1]

    @property
    def encoder_len(self) -> np.ndarray:
        """E."""
        return self.columns[2]

    @property
    def offset(self) -> np.ndarray:
        """The row position of the first decoder token."""
        return self.columns[3]

    @property
    def seq_len(self) -> np.ndarray:
        """Decoder tokens that have a slot."""
        return self.columns[4]

    @property
    def row_len(self) -> np.ndarray:
        """Row positions in use, ``offset + seq_len``: SGLang's ``kv_committed_len``."""
        return self.columns[5]

    @property
    def left(self) -> np.ndarray:
        """Tokens still to come."""
        return self.columns[6]

    def grow(self) -> None:
        """A decoder token more for each."""
        self.columns[4:6] += 1

    def take(self, which: np.ndarray | list[int]) -> Batch:
        """The requests that a mask or a list of indices names."""
        return Batch(self.columns[:, which])

    def join(self, other: Batch) -> Batch:
        return Batch(np.concatenate((self.columns, other.columns), axis=1))


EMPTY = Batch(np.empty((7, 0), np.int64))


@dataclass(frozen=True)
class Census:
    """The pool at one moment, counted from rows and free list; slots unless pages are named.

    ``free``: what the allocator reports. ``reserved``: pages in any row, each once, times the
    page size; it is ``written + gap + tail``. ``written``: slots that hold a token. ``gap``:
    between an encoder and its decoder, never touched. ``tail``: the rest of those pages.
    ``aliased``: tokens whose slot holds another token's too. ``owned_twice``: pages in the
    rows of two requests or more. ``free_twice``: pages more than once in the free list.
    ``lost``: pages in no row and not in the list.
    """

    free: int
    reserved: int
    written: int
    gap: int
    tail: int
    aliased: int
    owned_twice: int
    free_twice: int
    lost: int


class Pool:
    """Rows and free list; page 0 is padding, pages 1 to ``num_pages`` are handed out."""

    def __init__(self, slots: int, page_size: int, layout: Layout, rows: int, width: int):
        self.page_size = page_size
        self.num_pages = slots // page_size
        self.layout = layout
        # req_to_token, in the integers that index fastest
        self.rows = np.zeros((rows, width), np.int64)
        # SGLang takes pages from the front of its list and puts them back there, so the list
        # is a stack: here its front is the end of the array.
        self._stack = np.arange(self.num_pages, 0, -1)
        self._count = self.num_pages
        self._times_free = np.ones(self.num_pages + 2, np.int32)
        self._times_free[[0, -1]] = 0
        self.freed_twice = 0  # times that a page was freed while it was free

    @property
    def free_slots(self) -> int:
        """SGLang's ``available_size``; pages freed twice count twice, as they do there."""
        return self._count * self.page_size

    @property
    def free_list(self) -> np.ndarray:
        """Free pages in SGLang's order."""
        return self._stack[: self._count][::-1]

    def extend(self, batch: Batch) -> None:
        """Give new requests their rows, whole pages each: a prefill."""
        counts = -(-batch.row_len // self.page_size)
        pages = self._take(int(counts.sum()))
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        start = 0
        for row, length, count in zip(
            batch.row.tolist(), batch.row_len.tolist(), counts.tolist(), strict=True
        ):
            self.rows[row, :length] = slots[start : start + length]
            start += count * self.page_size

    def decode(self, batch: Batch) -> None:
        """Give each request's next token a slot.

        A page is opened when the decoder's own length is a multiple of the page size;
        otherwise it is the slot after the last one. Stock looks that one up at a position of
        the decoder's, in a row that begins with the encoder.
        """
        next_at = batch.row_len if self.layout == "aligned" else batch.seq_len
        slots = self.rows[batch.row, next_at - 1] + 1
        opens = np.flatnonzero(batch.seq_len % self.page_size == 0)
        if len(opens):
            slots[opens] = self._take(len(opens)) * self.page_size
        self.rows[batch.row, batch.row_len] = slots
        batch.grow()

    def slots_for_decode(self, batch: Batch) -> int:
        """What SGLang thinks the next decode step takes, from the whole row's length."""
        return int(np.count_nonzero(batch.row_len % self.page_size == 0)) * self.page_size

    def release(self, batch: Batch) -> None:
        """Free the rows together: of each, the pages of the slots at 0, P, 2P, ..."""
        self._give(
            np.concatenate(
                [
                    self.rows[row, : length : self.page_size] // self.page_size
                    for row, length in zip(batch.row.tolist(), batch.row_len.tolist(), strict=True)
                ]
            )
        )

    def _take(self, count: int) -> np.ndarray:
        if count > self._count:
            raise OutOfPages
        self._count -= count
        pages = self._stack[self._count : self._count + count][::-1].copy()
        np.subtract.at(self._times_free, pages, 1)
        return pages

    def _give(self, pages: np.ndarray) -> None:
        np.add.at(self._times_free, pages, 1)
        if self._times_free[pages].max() > 1:
            named, times = np.unique(pages, return_counts=True)
            newly_free = np.count_nonzero(self._times_free[named] == times)
            self.freed_twice += len(pages) - int(newly_free)
        end = self._count + len(pages)
        if end > len(self._stack):  # more than there are: some are in it twice
            self._stack = np.resize(self._stack, 2 * end)
        self._stack[self._count : end] = pages[::-1]
        self._count = end

    def census(self, batch: Batch) -> Census:
        """Count what ``batch``, all the requests that hold a row, has."""
        is_written = np.zeros((self.num_pages + 2) * self.page_size, bool)
        owners = np.zeros(self.num_pages + 2, np.int32)
        columns = (batch.row, batch.encoder_len, batch.offset, batch.row_len)
        for row, encoder_len, offset, length in zip(*(c.tolist() for c in columns), strict=True):
            slots = self.rows[row, :length]
            is_written[slots[:encoder_len]] = True
            is_written[slots[offset:]] = True
            # Indexed like this, a page that the row names many times counts once.
            owners[slots // self.page_size] += 1

        written = int(np.count_nonzero(is_written))
        reserved = int(np.count_nonzero(owners)) * self.page_size
        gap = int((batch.offset - batch.encoder_len).sum())
        tokens = int((batch.encoder_len + batch.seq_len).sum())
        return Census(
            free=self.free_slots,
            reserved=reserved,
            written=written,
            gap=gap,
            tail=reserved - written - gap,
            aliased=tokens - written,
            owned_twice=int(np.count_nonzero(owners > 1)),
            free_twice=int(np.count_nonzero(self._times_free > 1)),
            lost=int(np.count_nonzero((owners + self._times_free)[1:-1] == 0)),
        )
