"""The benchmarks' results file, tables and sentences, and the comparison's report with them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from test_bench_timing import decode_rows, planted
from test_compare_report import Links, found

from pagealign import bench
from pagealign.bench import projection, tables
from pagealign.bench.records import Run, Status, read, to_json
from pagealign.bench.run import markdown
from pagealign.compare import kernels, page, plots
from pagealign.errors import PagealignError


def run() -> Run:
    """The headline's planted rows, seconds 2 in place and 70 for the view, and whole steps."""
    rows = decode_rows()
    return Run(
        about={"date": "today", "form": "quick", "processor": "2 x Planted"},
        backends=(Status("ipex", "cpu", None), Status("flashinfer", "cuda", "no CUDA device")),
        rows=tuple(planted().values()),
        steps=tuple(projection.steps(rows)),
        cross_overs=tuple(projection.cross_overs(rows)),
        left_out=("flashinfer, tiny: why",),
    )


def test_a_file_for_a_folder_is_told_before_anything_runs(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.write_text("mine")
    monkeypatch.setattr(bench.run, "run_all", lambda *_: pytest.fail("it ran"))
    with pytest.raises(PagealignError, match=f"--out {out} can't be made"):
        bench.run.run(True, out, ["torch"], cpu_time=False)
    assert out.read_text() == "mine"


def test_the_file_holds_everything(tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text(to_json(run()))
    after = read(path)
    assert after.steps == run().steps and after.cross_overs == run().cross_overs
    assert after.backends == run().backends and after.left_out == run().left_out
    assert [r for r in after.rows if r.within] == [r for r in run().rows if r.within]
    (wrong,) = after.wrong
    assert math.isnan(wrong.median_s) and math.isnan(wrong.max_error)
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is no JSON


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 0}', '{"schema": 1, "about": {}}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "kernels.json"
    path.write_text(text)
    with pytest.raises(PagealignError, match="make bench-kernels"):
        read(path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0877, "87.7"), (0.0021, "2.10"), (0.00004561, "0.0456"), (1.5, "1500"), (math.nan, "")],
)
def test_milliseconds(seconds, text):
    assert tables.milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(35.2, "35"), (9.14, "9.1"), (0.754, "0.75"), (math.nan, "")]
)
def test_ratios(ratio, text):
    assert tables.times(ratio) == text


def test_sentences_tell_the_planted_figures():
    at_64, at_128 = tables.sentences(run())
    assert at_64 == (
        "planted, Whisper-large-v3's cross-attention, batch 8: in place at page size 64 2000 ms "
        "(75% of the bandwidth floor); page-size-1 view takes 35 times as long."
    )
    assert "page size 128 1500 ms" in at_128 and "takes 58 times as long" in at_128  # 35 / 0.6


def test_tables_tell_the_planted_figures():
    kernels_, shapes, steps, crossings = (
        [[column.cell(row) for column in table.columns] for row in table.rows]
        for table in tables.tables(run())
    )
    assert ["planted", "page-size-1 view", "64", "paged", "70000"] in [r[:5] for r in kernels_]
    assert [row[-1] for row in kernels_].count("WRONG") == 1
    ((*_, in_ms, of_floor, _, at_128, view, varlen, _),) = shapes
    assert (in_ms, of_floor, at_128, view, varlen) == ("2000", "75%", "0.60", "35", "")
    assert ["planted", "whisper-large-v3", "32", "8", "8", "96000"] in [row[:6] for row in steps]
    assert ["whisper-large-v3", "self-attention", "8", "page-size-1 view", "8 to 10"] in [
        row[1:] for row in crossings
    ]
    assert any(row[-1] == "never from 8 to 408" for row in crossings)


def test_markdown_says_what_did_not_run():
    text = markdown(run())
    assert "flashinfer did not run: no CUDA device." in text
    assert "Left out: flashinfer, tiny: why." in text


def test_the_comparisons_report_has_them_when_they_are_there(tmp_path):
    path = tmp_path / "kernels.json"
    assert kernels.section(path) is None
    path.write_text(to_json(run()))
    section = kernels.section(path)
    links = Links()
    links.feed(page.html(found(), section))
    assert len([tag for tag in links.tags if tag == "img"]) == len(plots.PLOTS) + 1
    assert "70000" in links.cells
    assert any("2 x Planted, today (quick form)" in cell for cell in links.cells)
    assert "takes 35 times as long" in page.markdown(found(), section)
    without = page.markdown(found())
    assert "Planted" not in without and "times as long" not in without


def test_the_figure_has_the_headline_and_the_steps():
    left, right = kernels.draw(run()).axes
    assert [label.get_text() for label in left.get_yticklabels()] == [
        "in place, 64",
        "in place, 128",
        "page-size-1 view",
    ]
    assert [bar.get_width() for bar in left.patches] == [2000, 1500, 70000]
    assert {line.get_label(): list(line.get_ydata()) for line in right.lines}["in place, 64"] == [
        96_000,
        224_000,
    ]


def test_a_run_without_rows_draws(tmp_path):
    assert plots.svg(kernels.draw(replace(run(), rows=(), steps=()))).startswith(b"<?xml")
