"""The comparison's report from planted findings: its sentences, tables, plots and files."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pandas as pd
import pytest

from pagealign.compare import accuracy_row, cost, fragmentation, page, plots, results, summary
from pagealign.compare.results import Results, frame
from pagealign.compare.row_picture import ENCODER, PAGE, pictures
from pagealign.compare.run import user_workloads
from pagealign.compare.summary import faults_of_aligned
from pagealign.errors import PagealignError

APPROACHES = ("aligned", "varlen", "page1")
STEP = cost.Row(
    approach="aligned",
    model="Whisper-large-v3",
    phase="decode",
    page_size=64,
    batch=4,
    encoder_len=1500,
    decoded=64,
    text_only=0,
    part="step",
    layers=64,
    syncs=0,
    uploads=0,
    operators=500,
    launches=200,
    attention=64,
    read=10**9,
    written=10**6,
    copied=0,
    stored=10**6,
    table_bytes=400,
)
POOL = fragmentation.Row(
    trace="whisper",
    model="Whisper-large-v3",
    approach="aligned",
    page_size=64,
    pool_slots=131_072,
    max_running=256,
    requests=500,
    finished=500,
    aborted=0,
    retractions=0,
    stopped="",
    steps=1000,
    prefills=500,
    reserved=100_000.0,
    written=97_000.0,
    gap=2_250.0,
    tail=750.0,
    aliased=0.0,
    fragmentation=0.03,
    gap_per_encoder=0.024,
    freed_twice=0,
    first_freed_twice=None,
    owned_twice=0,
    lost=0,
    running=60.0,
    peak_running=70,
    capacity=78,
    wait_mean=1.5,
    wait_p95=3.0,
    wait_max=9.0,
    table_bytes=6_000.0,
    gather_layer_bytes=0,
    gather_step_bytes=0.0,
)
ERROR = accuracy_row.Row(
    level="attention",
    approach="aligned",
    subject="cross",
    case="E 1500",
    dtype="bfloat16",
    page_size=64,
    max_error=0.002,
    mean_error=0.0004,
    plain_max_error=0.003,
    plain_mean_error=0.0005,
    within=True,
    compared=1000,
)


def found() -> Results:
    steps, pools, errors = [], [], []
    syncs = {"aligned": 0, "varlen": 64, "page1": 128}
    for name in APPROACHES:
        copied = 61_440_000 if name == "varlen" else 0
        step = replace(STEP, approach=name, syncs=syncs[name], copied=copied)
        metadata = replace(step, part="metadata", copied=0, time_ratio=2.0, microseconds=99.0)
        steps += [metadata, step, replace(step, decoded=128), replace(metadata, decoded=128)]
        steps += [replace(r, phase="prefill", decoded=4) for r in (metadata, step)]
        uploads = 3 if name == "varlen" else 0
        steps += [replace(r, text_only=1, uploads=uploads, copied=99) for r in (metadata, step)]
        twice = 0 if name == "aligned" else 4_100
        for page_size in (1, 64, 128):
            pools.append(replace(POOL, approach=name, page_size=page_size, freed_twice=twice))
        errors += [replace(ERROR, approach=name, dtype=dtype) for dtype in ("float32", "bfloat16")]
    samples = pd.DataFrame(
        {"trace": "whisper", "approach": name, "page_size": 64, "step": n,
         "written": 10 * n, "gap": n, "tail": n}
        for name in APPROACHES for n in range(5)
    )  # fmt: skip
    return Results(
        frame(errors), frame(pools), samples, frame(steps), {"date": "today", "form": "quick"}
    )


def text_of(sentences: list[str], start: str) -> str:
    return next(s for s in (s.replace("**", "") for s in sentences) if s.startswith(start))


def test_sentences_tell_the_planted_figures():
    said = summary.sentences(found())
    assert text_of(said, "A decode step of Whisper-large-v3") == (
        "A decode step of Whisper-large-v3 (4 requests): page-aligned 0 host syncs, 0 B copied, "
        "400 B of tables; varlen gather 64 host syncs, 61.4 MB copied, 400 B of tables; "
        "page-size-1 view 128 host syncs, 0 B copied, 400 B of tables."
    )
    mixed = text_of(said, "With one of the 4 text only, Whisper-large-v3")
    assert "page-aligned 0 host syncs, 0 uploads that wait, 99 B copied" in mixed
    assert "varlen gather 64 host syncs, 3 uploads that wait" in mixed
    pool = text_of(said, "Trace whisper")
    assert "the gap costs 2.4% of the encoder's slots; aligned frees 0 pages twice" in pool
    assert "free 4,100 pages twice" in pool
    assert "page-aligned 2.0e-03" in text_of(said, "Attention in bfloat16")
    assert "3 of 3 cases" in text_of(said, "Attention in float32")


def test_a_word_error_rate_is_over_all_words():
    """One word of 2 and none of 18 are wrong: 1 of 20, not the mean of 50 % and 0 %."""
    results = found()
    clip = replace(
        ERROR, level="server", subject="Whisper-base, log-probabilities", dtype="float32", tokens=9
    )
    clips = [
        replace(clip, case="short", tokens_same=8, words=2, word_errors=1),
        replace(clip, case="long", tokens_same=9, words=18, word_errors=0),
    ]
    mllama = replace(clip, level="model", subject="tiny Mllama, logits", tokens_same=9)
    results = replace(results, accuracy=pd.concat([results.accuracy, frame([*clips, mllama])]))
    said = summary.sentences(results)
    start = "tokens that transformers in float64 chooses too: page-aligned"
    assert text_of(said, "Whisper-base in float32") == (
        f"Whisper-base in float32 through a server: {start} 17 of 18, WER 5.0%."
    )
    assert text_of(said, "tiny Mllama") == f"tiny Mllama in float32: {start} 9 of 9."
    assert "| 17/18 | 5.0% |" in page.markdown(results)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (7_680_000, "7.7 MB")]
)
def test_sizes(count, text):
    assert summary.size(count) == text


def test_approaches_come_in_one_order():
    assert list(summary.per_step(found()).approach) == list(APPROACHES)
    assert list(summary.pools(found()).approach) == list(APPROACHES) * 3


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets, self.tags, self.cells = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.targets += [v for k, v in attributes if k in ("src", "href")]

    def handle_data(self, data):
        self.cells.append(data)


def test_the_page_needs_nothing_outside_it():
    links = Links()
    links.feed(page.html(found()))
    assert len([tag for tag in links.tags if tag == "img"]) == len(plots.PLOTS)
    assert links.targets and all(target.startswith("data:") for target in links.targets)
    assert "script" not in links.tags and "link" in links.tags
    assert "61.4 MB" in links.cells and "4,100" in links.cells


def test_markdown_and_page_have_the_same_cells():
    table = page.tables(found())[0]
    cells = [column.cell(table.rows[1]) for column in table.columns]
    assert cells[:4] == ["Whisper-large-v3", "varlen gather", "64", "0"]
    assert "| " + " | ".join(cells) + " |" in page.markdown(found())


def test_the_name_of_a_trace_is_text():
    named = found()
    named.fragmentation["trace"] = named.samples["trace"] = "<b>&me"
    text = page.html(named)
    assert "<b>Trace &lt;b&gt;&amp;me, page size 64</b>" in text
    assert "<b>&me" not in text


def test_every_plot_draws_svg_and_png():
    for _, draw in plots.PLOTS.values():
        assert plots.svg(draw(found())).startswith(b"<?xml")
        assert plots.png(draw(found())).startswith(b"\x89PNG")


def test_files_hold_everything(tmp_path):
    before = found()
    written = results.write(before, tmp_path)
    assert sorted(path.name for path in written) == [
        "accuracy.csv", "compare.json", "cost.csv", "fragmentation.csv", "samples.csv",
    ]  # fmt: skip
    after = results.read(tmp_path)
    assert summary.sentences(after) == summary.sentences(before)
    body = json.loads((tmp_path / "compare.json").read_text())
    assert body["about"] == before.about
    steps = [r for r in body["cost"] if r["part"] == "step" and r["approach"] == "varlen"]
    assert [r["copied"] for r in steps if not r["text_only"]] == [61_440_000] * 3


def test_a_right_aligned_tree_has_no_fault():
    assert faults_of_aligned(found()) == []


@pytest.mark.parametrize(
    ("table", "column", "fault"),
    [
        ("fragmentation", "freed_twice", "freed twice"),
        ("fragmentation", "lost", "lost"),
        ("fragmentation", "owned_twice", "owned twice"),
        ("fragmentation", "aliased", "aliased"),
        ("cost", "syncs", "waits"),
        ("cost", "uploads", "waits"),
        ("cost", "copied", "copies"),
    ],
)
def test_a_wrong_aligned_tree_is_told(table, column, fault):
    wrong = found()
    rows = wrong.tables[table]
    rows.loc[rows.approach == "aligned", column] = 1
    (told,) = faults_of_aligned(wrong)
    assert fault in told
    first, *others = summary.sentences(wrong)
    assert first == f"**Page-aligned is not right here**: {told}."
    assert not any("Use page-aligned" in sentence for sentence in others)


def test_without_page_size_64_another_is_shown():
    other = found()
    for table in (other.fragmentation, other.samples):
        table["page_size"] = table.page_size.replace(64, 32)
    assert "Trace whisper, page size 32" in page.markdown(other)
    assert len(plots.pool_over_time(other).axes[0].collections) == 3


def test_errors_out_of_bounds_are_told():
    wrong = found()
    wrong.accuracy.loc[wrong.accuracy.approach == "aligned", "within"] = False
    assert faults_of_aligned(wrong) == ["2 accuracy cases are out of bounds"]


def test_the_picture_is_drawn_to_the_rule():
    """By hand: 10 encoder slots at page 4 keep 12, so that the decoder starts at slot 12."""
    aligned, varlen, page1 = pictures()
    assert aligned.cells.index("decoder") == 12 and aligned.cells.count("gap") == 2
    assert varlen.cells.index("decoder") == page1.cells.index("decoder") == ENCODER == 10
    assert all(len(p.cells) % PAGE == 0 for p in pictures())
    assert [r.unit for r in aligned.reads] == [4, 4] and [r.unit for r in page1.reads] == [1, 1]
    assert [r.copied for p in pictures() for r in p.reads] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(PagealignError, match="no model 'gpt': use one of whisper-large-v3"):
        user_workloads([tmp_path / "t.csv"], "gpt", 10_000, 8, 1.0)
