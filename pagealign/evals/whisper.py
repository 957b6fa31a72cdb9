"""``pagealign eval whisper``: WER, speed, and whether batching changes a word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pagealign import report
from pagealign.errors import PagealignError
from pagealign.evals import outcome, peers, plots
from pagealign.evals.answers import transcript
from pagealign.evals.asking import ask_all
from pagealign.evals.journal import Journal, Record, check
from pagealign.evals.scores import Difference, Errors, bootstrap, count_errors, paired, ratio
from pagealign.evals.speech import LIMIT_SECONDS, Corpus, Skipped, Speech, load
from pagealign.evals.target import (
    PinnedServer,
    Target,
    check_given,
    describe,
    parse_concurrency,
    reached,
    weights_of,
)
from pagealign.server import ServerDied, terminable

GRANULARITIES = ("segment", "word")
LONG = ("auto", "send", "skip")


@dataclass(frozen=True)
class Settings:
    """What is asked for, besides the recordings: it decides the answers.

    ``language`` is a code, or "auto" for the server to detect it; ``timestamps`` a
    granularity of OpenAI's API, or None; ``long`` what becomes of clips above 30 s.
    """

    language: str = "en"
    timestamps: str | None = None
    long: str = "auto"

    def __post_init__(self) -> None:
        if self.timestamps not in (None, *GRANULARITIES):
            raise PagealignError(
                f"--timestamps {self.timestamps}: use {' or '.join(GRANULARITIES)}"
            )
        if self.long not in LONG:
            raise PagealignError(f"--long {self.long}: use {', '.join(LONG)}")

    @property
    def normaliser(self) -> str:
        """The language whose normaliser is used; "" is the one for any language."""
        return "" if self.language == "auto" else self.language


@dataclass(frozen=True)
class Clip:
    """One recording's answer in one run; ``error`` in place of ``text`` if it failed.
    ``took`` is seconds from the request to the answer, ``tokens`` the text's."""

    name: str
    seconds: float
    text: str | None
    error: str | None
    errors: Errors | None
    took: float
    tokens: int | None


@dataclass(frozen=True)
class Run:
    """All recordings at one concurrency, or by one peer (``concurrency`` None).

    ``wer`` and ``cer`` are sums of errors over sums of words and characters (0 .. 1 and
    more), with 95 % bootstrap intervals over recordings. ``latency`` are the 50th, 90th and
    99th percentile in seconds; ``tokens_per_second`` and ``audio_per_second`` are over the
    time in which anything was asked. ``against_first`` compares the WER with the first run.
    """

    label: str
    concurrency: int | None
    clips: tuple[Clip, ...]
    failures: int
    wer: float
    wer_interval: tuple[float, float]
    cer: float
    cer_interval: tuple[float, float]
    latency: tuple[float, ...]
    tokens_per_second: float | None
    audio_per_second: float
    against_first: Difference | None


def run(
    base_url: str | None = None,
    model: str | None = None,
    server: str | None = None,
    page_size: int = 64,
    backend: str = "intel_xpu",
    device: str = "auto",
    weights: Path | None = None,
    data: str | None = None,
    config: str | None = None,
    split: str = "test",
    text_column: str | None = None,
    limit: int | None = None,
    concurrency: str = "1",
    language: str = "en",
    timestamps: str | None = None,
    long: str = "auto",
    peer: Sequence[str] = (),
    seed: int = 0,
    out: Path = Path("reports/eval-whisper"),
    resume: bool = False,
) -> int:
    """Ask, score, print, write; 0, or 1 if a request failed or the server died.

    Raises PagealignError for what the user can put right.
    """
    console = report.console()
    settings, levels = Settings(language, timestamps, long), parse_concurrency(concurrency)
    check_given(base_url, server)
    chosen = peers.chosen(peer)
    if chosen and server is None and weights is None:
        raise PagealignError(
            "--peer beside --base-url needs --weights: the folder of the model that runs there"
        )
    file = report.out_folder(out) / "answers.jsonl"
    about: dict[str, Any] = {
        "eval": "whisper",
        "data": data or "LibriVox",
        "config": config,
        "split": split,
        "text_column": text_column,
        **dataclasses.asdict(settings),
    }
    check(file, about, resume=resume)
    # Whisper-base is fetched only where it is needed
    model_folder = weights_of(weights) if server or chosen or weights else None
    corpus = load(data, config, split, text_column, limit)
    if chosen:
        assert model_folder is not None
        heard = corpus.items if long != "skip" else ()
        peers.check(chosen, model_folder, language, heard)
    pinned = None
    if server is not None:
        assert model_folder is not None
        pinned = PinnedServer(server, model_folder, page_size, backend, device, max(levels))
    try:
        with terminable(), ExitStack() as stack:
            with report.progress(console) as say:
                say("starting the server" if pinned else f"looking for the server at {base_url}")
                target = stack.enter_context(reached(base_url, pinned, model))
            corpus = kept(corpus, settings, target)
            about["model"] = str(pinned.weights) if pinned else target.model
            about["server"] = describe(pinned, target)
            with Journal(file, about, resume=resume) as journal:
                records = ask(target, corpus.items, levels, settings, journal, console)
    except ServerDied as death:
        console.print(f"The server died: {death.reason}", style="red", markup=False)
        console.print(f"log: {death.log}", soft_wrap=True, markup=False)
        return 1
    count = tokenizer(weights)
    runs: list[Run] = []
    for level, answers in zip(levels, records, strict=True):
        first = runs[0] if runs else None
        runs.append(
            summarise(
                f"{level} at once", level, corpus.items, answers, settings, seed, count, first
            )
        )
    for name in chosen:
        assert model_folder is not None
        answers = peers.transcribe(name, corpus.items, model_folder, settings.language, console)
        runs.append(summarise(name, None, corpus.items, answers, settings, seed, count, runs[0]))
    show(console, runs, corpus.skipped)
    write(out, runs, corpus.skipped, about | {"seed": seed})
    console.print(f"{about['server']}; {out}/", soft_wrap=True, markup=False, highlight=False)
    return 1 if any(found.failures for found in runs) else 0


