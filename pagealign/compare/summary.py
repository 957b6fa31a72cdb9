"""What the figures say, in sentences and in the few tables that a reader looks at first."""

from __future__ import annotations

import pandas as pd

from pagealign.compare.approaches import APPROACHES
from pagealign.compare.results import Results

TITLES = {one.name: one.title for one in APPROACHES}


def per_step(results: Results, phase: str = "decode", text_only: int = 0) -> pd.DataFrame:
    """Counts of a whole step at each model's base case (batch 4, full encoder, page 64), with
    so many of the requests text only; a line per model and approach."""
    cost = results.cost
    metadata = cost[cost.part == "metadata"][[*_CASE, "time_ratio"]]
    step = cost[(cost.part == "step") & (cost.phase == phase)]
    step = step[step.text_only == text_only]
    step = step[(step.page_size == 64) & (step.batch == 4)]
    base = step.groupby("model").first().reset_index()[["model", "encoder_len", "decoded"]]
    step = step.drop(columns="time_ratio").merge(base).merge(metadata, on=_CASE)
    return _in_order(step)


_CASE = ["approach", "model", "phase", "page_size", "batch", "encoder_len", "decoded", "text_only"]


def errors(results: Results) -> pd.DataFrame:
    """Per level, subject, dtype and approach: the worst error, the worst of plain code in the
    same dtype, how many cases keep within the rule, tokens and word error rate."""
    rows = results.accuracy[results.accuracy.compared > 0]
    keys = ["level", "subject", "dtype", "approach"]
    found = (
        rows.groupby(keys, sort=False)
        .agg(
            max_error=("max_error", "max"),
            plain_max_error=("plain_max_error", "max"),
            cases=("within", "size"),
            within=("within", "sum"),
            tokens=("tokens", "sum"),
            tokens_same=("tokens_same", "sum"),
            words=("words", "sum"),
            word_errors=("word_errors", "sum"),
        )
        .reset_index()
    )
    found["wer"] = found.word_errors / found.words.where(found.words > 0)
    return _in_order(found)


def pools(results: Results) -> pd.DataFrame:
    """Per trace, page size and approach: what of the pool is wasted, lost or given twice."""
    return _in_order(results.fragmentation)


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Approaches in the order of APPROACHES, everything else as it comes."""
    rank = {name: n for n, name in enumerate(TITLES)}
    first = [c for c in ("level", "subject", "dtype", "trace", "model", "page_size") if c in rows]
    groups = rows.groupby(first, sort=False).ngroup()
    order = rows.assign(_group=groups, _rank=rows.approach.map(rank))
    return order.sort_values(["_group", "_rank"], kind="stable").drop(columns=["_group", "_rank"])


def size(count: float) -> str:
    """Bytes for people: ``61.4 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def sentences(results: Results) -> list[str]:
    """The summary, in Markdown: first what to do, then why, each with its figures."""
    faults = faults_of_aligned(results)
    out = [f"**Page-aligned is not right here**: {fault}." for fault in faults] or [
        "**Use page-aligned** wherever the kernel's page is larger than 1: it alone keeps the "
        "pool's books right there, and it reads the pool in place.",
    ]
    out += [
        "**At page size 1** the rows of all three are the same; what they cost still differs.",
        "**Varlen gather** is for a kernel that can't read pages at all; **the page-size-1 "
        "view** is for one that takes page size 1, on a tree that may not be patched. Both need "
        "the pool's fault (upstream 38840) fixed first.",
    ]
    return [*out, *_of_cost(results), *_of_pools(results), *_of_accuracy(results)]


def shown_page_size(table: pd.DataFrame) -> int:
    """64, or else the smallest above 1, or 1: of a table that has the column ``page_size``."""
    sizes = sorted(table.page_size.unique())
    return 64 if 64 in sizes else next((s for s in sizes if s > 1), sizes[0])


