"""The report: one HTML page with nothing outside it, and the same tables as Markdown."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pagealign import report
from pagealign.bench.tables import Table
from pagealign.compare import plots
from pagealign.compare.kernels import Section
from pagealign.compare.results import Results
from pagealign.compare.summary import TITLES, errors, per_step, pools, sentences, size
from pagealign.report import Column


def _number(name: str, title: str, form: str = "{:,.0f}") -> Column:
    def cell(row: Any) -> str:
        value = getattr(row, name)
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        return "" if missing else form.format(value)

    return Column(title, cell, right=True)


def _bytes(name: str, title: str) -> Column:
    return Column(title, lambda row: size(getattr(row, name)), right=True)


def _text(name: str, title: str) -> Column:
    return Column(title, lambda row: str(getattr(row, name)))


APPROACH = Column("approach", lambda row: TITLES[row.approach])


def tables(results: Results) -> list[Table]:
    """What a reader looks at first; the CSV files have everything."""
    out = []
    for phase, what in (("decode", "A decode step"), ("prefill", "A prefill")):
        out.append(
            Table(
                f"{what}: what the backend's attention path makes host and device do",
                "Whole model, 4 requests with a full encoder, bf16, page size 64. Syncs: the host "
                "waits for a value; uploads: blocking copies to the device; copied: keys, values, "
                "queries moved or cast; tables: page or slot ids. Time: wall time of the "
                "metadata's code, as a ratio to page-aligned.",
                (
                    _text("model", "model"),
                    APPROACH,
                    _number("syncs", "syncs"),
                    _number("uploads", "uploads"),
                    _number("operators", "operators"),
                    _number("launches", "launches"),
                    _number("attention", "attention kernels"),
                    _bytes("read", "read"),
                    _bytes("copied", "copied"),
                    _bytes("table_bytes", "tables"),
                    _number("time_ratio", "time", "{:.2f}"),
                ),
                list(per_step(results, phase).itertuples()),
            )
        )
    out.append(
        Table(
            "The pool under a trace",
            "Means over the steps. Waste: reserved slots without a token; gap: of the encoder's "
            "slots; freed twice: times that a page was freed while free; two owners: most pages "
            "in two requests' rows at once; sharing a slot: tokens in one that has another token's "
            "already, and where there are any, waste, running and wait say nothing; holds: average "
            "requests at full length; gather: bytes copied per decode step.",
            (
                _text("trace", "trace"),
                _number("page_size", "page"),
                APPROACH,
                _number("reserved", "reserved"),
                _number("written", "written"),
                _number("fragmentation", "waste", "{:.1%}"),
                _number("gap_per_encoder", "gap", "{:.1%}"),
                _number("freed_twice", "freed twice"),
                _number("owned_twice", "two owners"),
                _number("aliased", "sharing a slot"),
                _number("lost", "lost"),
                _number("finished", "finished"),
                _number("running", "running", "{:.1f}"),
                _number("capacity", "holds"),
                _number("wait_mean", "wait (steps)", "{:.1f}"),
                _bytes("table_bytes", "tables"),
                _bytes("gather_step_bytes", "gather"),
            ),
            list(pools(results).itertuples()),
        )
    )
    out.append(
        Table(
            "Accuracy",
            "Largest error against float64 beside that of plain code in the same precision; "
            "within: at most twice the plain maximum and 1.5 times its mean. Same tokens: as "
            "transformers in float64 chooses after the same text.",
            (
                _text("level", "level"),
                _text("subject", "subject"),
                _text("dtype", "dtype"),
                APPROACH,
                _number("max_error", "error", "{:.2e}"),
                _number("plain_max_error", "plain", "{:.2e}"),
                Column("within", lambda row: f"{row.within}/{row.cases}", right=True),
                Column(
                    "same tokens",
                    lambda row: f"{row.tokens_same:.0f}/{row.tokens:.0f}" if row.tokens else "",
                    right=True,
                ),
                _number("wer", "WER", "{:.1%}"),
            ),
            list(errors(results).itertuples()),
        )
    )
    return out


def html(results: Results, kernels: Section | None = None) -> str:
    """The page. Pictures are inside it, as SVG, and as PNG to take away."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=True
    )
    figures = {name: (title, draw(results)) for name, (title, draw) in plots.PLOTS.items()}
    if kernels:
        figures["kernels"] = (kernels.title, kernels.figure)
    drawn = []
    for name, (title, figure) in figures.items():
        pictures = {
            "svg": base64.b64encode(plots.svg(figure)).decode(),
            "png": base64.b64encode(plots.png(figure)).decode(),
        }
        drawn.append({"name": name, "title": title, **pictures})
    return environment.get_template("page.html.j2").render(
        sentences=[_bold(sentence) for sentence in _said(results, kernels)],
        plots=drawn,
        tables=[*tables(results), *(kernels.tables if kernels else ())],
        about=results.about,
    )


def _said(results: Results, kernels: Section | None) -> list[str]:
    return [*sentences(results), *(kernels.sentences if kernels else ())]


def _bold(sentence: str) -> Markup:
    """``**bold**`` as HTML, all else escaped: a trace has the name of its file."""
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", str(escape(sentence))))


def markdown(results: Results, kernels: Section | None = None) -> str:
    """The summary and the tables."""
    lines = [f"- {sentence}" for sentence in _said(results, kernels)]
    parts = ["# Three ways to page an encoder's KV", "\n".join(lines)]
    for table in [*tables(results), *(kernels.tables if kernels else ())]:
        body = report.markdown(table.rows, table.columns)
        parts.append(f"## {table.title}\n\n{table.note}\n\n{body}")
    parts.append("; ".join(f"{name}: {value}" for name, value in results.about.items()))
    return "\n\n".join(parts) + "\n"
