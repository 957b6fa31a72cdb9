"""A trace through SGLang's real scheduler, pools and allocator, beside the numpy model.

``pool_machine.Pools`` gives requests of any E whose model generates what it is told. In every
forward the model of ``pagealign.compare`` makes its own step; then both must hold the same
requests, in the same slots, and a count of the real rows and free list, made here with sets,
must give the model's figures.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from pool_machine import ENCODER_LENS, Pools

from pagealign.bed import Bed
from pagealign.compare.pool_model import Census, Layout
from pagealign.compare.scheduler_model import Limits, Scheduler
from pagealign.compare.traces import Trace

DECODE_OUT_OF_MEMORY = "Decode out of memory"


class FixedRatio:
    """SGLang's NewTokenRatioTracker, kept where the model has it."""

    def __init__(self, ratio: float):
        self._ratio = ratio

    @property
    def current(self) -> float:
        return self._ratio

    @current.setter
    def current(self, value: float) -> None:
        """SGLang raises it after a retraction."""

    def decay_step(self) -> None:
        pass

    def reset(self) -> None:
        pass


def random_trace(seed: int, count: int, longest: int) -> Trace:
    """Requests around page boundaries, in bursts, whose answers are up to ``longest``."""
    random = np.random.default_rng(seed)
    decode = random.choice([1, 2, 5, 17, longest // 2, longest], count)
    return Trace(
        f"random-{seed}",
        np.sort(random.choice(count * 4, count)).astype(float),
        random.choice(ENCODER_LENS, count),
        decode,
        random.integers(1, 41, count),
    )


class Served:
    """``pools`` serves ``trace`` to its end, checked at each forward; then what came of it."""

    def __init__(self, pools: Pools, trace: Trace, layout: Layout, limits: Limits):
        pools.reset()
        pools.scheduler.new_token_ratio_tracker = FixedRatio(limits.new_token_ratio)
        self.pools, self.trace, self.layout = pools, trace, layout
        self.model = Scheduler(trace, layout, pools.page_size, limits)
        self.forwards = 0
        self.freed_twice = 0
        self.most = Counter()  # largest figure of each kind
        self.died = False
        self._reqs: dict[int, object] = {}
        self._first_rid = pools._admitted
        self._first_step = pools.bed.steps
        self._count_frees(pools.bed)
        pools.check_forward = self._check
        try:
            self._serve()
        finally:
            del pools.bed.allocator._release_page_ids

    @property
    def retractions(self) -> int:
        return sum(req.retraction_count for req in self._reqs.values())

    def _count_frees(self, bed: Bed) -> None:
        allocator = bed.allocator
        release = getattr(type(allocator), "_release_page_ids", None)  # not at page size 1

        def counted(*page_ids):
            free = set(allocator.get_all_free_pages().tolist())
            for page in [page for ids in page_ids for page in ids.tolist()]:
                self.freed_twice += page in free
                free.add(page)
            release(allocator, *page_ids)

        allocator._release_page_ids = counted

    def _serve(self) -> None:
        arrivals = list(enumerate(self.trace.arrival.tolist()))
        while arrivals or self.pools.alive():
            iteration = self.pools.bed.steps - self._first_step
            assert iteration < 20_000, "the requests never end"
            while arrivals and arrivals[0][1] <= iteration:
                i, _ = arrivals.pop(0)
                lengths = (self.trace.encoder_len, self.trace.prompt_len, self.trace.decode_len)
                self.pools.admit(*(int(length[i]) for length in lengths))
            try:
                self.pools.bed.step()
            except RuntimeError as error:
                if DECODE_OUT_OF_MEMORY not in str(error):
                    raise
                self.died = True
                break
        assert not self.model.step()

    def _number(self, req) -> int:
        """The request's number in the trace."""
        return int(req.rid[1:]) - self._first_rid - 1  # Pools counts from 1

    def _check(self, forward_batch) -> None:
        model, pools = self.model, self.pools
        assert model.step()
        self.forwards += 1
        iteration = pools.bed.steps - self._first_step - 1
        assert model.now == iteration
        reqs = {self._number(req): req for req in pools.running()}
        for number in reqs.keys() - self._reqs.keys():
            assert model.waited[number] == iteration - self.trace.arrival[number]
        self._reqs |= reqs
        batch = model.holding
        assert sorted(batch.request.tolist()) == sorted(reqs)
        assert model.waiting == len(pools.scheduler.waiting_queue)
        if pools.page_size > 1:
            self._check_slots(reqs)
        assert model.pool.census(batch) == self._census(reqs)
        self.most["freed twice"] = self.freed_twice
        assert model.pool.freed_twice == self.freed_twice

    def _check_slots(self, reqs: dict[int, object]) -> None:
        """The same slots in the same order, and the same free list."""
        model, batch = self.model, self.model.holding
        for number, row, length in zip(batch.request, batch.row, batch.row_len, strict=True):
            slots = self.pools.slots(reqs[number])
            assert model.pool.rows[row, :length].tolist() == slots, f"request {number}"
        free = self.pools.bed.allocator.get_all_free_pages().tolist()
        assert model.pool.free_list.tolist() == free

    def _census(self, reqs: dict[int, object]) -> Census:
        """The real pool's figures."""
        page_size = self.pools.page_size
        free = Counter(self.pools.bed.allocator.get_all_free_pages().tolist())
        owners: Counter[int] = Counter()
        written: list[int] = []
        gap = 0
        for number, req in reqs.items():
            slots = self.pools.slots(req)
            owners.update({slot // page_size for slot in slots})
            encoder = int(self.trace.encoder_len[number])
            of_row = -encoder % page_size if self.layout == "aligned" else 0
            gap += of_row
            written += slots[:encoder] + slots[encoder + of_row :]
        reserved = len(owners) * page_size
        found = Census(
            free=free.total() * page_size,
            reserved=reserved,
            written=len(set(written)),
            gap=gap,
            tail=reserved - len(set(written)) - gap,
            aliased=len(written) - len(set(written)),
            owned_twice=sum(count > 1 for count in owners.values()),
            free_twice=sum(count > 1 for count in free.values()),
            lost=len(self.pools.all_pages - owners.keys() - free.keys()),
        )
        for name in ("aliased", "owned_twice", "free_twice", "lost"):
            self.most[name] = max(self.most[name], getattr(found, name))
        return found