def _of_cost(results: Results) -> list[str]:
    out = []
    for model, rows in per_step(results).groupby("model", sort=False):
        told = [
            f"{TITLES[row.approach]} {row.syncs} host syncs, {size(row.copied)} copied, "
            f"{size(row.table_bytes)} of tables"
            for row in rows.itertuples()
        ]
        out.append(f"**A decode step of {model}** (4 requests): {'; '.join(told)}.")
    for model, rows in per_step(results, text_only=1).groupby("model", sort=False):
        told = [
            f"{TITLES[row.approach]} {row.syncs} host syncs, {row.uploads} uploads that wait, "
            f"{size(row.copied)} copied"
            for row in rows.itertuples()
        ]
        out.append(f"**With one of the 4 text only**, {model}: {'; '.join(told)}.")
    return out


def _of_pools(results: Results) -> list[str]:
    rows, out = results.fragmentation, []
    page_size = shown_page_size(rows)
    rows = rows[rows.page_size == page_size]
    for trace, found in rows.groupby("trace", sort=False):
        by_name = found.set_index("approach")
        aligned, stock = by_name.loc["aligned"], by_name.loc["page1"]
        out.append(
            f"**Trace {trace}, page size {page_size}**: the gap costs "
            f"{aligned.gap_per_encoder:.1%} of the encoder's slots; aligned frees "
            f"{aligned.freed_twice:,.0f} pages twice and serves {aligned.finished:,.0f} of "
            f"{aligned.requests:,.0f} requests; the rows of stock, which varlen and the "
            f"page-size-1 view share, free {stock.freed_twice:,.0f} pages twice, put up to "
            f"{stock.owned_twice:,.0f} pages at once into two requests' rows, so that on "
            f"average {stock.aliased:,.0f} tokens lie in a slot that has another token's already, "
            f"and get through {stock.finished:,.0f}"
            + (f" ({stock.stopped})." if stock.stopped else ".")
        )
    return out


def _of_accuracy(results: Results) -> list[str]:
    rows = errors(results)
    attention = rows[rows.level == "attention"]
    out = []
    for dtype, found in attention.groupby("dtype", sort=False):
        told = [
            f"{TITLES[n]} {e:.1e}"
            for n, e in found.groupby("approach", sort=False).max_error.max().items()
        ]
        plain = found.plain_max_error.max()
        out.append(
            f"**Attention in {dtype}**: largest error against float64: {', '.join(told)}; plain "
            f"code in {dtype}: {plain:.1e}. {found.within.sum()} of {found.cases.sum()} cases are "
            "within twice the plain error."
        )
    whole = rows[(rows.level != "attention") & (rows.dtype == "float32")]
    for (level, subject), found in whole.groupby(["level", "subject"], sort=False):
        told = [
            f"{TITLES[row.approach]} {row.tokens_same:.0f} of {row.tokens:.0f}"
            + (f", WER {row.wer:.1%}" if row.words else "")
            for row in found.itertuples()
        ]
        where = " through a server" if level == "server" else ""
        out.append(
            f"**{subject.split(',')[0]} in float32**{where}: tokens that transformers in float64 "
            f"chooses too: {'; '.join(told)}."
        )
    return out


def faults_of_aligned(found: Results) -> list[str]:
    """What a right page-aligned tree never shows."""
    out = []
    pools = found.fragmentation[found.fragmentation.approach == "aligned"]
    for name in ("freed_twice", "owned_twice", "lost", "aliased"):
        if (pools[name] > 0).any():
            out.append(f"the pool has {name.replace('_', ' ')} pages or slots")
    steps = found.cost[(found.cost.approach == "aligned") & (found.cost.phase == "decode")]
    if (steps.syncs + steps.uploads > 0).any():
        out.append("a decode step waits for the device")
    # Beside requests without an encoder the others' queries and outputs are picked out.
    if (steps[steps.text_only == 0].copied > 0).any():
        out.append("a decode step copies keys or values")
    checked = found.accuracy[(found.accuracy.approach == "aligned") & (found.accuracy.compared > 0)]
    if not checked.within.all():
        out.append(f"{(~checked.within.astype(bool)).sum()} accuracy cases are out of bounds")
    return out
