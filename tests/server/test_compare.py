"""``pagealign compare --quick`` as a user runs it; the figures are worked out by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagealign.compare import model_accuracy
from pagealign.paths import REPO

TOKEN = 20 * 64 * 2 * 2  # bytes of a key and a value of Whisper-large-v3 in one layer, bf16
LAYERS = 32
OWN = "arrival,encoder_len,decode_len\n0,1500,200\n1,1500,40\n2,0,30\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("compare")
    (made / "own.csv").write_text(OWN)
    done = subprocess.run(
        [sys.executable, "-m", "pagealign", "compare", "--quick", "--out", made / "report",
         "--trace", made / "own.csv"],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    (made / "stdout").write_text(done.stdout)
    assert done.returncode == 0, done.stdout
    return made


@pytest.fixture(scope="module")
def found(folder) -> dict:
    return json.loads((folder / "report" / "compare.json").read_text())


def the(rows: list[dict], **wanted) -> dict:
    (row,) = (r for r in rows if all(r[name] == value for name, value in wanted.items()))
    return row


def decode_step(found: dict, approach: str) -> dict:
    return the(
        found["cost"],
        model="Whisper-large-v3",
        approach=approach,
        part="step",
        phase="decode",
        text_only=0,
    )


def test_a_decode_step_of_whisper_large(found):
    """Batch 4, E 1500, 64 decoder tokens, page size 64."""
    aligned, varlen, page1 = (decode_step(found, n) for n in ("aligned", "varlen", "page1"))
    assert (aligned["syncs"], aligned["uploads"], aligned["copied"]) == (0, 0, 0)
    assert page1["syncs"] == 1 + 2 * 2 * LAYERS  # the longest encoder; two per layer of each kind
    assert page1["copied"] == 0
    gathered = 4 * (1500 + 64) * TOKEN * LAYERS
    assert varlen["copied"] == pytest.approx(gathered, rel=1e-3)  # and tables of slots
    assert aligned["table_bytes"] == 4 * (24 + 1) * 4  # ceil(1500 / 64) + 64 / 64 pages
    assert page1["table_bytes"] == 4 * (1500 + 64) * 4
    assert varlen["table_bytes"] == 2 * page1["table_bytes"]  # its lists of slots, too


def test_the_pool(found):
    pools = found["fragmentation"]
    for page_size, gap in ((1, 0), (16, 4), (64, 36), (128, 36)):
        row = the(pools, trace="whisper", approach="aligned", page_size=page_size)
        assert row["gap_per_encoder"] == pytest.approx(gap / 1500)
    for row in pools:
        sound = row["approach"] == "aligned" or row["page_size"] == 1
        assert (row["freed_twice"] == 0) == sound
    # A row of 1500 + 200 tokens passes its second region's first page boundary; 40 do too.
    own = the(pools, trace="own", approach="page1", page_size=64)
    assert own["freed_twice"] > 0 and own["requests"] == 3


def test_every_case_is_as_good_as_plain_attention(found):
    assert len(found["accuracy"]) > 200
    assert all(row["within"] for row in found["accuracy"])
    models = [r for r in found["accuracy"] if r["level"] == "model"]
    assert {r["dtype"] for r in models} == {"float32", "bfloat16"}
    assert all(r["tokens"] == r["tokens_same"] == 8 for r in models if r["dtype"] == "float32")


def test_what_is_printed_and_written(folder):
    report, printed = folder / "report", (folder / "stdout").read_text()
    assert "A decode step of Whisper-large-v3 (4 requests): page-aligned 0 host syncs" in printed
    assert "Trace own, page size 64" in printed
    for name in ("compare.html", "compare.md", "compare.json", "cost.csv", "fragmentation.csv"):
        assert (report / name).stat().st_size
        assert str(report / name) in printed


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_server_per_tree(tmp_path):
    """What ``--quick`` leaves out: six recordings on each of three servers at the same time."""
    with model_accuracy.servers(tmp_path) as started:
        rows = list(model_accuracy.server_rows(started))
    for name in ("aligned", "varlen", "page1"):
        mine = [row for row in rows if row.approach == name]
        assert len({row.case for row in mine}) == len(mine) == 6
        assert all(row.within and row.tokens_same == row.tokens == row.compared for row in mine)
        # Two words of the six transcripts' 142 are heard wrong, by transformers too.
        assert (sum(row.words for row in mine), sum(row.word_errors for row in mine)) == (142, 2)
