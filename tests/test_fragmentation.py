"""What each approach wastes, against figures worked out by hand.

Whisper: E = 1500, so the aligned reserve is 1536 at page sizes 64 and 128 and 1504 at 16; the
prompt has 4 tokens. A request that generates D tokens has 4 + D - 1 decoder tokens in its row
at the end, since its last one is never written.
"""

import csv
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagealign.compare import fragmentation
from pagealign.compare.fragmentation import (
    LLAMA_11B_VISION,
    WHISPER_LARGE_V3,
    Workload,
    capacity,
    check,
    serve,
    simulate,
    sweep,
    user_workload,
    workloads,
    write_series,
)
from pagealign.compare.parallel import run_all
from pagealign.compare.scheduler_model import Limits, Scheduler
from pagealign.compare.traces import Trace, whisper_service
from pagealign.errors import PagealignError


def trace(*requests, name="by-hand"):
    """From ``(arrival, encoder_len, prompt_len, decode_len)``."""
    arrival, encoder, prompt, decode = zip(*requests, strict=True)
    return Trace(name, np.array(arrival, float), *map(np.array, (encoder, decode, prompt)))


def whisper(decode_len, arrival=0):
    return (arrival, 1500, 4, decode_len)


def workload(*requests, slots=65_536, model=WHISPER_LARGE_V3, **limits):
    return Workload(trace(*requests), model, Limits(slots, **limits))


# --- slots ---


@pytest.mark.parametrize(
    ("page_size", "gap", "reserved"),
    # reserved: the reserve and, from 16 up, one page for the prompt's 4 tokens
    [
        (1, 0, 1504),
        (16, 4, 1504 + 16),
        (32, 4, 1504 + 32),
        (64, 36, 1536 + 64),
        (128, 36, 1536 + 128),
        (256, 36, 1536 + 256),
    ],
)
def test_a_whisper_request_on_aligned(page_size, gap, reserved):
    # one prefill, no decode step: the one token it generates is never written
    simulation = simulate("aligned", workload(whisper(1)), page_size)
    (sample,) = simulation.samples
    assert sample.pool.gap == gap
    assert sample.pool.reserved == reserved
    assert sample.pool.written == 1504
    assert sample.pool.tail == reserved - 1504 - gap
    assert sample.pool.free == 65_536 - reserved
    row = simulation.row
    assert row.gap_per_encoder == pytest.approx(gap / 1500)
    assert row.fragmentation == pytest.approx(1 - 1504 / reserved)


@pytest.mark.parametrize("page_size", [64, 128])
def test_whisper_wastes_2_4_percent(page_size):
    row = simulate("aligned", workload(whisper(50)), page_size).row
    assert row.gap == 36
    assert f"{row.gap_per_encoder:.1%}" == "2.4%"


@pytest.mark.parametrize(("page_size", "reserve"), [(64, 6464), (128, 6528)])
def test_four_tiles(page_size, reserve):
    request = (0, 4 * 1601, 1, 1)
    (sample,) = simulate("aligned", workload(request), page_size).samples
    assert sample.pool.reserved == reserve + page_size
    assert sample.pool.gap == reserve - 6404


def test_text_only_has_no_gap():
    (sample,) = simulate("aligned", workload((0, 0, 10, 1)), 64).samples
    assert (sample.pool.reserved, sample.pool.gap, sample.pool.tail) == (64, 0, 54)


@pytest.mark.parametrize("name", ["varlen", "page1"])
def test_a_whisper_request_on_stock(name):
    """P = 64: the prompt goes into the encoder's last page, which has room for 36."""
    (sample,) = simulate(name, workload(whisper(1)), 64).samples
    assert (sample.pool.reserved, sample.pool.written) == (1536, 1504)
    assert (sample.pool.gap, sample.pool.tail) == (0, 32)


def test_stocks_decode_tokens_share_the_encoders_slots():
    """P = 64, 70 tokens generated: decoder tokens 4 to 72 come by decoding, and all but token
    64, which opens a page, get the slot of the encoder's token of the same number."""
    last = simulate("page1", workload(whisper(70)), 64).samples[-1]
    assert last.decoder_tokens == 73
    assert last.pool.aliased == 69 - 1
    assert last.pool.reserved == 1536 + 64
    assert last.pool.written == 1504 + 1


