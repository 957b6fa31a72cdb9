"""The counted device, on operators whose costs are known, and what is counted for which model."""

import dataclasses

import pytest
import torch
from torch.nn.functional import pad

from pagealign.compare import cost
from pagealign.compare.cost_cases import MODELS, batch_of, cases, model
from pagealign.compare.counting import DEVICE, Counter, Counts
from pagealign.compare.metadata_time import Time

counter = Counter()


@pytest.fixture(autouse=True)
def counting():
    counter.take()
    with torch.no_grad(), counter:
        yield


def on_device(*shape: int, dtype=torch.float32):
    return counter.put(torch.zeros(*shape, dtype=dtype))


def lengths(*values: int):
    return counter.put(torch.tensor(values))


def costs(operation) -> Counts:
    counter.take()
    operation()
    return counter.take()


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t[0].item(),
        lambda t: int(t[0]),
        lambda t: bool((t > 0).any()),
        lambda t: t.cpu(),
        lambda t: t.tolist(),
        lambda t: t.to("cpu"),
        lambda t: torch.zeros(3, dtype=torch.int64).copy_(t),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.masked_select(t > 0),
        lambda t: t.unique(),
        lambda t: torch.equal(t, t),
        lambda t: t.repeat_interleave(t),
    ],
)
def test_syncs(operation):
    assert costs(lambda: operation(lengths(2, 1, 3))).syncs == 1


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t.max(),
        lambda t: t.to(torch.int32),
        lambda t: t.to(DEVICE),
        lambda t: t[1:].clone(),
        lambda t: t[lengths(0, 2)],
        lambda t: torch.where(t > 0, t, 0),
        lambda t: pad(t.cumsum(0), (1, 0)),
        lambda t: t.repeat_interleave(t, output_size=6),
        lambda t: t.index_put_((t > 1,), torch.tensor(0)),  # PyTorch makes it masked_fill
        lambda t: torch.tensor([2, 1, 3]).max().item(),  # on the host to begin with
        lambda t: torch.arange(4, device=t.device),
    ],
)
def test_no_syncs(operation):
    found = costs(lambda: operation(lengths(2, 1, 3)))
    assert (found.syncs, found.uploads) == (0, 0)


def test_a_value_read_is_the_right_one():
    assert lengths(2, 7, 3).max().item() == 7
    assert lengths(2, 7, 3).tolist() == [2, 7, 3]


def test_uploads_wait_unless_told_not_to():
    rows = torch.tensor([1, 2])
    assert costs(lambda: rows.to(DEVICE)) == Counts(uploads=1, operators=1, written=16)
    assert costs(lambda: rows.to(DEVICE, non_blocking=True)).uploads == 0
    assert costs(lambda: lengths(0, 0).copy_(rows)).uploads == 1
    # an index that lies on the host has to be sent first
    assert costs(lambda: on_device(4, 2)[rows]).uploads == 1


def test_views_and_empty_run_nothing():
    def views():
        t = on_device(4, 6)
        t.view(6, 4).t()[1:, ::2].unsqueeze(0).expand(3, -1, -1)
        torch.empty_like(t)
        t.new_empty(3)

    found = costs(views)
    assert (found.launches, found.read, found.written) == (0, 0, 0)
    assert found.operators > 5


def test_bytes_of_arithmetic():
    # 12 + 4 numbers in (the second operand is only expanded), 12 out, 4 bytes each
    row = on_device(4)
    found = costs(lambda: on_device(3, 4) + row.expand(3, 4))
    assert (found.launches, found.read, found.written) == (1, 64, 48)
    assert (found.copied, found.stored) == (0, 0)
    # zeros are written, not read; a mask is a byte an element
    assert costs(lambda: row.zero_()) == Counts(operators=1, launches=1, written=16)
    assert costs(lambda: row.new_zeros(2)) == Counts(operators=1, launches=1, written=8)
    assert costs(lambda: row > 0) == Counts(operators=1, launches=1, read=16, written=4)


def test_gather_of_one_whisper_large_request_and_layer():
    k, v = (on_device(1600, 20, 64, dtype=torch.bfloat16) for _ in "kv")
    slots = counter.put(torch.arange(1500))
    found = costs(lambda: (k[slots], v.index_select(0, slots)))
    assert found.copied == 1500 * 20 * 64 * 2 * 2 == 7_680_000
    assert found.written == found.copied
    assert found.read == found.copied + 2 * 1500 * 8  # what is taken, not the pool, and slots
    assert (found.launches, found.syncs, found.stored) == (2, 0, 0)


