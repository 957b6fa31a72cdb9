"""Random requests through the real scheduler, pools and allocator; only the model is made up.

After every step the books are checked from the rows and the free list themselves, not by
SGLang's own checker, and in every forward the tables that the attention backends built
are compared with the rows, position by position.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from flashinfer_tables import FlashInferTables
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagealign.bed import Bed, Request
from pagealign.tiny_models import VOCAB

EOS, TOKEN = 3, 9
# below, at and above pages of 16, 64 and 128; 0 is text only
ENCODER_LENS = (0, 1, 15, 16, 17, 40, 63, 64, 65, 100, 128, 130, 200)
REQUESTS = st.tuples(
    st.sampled_from(ENCODER_LENS), st.integers(1, 40), st.sampled_from([1, 5, 70, 200])
)


@dataclass(frozen=True)
class Row:
    """A request's row by hand: ``[encoder | gap | decoder]``, as slots."""

    encoder: list[int]
    gap: list[int]
    decoder: list[int]


class Pools:
    """A bed whose requests have any E and whose model says what it is told."""

    def __init__(self, bed: Bed):
        self.bed = bed
        self.page_size = bed.page_size
        self.scheduler = bed.scheduler
        self.runner = bed.scheduler.tp_worker.model_runner
        self.flashinfer = FlashInferTables(self.runner)
        self.all_pages = set(bed.allocator.get_all_free_pages().tolist())
        self.ending: set[str] = set()
        self.check_forward: Callable[[object], None] = lambda batch: None
        self.seen: Counter[str] = Counter()
        self._batch = None
        self._admitted = 0
        self._forwards = 0
        self.scheduler.pad_input_ids_func = self._pad
        self.runner.model.forward = self._forward
        bed.on_batch = self._remember

    # --- what the machine does ---

    def admit(self, encoder_len: int, text_len: int, max_new_tokens: int) -> None:
        # The encoder's length is read off the features by _pad.
        features = torch.zeros(1, 1, encoder_len) if encoder_len else None
        text = tuple(10 + i for i in range(text_len))
        request = Request(
            text, features, max_new_tokens=max_new_tokens, ignore_eos=False, return_logprob=False
        )
        self._admitted += 1
        tokenized = self.bed._tokenized(f"q{self._admitted:06}", request)
        self.bed._todo.append((self.bed.steps, tokenized))

    def abort(self, rid: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.bed._todo.append((self.bed.steps, AbortReq(rid=rid)))

    def retract(self) -> None:
        """One step in which SGLang retracts whether or not the pool is full."""
        from sglang.srt.managers import scheduler

        before = scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 1
        try:
            self.bed.step()
        finally:
            scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = before

    def drain(self) -> None:
        self.bed.step()  # takes in what was admitted last
        for req in self.alive():
            self.abort(req.rid)
        for _ in range(4):
            self.bed.step()
        assert not self.alive()

    def reset(self) -> None:
        """Forget everything, also what a failure left behind."""
        self.bed._todo.clear()
        self.ending.clear()
        self._batch = None
        self.scheduler.waiting_queue.clear()
        self.scheduler.running_batch = type(self.scheduler.running_batch)(
            reqs=[], batch_is_full=False
        )
        self.scheduler.last_batch = None
        self.scheduler.tree_cache.reset()
        self.bed.req_to_token_pool.clear()
        self.bed.allocator.clear()

    # --- what is there ---

    def alive(self) -> list:
        """Requests that wait or run."""
        last = self.scheduler.last_batch
        found = [
            *self.scheduler.waiting_queue,
            *self.scheduler.running_batch.reqs,
            *(last.reqs if last is not None else []),
        ]
        return list({req.rid: req for req in found if not req.finished()}.values())

    def running(self) -> list:
        """Requests that own a row, also those of the batch in flight."""
        found = [*self.alive(), *(self._batch.reqs if self._batch is not None else [])]
        rows = {req.rid: req for req in found if req.kv.holds_kv and not req.finished()}
        return list(rows.values())

    def slots(self, req) -> list[int]:
        """All that a request's row owns, in order."""
        row = self.bed.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        return row[: req.kv.kv_allocated_len].tolist()

    def row(self, req) -> Row:
        slots = self.slots(req)
        encoder_len = getattr(req.multimodal_inputs, "num_image_tokens", None) or 0
        reserve = -(-encoder_len // self.page_size) * self.page_size
        return Row(slots[:encoder_len], slots[encoder_len:reserve], slots[reserve:])

    # --- what must hold ---

    def check_owners(self) -> None:
        """No slot has two owners; free plus owned is the pool."""
        free = Counter(self.bed.allocator.get_all_free_pages().tolist())
        twice = [page for page, count in free.items() if count > 1]
        assert not twice, f"pages freed twice: {twice}"
        owners: dict[int, str] = {}
        for req in self.running():
            slots = self.slots(req)
            again = [slot for slot, count in Counter(slots).items() if count > 1]
            assert not again, f"slots at two positions of {req.rid}'s row: {again}"
            for page in {slot // self.page_size for slot in slots}:
                assert page not in owners, f"page {page} of {req.rid} and {owners[page]}"
                assert page not in free, f"page {page} of {req.rid} is also free"
                owners[page] = req.rid
        lost = self.all_pages - owners.keys() - free.keys()
        assert not lost, f"pages neither free nor owned: {sorted(lost)}"
        assert owners.keys() | free.keys() == self.all_pages

    def check_regions(self) -> None:
        """Encoder and decoder start on a page each and fill their pages in order."""
        for req in self.running():
            row = self.row(req)
            for region in (row.encoder + row.gap, row.decoder):
                for i, slot in enumerate(region):
                    in_page = i % self.page_size
                    assert slot % self.page_size == in_page, f"{req.rid}: {i} at slot {slot}"
                    assert in_page == 0 or slot == region[i - 1] + 1

    def check_writes(self, forward_batch) -> None:
        """What a forward writes: the encoder's own slots, and the decoder's new tokens."""
        encoder, decoder = [], []
        for req, new in zip(self._batch.reqs, self._new_tokens(forward_batch), strict=True):
            row = self.row(req)
            decoder += row.decoder[-new:]
            if not forward_batch.forward_mode.is_decode():
                encoder += row.encoder
        assert forward_batch.out_cache_loc.tolist() == decoder
        if not forward_batch.forward_mode.is_decode():
            assert forward_batch.encoder_out_cache_loc.tolist() == encoder

    def check_tables(self, forward_batch) -> None:
        """XPU's and FlashInfer's tables against the rows."""
        rows = [self.row(req) for req in self._batch.reqs]
        decoders = [row.decoder for row in rows]
        encoders = [row.encoder for row in rows]
        gaps = {slot for row in rows for slot in row.gap}

        read: tuple[list[list[int]], ...] = ()
        self._forwards += 1
        # Triton's interpreter takes longer than all else: not at every decode step.
        if not forward_batch.forward_mode.is_decode() or self._forwards % 7 == 0:
            read += self.flashinfer.of(forward_batch)
            assert read == (decoders, encoders)
        if self.bed.server_args.attention_backend == "intel_xpu":
            read += self._xpu_tables(forward_batch, decoders, encoders)
        for table in read:
            assert not gaps.intersection(slot for slots in table for slot in slots)

    def _xpu_tables(self, forward_batch, decoders, encoders) -> tuple[list[list[int]], ...]:
        """Slots per request as intel_xpu's kernels read them: of all, and with an encoder."""
        metadata = self.runner.attn_backend.forward_metadata
        lens = [len(slots) for slots in decoders]
        assert metadata.cache_seqlens_int32.tolist() == lens
        decoder = self._read(metadata.page_table, lens)
        assert decoder == decoders
        with_encoder = [slots for slots in encoders if slots]
        if not with_encoder:
            return (decoder,)
        lens = [len(slots) for slots in with_encoder]
        assert metadata.encoder_lens_int32.tolist() == lens
        encoder = self._read(metadata.encoder_page_table, lens)
        assert encoder == with_encoder
        q_lens = self._new_tokens(forward_batch)
        expected = [n for n, slots in zip(q_lens, encoders, strict=True) if slots]
        assert metadata.encoder_cu_seqlens_q.diff().tolist() == expected
        return decoder, encoder

    def _read(self, page_table: torch.Tensor, lens: list[int]) -> list[list[int]]:
        """The slots that a paged kernel reads: page ``t // P``, offset ``t % P``."""
        assert page_table.dtype == torch.int32
        size = self.page_size
        pages = page_table.tolist()
        return [
            [row[t // size] * size + t % size for t in range(n)]
            for row, n in zip(pages, lens, strict=True)
        ]

    # --- what stands for the model ---

    def _new_tokens(self, forward_batch) -> list[int]:
        if forward_batch.forward_mode.is_decode():
            return [1] * forward_batch.batch_size
        return list(forward_batch.extend_seq_lens_cpu)

    def _remember(self, batch) -> None:
        self._batch = batch
        with_encoder = [bool(n) for n in batch.encoder_lens_cpu or []]
        mixed = any(with_encoder) and not all(with_encoder)
        mode = "decode" if batch.forward_mode.is_decode() else "extend"
        self.seen[f"{mode}, mixed" if mixed else mode] += 1

    @staticmethod
    def _pad(input_ids, mm_inputs):
        encoder_len = mm_inputs.mm_items[0].feature.shape[-1]
        mm_inputs.num_image_tokens = encoder_len
        return type(input_ids)("q", [7] * encoder_len) + input_ids

    def _forward(self, input_ids, positions, forward_batch, **kwargs):
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        self.check_forward(forward_batch)
        logits = torch.zeros(forward_batch.batch_size, VOCAB)
        for i, req in enumerate(self._batch.reqs):
            logits[i, EOS if req.rid in self.ending else TOKEN] = 1
        return LogitsProcessorOutput(next_token_logits=logits)


def machine(pools: Pools, layout: bool) -> type[RuleBasedStateMachine]:
    """A state machine over ``pools``; ``layout``: also the rows' regions and the tables.

    Without ``layout`` it knows nothing of how a row is laid out and asks only who owns
    what, which must hold of any tree.
    """

    def check_forward(forward_batch):
        pools.check_owners()
        if layout:
            pools.check_regions()
            pools.check_writes(forward_batch)
            pools.check_tables(forward_batch)

    class Machine(RuleBasedStateMachine):
        @initialize(requests=st.lists(REQUESTS, min_size=3, max_size=6))
        def fresh(self, requests):
            pools.reset()
            pools.check_forward = check_forward
            self.admit(requests)
            pools.bed.step()

        @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
        def admit(self, requests):
            for request in requests:
                pools.admit(*request)

        @rule(steps=st.sampled_from([1, 2, 17, 30]))
        def decode(self, steps):
            for _ in range(steps):
                pools.bed.step()

        @rule()
        def retract(self):
            running = len(pools.running())
            pools.retract()
            pools.seen["retracted"] += running > 1

        @rule(which=st.integers(0, 7))
        def abort(self, which):
            if alive := pools.alive():
                pools.abort(alive[which % len(alive)].rid)
                pools.seen["aborted"] += 1

        @rule(which=st.integers(0, 7))
        def finish(self, which):
            if alive := pools.alive():
                pools.ending.add(alive[which % len(alive)].rid)
                pools.seen["finished"] += 1

        @invariant()
        def owners(self):
            pools.check_owners()

        def teardown(self):
            if sys.exc_info()[0] is not None:
                return  # the fault that was found, not what it leaves behind
            pools.drain()
            assert set(pools.bed.allocator.get_all_free_pages().tolist()) == pools.all_pages
            assert pools.bed.free() == pools.bed.start

    return Machine
