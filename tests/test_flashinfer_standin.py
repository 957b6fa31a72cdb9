"""The stand-in for FlashInfer's wrappers: against float64 attention, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from pagealign.kernels.reference import paged_attention
from pagealign.standins import flashinfer_cpu as flashinfer
from pagealign.standins.flashinfer_cpu._checks import Misuse
from pagealign.standins.flashinfer_cpu.calls import listening

HEADS, KV_HEADS, SIZE = 4, 2, 64
LENGTHS = [5, 0, 9, 1]
Q_LENGTHS = [3, 2, 1, 1]


def workspace() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.uint8)


def indptr(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)


def make(page_size: int = 1, q_lengths=Q_LENGTHS, dtype=torch.float32):
    """Queries, a pool, and the pages of each request, scattered."""
    generator = torch.Generator().manual_seed(page_size)
    counts = [-(-n // page_size) for n in LENGTHS]
    pages = torch.randperm(40, generator=generator)[: sum(counts)].to(torch.int32)
    q = torch.randn(sum(q_lengths), HEADS, SIZE, generator=generator).to(dtype)
    k, v = (torch.randn(40, page_size, KV_HEADS, SIZE, generator=generator).to(dtype) for _ in "kv")
    last = torch.tensor([(n - 1) % page_size + 1 if n else 1 for n in LENGTHS], dtype=torch.int32)
    return q, k, v, pages, indptr(counts), last


def table(pages, bounds):
    rows = [pages[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def expected(q, k, v, pages, bounds, q_lengths, causal):
    return paged_attention(
        q, k, v, table(pages, bounds), torch.tensor(LENGTHS), indptr(q_lengths),
        scale=0.2, causal=causal,
    )  # fmt: skip


def decode(**options):
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", backend="fa2", **options
    )


def prefill(**options):
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(), "NHD", backend="fa2", **options
    )


def plan_decode(wrapper, pages, bounds, last, page_size=1, **options):
    options = dict(q_data_type=torch.float32, data_type=torch.float32) | options
    wrapper.begin_forward(bounds, pages, last, HEADS, KV_HEADS, SIZE, page_size, **options)


def plan_prefill(wrapper, pages, bounds, last, page_size=1, q_lengths=Q_LENGTHS, **options):
    options = dict(q_data_type=torch.float32) | options
    wrapper.begin_forward(
        indptr(q_lengths), bounds, pages, last, HEADS, KV_HEADS, SIZE, page_size, **options
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decode(page_size):
    q, k, v, pages, bounds, last = make(page_size, [1] * 4)
    wrapper = decode()
    plan_decode(wrapper, pages, bounds, last, page_size)
    out = wrapper.forward(q, (k, v), sm_scale=0.2)
    truth = expected(q, k, v, pages, bounds, [1] * 4, causal=False)
    assert torch.allclose(out.double(), truth.out, atol=1e-6)
    assert not out[1].any()  # no keys


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(page_size, causal):
    q, k, v, pages, bounds, last = make(page_size)
    wrapper = prefill()
    plan_prefill(wrapper, pages, bounds, last, page_size)
    out, lse = wrapper.forward_return_lse(q, (k, v), causal=causal, sm_scale=0.2)
    truth = expected(q, k, v, pages, bounds, Q_LENGTHS, causal)
    assert torch.allclose(out.double(), truth.out, atol=1e-6)
    # base 2, (rows, heads)
    assert torch.allclose(lse.double(), truth.lse.T.double() / math.log(2), atol=1e-5)
    assert torch.isneginf(lse[3:5]).all()


def test_a_custom_mask_replaces_the_causal_one():
    """A mask that is the causal one, bit by bit, and one that hides all from a row."""
    q, k, v, pages, bounds, last = make()
    masks = [
        torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        for rows, keys in zip(Q_LENGTHS, LENGTHS, strict=True)
    ]
    masks[2][:] = False
    wrapper = prefill()
    plan_prefill(wrapper, pages, bounds, last, custom_mask=torch.cat([m.flatten() for m in masks]))
    out = wrapper.forward(q, (k, v), causal=False, sm_scale=0.2)
    truth = expected(q, k, v, pages, bounds, Q_LENGTHS, causal=True)
    assert torch.allclose(out[:3].double(), truth.out[:3], atol=1e-6)
    assert not out[5].any()


def test_ragged_and_merge():
    """Attention over two parts of the keys, merged, is attention over all of them."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, HEADS, SIZE, generator=generator)
    k, v = (torch.randn(9, KV_HEADS, SIZE, generator=generator) for _ in "kv")

    def run(keys: slice, lengths, causal):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD")
        bounds = indptr(lengths)
        wrapper.begin_forward(indptr([4]), bounds, HEADS, KV_HEADS, SIZE, q_data_type=torch.float32)
        return wrapper.forward_return_lse(q, k[keys], v[keys], causal=causal, sm_scale=0.2)

    whole = run(slice(0, 9), [9], True)
    merged = flashinfer.merge_state(*run(slice(0, 5), [5], False), *run(slice(5, 9), [4], True))
    for a, b in zip(whole, merged, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    alone = flashinfer.merge_state(*whole, torch.zeros_like(q), torch.full((4, HEADS), -math.inf))
    assert torch.allclose(alone[0], whole[0])


def test_calls_are_told():
    q, k, v, pages, bounds, last = make(1, [1] * 4)
    told = []
    wrapper = decode()
    with listening(lambda call, owner, arguments: told.append((call, owner, arguments))):
        plan_decode(wrapper, pages, bounds, last)
        wrapper.forward(q, (k, v), sm_scale=0.2)
    plan_decode(wrapper, pages, bounds, last)
    assert [(call, owner is wrapper) for call, owner, _ in told] == [
        ("decode.plan", True),
        ("decode.run", True),
    ]
    assert told[0][2]["kv_indptr"] is bounds
    assert told[1][2]["q"] is q


@pytest.mark.parametrize("name", ["kv_indptr", "kv_indices", "last_page_len"])
def test_a_change_between_plan_and_run(name):
    q, k, v, pages, bounds, last = make(1, [1] * 4)
    wrapper = decode()
    plan_decode(wrapper, pages, bounds, last)
    {"kv_indptr": bounds, "kv_indices": pages, "last_page_len": last}[name][-1] += 1
    with pytest.raises(Misuse, match=f"{name} changed since the plan"):
        wrapper.forward(q, (k, v), sm_scale=0.2)


PLANS = {
    "int64 indptr": (dict(bounds=lambda b: b.long()), ValueError, "indptr must be int32"),
    "int64 indices": (dict(pages=lambda p: p.long()), ValueError, "indices must be int32"),
    "decreasing": (dict(bounds=lambda b: b.flip(0)), Misuse, "starts at|decreases"),
    "too few indices": (dict(pages=lambda p: p[:-1]), Misuse, "14 indices, indptr ends at 15"),
    "an empty last page": (dict(last=lambda n: n * 0), Misuse, "outside 1 .. page_size"),
    "other rows": (dict(last=lambda n: n[:-1]), Misuse, "5 entries for 3 rows"),
    "split without tensor cores": (dict(fixed_split_size=8), ValueError, "only supported by ten"),
}


@pytest.mark.parametrize("change", PLANS)
def test_plans_that_are_refused(change):
    changes, kind, said = PLANS[change]
    _, _, _, pages, bounds, last = make()
    made = dict(pages=pages, bounds=bounds, last=last)
    options = {n: c(made.pop(n)) if n in made else c for n, c in changes.items()}
    with pytest.raises(kind, match=said):
        plan_decode(decode(), **made, **options)


def test_positional_options_are_refused():
    _, _, _, pages, bounds, last = make()
    with pytest.raises(TypeError):
        decode().plan(bounds, pages, last, HEADS, KV_HEADS, SIZE, 1, "NONE")


RUNS = {
    "dtype of q": (lambda q, k, v: (q.half(), (k, v)), {}, ValueError, "dtype of q"),
    "dtype of k": (lambda q, k, v: (q, (k.half(), v.half())), {}, ValueError, "dtype of k"),
    "rows": (lambda q, k, v: (q[:-1], (k, v)), {}, ValueError, "does not match qo_indptr"),
    "heads": (lambda q, k, v: (q[:, :2], (k, v)), {}, Misuse, "planned for 4 heads of 64"),
    "cache": (lambda q, k, v: (q, (k[:5], v[:5])), {}, Misuse, "a slot outside the cache"),
    "page size": (
        lambda q, k, v: (q, (k.view(20, 2, KV_HEADS, SIZE), v.view(20, 2, KV_HEADS, SIZE))),
        {},
        Misuse,
        "other pages than planned",
    ),
    "window": (lambda q, k, v: (q, (k, v)), dict(window_left=3), Misuse, "window not planned"),
    "cap": (lambda q, k, v: (q, (k, v)), dict(logits_soft_cap=3.0), Misuse, "cap not planned"),
}


@pytest.mark.parametrize("change", RUNS)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_runs_that_are_refused(kind, change):
    arguments, options, error, said = RUNS[change]
    q_lengths = [1] * 4 if kind == "decode" else Q_LENGTHS
    q, k, v, pages, bounds, last = make(1, q_lengths)
    wrapper = decode() if kind == "decode" else prefill()
    (plan_decode if kind == "decode" else plan_prefill)(wrapper, pages, bounds, last)
    with pytest.raises(error, match=said):
        wrapper.forward(*arguments(q, k, v), sm_scale=0.2, **options)


def test_run_before_plan():
    q, k, v, *_ = make()
    with pytest.raises(ValueError, match="run before plan"):
        prefill().forward(q, (k, v))


def graph(batch=4, indices=20):
    buffers = (
        torch.zeros(batch + 1, dtype=torch.int32),
        torch.zeros(indices, dtype=torch.int32),
        torch.ones(batch, dtype=torch.int32),
    )
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    wrapper = decode(use_cuda_graph=True, **dict(zip(names, buffers, strict=True)))
    return wrapper, buffers


def test_a_graph_reads_its_buffers():
    q, k, v, pages, bounds, last = make(1, [1] * 4)
    wrapper, buffers = graph()
    plan_decode(wrapper, pages, bounds, last)
    bounds.fill_(0)  # no longer anyone's
    truth = expected(q, k, v, pages, buffers[0], [1] * 4, causal=False)
    assert torch.allclose(wrapper.forward(q, (k, v), sm_scale=0.2).double(), truth.out, atol=1e-6)


def test_a_graph_keeps_its_shape():
    _, _, _, pages, bounds, last = make()
    with pytest.raises(ValueError, match="batch size should be fixed"):
        plan_decode(graph(batch=3)[0], pages, bounds, last)
    with pytest.raises(ValueError, match="less than or equal to the allocated buffer"):
        plan_decode(graph(indices=3)[0], pages, bounds, last)
    with pytest.raises(ValueError, match="should be a torch.Tensor in cudagraph mode"):
        decode(use_cuda_graph=True)


def test_the_fast_plan_copies_nothing():
    """What it is given has to be the graph's buffers, and the host's lengths the device's."""
    q, k, v, pages, bounds, last = make(1, [1] * 4)
    wrapper, buffers = graph()
    options = dict(q_data_type=torch.float32, data_type=torch.float32)

    def fast(*tensors, **more):
        sizes = (HEADS, KV_HEADS, SIZE, 1)
        flashinfer.fast_decode_plan(wrapper, *tensors, *sizes, **options, **more)

    with pytest.raises(Misuse, match="indptr is not the graph's"):
        fast(bounds, pages, last)
    buffers[0].copy_(bounds)
    buffers[1][: len(pages)] = pages
    with pytest.raises(Misuse, match="the host's indptr"):
        fast(*buffers, global_override_indptr_cpu=bounds + 1)
    fast(*buffers, global_override_indptr_cpu=bounds)
    truth = expected(q, k, v, pages, bounds, [1] * 4, causal=False)
    assert torch.allclose(wrapper.forward(q, (k, v), sm_scale=0.2).double(), truth.out, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "size", "said"), [(3, SIZE, "divisible"), (4, 80, "head_dim"), (10, 64, "group")]
)
def test_sizes_without_a_kernel(heads, size, said):
    _, _, _, pages, bounds, last = make()
    options = dict(q_data_type=torch.float32, data_type=torch.float32)
    with pytest.raises(ValueError, match=said):
        decode().plan(bounds, pages, last, heads, 2, size, 1, **options)


def test_an_unaligned_workspace():
    with pytest.raises(ValueError, match="16-byte aligned"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()[1:], "NHD")