def test_a_store_into_the_pool_is_not_a_copy():
    pool = counter.put(torch.zeros(64, 2, 8), pool=True)
    new, slots = on_device(3, 2, 8), lengths(5, 6, 7)
    size = 3 * 2 * 8 * 4

    def store():
        pool[slots] = new

    found = costs(store)
    assert (found.stored, found.copied) == (size, 0)
    assert (found.read, found.written) == (size + 3 * 8, size)
    assert pool.held[5:8].shape == (3, 2, 8)
    copied = costs(lambda: on_device(9, 2, 8).index_copy_(0, slots, new))
    assert (copied.stored, copied.copied) == (0, size)


def test_tables_are_no_copies():
    table = counter.put(torch.zeros(4, 100, dtype=torch.int32))
    found = costs(lambda: table[lengths(1, 2), :50].to(torch.int64))
    assert found.copied == 0
    # gathered in int32, then cast to int64
    assert found.written == 2 * 50 * 4 + 2 * 50 * 8


def test_what_a_device_refuses_is_refused():
    with pytest.raises(RuntimeError, match="on the host and on the device"):
        on_device(4) + torch.zeros(4)


def test_an_unknown_access_pattern_is_refused():
    with pytest.raises(NotImplementedError, match="scatter_"):
        on_device(4, 4).scatter_(0, counter.put(torch.zeros(1, 4, dtype=torch.int64)), 1.0)


def test_counts_add_and_multiply():
    one = Counts(syncs=1, read=10, copied=3)
    assert one + one * 2 == Counts(syncs=3, read=30, copied=9)


def test_models_are_the_released_ones():
    """transformers' defaults for Llama-3.2-Vision's text model, and published shapes."""
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig

    text, llama = MllamaTextConfig(), model("Llama-3.2-11B-Vision")
    assert len(text.cross_attention_layers) == llama.cross_layers
    assert text.num_hidden_layers == llama.cross_layers + llama.self_layers
    assert text.num_attention_heads == llama.query_heads
    assert text.num_key_value_heads == llama.kv_heads
    assert text.hidden_size == llama.query_heads * llama.head_size
    assert llama.encoder_len == 4 * ((560 // 14) ** 2 + 1) == 6404
    whisper = model("Whisper-large-v3")
    assert whisper.query_heads * whisper.head_size == 1280
    assert (whisper.self_layers, whisper.cross_layers, whisper.encoder_len) == (32, 32, 1500)


def test_cases():
    quick, full = cases(quick=True), cases(quick=False)
    assert set(quick) < set(full)
    assert len(set(full)) == len(full)
    for name in (m.name for m in MODELS):
        own = [c for c in full if c.model == name]
        for field in ("batch", "encoder_len", "decoded", "page_size", "text_only", "decoding"):
            assert len({getattr(c, field) for c in own}) > 1


def test_a_case_as_lengths():
    case = dataclasses.replace(cases(quick=True)[0], batch=3, text_only=1, decoded=7)
    assert batch_of(case).encoder_lens == (0, 1500, 1500)
    assert batch_of(case).q_lens == (1, 1, 1)
    prefill = dataclasses.replace(case, decoding=False)
    assert batch_of(prefill).q_lens == batch_of(prefill).seq_lens == (7, 7, 7)


def test_a_step_is_its_metadata_once_and_its_layers():
    case = cases(quick=True)[0]
    parts = {
        "metadata": Counts(syncs=1, read=1000),
        "self": Counts(syncs=2, read=10),
        "cross": Counts(read=1),
    }
    counted = {name: dataclasses.asdict(c) for name, c in parts.items()} | {"table_bytes": 400}
    rows = {row.part: row for row in cost.rows_of("page1", case, counted, Time(5.0, 1.5))}
    assert list(rows) == ["metadata", "self", "cross", "step"]
    assert (rows["step"].syncs, rows["step"].read) == (1 + 2 * 32, 1000 + 10 * 32 + 32)
    assert [rows[part].layers for part in rows] == [0, 1, 1, 64]
    assert (rows["metadata"].microseconds, rows["metadata"].time_ratio) == (5.0, 1.5)
    assert rows["step"].microseconds is None
    assert {row.table_bytes for row in rows.values()} == {400}
