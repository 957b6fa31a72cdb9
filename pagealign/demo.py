"""``make demo``: stock and patched SGLang on the same recordings, one table.

Each row is a real server on one tree. The first two show what stock does at page size
64; the aligned rows must give exactly the tokens of Hugging Face transformers.
"""

from __future__ import annotations

import enum
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from pagealign import report, wer
from pagealign.assets import Clip, clips, whisper_base
from pagealign.client import Client, Generation, at_once, explained, threads
from pagealign.errors import PagealignError
from pagealign.hf_reference import Reference, references
from pagealign.server import PoolChecks, Server, ServerDied, ServerSpec, terminable

R = TypeVar("R")
AT_ONCE = 4
ANOTHER_SERVER = 8 << 30  # bytes: one takes 5.5 GB at its most, and the first still grows
TEXT = "The capital city of France is"
LOGPROB_TOLERANCE = 1e-3  # float32, another order of summation; a wrong slot is off by > 1


class Expect(enum.StrEnum):
    """How a row should end; the value is what the table says."""

    REFUSED = "refused: page size"
    FREED_TWICE = "dies: pages freed twice"
    EXACT = "tokens equal transformers'"


# What the reason in the log looks like for the two ways in which stock fails.
_REASONS = {
    Expect.REFUSED: re.compile(r"page.?size", re.IGNORECASE),
    Expect.FREED_TWICE: re.compile(
        r"free_segment|double.?free|freed twice|duplicate|len\(torch\.unique|leak", re.IGNORECASE
    ),
}


@dataclass(frozen=True)
class Case:
    """One row to run. ``clips`` names the recordings, all if empty; ``beside`` adds the
    transcription API, and requests without audio, alone and while clips decode."""

    tree: str
    backend: str
    page_size: int
    expect: Expect
    checks: PoolChecks
    poison: bool = False
    clips: tuple[str, ...] = ()
    beside: bool = False

    @property
    def name(self) -> str:
        return f"{self.tree}-{self.backend}-{self.page_size}"


CASES = (
    Case("stock", "intel_xpu", 64, Expect.REFUSED, PoolChecks.IDLE),
    Case("stock", "torch_native", 64, Expect.FREED_TWICE, PoolChecks.IDLE, clips=("austen-all",)),
    Case("aligned", "intel_xpu", 64, Expect.EXACT, PoolChecks.BUSY, poison=True, beside=True),
    Case("aligned", "intel_xpu", 128, Expect.EXACT, PoolChecks.BUSY, poison=True),
    Case("aligned", "torch_native", 64, Expect.EXACT, PoolChecks.BUSY),
)


@dataclass(frozen=True)
class Row:
    """How a case went.

    ``alone`` and ``together`` count the clips whose tokens are exactly the reference's,
    sent one at a time and ``AT_ONCE`` at a time, of ``clips``; ``wer`` is over all their
    words. ``pool_start`` and ``pool_end`` are free KV
    slots. ``text_beside`` counts the requests without audio that ran while clips decoded
    and gave what they give alone (None where not tried). ``died`` is the reason in the
    server's log, ``problems`` what else is wrong. ``startup_seconds`` is from the start of
    the process, ``seconds`` the whole row, both maybe beside another row.
    """

    name: str
    tree: str
    backend: str
    page_size: int
    poison: bool
    checks: str
    expected: str
    as_expected: bool
    died: str | None
    problems: tuple[str, ...]
    clips: int
    alone: int
    together: int
    wer: float | None
    pool_start: int | None
    pool_end: int | None
    text_beside: int | None
    startup_seconds: float
    seconds: float
    log: Path


@dataclass
class _Work:
    """What a run has found so far; it survives the server's death."""

    clips: int = 0
    alone: int = 0
    together: int = 0
    wer: float | None = None
    pool_start: int | None = None
    pool_end: int | None = None
    text_beside: int | None = None
    startup_seconds: float = 0.0
    died: str | None = None
    problems: tuple[str, ...] = ()

    def problem(self, text: str) -> None:
        self.problems += (text,)


def as_expected(expect: Expect, died: str | None, problems: Sequence[str]) -> bool:
    """Whether a row ended as it should: an exact one alive and without a problem, a
    failing one dead for the right reason."""
    if expect is Expect.EXACT:
        return died is None and not problems
    return died is not None and bool(_REASONS[expect].search(died))


def check(got: Generation, want: Reference, what: str, work: _Work) -> bool:
    """Whether the tokens are the reference's; records a problem if these or their
    log-probabilities are not."""
    if got.tokens != want.tokens:
        same = next(
            (i for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b),
            min(len(got.tokens), len(want.tokens)),
        )
        work.problem(f"{what}: token {same} of {len(want.tokens)} differs")
        return False
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        if not abs(a - b) <= LOGPROB_TOLERANCE:  # not >, so that NaN counts
            work.problem(f"{what}: a log-probability is {a:.4f}, not {b:.4f}")
            break
    return True


