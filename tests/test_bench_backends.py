"""The benchmarks' backends compute attention: plain PyTorch, the XPU's calls on the stand-in,
FlashInfer's on wrappers that do what its documentation says, all against float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from standin_loader import load_standin

from pagealign.bench import run as bench_run
from pagealign.bench.backends import all_backends
from pagealign.bench.backends.flashinfer import FlashInfer
from pagealign.bench.backends.interface import Variant
from pagealign.bench.backends.ipex import Ipex
from pagealign.bench.backends.plain import Plain
from pagealign.bench.backends.sgl_kernel import SINGLE_ROW, SglKernel
from pagealign.bench.inputs import FOREIGN, as_single_slots, make_inputs
from pagealign.bench.measure import check, sets_for
from pagealign.bench.records import Approach
from pagealign.bench.run import chosen
from pagealign.bench.shapes import HEADLINE, PAGE_SIZES, Shape, grid
from pagealign.errors import PagealignError
from pagealign.kernels.reference import paged_attention, ragged_attention


def shape(q_len=1, kv_len=100, heads=4, kv_heads=2, dtype="bfloat16", **more) -> Shape:
    given = {"model": "tiny", "kind": "cross", "phase": "decode", "batch": 3, "head_size": 64}
    given |= {"q_len": q_len, "kv_len": kv_len, "heads": heads, "kv_heads": kv_heads}
    return Shape(**given | more, dtype=dtype)


SHAPES = (
    shape(),
    shape(q_len=4, kv_len=130),
    shape(kv_len=64, kv_heads=4),
    shape(q_len=5, kv_len=5, kind="self", phase="prefill"),
    shape(batch=1, kv_len=7),
)


class Wrapper:
    """FlashInfer's paged wrappers as documented: plan by position, then run."""

    def __init__(self, workspace, layout, use_tensor_cores=False):
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(self, *given, causal=False, sm_scale, q_data_type, kv_data_type):
        if len(given) == 7:  # decode: one query per request
            given = (torch.arange(len(given[0]), dtype=torch.int32), *given)
        self.cu_q, indptr, indices, last, *self.heads, self.page_size = given
        for one in (self.cu_q, indptr, indices, last):
            assert one.dtype == torch.int32
        pages = [indices[a:b] for a, b in zip(indptr, indptr[1:], strict=False)]
        self.table = torch.stack(pages)
        self.lengths = (self.table.shape[1] - 1) * self.page_size + last
        self.causal, self.scale, self.dtypes = causal, sm_scale, (q_data_type, kv_data_type)

    def run(self, q, cache):
        k, v = cache
        assert (q.dtype, k.dtype) == self.dtypes and k.shape[1] == self.page_size
        assert [q.shape[1], k.shape[2], k.shape[3]] == self.heads
        return paged_attention(
            q, k, v, self.table, self.lengths, self.cu_q, scale=self.scale, causal=self.causal
        ).out.to(q.dtype)


class Ragged(Wrapper):
    def plan(self, cu_q, cu_k, *heads, causal, sm_scale, q_data_type, kv_data_type):
        self.cu, self.heads, self.causal, self.scale = (cu_q, cu_k), heads, causal, sm_scale

    def run(self, q, k, v):
        assert (q.shape[1], *k.shape[1:]) == self.heads
        options = {"scale": self.scale, "causal": self.causal}
        return ragged_attention(q, k, v, *self.cu, **options).out.to(q.dtype)


FAKE_FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Wrapper,
    BatchPrefillWithPagedKVCacheWrapper=Wrapper,
    BatchPrefillWithRaggedKVCacheWrapper=Ragged,
)


def backend_named(name: str):
    if name == "torch":
        return Plain()
    if name == "flashinfer":
        return FlashInfer(FAKE_FLASHINFER, device="cpu")
    return SglKernel(load_standin(), device="cpu")


