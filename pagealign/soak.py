"""``make soak``: mixed traffic against one patched server, for half an hour.

Recordings of different lengths, requests without audio, stop strings, limits of one
token, clients that go away, aborts by id, and a health probe every second, on a pool so
small that decoding requests are retracted. What comes back is compared with transformers.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from pagealign import report
from pagealign.assets import Clip, clips, whisper_base
from pagealign.client import Client, Generation, explained
from pagealign.demo import TEXT
from pagealign.errors import PagealignError
from pagealign.hf_reference import Reference, references
from pagealign.layout import ceil_align
from pagealign.server import Server, ServerDied, ServerSpec, session_members, terminable

CLIENTS = 8
TEXT_TOKENS = 150
PROBE_SECONDS = 1.0
RSS_SECONDS = 5.0
SURE_TO_RETRACT = 600.0  # seconds; in three minutes there may be one retraction or none
FLAT = 0.02  # how far the memory of the last quarter may be from that of the one before


@dataclass(frozen=True)
class Kind:
    """One kind of request, how often it is drawn, and whether its client ends it."""

    name: str
    weight: int
    ended_by_client: bool = False


KINDS = (
    Kind("recording", 50),
    Kind("text only", 30),
    Kind("stop string", 6),
    Kind("one token", 4),
    Kind("client goes away", 10, True),
    Kind("abort by id", 10, True),
)


@dataclass
class Row:
    """One kind's tally: ``cut`` ended early because its client wanted it to."""

    kind: str
    sent: int = 0
    whole: int = 0
    cut: int = 0
    wrong: int = 0

    @property
    def lost(self) -> int:
        return self.sent - self.whole - self.cut - self.wrong


COLUMNS = (
    report.Column("requests", lambda r: r.kind),
    report.Column("sent", lambda r: str(r.sent), right=True),
    report.Column("whole and right", lambda r: str(r.whole), right=True),
    report.Column("ended by client", lambda r: str(r.cut), right=True),
    report.Column("wrong", lambda r: str(r.wrong), right=True),
    report.Column("lost", lambda r: str(r.lost), right=True),
)


@dataclass
class Findings:
    """What a soak saw. ``rss`` is (seconds since the start, bytes of the whole server)."""

    rows: dict[str, Row] = field(default_factory=lambda: {k.name: Row(k.name) for k in KINDS})
    problems: list[str] = field(default_factory=list)
    probes: int = 0
    retractions: int = 0
    rss: list[tuple[float, int]] = field(default_factory=list)
    pool_start: int | None = None
    pool_end: int | None = None
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)

    def sent(self, kind: Kind) -> None:
        with self.lock:
            self.rows[kind.name].sent += 1

    def ended(self, kind: Kind, outcome: str, retractions: int = 0) -> None:
        """``outcome``: whole, cut or wrong."""
        with self.lock:
            row = self.rows[kind.name]
            setattr(row, outcome, getattr(row, outcome) + 1)
            self.retractions += retractions


def small_pool(page_size: int, running: int = 2) -> int:
    """KV slots for ``running`` recordings with one page of text each and 256 slots more: what
    else is admitted, text first of all, has to grow at the cost of another request. A third
    recording would have to wait in any case, so more slots would never be taken."""
    return running * (ceil_align(1500, page_size) + page_size) + 256


def memory_growth(rss: Sequence[tuple[float, int]]) -> float:
    """By which part the median of the last quarter's memory is above (or below, negative)
    that of the quarter before; PagealignError for fewer than 8 samples."""
    if len(rss) < 8:
        raise PagealignError(f"only {len(rss)} samples of the memory: run for longer")
    begin, end = rss[0][0], rss[-1][0]
    quarters = [[], []]
    for at, size in rss:
        quarter = int(4 * (at - begin) / (end - begin))
        if quarter >= 2:
            quarters[min(quarter, 3) - 2].append(size)
    third, fourth = map(statistics.median, quarters)
    return fourth / third - 1