def _beside(
    client: Client, work: _Work, spoken: Sequence[Clip], want: dict[str, Reference]
) -> None:
    """Requests without audio, alone and one after the other while four clips decode."""
    alone = client.generate_text(TEXT)
    if not client.healthy():
        work.problem("/health_generate alone")
    done = threading.Event()

    def while_decoding(ask: Callable[[], R]) -> list[R]:
        """The answers to what was asked before the last clip's answer."""
        out = []
        while not done.is_set():
            out.append(ask())
        return out

    with threads(2) as pool:
        try:
            texts = pool.submit(while_decoding, lambda: client.generate_text(TEXT))
            health = pool.submit(while_decoding, client.healthy)
            answers = at_once(lambda c: client.transcribe_tokens(c.path), spoken, AT_ONCE)
        finally:
            done.set()
        for clip, answer in zip(spoken, answers, strict=True):
            check(answer, want[clip.name], f"{clip.name} beside text", work)
        if any(a.tokens != alone.tokens for a in texts.result()):
            work.problem("a request without audio gives other tokens beside clips")
        if not all(health.result()):
            work.problem("/health_generate beside clips")
        work.text_beside = len(texts.result())
    if not work.text_beside:
        work.problem("no request without audio ran beside the clips")


def exercise(
    server: Server, case: Case, spoken: Sequence[Clip], want: dict[str, Reference], work: _Work
) -> None:
    """Send everything the case asks for; findings go to ``work``."""
    work.pool_start = server.pool_free()
    with Client(server.url) as client:
        for clip in spoken:
            got = client.transcribe_tokens(clip.path)
            work.alone += check(got, want[clip.name], f"{clip.name} alone", work)
        answers = at_once(lambda c: client.transcribe_tokens(c.path), spoken, AT_ONCE)
        for clip, got in zip(spoken, answers, strict=True):
            work.together += check(got, want[clip.name], f"{clip.name} together", work)
        texts = [answer.text for answer in answers]
        if case.beside:
            texts = at_once(lambda c: client.transcribe(c.path), spoken, AT_ONCE)
            for clip, text in zip(spoken, texts, strict=True):
                if text != want[clip.name].text.strip():
                    work.problem(f"{clip.name}: the transcription API says {text!r}")
        work.wer = wer.word_error_rate(
            " ".join(c.transcript or "" for c in spoken), " ".join(texts)
        )
        if case.beside:
            _beside(client, work, sorted(spoken, key=lambda c: -c.seconds)[:AT_ONCE], want)
    work.pool_end = server.pool_free()
    if not work.pool_start == work.pool_end == server.spec.pool_slots:
        work.problem(
            f"free slots: {work.pool_start} at the start, {work.pool_end} at the end, "
            f"the pool has {server.spec.pool_slots}"
        )


def run_case(
    case: Case, spec: ServerSpec, log: Path, spoken: Sequence[Clip], want: dict[str, Reference]
) -> Row:
    """Run one row on a server of its own; one that dies or refuses is a result too."""
    return _run(case, Server(spec, log), spoken, want)


def _run(case: Case, server: Server, spoken: Sequence[Clip], want: dict[str, Reference]) -> Row:
    spoken = [c for c in spoken if not case.clips or c.name in case.clips]
    work, started = _Work(clips=len(spoken)), time.monotonic()
    try:
        with server:
            work.startup_seconds = server.startup_seconds
            with explained(server):
                exercise(server, case, spoken, want, work)
    except ServerDied as death:
        work.died = death.reason
    except PagealignError as error:  # not ready in time, or it refused a request
        work.problem(str(error))
    return Row(
        name=case.name,
        tree=case.tree,
        backend=case.backend,
        page_size=case.page_size,
        poison=case.poison,
        checks=case.checks.value,
        expected=case.expect.value,
        as_expected=as_expected(case.expect, work.died, work.problems),
        seconds=time.monotonic() - started,
        log=server.log,
        **vars(work),
    )


def _result(row: Row) -> str:
    """One or two words; ``_detail`` has the rest."""
    if row.died is not None:
        return row.expected if row.as_expected else "died"
    return "wrong" if row.problems else "exact"


def _detail(row: Row) -> str:
    """The log's reason for a server that died, else what is wrong, if anything."""
    return row.died if row.died is not None else "; ".join(row.problems)


def _count(row: Row, n: int) -> str:
    return "" if row.died is not None else f"{n}/{row.clips}"


COLUMNS = (
    report.Column("tree", lambda r: r.tree),
    report.Column("backend", lambda r: r.backend),
    report.Column("page", lambda r: str(r.page_size), right=True),
    report.Column("result", lambda r: _result(r) + (", poisoned" if r.poison else "")),
    report.Column("expected", lambda r: "yes" if r.as_expected else "NO"),
    report.Column("alone", lambda r: _count(r, r.alone), right=True),
    report.Column("at once", lambda r: _count(r, r.together), right=True),
    report.Column("WER", lambda r: "" if r.wer is None else f"{r.wer:.1%}", right=True),
    report.Column("text", lambda r: "" if r.text_beside is None else str(r.text_beside), True),
    report.Column(
        "free slots", lambda r: "" if r.pool_end is None else f"{r.pool_end}/{r.pool_start}"
    ),
    report.Column("s", lambda r: f"{r.seconds:.0f}", right=True),
)