@pytest.mark.parametrize("name", ["torch", "sgl_kernel", "flashinfer"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_every_way_equals_float64(name, case, monkeypatch):
    monkeypatch.setenv("PAGEALIGN_KERNELS", "page1")
    monkeypatch.setenv(SINGLE_ROW, "1")
    backend, inputs = backend_named(name), make_inputs(case, sets=2)
    ways = backend.variants(case, PAGE_SIZES)
    assert {way.approach for way in ways} == set(Approach)
    calls = {way: backend.prepare(way, inputs) for way in ways}
    assert all(len(of_way) == 2 for of_way in calls.values())
    errors = check(inputs, {way: of_way[0]() for way, of_way in calls.items()})
    assert all(error.ok for error in errors.values()), errors


@pytest.mark.parametrize("name", ["torch", "sgl_kernel", "flashinfer"])
def test_each_set_is_attended_for_itself(name):
    """Two sets in one pool: the second call gives the second set's rows."""
    case, backend = shape(q_len=2, kv_len=70, kv_heads=4), backend_named(name)
    inputs = make_inputs(case, sets=2)
    _, second = backend.prepare(backend.variants(case, (64,))[0], inputs)
    want = torch.nn.functional.scaled_dot_product_attention(
        inputs.q[1].view(3, 2, 4, 64).transpose(1, 2).double(),
        *(x[1].transpose(1, 2).double() for x in (inputs.k, inputs.v)),
    )
    got = second().view(3, 2, 4, 64).transpose(1, 2).double()
    torch.testing.assert_close(got, want, atol=0.02, rtol=0)


def test_float32_is_held_to_float32():
    case = shape(dtype="float32")
    inputs = make_inputs(case, sets=1)
    (way, *_) = Plain().variants(case, (64,))
    right = Plain().prepare(way, inputs)[0]()
    assert check(inputs, {way: right})[way].ok
    assert not check(inputs, {way: right.bfloat16().float()})[way].ok


@pytest.mark.parametrize("request_", [0, 2])
def test_a_wrong_row_is_found(request_):
    case = shape()
    inputs = make_inputs(case, sets=1)
    (way, *_) = Plain().variants(case, (64,))
    out = Plain().prepare(way, inputs)[0]()
    out[request_] = out[1].clone()
    assert not check(inputs, {way: out})[way].ok


def test_a_wrong_copy_is_found():
    case = shape()
    inputs = make_inputs(case, sets=1)
    way = Variant(Approach.gather, 64, "index_select")
    copy = Plain().prepare(way, inputs)[0]()
    assert check(inputs, {way: copy})[way].ok
    copy[1, -1, 0, 0] += 1
    assert not check(inputs, {way: copy})[way].ok


def test_pools_hold_the_rows_on_random_pages_and_nothing_else():
    inputs = make_inputs(shape(kv_len=100), sets=2)
    pool = inputs.pool(16)
    assert pool.page_table.shape == (2, 3, 7) and pool.page_table.dtype == torch.int32
    assert sorted(pool.page_table.flatten().tolist()) == list(range(1, 43))
    assert pool.page_table.flatten().tolist() != list(range(1, 43))
    for s in range(2):
        for b in range(3):
            for t in (0, 15, 16, 99):
                page = pool.page_table[s, b, t // 16]
                assert torch.equal(pool.k[page, t % 16], inputs.k[s, b, t])
                assert torch.equal(pool.v[page, t % 16], inputs.v[s, b, t])
    owned = torch.zeros(pool.k.shape[:2], dtype=torch.bool).flatten()
    owned[pool.slots.flatten()] = True
    assert owned.sum() == 600
    assert (pool.k.flatten(0, 1)[~owned] == FOREIGN).all()
    assert inputs.pool(16) is pool


def test_single_slots_are_a_view():
    pool = make_inputs(shape(), sets=1).pool(64)
    view = as_single_slots(pool)
    assert view.k.data_ptr() == pool.k.data_ptr() and view.k.shape[1] == 1
    slot = int(view.page_table[0, 2, 70])
    assert slot == int(pool.page_table[0, 2, 1]) * 64 + 6


def test_the_view_reaches_the_kernel_as_pages_of_one_slot():
    seen = {}

    class Seen(Plain):
        def paged(self, kernel, inputs, pool, q, table):
            seen[approach] = (pool.page_size, table.shape[1])
            return super().paged(kernel, inputs, pool, q, table)

    inputs = make_inputs(shape(kv_len=100), sets=1)
    for approach in (Approach.in_place, Approach.page1_view):
        Seen().prepare(Variant(approach, 64, "any"), inputs)
    assert seen == {Approach.in_place: (64, 2), Approach.page1_view: (1, 100)}


def test_processor_time_is_for_one_thread(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(PagealignError, match="--threads 1"):
        bench_run.run(quick=True, out=tmp_path, names=["torch"], cpu_time=True)


def test_a_slow_machine_leaves_the_last_shapes_out(monkeypatch):
    """Each shape takes 40 s of 60, and 12 more are allowed."""
    now = [0.0]
    monkeypatch.setattr(bench_run.time, "monotonic", lambda: now[0])

    def measure(shape, backend, page_sizes, effort, clock):
        now[0] += 40
        return [shape]

    monkeypatch.setattr(bench_run, "measure", measure)
    rows, left_out = bench_run.run_all([Plain()], quick=True, say=lambda text: None)
    shapes, _ = grid(quick=True)
    assert rows == shapes[:2]
    assert len(left_out) == len(shapes) - 2 and "no time left" in left_out[0]


def test_what_cannot_run_says_why():
    why = {one.name: one.why_not() for one in all_backends()}
    assert why["torch"] is None
    for name in ("sgl_kernel", "flashinfer", "ipex"):  # the tests' machines have no GPU
        assert why[name] is None or "\n" not in why[name]


def test_the_stand_in_is_not_timed(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert "stand-in" in SglKernel(load_standin()).why_not()


def test_ipex_is_asked_for_by_its_script(monkeypatch):
    monkeypatch.setattr("pagealign.bench.backends.ipex.find_spec", lambda name: None)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert "scripts/setup_bench_env.sh" in Ipex().why_not()


def test_a_single_row_reaches_the_xpus_varlen_kernel_only_on_request(monkeypatch):
    ways = {way.approach for way in SglKernel().variants(shape(), (64,))}
    assert Approach.gather_varlen not in ways
    ways = {way.approach for way in SglKernel().variants(shape(q_len=2), (64,))}
    assert Approach.gather_varlen in ways


def test_the_xpus_kernels_get_their_page_sizes_only():
    ways = SglKernel().variants(shape(), PAGE_SIZES)
    assert {w.page_size for w in ways if w.approach == Approach.in_place} == {64, 128}


class Named(Plain):
    def __init__(self, name: str, why: str | None) -> None:
        self.name, self.why = name, why

    def why_not(self) -> str | None:
        return self.why


def test_plain_pytorch_runs_only_where_nothing_else_does():
    known = [Named("ipex", None), Named("sgl_kernel", "no XPU"), Named("torch", None)]
    assert [one.name for one in chosen([], known)[0]] == ["ipex"]
    assert [one.name for one in chosen([], known[1:])[0]] == ["torch"]
    assert [one.name for one in chosen(["torch"], known)[0]] == ["torch"]
    assert [one.why_not for one in chosen([], known)[1]] == [None, "no XPU", None]


@pytest.mark.parametrize(
    ("name", "message"), [("cuda", "no backend 'cuda': use one of"), ("sgl_kernel", "no XPU")]
)
def test_a_backend_that_cannot_run_is_refused(name, message):
    with pytest.raises(PagealignError, match=message):
        chosen([name], [Named("sgl_kernel", "no XPU"), Named("torch", None)])


def test_sets_outgrow_the_cache():
    assert sets_for(61_440_000, 8 << 20) == 1
    assert sets_for(3_072_000, 8 << 20) == 9  # 25.2 MB in all, by hand
    assert sets_for(1000, 8 << 20) == 64
    assert sets_for(61_440_000, 0) == 27  # unknown: as if it were 512 MiB


def test_the_headline_reads_61_mb():
    # 8 requests, 1500 keys and values, 20 heads of 64, 2 bytes
    assert HEADLINE.kv_bytes == 61_440_000
    assert grid(quick=True)[0][0] == grid(quick=False)[0][0] == HEADLINE


@pytest.mark.parametrize("quick", [True, False])
def test_no_shape_is_measured_twice(quick):
    shapes, page_sizes = grid(quick)
    assert len(set(shapes)) == len(shapes) and 64 in page_sizes