class Traffic:
    """Clients that each send one request after the other until told to stop."""

    def __init__(
        self,
        client: Client,
        spoken: Sequence[Clip],
        want: dict[str, Reference],
        text: Generation,
        found: Findings,
        until: float,
    ) -> None:
        self.client, self.spoken, self.want, self.text = client, spoken, want, text
        self.found, self.until = found, until
        # a request that is to be aborted is waited for while the abort is sent
        self.waiting = ThreadPoolExecutor(CLIENTS)

    def run(self, number: int, seed: int) -> None:
        """One client: its kinds, recordings and moments come from ``seed`` and its number."""
        draw = random.Random(f"{seed}/{number}")
        count = 0
        while time.monotonic() < self.until:
            (kind,) = draw.choices(KINDS, [k.weight for k in KINDS])
            if count == 0:  # between them, the clients begin with every kind
                kind = KINDS[number % len(KINDS)]
            clip = draw.choice(self.spoken)
            self.found.sent(kind)
            self.send(kind, clip, f"soak-{number:02}-{count:06}", draw)
            count += 1

    def send(self, kind: Kind, clip: Clip, rid: str, draw: random.Random) -> None:
        """Send one request and compare what comes back."""
        want = self.want[clip.name]
        if kind.name == "text only":
            limit = draw.randrange(1, TEXT_TOKENS + 1)
            got = self.client.generate_text(TEXT, limit)
            self.judge(kind, got, self.text.tokens[:limit], rid)
        elif kind.name == "recording":
            got = self.client.transcribe_tokens(clip.path)
            self.judge(kind, got, want.tokens, f"{rid} {clip.name}")
        elif kind.name == "one token":
            got = self.client.transcribe_tokens(clip.path, limit=1)
            self.judge(kind, got, want.tokens[:1], f"{rid} {clip.name}")
        elif kind.name == "stop string":
            words = want.text.split()
            word = " " + words[draw.randrange(1, len(words))]
            got = self.client.transcribe_tokens(clip.path, stop=word)
            before = want.text[: want.text.index(word)].strip()
            right = got.text == before and got.tokens == want.tokens[: len(got.tokens)]
            self.note(kind, right, got, f"{rid} {clip.name} to {word!r}: {got.text!r}")
        elif kind.name == "client goes away":
            patience = draw.uniform(0.05, 4.0)
            try:
                got = self.client.transcribe_tokens(clip.path, patience=patience)
            except httpx.TimeoutException:
                self.found.ended(kind, "cut")
            else:
                self.judge(kind, got, want.tokens, f"{rid} {clip.name}")
        else:
            answer = self.waiting.submit(self.client.transcribe_tokens, clip.path, rid=rid)
            time.sleep(draw.uniform(0.0, 4.0))
            self.client.abort(rid)
            got = answer.result()
            if got.meta["finish_reason"]["type"] == "abort":
                right = got.tokens == want.tokens[: len(got.tokens)]
                if not right:
                    self.found.problem(f"{rid} {clip.name}: aborted, with a wrong beginning")
                self.found.ended(kind, "cut" if right else "wrong")
            else:
                self.judge(kind, got, want.tokens, f"{rid} {clip.name}")

    def judge(self, kind: Kind, got: Generation, want: Sequence[int], what: str) -> None:
        same = 0
        for a, b in zip(got.tokens, want, strict=False):
            if a != b:
                break
            same += 1
        right = got.tokens == tuple(want)
        self.note(kind, right, got, f"{what}: {same} of {len(want)} tokens are right")

    def note(self, kind: Kind, right: bool, got: Generation, what: str) -> None:
        self.found.ended(kind, "whole" if right else "wrong", got.meta.get("num_retractions", 0))
        if not right:
            self.found.problem(f"{kind.name} {what}")


def _every(seconds: float, done: threading.Event, work: Callable[[], None]) -> None:
    """``work`` at each multiple of ``seconds``, or later if it takes longer, until done."""
    while not done.wait(seconds):
        work()