LEGEND = f"""\
alone, at once: recordings whose tokens, end-of-text included, are exactly those of Hugging
Face transformers (float32, same prompt, greedy; log-probabilities within
{LOGPROB_TOLERANCE:g}), sent one at a time and {AT_ONCE} at once.
WER: of the texts against the words that LibriVox's readers spoke; where there is a figure
under text, they are the transcription API's.
text: requests without audio that ran while {AT_ONCE} recordings decoded, same answer as alone.
free slots: of the KV pool, after the work / before it.
poisoned: in the pool, what was never written holds NaN keys, so reading it would show.
intel_xpu is SGLang's own XPU backend on a strict CPU stand-in for the kernels.
"""


def exit_code(rows: Sequence[Row]) -> int:
    """1 if a row of the series isn't as expected, else 0: stock's rows are a report on a
    release that is not ours."""
    return int(any(not row.as_expected for row in rows if row.tree != "stock"))


def write_report(rows: Sequence[Row], out: Path) -> tuple[Path, Path]:
    """The table as ``demo.json`` and ``demo.md``."""
    notes = "".join(
        f"- {row.name}: {_detail(row) or 'exact'} (log: `{row.log.name}`)\n" for row in rows
    )
    text = f"# Demo\n\n{report.markdown(rows, COLUMNS)}\n{notes}\n```\n{LEGEND}```\n"
    return (
        report.write(out / "demo.json", report.as_json(rows)),
        report.write(out / "demo.md", text),
    )


def chosen(only: Sequence[str]) -> list[Case]:
    """The cases named, all if none; PagealignError for a name there is not."""
    names = [case.name for case in CASES]
    if unknown := [name for name in only if name not in names]:
        raise PagealignError(f"no row {unknown[0]!r}: use one of {', '.join(names)}")
    return [case for case in CASES if not only or case.name in only]


def run(out: Path, only: Sequence[str] = ()) -> int:
    """Build, run and print; files go to ``out``. Returns the exit code."""
    cases, console, out = chosen(only), report.console(), report.out_folder(out.absolute())
    with report.progress(console) as say, terminable():
        rows = _run_all(cases, out, say)
    console.print(report.table(rows, COLUMNS, "Whisper-base, six recordings"))
    console.print(LEGEND, soft_wrap=True, highlight=False)
    for row in rows:
        detail = f"\n    {_detail(row)}" if _detail(row) else ""
        console.print(f"{row.name}: {row.log}{detail}", soft_wrap=True, markup=False)
    for path in write_report(rows, out):
        console.print(f"written: {path}", soft_wrap=True)
    for row in rows:
        if not row.as_expected:
            text = f"{row.name}: expected {row.expected}, got {_result(row)}"
            console.print(text, style="red", soft_wrap=True, markup=False)
    return exit_code(rows)


def _run_all(cases: Sequence[Case], out: Path, say: Callable[[str], None]) -> list[Row]:
    from pagealign.trees import build_tree

    say("weights and recordings")
    model, spoken = whisper_base(), clips()
    say("the answers of transformers")
    found = references(model, [c.path for c in spoken])
    want = {c.name: r for c, r in zip(spoken, found, strict=True)}
    servers = []
    for name in dict.fromkeys(case.tree for case in cases):
        say(f"the tree {name}")
        build_tree(name)
    for case in cases:
        spec = ServerSpec(
            tree=build_tree(case.tree),
            model=model,
            backend=case.backend,
            page_size=case.page_size,
            poison=case.poison,
            pool_checks=case.checks,
            concurrency=AT_ONCE,
        )
        servers.append(Server(spec, out / f"{case.name}.log"))
    # Two at a time on two cores, the long rows first. The main thread starts the servers: they
    # end with their thread.
    waiting = sorted(range(len(cases)), key=lambda n: cases[n].expect is not Expect.EXACT)
    running: dict[Future[Row], int] = {}
    rows: dict[int, Row] = {}
    with ExitStack() as stack, threads(2) as pool:
        for server in servers:
            stack.callback(server.stop)
        while waiting or running:
            while waiting and (not running or (len(running) < 2 and _room())):
                number = waiting.pop(0)
                case, server = cases[number], servers[number]
                say(f"server {number + 1} of {len(cases)}: {case.name}")
                server.start()
                running[pool.submit(_run, case, server, spoken, want)] = number
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                row = rows[running.pop(future)] = future.result()
                say(f"{row.name}: {_result(row)}")
    return [rows[number] for number in range(len(cases))]


def _room() -> bool:
    """Whether the memory is enough for another server."""
    return psutil.virtual_memory().available > ANOTHER_SERVER