# --- pages freed twice, lost, owned by two: upstream 38840 ---


@pytest.mark.parametrize(
    ("page_size", "harmless"),
    # Freed are the slots at row positions 0, P, 2P, ... The first of the decoder's behind
    # the prefill's 1504 is 1504 at P = 16 and 32, 1536 from 64 up: decoder token 4 or 36.
    # That token has the slot of the encoder's token 4 or 36, in a page named already.
    [(16, 4), (32, 4), (64, 36), (128, 36), (256, 36)],
)
@pytest.mark.parametrize("name", ["varlen", "page1"])
def test_stock_frees_a_page_twice_from_one_token_on(name, page_size, harmless):
    generated = harmless - 4 + 1  # so that so many decoder tokens are in the row at the end
    row = simulate(name, workload(whisper(generated)), page_size).row
    assert (row.freed_twice, row.first_freed_twice, row.lost) == (0, None, 0)
    row = simulate(name, workload(whisper(generated + 1)), page_size).row
    assert (row.freed_twice, row.lost) == (1, 0)
    assert row.first_freed_twice == generated + 1  # its prefill is step 0


def test_longer_rows_free_more_pages_twice_and_lose_others():
    """P = 64, 165 decoder tokens: positions 1536, 1600 and 1664 are the decoder's, tokens 36,
    100 and 164, with slots in the encoder's first three pages. The pages opened by tokens 64
    and 128 lie at 1564 and 1628, which are no multiples of 64: nobody frees them."""
    row = simulate("page1", workload(whisper(162)), 64).row
    assert (row.freed_twice, row.lost) == (3, 2)


@pytest.mark.parametrize("name", ["varlen", "page1"])
def test_stock_is_sound_at_page_size_1(name):
    row = simulate(name, workload(whisper(300), whisper(200, 10)), 1).row
    assert (row.freed_twice, row.owned_twice, row.lost, row.aliased) == (0, 0, 0, 0)


def test_stock_is_sound_without_an_encoder():
    row = simulate("page1", workload((0, 0, 9, 300)), 64).row
    assert (row.freed_twice, row.owned_twice, row.lost, row.aliased) == (0, 0, 0, 0)


def test_a_page_freed_twice_is_owned_by_two():
    """The first request leaves its 24 pages and the first of them once more at the front of
    the list; the next two, in one prefill, take 24 each, so both have that page."""
    after = [whisper(3, 100), whisper(3, 100)]
    two = workload(whisper(34), *after)
    assert simulate("page1", two, 64).row.owned_twice == 1
    # With one token less nothing is freed twice.
    assert simulate("page1", workload(whisper(33), *after), 64).row.owned_twice == 0
    assert simulate("aligned", two, 64).row.owned_twice == 0


def test_stock_loses_pages_until_nobody_fits():
    """P = 64, E = 28 and a prompt of 40: the prefill takes 2 pages, decoder token 64 opens a
    third at row position 92, which no multiple of 64 names. Each request costs the pool of 5
    a page, and 28 + 40 + 30 + 64 slots must be free for one: 3 pages."""
    spaced = workload(*((100 * i, 28, 40, 30) for i in range(6)), slots=320)
    row = simulate("page1", spaced, 64).row
    assert row.finished == 3
    assert row.lost == 3
    assert row.freed_twice == 0
    assert row.stopped == "no room for a request in an idle pool"
    row = simulate("aligned", replace(spaced, limits=Limits(384)), 64).row
    assert (row.finished, row.lost, row.stopped) == (6, 0, "")