def kept(corpus: Corpus, settings: Settings, target: Target) -> Corpus:
    """Without the clips that the server would cut short, as ``settings.long`` says.

    Whisper hears 30 s. SGLang's endpoint cuts longer audio in the last second before the
    limit where it is quietest, and joins the texts (``entrypoints/openai/audio_chunking.py``);
    other servers may drop the rest without a word, so these aren't sent any.
    """
    long = [item for item in corpus.items if item.seconds > LIMIT_SECONDS]
    if not long or settings.long == "send" or (settings.long == "auto" and target.cuts_long_audio):
        return corpus
    if settings.long == "auto":
        raise PagealignError(
            f"{len(long)} clips are longer than {LIMIT_SECONDS:.0f} s (the first: {long[0].name}, "
            f"{long[0].seconds:.1f} s) and this server isn't known to cut them: --long send sends "
            "them all the same, --long skip leaves them out"
        )
    items = tuple(item for item in corpus.items if item.seconds <= LIMIT_SECONDS)
    if not items:
        raise PagealignError("--long skip leaves no recording")
    skipped = [Skipped(item.name, f"{item.seconds:.1f} s long") for item in long]
    return Corpus(items, (*corpus.skipped, *skipped))


def ask(
    target: Target,
    items: Sequence[Speech],
    levels: Sequence[int],
    settings: Settings,
    journal: Journal,
    console: Console,
) -> list[list[Record]]:
    """The records of every recording at each concurrency."""
    options: dict[str, Any] = {"response_format": "json"}
    if settings.language != "auto":
        options["language"] = settings.language
    if settings.timestamps:
        options |= {
            "response_format": "verbose_json",
            "timestamp_granularities": [settings.timestamps],
        }
    with target.openai() as client:

        def one(item: Speech) -> dict[str, Any]:
            raw = client.audio.transcriptions.with_raw_response.create(
                file=(item.filename, item.read()), model=target.model, temperature=0, **options
            )
            return transcript(raw)

        out = []
        for level in levels:
            with outcome.progress_bar(console, f"{level} at once", len(items)) as step:
                out.append(ask_all(items, one, level, journal, step, target.check))
        return out


def tokenizer(weights: Path | None) -> Callable[[str], int] | None:
    """Counts a text's tokens: by ``weights``' tokenizer, or Whisper-base's, whose vocabulary
    of words all multilingual Whispers share. None where there is none."""
    from tokenizers import Tokenizer

    from pagealign.transcribe import model_of

    try:
        file = model_of(weights) / "tokenizer.json"
    except PagealignError:
        return None
    if not file.is_file():
        return None
    vocabulary = Tokenizer.from_file(str(file))
    return lambda text: len(vocabulary.encode(text, add_special_tokens=False).ids)


def summarise(
    label: str,
    concurrency: int | None,
    items: Sequence[Speech],
    records: Sequence[Record],
    settings: Settings,
    seed: int,
    count: Callable[[str], int] | None,
    first: Run | None,
) -> Run:
    """One run's figures from its records, in the items' order."""
    clips = tuple(_clip(*pair, settings, count) for pair in zip(items, records, strict=True))
    good = [clip for clip in clips if clip.errors]
    answered = [record for record in records if "error" not in record]
    sums = [
        [getattr(clip.errors, name) for clip in good]
        for name in ("word_errors", "words", "char_errors", "chars")
    ]
    busy = outcome.busy(answered)
    return Run(
        label=label,
        concurrency=concurrency,
        clips=clips,
        failures=len(clips) - len(good),
        wer=ratio(sums[0], sums[1]),
        wer_interval=bootstrap(sums[0], sums[1], seed),
        cer=ratio(sums[2], sums[3]),
        cer_interval=bootstrap(sums[2], sums[3], seed),
        latency=outcome.latencies(answered),
        tokens_per_second=(
            outcome.per_second(sum(clip.tokens or 0 for clip in good), busy) if count else None
        ),
        audio_per_second=outcome.per_second(sum(clip.seconds for clip in good), busy),
        against_first=_against(first, clips) if first else None,
    )