def _resident(session: int) -> int:
    """Bytes resident in all processes of a session."""
    total = 0
    for process in session_members(session):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def exercise(
    server: Server,
    spoken: Sequence[Clip],
    want: dict[str, Reference],
    seconds: float,
    seed: int,
    found: Findings,
    say: Callable[[str], None],
) -> None:
    """Run the traffic for ``seconds``; findings go to ``found``."""
    found.pool_start = server.pool_free()
    with Client(server.url) as client, Client(server.url) as prober:
        text = client.generate_text(TEXT, TEXT_TOKENS)
        started = time.monotonic()
        traffic = Traffic(client, spoken, want, text, found, started + seconds)
        done = threading.Event()

        def probe() -> None:
            if not prober.healthy():
                found.problem(f"a health probe failed after {time.monotonic() - started:.0f} s")
            found.probes += 1

        def sample() -> None:
            found.rss.append((time.monotonic() - started, _resident(server.pid)))
            counts = ", ".join(f"{r.whole + r.cut}/{r.sent} {r.kind}" for r in found.rows.values())
            say(f"{time.monotonic() - started:.0f} of {seconds:.0f} s: {counts}")

        watchers = ThreadPoolExecutor(2)
        clients = ThreadPoolExecutor(CLIENTS)
        try:
            watching = [
                watchers.submit(_every, PROBE_SECONDS, done, probe),
                watchers.submit(_every, RSS_SECONDS, done, sample),
            ]
            running = [clients.submit(traffic.run, n, seed) for n in range(CLIENTS)]
            for future in running:
                future.result()
            done.set()
            for future in watching:
                future.result()
        finally:
            done.set()
            for pool in (clients, watchers, traffic.waiting):
                pool.shutdown(wait=False, cancel_futures=True)
        found.seconds = time.monotonic() - started
    found.pool_end = server.pool_free()


def verdict(found: Findings, slots: int) -> list[str]:
    """What is wrong, if anything, besides what the traffic itself saw."""
    out = []
    if lost := [r for r in found.rows.values() if r.lost]:
        out += [f"{r.kind}: {r.lost} of {r.sent} had no answer" for r in lost]
    if unsent := [r.kind for r in found.rows.values() if not r.sent]:
        out.append(f"never sent: {', '.join(unsent)}")
    if not found.retractions and found.seconds >= SURE_TO_RETRACT:
        out.append("nothing was retracted: the pool was not small enough to show it")
    if not found.pool_start == found.pool_end == slots:
        out.append(
            f"free slots: {found.pool_start} at the start, {found.pool_end} at the end, "
            f"the pool has {slots}"
        )
    growth = memory_growth(found.rss)
    if abs(growth) > FLAT:
        out.append(f"the memory of the last quarter is {growth:+.1%} of the one before")
    return out


def run(minutes: float, page_size: int, backend: str, seed: int, out: Path) -> int:
    """Soak and print; files go to ``out``. Returns the exit code: 1 if anything is wrong."""
    from pagealign.trees import build_tree

    console, out, found = report.console(), report.out_folder(out.absolute()), Findings()
    with report.progress(console) as say, terminable():
        say("weights, recordings, answers of transformers, the tree")
        model, spoken = whisper_base(), clips()
        answers = references(model, [c.path for c in spoken])
        want = {c.name: r for c, r in zip(spoken, answers, strict=True)}
        spec = ServerSpec(
            tree=build_tree("aligned"),
            model=model,
            backend=backend,
            page_size=page_size,
            poison=True,
            slots=small_pool(page_size),
            # Admitted as if each wrote 8 more tokens: the pool then fills while they decode.
            extra_args=("--schedule-conservativeness", "0.01"),
            extra_env={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"},
        )
        server = Server(spec, out / "server.log")
        say("the server starts")
        try:
            with server, explained(server):
                exercise(server, spoken, want, 60 * minutes, seed, found, say)
            found.problems += verdict(found, spec.pool_slots)
        except ServerDied as death:
            found.problems.append(str(death))
    rows = list(found.rows.values())
    console.print(report.table(rows, COLUMNS, f"{minutes:g} minutes, {backend}, page {page_size}"))
    lines = [
        f"health probes: {found.probes}; retractions: {found.retractions}; "
        f"free slots: {found.pool_end}/{found.pool_start}",
    ]
    if len(found.rss) >= 8:
        last = found.rss[-1][1] / 2**30
        lines.append(f"memory: {last:.2f} GiB, {memory_growth(found.rss):+.2%} in the last quarter")
    lines += [f"wrong: {problem}" for problem in found.problems]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    summary = {
        "minutes": minutes,
        "backend": backend,
        "page_size": page_size,
        "seed": seed,
        "probes": found.probes,
        "retractions": found.retractions,
        "pool_start": found.pool_start,
        "pool_end": found.pool_end,
        "rss": found.rss,
        "problems": found.problems,
    }
    text = f"# Soak\n\n{report.markdown(rows, COLUMNS)}\n" + "".join(f"- {x}\n" for x in lines)
    for path in (
        report.write(out / "soak.json", report.as_json(rows, **summary)),
        report.write(out / "soak.md", text),
    ):
        console.print(f"written: {path}", soft_wrap=True)
    return int(bool(found.problems))