def test_stock_dies_of_a_full_pool():
    """S3, P = 64: the memory check counts the whole row, the allocation the decoder. 52 pages:
    24 for each clip leave 4. The check looks for pages at decoder token 36 and finds them; then
    the text takes 3, and tokens 64 of both clips want 2 of the last one, unchecked."""
    text = (40, 0, 130, 50)
    two = workload(whisper(140), whisper(140, 1), text, slots=52 * 64, new_token_ratio=0.0)
    row = simulate("page1", two, 64).row
    assert row.stopped == "decode out of memory"
    assert row.finished == 0
    # the decode steps of tokens 4 to 63
    assert (row.prefills, row.steps) == (3, 3 + 60)
    row = simulate("aligned", two, 64).row
    assert (row.stopped, row.finished) == ("", 3)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 130]),
        st.integers(1, 40),
        st.sampled_from([1, 2, 17, 70]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS, page_size=st.sampled_from([1, 16, 64, 128]), ratio=st.sampled_from([0, 1])
)
def test_on_aligned_free_and_owned_are_the_pool_at_every_step(requests, page_size, ratio):
    # room for one or two of the longest, so that requests wait and are retracted
    slots = {1: 300, 16: 400, 64: 640, 128: 1024}[page_size]
    limits = Limits(slots, max_running=5, new_token_ratio=ratio)
    scheduler = Scheduler(trace(*sorted(requests)), "aligned", page_size, limits)
    pool = scheduler.pool
    while scheduler.step():
        owned: list[int] = []
        batch = scheduler.holding
        for row, length in zip(batch.row, batch.row_len, strict=True):
            slots = pool.rows[row, :length].tolist()
            assert len(set(slots)) == length
            owned += {slot // page_size for slot in slots}
        free = pool.free_list.tolist()
        assert sorted(owned + free) == list(range(1, pool.num_pages + 1))
    assert scheduler.finished == len(requests)
    assert len(pool.free_list) == pool.num_pages


# --- requests ---


@pytest.mark.parametrize(
    ("layout", "page_size", "fit"),
    # 103 decoder tokens at full length. Aligned: 24 + 2 pages of 64, 12 + 1 of 128. Stock:
    # 24 pages of 64 for 1504 and one more opened, 12 of 128 and none.
    [
        ("aligned", 1, 131072 // 1603),
        ("stock", 1, 131072 // 1603),
        ("aligned", 64, 2048 // 26),
        ("aligned", 128, 1024 // 13),
        ("stock", 64, 2048 // 25),
        ("stock", 128, 1024 // 12),
    ],
)
def test_capacity(layout, page_size, fit):
    assert capacity(trace(whisper(100)), layout, page_size, 131072) == fit


@pytest.mark.parametrize(
    ("slots", "wait", "running", "steps"), [(4800, 10, 2, 20), (4864, 1, 3, 11), (4992, 0, 3, 10)]
)
def test_who_finds_no_room_waits(slots, wait, running, steps):
    """P = 64, three clips, D = 10. Each needs 1536 + 4 + 10 + 64 = 1614 slots to be less than the
    budget, of which it takes 1600 + 64 + 10 = 1674: all three at once in more than 4962 slots,
    two in more than 3288. A step later those two have 3200 slots and 9 tokens each to come, and
    the third needs more than 4832 slots, or to wait for their last token, in step 9."""
    row = simulate("aligned", workload(*[whisper(10)] * 3, slots=slots), 64).row
    assert (row.wait_max, row.wait_mean) == (wait, pytest.approx(wait / 3))
    assert (row.peak_running, row.steps, row.finished) == (running, steps, 3)


def test_max_running():
    row = simulate("aligned", workload(*[whisper(10)] * 3, max_running=1), 64).row
    assert (row.peak_running, row.wait_max) == (1, 20)


def test_max_prefill_tokens():
    """1600 tokens in whole pages each: after two, less than 1600 of 4000 are left."""
    row = simulate("aligned", workload(*[whisper(10)] * 3, max_prefill_tokens=4000), 64).row
    assert (row.prefills, row.wait_max) == (2, 1)


def test_an_idle_scheduler_waits_for_the_next_arrival():
    row = simulate("aligned", workload(whisper(1), whisper(1, 1000.5)), 64).row
    assert (row.steps, row.wait_max) == (2, 0.5)


def test_a_full_pool_retracts():
    """P = 1, 64 slots, prompts of 10. Ratio 0 lets the second request in a step after the first;
    44 slots are left for 22 decode steps of both, and each has 23 of its 40 tokens. The later
    one goes, and comes back when the first has its other 17; its second prefill, of 33 tokens,
    gives a token, and 16 steps the rest."""
    requests = [(0, 0, 10, 40), (0, 0, 10, 40)]
    row = simulate("aligned", workload(*requests, slots=64, new_token_ratio=0.0), 1).row
    assert (row.retractions, row.finished, row.aborted) == (1, 2, 0)
    assert (row.prefills, row.steps) == (3, 2 + 22 + 17 + 1 + 16)
    assert row.wait_max == 1  # until the first prefill


def test_who_does_not_fit_alone_is_aborted():
    """P = 64, stock, 8 pages. The text will fill 7 of them; two requests that lose a page each,
    as above, come and go meanwhile. There is no seventh page for its token 384."""
    text, loser = (0, 0, 10, 383), (28, 40, 30)
    requests = [text, (1, *loser), (60, *loser)]
    row = simulate("page1", workload(*requests, slots=512, new_token_ratio=0.0), 64).row
    assert (row.lost, row.finished, row.aborted, row.retractions) == (2, 2, 1, 0)


# --- what a decode step reads ---


def test_the_gather_of_one_whisper_request_and_layer():
    simulation = simulate("varlen", workload(whisper(50)), 64)
    assert simulation.row.gather_layer_bytes == 1500 * 20 * 64 * 2 * 2
    # 32 layers gather the encoder's and the decoder's keys and values at each step
    decoder = [sample.decoder_tokens for sample in simulation.samples]
    assert decoder == list(range(4, 54))
    assert simulation.row.gather_step_bytes == pytest.approx(
        32 * (1500 + np.mean(decoder)) * 20 * 64 * 2 * 2
    )


@pytest.mark.parametrize("name", ["aligned", "page1"])
def test_reading_in_place_gathers_nothing(name):
    row = simulate(name, workload(whisper(50)), 64).row
    assert (row.gather_layer_bytes, row.gather_step_bytes) == (0, 0)


def test_model_shapes():
    assert WHISPER_LARGE_V3.kv_bytes == 5120
    assert LLAMA_11B_VISION.kv_bytes == 2 * 8 * 128 * 2
    # 40 text layers, of which every fifth from 3 on is a cross-attention layer
    cross = len(range(3, 40, 5))
    assert (LLAMA_11B_VISION.cross_layers, LLAMA_11B_VISION.self_layers) == (cross, 40 - cross)


def test_tables():
    """P = 64, one prefill of a Whisper request and of text with 70 tokens: the aligned tables
    have 24 pages for the one encoder and 2 columns for both decoders; the slot tables have
    1500 and 70 columns for both."""
    both = workload(whisper(1), (0, 0, 70, 1))
    assert simulate("aligned", both, 64).row.table_bytes == (24 + 2 * 2) * 4
    for name in ("varlen", "page1"):
        assert simulate(name, both, 64).row.table_bytes == 2 * (1500 + 70) * 4


# --- sweeps ---


def test_samples_are_evenly_spaced():
    busy = Workload(whisper_service(60, rate=10), WHISPER_LARGE_V3, Limits(16_384))
    every = serve(busy, "aligned", 64, points=10_000)
    first = every.samples[0].step  # when the first request arrived
    assert [s.step for s in every.samples] == list(range(first, first + every.steps))
    few = serve(busy, "aligned", 64, points=20)
    assert 20 <= len(few.samples) < 40
    assert len({b.step - a.step for a, b in zip(few.samples, few.samples[1:], strict=False)}) == 1
    assert (few.steps, few.freed_twice) == (every.steps, every.freed_twice)
    assert set(few.samples) < set(every.samples)


@pytest.fixture(scope="module")
def small():
    return [
        Workload(whisper_service(40, rate=0.5), WHISPER_LARGE_V3, Limits(16_384)),
        workload(whisper(3), (5, 3202, 7, 9)),
    ]


@pytest.fixture(scope="module")
def alone(small):
    """What a sweep of ``small`` must give, one simulation after the other."""
    return [
        simulate(name, one, page_size)
        for one in small
        for page_size in (1, 64)
        for name in ("aligned", "varlen", "page1")
    ]


def test_a_sweep_over_processes(small, alone):
    seen = []
    swept = sweep(small, (1, 64), jobs=2, progress=lambda *done: seen.append(done))
    assert swept == alone
    # two layouts at two page sizes of two traces; varlen and page1 share theirs
    assert seen == [(done, 8) for done in range(9)]


def test_a_sweep_over_dask(small, alone):
    """Over a Dask cluster on this machine, started for it, and over one that runs already."""
    import distributed

    assert sweep(small, (1, 64), parallel="dask", jobs=2) == alone
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as one,
        distributed.Client(one),
    ):
        address = one.scheduler_address
        assert sweep(small, (1, 64), parallel="dask", scheduler=address) == alone


@pytest.mark.parametrize(("where", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_a_missing_cluster_package_is_named(small, monkeypatch, where, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PagealignError, match=f"{module} is not installed: pip install"):
        sweep(small, (64,), parallel=where)


@pytest.mark.parametrize("where", ["dask", "ray"])
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nowhere", "127.0.0.1:99999", ":"])
def test_a_cluster_that_is_not_there(small, where, address):
    with pytest.raises(PagealignError, match=f"no {where} cluster at {address}: "):
        sweep(small, (64,), parallel=where, scheduler=address)


def test_where_a_sweep_can_run():
    with pytest.raises(PagealignError, match="use one of processes, dask, ray"):
        run_all(abs, [(1,)], "threads")
    with pytest.raises(PagealignError, match="a scheduler's address needs parallel dask or ray"):
        run_all(abs, [(1,)], scheduler="tcp://127.0.0.1:1")
    with pytest.raises(PagealignError, match="0 jobs: give at least 1, or -1 for one per core"):
        run_all(abs, [(1,)], jobs=0)


def test_results_come_in_the_order_of_the_calls():
    assert run_all(abs, [(-3,), (2,), (-1,)], jobs=2) == [3, 2, 1]


def test_a_service_that_stops_early_is_told():
    """Stock's pool runs full long before a trace of this length has had 256 steps."""
    random, count = np.random.default_rng(2), 20_000
    encoder, decode = random.choice([0, 40, 100], count), random.choice([5, 200, 300], count)
    long = Trace("long", np.zeros(count), encoder, decode, random.integers(1, 41, count))
    limits = Limits(pool_slots=1024, max_running=6, new_token_ratio=0.0)
    row = simulate("page1", Workload(long, WHISPER_LARGE_V3, limits), 64).row
    assert row.stopped == "decode out of memory"
    assert 0 < row.steps < 256 and row.finished < count
    assert row.reserved > 0


# --- what is refused before anything runs ---


@pytest.mark.parametrize(
    ("page_sizes", "backend", "message"),
    [
        ([64, 0], None, "page size 0: give 1 to 2147483647"),
        ([10**20], None, "page size 100000000000000000000: give 1 to"),
        ([64], "intel-xpu", "no page sizes are known for 'intel-xpu': use intel_xpu, torch_nat"),
        ([64, 16], "intel_xpu", "page size 16: intel_xpu has kernels for 64 and 128 only"),
        ([1], "intel_xpu", "page size 1: intel_xpu has kernels for 64 and 128 only"),
    ],
)
def test_page_sizes_that_are_refused(small, page_sizes, backend, message):
    with pytest.raises(PagealignError, match=message):
        check(small, page_sizes, backend)


def test_page_sizes_that_are_not(small):
    check(small, [64, 128], "intel_xpu")
    check(small, [1, 16, 256], "torch_native")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"slots": 0}, "pool_slots is 0; give at least 1"),
        ({"max_running": 0}, "max_running is 0; give at least 1"),
        ({"max_prefill_tokens": -5}, "max_prefill_tokens is -5; give at least 1"),
        ({"new_token_ratio": 1.5}, "new_token_ratio is 1.5; give 0 to 1"),
        ({"new_token_ratio": float("nan")}, "new_token_ratio is nan; give 0 to 1"),
    ],
)
def test_limits_that_are_refused(limits, message):
    with pytest.raises(PagealignError, match=message):
        check([workload(whisper(1), **limits)], [64])


def test_two_traces_of_one_name(small):
    with pytest.raises(PagealignError, match="two traces are named whisper: rename the file"):
        check([*small, small[0]], [64])


def test_a_pool_smaller_than_a_request():
    """P = 64: 1536 + 4 is 1600 in whole pages, 20 to generate, a page more and the slot by which
    all that must be less than the pool: 1685 slots, 27 pages."""
    requests = [(0, 10, 1, 1), whisper(20)]
    check([workload(*requests, slots=27 * 64)], [64])
    message = (
        "trace by-hand, request 1: needs a pool of 1685 slots at page size 64, "
        "and 1727 are 1664 in whole pages"
    )
    with pytest.raises(PagealignError, match=message):
        check([workload(*requests, slots=27 * 64 - 1)], [64])
    # A pool that passes the check serves the request.
    assert simulate("aligned", workload(*requests, slots=27 * 64), 64).row.finished == 2


def test_nothing_runs_after_a_refusal(small, monkeypatch):
    monkeypatch.setattr(fragmentation, "run_all", lambda *args: pytest.fail("it ran"))
    with pytest.raises(PagealignError, match="page size -1"):
        sweep(small, (64, -1))


# --- what is written ---


def test_the_report_s_workloads_are_accepted():
    for quick in (True, False):
        check(workloads(quick), fragmentation.PAGE_SIZES)


def test_a_users_trace(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("arrival,encoder_len,decode_len,prompt_len\n0,1500,1,4\n")
    one = user_workload(path, WHISPER_LARGE_V3, Limits(4096))
    row = simulate("aligned", one, 64).row
    assert (row.trace, row.gap) == ("mine", 36)


def test_run_writes_the_samples(tmp_path, small, monkeypatch):
    monkeypatch.setattr(fragmentation, "workloads", lambda quick: small[:1])
    said = []
    say = lambda *what: said.append(what)  # noqa: E731
    rows = fragmentation.run(True, tmp_path, say, extra=small[1:], jobs=1)
    assert len(rows) == 2 * 3 * 6
    assert said[-1] == ("fragmentation: 24 of 24 services", 24, 24)
    with (tmp_path / fragmentation.SERIES_FILE).open() as file:
        lines = list(csv.DictReader(file))
    aligned = [
        line
        for line in lines
        if (line["trace"], line["approach"], line["page_size"]) == ("whisper", "aligned", "64")
    ]
    (row,) = (r for r in rows if (r.trace, r.approach, r.page_size) == ("whisper", "aligned", 64))
    assert fragmentation.POINTS <= len(aligned) < 2 * fragmentation.POINTS < row.steps
    assert np.mean([float(line["reserved"]) for line in aligned]) == pytest.approx(row.reserved)
    for line in aligned:
        parts = sum(int(line[name]) for name in ("written", "gap", "tail"))
        assert parts == int(line["reserved"])


def test_run_refuses_first(tmp_path):
    with pytest.raises(PagealignError, match="page size 1: intel_xpu has kernels"):
        fragmentation.run(True, tmp_path, pytest.fail, backend="intel_xpu")
    assert not list(tmp_path.iterdir())


def test_write_series_of_one(tmp_path):
    simulation = simulate("varlen", workload(whisper(1)), 64)
    write_series([simulation], tmp_path / "series.csv")
    with (tmp_path / "series.csv").open() as file:
        (line,) = csv.DictReader(file)
    expected = {"trace": "by-hand", "approach": "varlen", "page_size": "64", "step": "0"}
    assert line.items() >= expected.items()
    assert (line["running"], line["reserved"], line["slot_table"]) == ("1", "1536", "1504")