def _clip(
    item: Speech, record: Record, settings: Settings, count: Callable[[str], int] | None
) -> Clip:
    text = record.get("text")
    return Clip(
        name=item.name,
        seconds=item.seconds,
        text=text,
        error=record.get("error"),
        errors=None if text is None else count_errors(item.transcript, text, settings.normaliser),
        took=record["seconds"],
        tokens=None if text is None or count is None else count(text),
    )


def _against(first: Run, clips: Sequence[Clip]) -> Difference:
    both = [(a, b) for a, b in zip(first.clips, clips, strict=True) if a.errors and b.errors]
    return paired(
        [a.errors.word_errors for a, _ in both],
        [b.errors.word_errors for _, b in both],
        [a.errors.words for a, _ in both],
        [a.text == b.text for a, b in both],
    )


# --- the reports ------------------------------------------------------------------------


def show(console: Console, runs: Sequence[Run], skipped: Sequence[Skipped]) -> None:
    """Print the table per recording (of few), the one per run, and what went wrong."""
    if len(runs[0].clips) <= 20:
        console.print(report.table(_rows(runs), _clip_columns(runs)))
    console.print(report.table(runs, RUN_COLUMNS))
    outcome.name_some(console, "skipped", [f"{item.name}: {item.why}" for item in skipped])
    failed = [
        f"{found.label}, {clip.name}: {clip.error}"
        for found in runs
        for clip in found.clips
        if clip.error
    ]
    outcome.name_some(console, "failed", failed)


def _rows(runs: Sequence[Run]) -> list[tuple[Clip, ...]]:
    return list(zip(*(found.clips for found in runs), strict=True))


def _clip_columns(runs: Sequence[Run]) -> list[report.Column]:
    def rate(at: int) -> Callable[[tuple[Clip, ...]], str]:
        return lambda row: _rate(row[at])

    return [
        report.Column("recording", lambda row: row[0].name),
        report.Column("length", lambda row: f"{row[0].seconds:.1f} s", right=True),
        *(report.Column(f"WER, {r.label}", rate(n), right=True) for n, r in enumerate(runs)),
        report.Column("texts", lambda row: _same([clip.text for clip in row])),
    ]


def _rate(clip: Clip) -> str:
    if clip.errors is None:
        return "failed"
    return outcome.number(ratio([clip.errors.word_errors], [clip.errors.words]), ".1%")


def _same(texts: Sequence[str | None]) -> str:
    return "" if len(texts) < 2 else "identical" if len(set(texts)) == 1 else "differ"


def _interval(ends: tuple[float, float]) -> str:
    return "" if not ends[0] <= ends[1] else f"{ends[0]:.1%} to {ends[1]:.1%}"


RUN_COLUMNS = (
    report.Column("run", lambda r: r.label),
    report.Column("WER", lambda r: outcome.number(r.wer, ".2%"), right=True),
    report.Column("95 %", lambda r: _interval(r.wer_interval)),
    report.Column("CER", lambda r: outcome.number(r.cer, ".2%"), right=True),
    report.Column(
        "WER less the first's", lambda r: outcome.difference(r.against_first, ".2%"), right=True
    ),
    report.Column("identical", lambda r: outcome.identical(r.against_first), right=True),
    report.Column("p50, p90, p99 (s)", lambda r: outcome.numbers(r.latency, ".1f")),
    report.Column("tokens/s", lambda r: outcome.number(r.tokens_per_second, ".1f"), right=True),
    report.Column("audio s/s", lambda r: outcome.number(r.audio_per_second, ".2f"), right=True),
    report.Column("failed", lambda r: str(r.failures), right=True),
)


def write(
    folder: Path, runs: Sequence[Run], skipped: Sequence[Skipped], about: dict[str, Any]
) -> None:
    """Write ``results.json`` and ``results.png`` into ``folder``."""
    outcome.write_json(folder, runs, skipped, about)
    plots.write(
        folder / "results.png",
        [found.label for found in runs],
        ("word error rate", [found.wer for found in runs], [r.wer_interval for r in runs]),
        [[c.took for c in found.clips if c.errors and c.took == c.took] for found in runs],
    )
