"""``pagealign parity``: at page size 1 the series changes nothing, value by value."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from pagealign import report
from pagealign.parity import expected
from pagealign.parity.jobs import Job, run_jobs
from pagealign.parity.pages import PageRow, compare_pages
from pagealign.parity.prefixes import Prefix, build_prefixes, check_reversible, touched_modules
from pagealign.parity.verdict import Verdict, compare
from pagealign.pin import load_series
from pagealign.trees import build_tree, tree_of

COLUMNS = (
    report.Column("workload", lambda v: v.workload),
    report.Column("values", lambda v: str(v.entries), right=True),
    report.Column("aligned against stock", lambda v: v.outcome),
)
PREFIX_COLUMNS = (
    report.Column("diffs applied", lambda r: r.tree),
    report.Column("workloads", lambda r: str(r.workloads), right=True),
    report.Column("values", lambda r: str(r.entries), right=True),
    report.Column("against stock", lambda r: r.outcome),
)
PAGE_COLUMNS = (
    report.Column("workload", lambda r: r.workload),
    report.Column("requests", lambda r: str(r.requests), right=True),
    report.Column("stock", lambda r: r.stock),
    report.Column("aligned", lambda r: r.aligned),
)


@dataclass(frozen=True)
class PrefixRow:
    """A prefix of the series against stock; ``faults`` are the first of each workload."""

    tree: str
    workloads: int
    entries: int
    explained: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def outcome(self) -> str:
        if self.faults:
            return f"DIFFERS: {self.faults[0]}"
        return "expected: " + ", ".join(self.explained) if self.explained else "equal"


def run(*, quick: bool, out: Path, tree: Path | None = None, at_once: int = 2) -> int:
    """Record, compare and print; 0 if all is equal but for what is expected, else 1.

    ``tree``: another SGLang to hold against stock than the aligned tree. Writes
    ``parity.json`` to ``out``, and leaves the recordings there where something differs.
    """
    started = time.monotonic()
    console = report.console()
    report.out_folder(out)
    other = tree_of(tree) if tree else build_tree("aligned")
    stock = build_tree("stock")
    diffs = load_series().all
    recordings = out / "recordings"
    shutil.rmtree(recordings, ignore_errors=True)
    form = "quick" if quick else "full"
    with tempfile.TemporaryDirectory() as work, report.progress(console) as progress:
        scratch = Path(work)
        jobs = _jobs(form, stock, other, recordings)
        prefixes: list[Prefix] = []
        if not quick and tree is None:
            progress("trees of the series' prefixes")
            check_reversible(scratch)
            prefixes = list(build_prefixes(scratch))
            jobs += _prefix_jobs(stock, prefixes, recordings)
        progress("PyTorch, transformers and the tiny models")
        run_jobs(jobs, scratch / "models", at_once, progress)
        progress("comparing")
        verdicts = list(compare(form, recordings / "stock", recordings / "aligned", "all", diffs))
        rows = [_prefix_row(p, recordings) for p in prefixes]
        pages: list[PageRow] = []
        if not quick:
            pages = list(compare_pages(recordings / "stock-pages", recordings / "aligned-pages"))
    console.print(report.table(verdicts, COLUMNS))
    if rows:
        console.print(report.table(rows, PREFIX_COLUMNS, title="Diff by diff"))
    if pages:
        title = "FlashInfer above page size 1, against the aligned tree at page size 1"
        console.print(report.table(pages, PAGE_COLUMNS, title=title))
    faults = [v.fault for v in verdicts if v.fault]
    faults += [f"{row.tree}: {fault}" for row in rows for fault in row.faults]
    faults += [f"{row.workload}: {row.aligned}" for row in pages if not row.right]
    report.write(
        out / "parity.json",
        report.as_json(
            verdicts,
            form=form,
            prefixes=[vars(row) for row in rows],
            pages=[vars(row) for row in pages],
            expected={e.name: e.why for e in _expectations(verdicts, rows)},
            seconds=round(time.monotonic() - started),
        ),
    )
    for known in _expectations(verdicts, rows):
        console.print(Text(f"{known.name}: {known.why}"), soft_wrap=True)
    if faults:
        for fault in faults:
            console.print(Text(fault, style="red"), soft_wrap=True)
        console.print(Text(f"{len(faults)} differences; recordings: {recordings}"))
        return 1
    shutil.rmtree(recordings)
    values = sum(v.entries for v in verdicts) + sum(row.entries for row in rows)
    console.print(Text(f"{values} values compared, no difference that is not expected"))
    return 0


def _jobs(form: str, stock: Path, other: Path, recordings: Path) -> list[Job]:
    jobs = []
    for name, tree in (("stock", stock), ("aligned", other)):
        jobs.append(Job(f"{name} ({form})", tree, form, recordings / name))
    if form == "full":
        for name, tree in (("stock", stock), ("aligned", other)):
            jobs.append(Job(f"{name} (pages)", tree, "pages", recordings / f"{name}-pages"))
    return jobs


def _prefix_jobs(stock: Path, prefixes: Sequence[Prefix], recordings: Path) -> list[Job]:
    jobs = [Job("stock (prefix)", stock, "prefix", recordings / "stock-prefix")]
    for prefix in prefixes:
        out = recordings / prefix.tree.name
        imports = tuple(touched_modules(prefix.tree))
        jobs.append(Job(f"diff {prefix.name}", prefix.tree, "prefix", out, imports))
    return jobs


def _prefix_row(prefix: Prefix, recordings: Path) -> PrefixRow:
    stock, out = recordings / "stock-prefix", recordings / prefix.tree.name
    found = list(compare("prefix", stock, out, prefix.name, prefix.diffs))
    explained = {name: None for verdict in found for name in verdict.explained}
    faults = tuple(verdict.fault for verdict in found if verdict.fault)
    entries = sum(verdict.entries for verdict in found)
    return PrefixRow(prefix.name, len(found), entries, tuple(explained), faults)


def _expectations(
    verdicts: Sequence[Verdict], rows: Sequence[PrefixRow]
) -> list[expected.Expected]:
    """The expected differences that were seen, each once."""
    names = {name: None for v in verdicts for name in v.explained}
    names |= {name: None for row in rows for name in row.explained}
    known = expected.ENTRIES | expected.ANSWERS
    return [known[name] for name in names]
