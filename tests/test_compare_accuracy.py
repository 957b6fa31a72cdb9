"""Accuracy of attention without a tree: cases, contents, truth and figures."""

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch

from pagealign.compare import attention_accuracy, model_accuracy
from pagealign.compare.accuracy_row import errors
from pagealign.compare.attention_accuracy import Case, cases, contents_of, truth_and_plain

SMALL = Case("float32", (4, 2, 64), (3, 0, 1), decoding=False)


def test_cases_cover_the_matrix():
    full = cases(quick=False)
    assert set(cases(quick=True)) < set(full)
    assert len(set(full)) == len(full)
    uniform = {c.encoder_lens[0] for c in full if len(set(c.encoder_lens)) == 1}
    assert uniform == {0, 1, 63, 64, 65, 1500, 1601, 6404}
    assert {c.dtype for c in full} == {"float32", "bfloat16", "float16"}
    assert {c.heads[0] // c.heads[1] for c in full} == {1, 4}
    mixed = [c.encoder_lens for c in full if len(set(c.encoder_lens)) > 1]
    assert any(0 in lens for lens in mixed) and any(0 not in lens for lens in mixed)
    for field in ("decoding", "dtype", "heads"):
        assert len({getattr(c, field) for c in cases(quick=True)}) > 1


def test_a_case_survives_json():
    assert Case.of(json.loads(json.dumps(dataclasses.asdict(SMALL)))) == SMALL


def test_names():
    assert SMALL.name == "GQA, E = 3, 0, 1"
    assert Case("float16", (4, 4, 64), (65, 65), decoding=True).name == "MHA, E = 65"


def test_batches():
    prefill = SMALL.batch
    assert prefill.q_lens == prefill.seq_lens and prefill.encoder_is_new
    decode = dataclasses.replace(SMALL, decoding=True).batch
    assert decode.q_lens == (1, 1, 1) and not decode.encoder_is_new
    assert min(decode.seq_lens) > 1


def test_contents_depend_on_the_case_alone():
    first, again = contents_of(SMALL), contents_of(SMALL)
    other = contents_of(dataclasses.replace(SMALL, encoder_lens=(3, 1, 0)))
    assert torch.equal(first.q["cross"], again.q["cross"])
    assert not torch.equal(first.q["cross"], other.q["cross"])
    assert first.k["cross"].shape == (4, 2, 64)  # three keys and one, two kv heads
    assert first.q["self"].shape == (sum(SMALL.batch.seq_lens), 4, 64)
    assert (
        contents_of(dataclasses.replace(SMALL, dtype="bfloat16")).v["self"].dtype == torch.bfloat16
    )


def test_truth_of_empty_and_single_keys():
    contents = contents_of(SMALL)
    truth, plain = truth_and_plain(SMALL, contents, "cross")
    one, two, three = truth.split(SMALL.batch.q_lens)
    assert truth.dtype == torch.float64 and plain.dtype == torch.float32
    assert not two.any()  # no key: zero
    # one key: its value, for each query head that shares its kv head
    value = contents.v["cross"][3].double().repeat_interleave(2, dim=0)
    assert torch.allclose(three, value.expand_as(three))
    # three keys: inside of what the values span
    values = contents.v["cross"][:3].double().repeat_interleave(2, dim=1)
    assert (one <= values.max(0).values).all() and (one >= values.min(0).values).all()


def test_truth_is_causal_for_self_attention():
    contents = contents_of(SMALL)
    truth, _ = truth_and_plain(SMALL, contents, "self")
    first_token = contents.v["self"][0].double().repeat_interleave(2, dim=0)
    assert torch.allclose(truth[0], first_token)


def test_figures_by_hand():
    truth = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    plain = truth + torch.tensor([0.0, 0.25, 0.0, 0.25])
    found = errors((truth + torch.tensor([0.5, 0.0, 0.0, 0.0])).float(), truth, plain.float())
    assert found == {
        "max_error": 0.5,
        "mean_error": 0.125,
        "plain_max_error": 0.25,
        "plain_mean_error": 0.125,
        "within": True,  # just: twice the plain maximum
        "compared": 4,
    }
    assert not errors((truth + 0.75).float(), truth, plain.float())["within"]
    assert not errors(truth.float() * float("nan"), truth, plain.float())["within"]


@pytest.mark.parametrize("page_sizes", [(64,), (64, 128)])
def test_rows_pair_each_output_with_its_case(page_sizes):
    """Planted outputs: the truth everywhere but in one approach's last case and page size."""
    wanted = [SMALL, dataclasses.replace(SMALL, decoding=True)]
    truths = [
        {kind: truth_and_plain(c, contents_of(c), kind)[0] for kind in attention_accuracy.KINDS}
        for c in wanted
    ]
    right = truths * len(page_sizes)
    wrong = [*right[:-1], right[-1] | {"cross": right[-1]["cross"] + 1}]
    found = {"aligned": right, "page1": wrong}
    rows = list(attention_accuracy.rows(wanted, page_sizes, found))
    assert len(rows) == 2 * len(attention_accuracy.KINDS) * 2 * len(page_sizes)
    off = [row for row in rows if not row.within]
    assert [(r.approach, r.subject, r.page_size) for r in off] == [
        ("page1", "cross-attention, decode", page_sizes[-1])
    ]
    assert off[0].max_error == pytest.approx(1) and off[0].level == "attention"
    assert all(row.max_error == 0 for row in rows if row.within)


def test_the_truth_of_the_same_tokens_is_worked_out_once(tmp_path):
    asked = []

    def logits_in(dtype):
        def logits(features, start, tokens):
            asked.append((dtype, features, start, tuple(tokens)))
            return torch.zeros(len(tokens), 5)

        return logits

    requests = {name: {"features": name, "input_ids": (1,)} for name in "ab"}
    subject = model_accuracy.Subject("tiny", tmp_path, requests, logits_in)
    first = subject.logits(torch.float64, "a", [3, 4])
    assert subject.logits(torch.float64, "a", (3, 4)) is first
    subject.logits(torch.float64, "a", (3, 5))
    subject.logits(torch.float64, "b", (3, 4))
    subject.logits(torch.float32, "a", (3, 4))
    assert asked == [
        (torch.float64, "a", (1,), (3, 4)),
        (torch.float64, "a", (1,), (3, 5)),
        (torch.float64, "b", (1,), (3, 4)),
        (torch.float32, "a", (1,), (3, 4)),
    ]


@pytest.mark.parametrize(("free", "at_once"), [(64, 3), (9, 2), (5, 1), (1, 1)])
def test_servers_run_at_once_as_the_memory_allows(tmp_path, monkeypatch, free, at_once):
    """Of 4 GiB each; the others follow, and each is asked and ended."""
    running, most, asked = set(), [], []

    class Fake:
        url = "http://127.0.0.1:1"

        def __init__(self, spec, _log):
            self.spec = spec

        @property
        def started(self):
            return self in running

        def start(self):
            running.add(self)
            most.append(len(running))

        def wait_ready(self):
            assert self.started
            asked.append(self)
            # what runs beside it has its turn before it ends
            time.sleep(0.1)

        def stop(self):
            running.discard(self)

    gib = SimpleNamespace(available=free << 30)
    monkeypatch.setattr(model_accuracy.psutil, "virtual_memory", lambda: gib)
    monkeypatch.setattr(model_accuracy, "Server", Fake)
    monkeypatch.setattr(model_accuracy, "clips", list)
    for name in ("whisper_base", "whisper_subject"):
        monkeypatch.setattr(model_accuracy, name, lambda: None)
    monkeypatch.setattr(model_accuracy, "build_tree", lambda name: tmp_path / name)
    with model_accuracy.servers(tmp_path) as found:
        assert len(running) == at_once
        assert list(model_accuracy.server_rows(found)) == []
        assert not running
    assert max(most) == at_once
    assert sorted(map(id, asked)) == sorted(map(id, found.values()))
