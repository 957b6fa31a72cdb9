"""``pagealign eval docvqa``: ANLS on document images, and whether batching changes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pagealign import report
from pagealign.errors import PagealignError
from pagealign.evals import outcome, plots
from pagealign.evals.answers import chat, count
from pagealign.evals.asking import ask_all
from pagealign.evals.documents import Question, load
from pagealign.evals.journal import Journal, Record, check
from pagealign.evals.scores import Difference, anls, bootstrap, paired, ratio
from pagealign.evals.speech import Skipped
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

PROMPT = "{question}\nGive only the answer, in the document's own words, as short as possible."


@dataclass(frozen=True)
class Answer:
    """One question's answer in one run; ``error`` in place of ``text`` if it failed.
    ``score`` is its ANLS, ``took`` seconds, ``tokens`` the server's count of the answer's."""

    name: str
    text: str | None
    error: str | None
    score: float | None
    took: float
    tokens: int | None


@dataclass(frozen=True)
class Run:
    """All questions at one concurrency.

    ``anls`` is the mean over answered questions, with its standard error and 95 % bootstrap
    interval; ``exact`` counts answers that score 1. ``latency`` are the 50th, 90th and 99th
    percentile in seconds. ``against_first`` compares the ANLS with the first run.
    """

    label: str
    concurrency: int
    answers: tuple[Answer, ...]
    failures: int
    anls: float
    error: float
    interval: tuple[float, float]
    exact: int
    latency: tuple[float, ...]
    tokens_per_second: float | None
    questions_per_second: float
    against_first: Difference | None


def run(
    data: str,
    base_url: str | None = None,
    model: str | None = None,
    server: str | None = None,
    page_size: int = 64,
    backend: str = "intel_xpu",
    device: str = "auto",
    weights: Path | None = None,
    config: str | None = None,
    split: str = "validation",
    limit: int | None = None,
    concurrency: str = "1",
    prompt: str = PROMPT,
    max_tokens: int = 64,
    seed: int = 0,
    out: Path = Path("reports/eval-docvqa"),
    resume: bool = False,
) -> int:
    """Ask, score, print, write; 0, or 1 if a request failed or the server died.

    Raises PagealignError for what the user can put right.
    """
    console = report.console()
    levels = parse_concurrency(concurrency)
    check_given(base_url, server)
    if server is not None and weights is None:
        raise PagealignError("--server needs --weights: a folder with a model that sees images")
    if "{question}" not in prompt:
        raise PagealignError("--prompt must say where the question goes: {question}")
    found = None if weights is None else weights_of(weights)
    file = report.out_folder(out) / "answers.jsonl"
    about: dict[str, Any] = {
        "eval": "docvqa",
        "data": data,
        "config": config,
        "split": split,
        "prompt": prompt,
        "max_tokens": max_tokens,
    }
    check(file, about, resume=resume)
    questions = load(data, config, split, limit)
    pinned = None
    if server is not None:
        assert found is not None
        pinned = PinnedServer(server, found, page_size, backend, device, max(levels))
    try:
        with terminable(), ExitStack() as stack:
            with report.progress(console) as say:
                say("starting the server" if pinned else f"looking for the server at {base_url}")
                target = stack.enter_context(reached(base_url, pinned, model))
            about["model"] = str(pinned.weights) if pinned else target.model
            about["server"] = describe(pinned, target)
            journal = stack.enter_context(Journal(file, about, resume=resume))
            records = ask(target, questions.items, levels, prompt, max_tokens, journal, console)
    except ServerDied as death:
        console.print(f"The server died: {death.reason}", style="red", markup=False)
        console.print(f"log: {death.log}", soft_wrap=True, markup=False)
        return 1
    runs: list[Run] = []
    for level, answers in zip(levels, records, strict=True):
        runs.append(summarise(level, questions.items, answers, seed, runs[0] if runs else None))
    show(console, runs, questions.skipped)
    write(out, runs, questions.skipped, about | {"seed": seed})
    console.print(f"{about['server']}; {out}/", soft_wrap=True, markup=False, highlight=False)
    return 1 if any(found.failures for found in runs) else 0


def ask(
    target: Target,
    items: Sequence[Question],
    levels: Sequence[int],
    prompt: str,
    max_tokens: int,
    journal: Journal,
    console: Console,
) -> list[list[Record]]:
    """The records of every question at each concurrency."""
    with target.openai() as client:

        def one(item: Question) -> dict[str, Any]:
            content = [
                {"type": "image_url", "image_url": {"url": item.image_url()}},
                {"type": "text", "text": prompt.replace("{question}", item.question)},
            ]
            raw = client.chat.completions.with_raw_response.create(
                model=target.model,
                messages=[{"role": "user", "content": content}],
                max_tokens=max_tokens,
                temperature=0,
            )
            text, usage = chat(raw)
            counts = {
                "prompt_tokens": count(usage, "prompt_tokens"),
                "tokens": count(usage, "completion_tokens"),
            }
            return {"text": text, "score": anls(text, item.answers), **counts}

        out = []
        for level in levels:
            with outcome.progress_bar(console, f"{level} at once", len(items)) as step:
                out.append(ask_all(items, one, level, journal, step, target.check))
        return out


def summarise(
    level: int,
    items: Sequence[Question],
    records: Sequence[Record],
    seed: int,
    first: Run | None,
) -> Run:
    """One run's figures from its records, in the items' order."""
    answers = tuple(_answer(*pair) for pair in zip(items, records, strict=True))
    good = [answer for answer in answers if answer.score is not None]
    scores, ones = [answer.score for answer in good], [1.0] * len(good)
    answered = [record for record in records if "error" not in record]
    busy = outcome.busy(answered)
    counted = [answer.tokens for answer in good if answer.tokens is not None]
    error = float(np.std(scores, ddof=1)) / math.sqrt(len(good)) if len(good) > 1 else math.nan
    return Run(
        label=f"{level} at once",
        concurrency=level,
        answers=answers,
        failures=len(answers) - len(good),
        anls=ratio(scores, ones),
        error=error,
        interval=bootstrap(scores, ones, seed),
        exact=sum(score == 1.0 for score in scores),
        latency=outcome.latencies(answered),
        tokens_per_second=outcome.per_second(sum(counted), busy) if counted else None,
        questions_per_second=outcome.per_second(len(good), busy),
        against_first=_against(first, answers) if first else None,
    )


def _answer(item: Question, record: Record) -> Answer:
    text = record.get("text")
    score = None if text is None else anls(text, item.answers)
    return Answer(
        item.name, text, record.get("error"), score, record["seconds"], record.get("tokens")
    )


def _against(first: Run, answers: Sequence[Answer]) -> Difference:
    pairs = zip(first.answers, answers, strict=True)
    both = [(a, b) for a, b in pairs if a.score is not None and b.score is not None]
    return paired(
        [a.score for a, _ in both],
        [b.score for _, b in both],
        [1.0] * len(both),
        [a.text == b.text for a, b in both],
    )


# --- the reports ------------------------------------------------------------------------


def show(console: Console, runs: Sequence[Run], skipped: Sequence[Skipped]) -> None:
    """Print the table of the runs, and what went wrong."""
    console.print(report.table(runs, COLUMNS))
    outcome.name_some(console, "skipped", [f"{item.name}: {item.why}" for item in skipped])
    failed = [
        f"{found.label}, {answer.name}: {answer.error}"
        for found in runs
        for answer in found.answers
        if answer.error
    ]
    outcome.name_some(console, "failed", failed)


COLUMNS = (
    report.Column("run", lambda r: r.label),
    report.Column("ANLS", lambda r: outcome.number(r.anls, ".4f"), right=True),
    report.Column("SE", lambda r: outcome.number(r.error, ".4f"), right=True),
    report.Column("95 %", lambda r: " to ".join(outcome.number(x, ".4f") for x in r.interval)),
    report.Column("exact", lambda r: f"{r.exact} of {len(r.answers) - r.failures}", right=True),
    report.Column(
        "ANLS less the first's", lambda r: outcome.difference(r.against_first, ".4f"), right=True
    ),
    report.Column("identical", lambda r: outcome.identical(r.against_first), right=True),
    report.Column("p50, p90, p99 (s)", lambda r: outcome.numbers(r.latency, ".1f")),
    report.Column("tokens/s", lambda r: outcome.number(r.tokens_per_second, ".1f"), right=True),
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
        ("ANLS", [found.anls for found in runs], [found.interval for found in runs]),
        [[a.took for a in found.answers if a.score is not None] for found in runs],
    )
