"""SGLang 0.5.23's scheduler as far as it decides who holds slots: arrival, admission, prefill
or decode, retraction, finish.

The sources, under ``sglang/srt/managers/``: ``scheduler.py`` (``get_next_batch_to_run``,
``_get_new_batch_prefill_raw``, ``update_running_batch``), ``schedule_policy.py``
(``PrefillAdder.add_one_req``) and ``schedule_batch.py`` (``retract_decode``). First come, first
served; without prefix cache, chunked prefill, priorities and overlap. SGLang admits by what a
request may generate at most; here that is what it will generate.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from pagealign.compare.pool_model import EMPTY, Batch, Layout, OutOfPages, Pool
from pagealign.compare.traces import Trace
from pagealign.layout import ceil_align

CLIP_MAX_NEW_TOKENS = 4096  # the most that SGLang reserves for an answer


@dataclass(frozen=True)
class Limits:
    """``pool_slots``: SGLang's ``--max-total-tokens``; ``max_running`` and
    ``max_prefill_tokens``: its options of these names. ``new_token_ratio``: how much of what the
    running requests have still to generate is kept free when another is admitted; SGLang moves
    it between 0.7 and 0.1 and retracts requests when it was too little."""

    pool_slots: int
    max_running: int = 256
    max_prefill_tokens: int = 16384
    new_token_ratio: float = 1.0


class Scheduler:
    """Serves a trace, one iteration per ``step``.

    Between two steps the last one's forward is under way: ``holding`` has the requests that
    own slots then, also those whose last token it makes.
    """

    def __init__(self, trace: Trace, layout: Layout, page_size: int, limits: Limits):
        self.limits = limits
        self.page_size = page_size
        self._arrival = trace.arrival.tolist()
        self._encoder = trace.encoder_len.tolist()
        self._prompt = trace.prompt_len.tolist()
        self._decode = trace.decode_len.tolist()
        offset = trace.encoder_len
        if layout == "aligned":
            offset = -(-offset // page_size) * page_size
        self._offset = offset.tolist()
        rows = min(limits.max_running, len(trace))
        width = int((offset + trace.prompt_len + trace.decode_len).max())
        self.pool = Pool(limits.pool_slots, page_size, layout, rows, width)
        self._free_rows = list(range(rows))
        self._arrived = 0
        self._waiting: deque[int] = deque()
        self._full = False  # SGLang's batch_is_full: admit nobody until somebody leaves
        self._running = EMPTY
        self._prefilled = EMPTY  # in the forward under way, if that is a prefill
        self._generated: dict[int, int] = {}  # by request, of those retracted

        self.now = -1  # the iteration under way
        self.steps = 0  # iterations that ran a batch
        self.prefills = 0  # of these
        self.finished = 0
        self.aborted = 0
        self.retractions = 0
        self.waited = np.full(len(trace), np.nan)  # steps from arrival to first prefill
        self.stopped = ""  # why the service ended early, if it did

    @property
    def holding(self) -> Batch:
        return self._running.join(self._prefilled)

    @property
    def running(self) -> int:
        return len(self._running) + len(self._prefilled)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def step(self) -> bool:
        """Run the next batch, after idle iterations if there are any; False if there is none."""
        self._finish()
        while not self.stopped:
            self.now += 1
            self._receive()
            if self._admit():
                self.prefills += 1
            elif len(self._running):
                if not self._decode_running():
                    continue
            elif self._waiting:
                self.stopped = "no room for a request in an idle pool"
                continue
            elif self._arrived < len(self._arrival):
                self.now = math.ceil(self._arrival[self._arrived]) - 1
                continue
            else:
                return False
            self.steps += 1
            return True
        return False

    def _receive(self) -> None:
        arrived = self._arrived
        while arrived < len(self._arrival) and self._arrival[arrived] <= self.now:
            self._waiting.append(arrived)
            arrived += 1
        self._arrived = arrived

    def _finish(self) -> None:
        """The forward's tokens have come: who has all of its own leaves."""
        prefill = len(self._prefilled) > 0
        batch = self._prefilled if prefill else self._running
        batch.left[:] -= 1
        done = batch.left == 0
        if done.any():
            self._release(batch.take(done))
            self.finished += int(np.count_nonzero(done))
            self._full = False
            batch = batch.take(~done)
        if prefill:
            if not len(self._running):
                self._full = False  # the prefill batch, with its own flag, takes the place
            self._running = self._running.join(batch)
            self._prefilled = EMPTY
        else:
            self._running = batch

    def _release(self, batch: Batch) -> None:
        self.pool.release(batch)
        self._free_rows += batch.row.tolist()

    def _admit(self) -> bool:
        """Admit who fits, in order, and give them their rows; whether there was anybody."""
        running = len(self._running)
        if not running:
            self._full = False
        if self._full or not self._waiting:
            return False
        places = self.limits.max_running - running
        reserved = np.minimum(self._running.left, CLIP_MAX_NEW_TOKENS).sum()
        slots = self.pool.free_slots - float(reserved) * self.limits.new_token_ratio
        prefill_tokens = self.limits.max_prefill_tokens
        admitted: list[int] = []
        while self._waiting:
            if len(admitted) >= places:
                self._full = True
                break
            request = self._waiting[0]
            generated = self._generated.get(request, 0)
            length = self._offset[request] + self._prompt[request] + generated
            left = self._decode[request] - generated
            if length + min(left, CLIP_MAX_NEW_TOKENS) + self.page_size >= slots:
                self._full = bool(admitted) or running > 0
                break
            paged = ceil_align(length, self.page_size)
            if admitted and paged >= prefill_tokens:
                break
            admitted.append(self._waiting.popleft())
            most = min(self._decode[request], CLIP_MAX_NEW_TOKENS)
            slots -= paged + self.page_size + most
            prefill_tokens -= paged
            if slots <= 0:
                self._full = True
                break
            if prefill_tokens <= 0:
                break
        if admitted:
            self._prefill(admitted)
        return bool(admitted)

    def _prefill(self, admitted: list[int]) -> None:
        rows, seq_lens, left = [], [], []
        for request in admitted:
            generated = self._generated.pop(request, None)
            if generated is None:
                generated = 0
                self.waited[request] = self.now - self._arrival[request]
            rows.append(self._free_rows.pop())
            seq_lens.append(self._prompt[request] + generated)
            left.append(self._decode[request] - generated)
        offsets = [self._offset[request] for request in admitted]
        columns = (
            admitted,
            rows,
            [self._encoder[request] for request in admitted],
            offsets,
            seq_lens,
            [offset + seq_len for offset, seq_len in zip(offsets, seq_lens, strict=True)],
            left,
        )
        self._prefilled = Batch(np.array(columns, np.int64))
        self.pool.extend(self._prefilled)

    def _decode_running(self) -> bool:
        """One decode step; False if the pool had no room for anybody."""
        if not self._fits(self._running):
            self._retract()
        if not len(self._running):
            return False
        try:
            self.pool.decode(self._running)
        except OutOfPages:
            self.stopped = "decode out of memory"
            return False
        return True

    def _fits(self, batch: Batch) -> bool:
        free = self.pool.free_slots
        # Most often there is a page for everybody.
        return len(batch) * self.page_size <= free or self.pool.slots_for_decode(batch) <= free

    def _retract(self) -> None:
        """Send the requests with the fewest tokens back to wait, until the others fit; the
        last one is aborted if it does not fit alone."""
        batch = self._running

        def progress(i: int) -> tuple[int, int]:
            request = batch.request[i]
            generated = self._decode[request] - batch.left[i]
            return generated, -(self._offset[request] + self._prompt[request])

        kept = sorted(range(len(batch)), key=progress, reverse=True)
        while len(kept) > 1:
            last = kept.pop()
            self._release(batch.take([last]))
            request = int(batch.request[last])
            self._generated[request] = self._decode[request] - int(batch.left[last])
            self._waiting.append(request)
            self.retractions += 1
            if self._fits(batch.take(kept)):
                break
        if not self._fits(batch.take(kept)):
            self._release(batch.take(kept))
            self.aborted += len(kept)
            kept = []
        self._running = batch.take(kept)
        self._full = False
