"""Which differences are expected, and of which diffs, on recordings written by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from pagealign.bed import Result
from pagealign.parity import expected, verdict
from pagealign.parity.pages import _outcome
from pagealign.parity.recording import Writer
from pagealign.parity.workloads import BACKENDS, Workload, select
from pagealign.pin import load_series

SERIES = load_series().all
ZEROS, ONES = torch.zeros(2, 4), torch.ones(2, 4)


def workload(backend="flashinfer", model="whisper", fault=None):
    return Workload("w", model, backend, (), expected=fault)


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """The verdict on a workload, given both sides' entries and answers."""

    def of(made, stock, other, *, diffs=SERIES, answer=None, stock_crash=None):
        monkeypatch.setattr(verdict, "select", lambda form: [made])
        for name, entries in (("stock", stock), ("other", other)):
            with Writer(tmp_path / name / "000.zip") as writer:
                for step, event, what, value, *layer in entries:
                    writer.add(step, event, what, value, layer=layer[0] if layer else None)
        empty = {"results": [], "crash": None, "alone": []}
        for name, given in (
            ("stock", empty | {"crash": stock_crash}),
            ("other", empty | (answer or {})),
        ):
            (tmp_path / name / "answers.json").write_text(json.dumps({"w": given}))
        [found] = verdict.compare("any", tmp_path / "stock", tmp_path / "other", "t", diffs)
        return found

    return of


def step(out, lens=(0, 0)):
    """A step of stock's with cross-attention in layer 3."""
    return [
        (0, "batch", "encoder_lens_cpu", list(lens)),
        (0, "cross", "q", ONES, 3),
        (0, "cross", "out", out, 3),
        (0, "model", "logits", ONES),
    ]


def without_cross(entries):
    return [entry for entry in entries if entry[1] != "cross"]


def test_no_kernel_without_keys(judge):
    found = judge(workload(), step(ZEROS), without_cross(step(ZEROS)))
    assert (found.fault, found.explained) == (None, {"no-kernel-without-keys": 2})
    assert found.entries == 4


@pytest.mark.parametrize(
    ("made", "entries", "diffs"),
    [
        (workload(), step(ONES), SERIES),  # stock's result was not zero
        (workload(), step(ZEROS, (0, 40)), SERIES),  # there are keys
        (workload(model="mllama"), step(ZEROS), SERIES),  # Mllama's stock skips the layer
        (workload(), step(ZEROS), SERIES[:3]),  # the diff isn't there yet
    ],
)
def test_a_kernel_that_is_missing_for_no_reason(judge, made, entries, diffs):
    found = judge(made, entries, without_cross(entries), diffs=diffs)
    assert "layer 3, cross.q: stock float32 [2, 4], other nothing" in found.fault


def test_what_an_expectation_does_not_cover(judge):
    other = [*without_cross(step(ZEROS))[:1], (0, "model", "logits", ZEROS)]
    found = judge(workload(), step(ZEROS), other)
    assert "model.logits[0][0]: stock 1.0, other 0.0" in found.fault


def test_tables_of_intel_xpu(judge):
    sides = [
        [
            (0, "metadata", "encoder_page_table", torch.zeros(1, n)),
            (0, "flash_attn_with_kvcache", "page_table", torch.zeros(1, n), 1),
            (0, "read", "slots", torch.zeros(4), 1),
        ]
        for n in (4, 5)
    ]
    found = judge(workload("intel_xpu"), *sides)
    assert (found.fault, found.explained) == (None, {"xpu-page-tables": 2})
    for made in (workload("intel_xpu", "llama"), workload("fa3")):
        assert "metadata.encoder_page_table" in judge(made, *sides).fault
    sides[1][2] = (0, "read", "slots", torch.ones(4), 1)
    assert "read.slots[0]: stock 0.0, other 1.0" in judge(workload("intel_xpu"), *sides).fault


def answers(*ids, crash=None):
    alone = dataclasses.asdict(
        Result([1, 2], [-0.5, -0.25], finish={"type": "length", "length": 2})
    )
    return {"crash": crash, "results": [alone | {"output_ids": list(i)} for i in ids],
            "alone": [alone]}  # fmt: skip


BAD, GOOD = [(0, "scheduler", "crash", "x")], [(0, "model", "logits", ONES)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answers([1, 2]), None),
        (answers([1, 3]), "request r000000 is not answered as it is alone"),
        (answers(), "request r000000 is not answered as it is alone"),
        (answers([1, 2], crash="it died"), "it died"),
    ],
)
def test_where_stock_is_wrong_the_request_alone_decides(judge, answer, said):
    found = judge(workload(fault="cut-encoder"), BAD, GOOD, answer=answer, stock_crash="x")
    assert said is None and found.fault is None or said in found.fault
    assert found.explained == ({} if said else {"cut-encoder": 1})


def test_a_stale_expectation_is_a_fault(judge):
    found = judge(workload(fault="cut-encoder"), GOOD, GOOD, answer=answers([1, 2]))
    assert "the expectation is stale" in found.fault


def test_before_the_fix_the_fault_has_to_be_the_same(judge):
    made, diffs = workload(fault="cut-encoder"), SERIES[:2]
    assert judge(made, BAD, BAD, diffs=diffs, stock_crash="x").outcome == "equal"
    assert judge(made, BAD, GOOD, diffs=diffs, stock_crash="x").fault


def test_stock_may_not_die_unexpectedly(judge):
    assert judge(workload(), BAD, BAD, stock_crash="it died").fault == "stock: it died"


def test_every_expectation_names_diffs_of_the_series():
    known = expected.ANSWERS | expected.ENTRIES
    assert len(known) == len(expected.ANSWERS) + len(expected.ENTRIES)
    for one in known.values():
        assert one.diffs and set(one.diffs) <= set(SERIES)
    fixes = {d for one in expected.ANSWERS.values() for d in one.diffs if d.startswith("fixes_")}
    # The others show on other models, or by chance: tests/stock has them.
    assert set(load_series().fixes) - fixes == {
        "fixes_torch_native_empty_encoder.diff",
        "fixes_moss_vl_retraction.diff",
        "fixes_non_finite_features.diff",
    }


def test_the_forms():
    full = select("full")
    names = [w.name for w in full]
    assert len(set(names)) == len(names)
    for form in ("quick", "prefix"):
        assert {w.name for w in select(form)} <= set(names)
    for backend in BACKENDS:
        own = [w for w in full if w.backend == backend]
        assert {w.model for w in own} == {"whisper", "mllama", "llama"}
        sizes = {w.page_size for w in own if w.model == "llama"}
        assert sizes == ({1, 64} if backend == "intel_xpu" else {1, 16, 64})
        assert all(w.page_size == 1 for w in own if w.model != "llama")
        assert any(w.graph for w in own) == (backend != "torch_native")
        assert {bool(w.options.get("overlap")) for w in own} == {False, True}
        walks = [w for w in own if w.name.endswith("/walk")]
        assert len(walks) == 3
        for walk in walks:
            assert max(r.arrive_at for r in walk.bursts[0].requests) >= 190
            assert any(r.abort_at is not None for r in walk.bursts[0].requests)
    assert {w.expected for w in full} == {None, *expected.ANSWERS}


def test_pages_against_page_size_1():
    want = answers([1, 2], [1, 3])
    assert _outcome(answers([1, 2], [1, 3]), want) == "same tokens"
    assert _outcome(answers([1, 2], [1, 4]), want) == "1 of 2 other answers"
    assert _outcome(answers([1, 2]), want) == "1 of 2 other answers"
    assert _outcome(answers(crash="AssertionError: x\ny"), want) == "dies: AssertionError: x"
