"""Traces: when requests arrive, and how long each one's encoder, prompt and answer are.

Time is counted in scheduler steps: one iteration of SGLang's loop, which runs one prefill or
one decode step. A request that arrives at 3.2 is seen by iteration 4.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagealign.errors import PagealignError

WHISPER_ENCODER = 1500  # 30 s of audio, whatever the clip's own length
WHISPER_PROMPT = 4  # start of transcript, language, task, no timestamps
WHISPER_LONGEST = 448 - WHISPER_PROMPT  # max_target_positions less the prompt
MLLAMA_TILE = 1601  # (560 / 14)^2 patches and a class token

LENGTHS = ("encoder_len", "decode_len", "prompt_len")
COLUMNS = ("arrival", *LENGTHS)
LEAST = {"encoder_len": 0, "decode_len": 1, "prompt_len": 1}
MOST = 2**31 - 1  # slots are int32 in SGLang's tables


@dataclass(frozen=True, eq=False)
class Trace:
    """``arrival``: float64 ``[N]``, in steps, sorted. The lengths are int64 ``[N]``, in tokens:
    ``encoder_len`` is E, 0 for text only; ``decode_len`` the tokens generated, of which the
    prefill itself gives the first; ``prompt_len`` the decoder's prompt.

    PagealignError, naming the first request at fault (from 0), where that does not hold.
    """

    name: str
    arrival: np.ndarray
    encoder_len: np.ndarray
    decode_len: np.ndarray
    prompt_len: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.arrival)
        if not count:
            raise PagealignError(f"trace {self.name}: no requests")
        for name in LENGTHS:
            lengths = getattr(self, name)
            if len(lengths) != count:
                raise PagealignError(
                    f"trace {self.name}: {len(lengths)} values of {name} for {count} arrivals"
                )
            self._refuse((lengths < LEAST[name]) | (lengths > MOST), name, lengths)
        early = np.diff(self.arrival, prepend=0) < 0
        self._refuse(early | ~np.isfinite(self.arrival), "arrival", self.arrival)

    def _refuse(self, wrong: np.ndarray, name: str, values: np.ndarray) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            problem = _problem(name, values[first].item(), self.arrival[first - 1] if first else 0)
            raise PagealignError(f"trace {self.name}, request {first}: {problem}")

    def __len__(self) -> int:
        return len(self.arrival)


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens: log-normal around ``median``, rounded, between ``least`` and ``most``.
    ``sigma`` is the deviation of the natural logarithm; 0 makes every length the median."""

    median: float
    sigma: float
    least: int = 1
    most: int = MOST

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        lengths = random.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(np.rint(lengths), self.least, self.most).astype(np.int64)


# A 25 s clip of read speech has about 85 tokens.
WHISPER_ANSWERS = Lengths(85, 0.5, most=WHISPER_LONGEST)
CHAT_ANSWERS = Lengths(120, 0.7, most=1024)
CHAT_PROMPTS = Lengths(60, 0.8, most=2048)


def whisper_service(
    count: int, rate: float, decode: Lengths = WHISPER_ANSWERS, seed: int = 0
) -> Trace:
    """Clips of up to 30 s that arrive at random, ``rate`` of them per step on average."""
    random = np.random.default_rng(seed)
    return Trace(
        "whisper",
        _poisson(count, rate, random),
        np.full(count, WHISPER_ENCODER),
        decode.draw(count, random),
        np.full(count, WHISPER_PROMPT),
    )


def mllama_tiles(count: int, rate: float, decode: Lengths = CHAT_ANSWERS, seed: int = 0) -> Trace:
    """Questions about one image of 1, 2 or 4 tiles each, equally often."""
    random = np.random.default_rng(seed)
    return Trace(
        "mllama-tiles",
        _poisson(count, rate, random),
        random.choice([1, 2, 4], count) * MLLAMA_TILE,
        decode.draw(count, random),
        CHAT_PROMPTS.draw(count, random),
    )


def mllama_with_text(
    count: int,
    rate: float,
    text_share: float = 0.5,
    decode: Lengths = CHAT_ANSWERS,
    seed: int = 0,
) -> Trace:
    """``mllama_tiles`` in which a random ``text_share`` of the requests has no image."""
    tiles = mllama_tiles(count, rate, decode, seed)
    text_only = np.random.default_rng([seed, 1]).random(count) < text_share
    return Trace(
        "mllama-and-text",
        tiles.arrival,
        np.where(text_only, 0, tiles.encoder_len),
        tiles.decode_len,
        tiles.prompt_len,
    )


def _poisson(count: int, rate: float, random: np.random.Generator) -> np.ndarray:
    """Arrivals of a Poisson process."""
    if not rate > 0:
        raise PagealignError(f"the rate must be above 0 requests per step, not {rate}")
    return np.cumsum(random.exponential(1 / rate, count))


def read_trace(path: Path, steps_per_second: float = 1.0) -> Trace:
    """A user's own trace: ``.csv`` with a header, or ``.jsonl`` / ``.ndjson``, an object a line.

    Columns ``arrival``, ``encoder_len``, ``decode_len`` and, if there, ``prompt_len`` (else 1);
    others are ignored. ``arrival`` is multiplied by ``steps_per_second``. PagealignError, with
    the file, the line and what to do, for anything that is no such trace.
    """
    readers = {".csv": _csv_records, ".jsonl": _json_records, ".ndjson": _json_records}
    if path.suffix not in readers:
        raise PagealignError(
            f"{path}: a trace is a .csv or a .jsonl file, not {path.suffix or 'one without suffix'}"
        )
    if not (steps_per_second > 0 and math.isfinite(steps_per_second)):
        raise PagealignError(f"steps per second must be above 0, not {steps_per_second}")
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, record in readers[path.suffix](path, file):
                _append(columns, record, f"{path}, line {line}")
    except UnicodeDecodeError as error:
        raise PagealignError(f"{path}: not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise PagealignError(f"{path}: can't be read: {error.strerror}") from error
    if not columns["arrival"]:
        raise PagealignError(f"{path}: no requests; give at least one")
    return Trace(
        path.stem,
        np.array(columns["arrival"]) * steps_per_second,
        *(np.array(columns[name], dtype=np.int64) for name in LENGTHS),
    )


def _csv_records(path: Path, file: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells by column name."""
    reader = csv.reader(file, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if repeated := [name for name in header if name in COLUMNS and header.count(name) > 1]:
            raise PagealignError(f"{path}, line 1: two columns named {repeated[0]}; keep one")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise PagealignError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells under a header of "
                    f"{len(header)}; give one for each column"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise PagealignError(f"{path}, line {reader.line_num}: not CSV: {error}") from error


def _json_records(path: Path, file: Iterable[str]) -> Iterator[tuple[int, dict[str, object]]]:
    """Line number and object."""
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PagealignError(f"{path}, line {line}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise PagealignError(f"{path}, line {line}: not an object; write one object a line")
        yield line, record


def _append(columns: dict[str, list[float]], record: dict, where: str) -> None:
    """Append a record's values; PagealignError unless each is a number in its range."""
    before = columns["arrival"][-1] if columns["arrival"] else 0
    for name, values in columns.items():
        if name not in record and name != "prompt_len":
            raise PagealignError(
                f"{where}: no {name}; a trace has arrival, encoder_len, decode_len and, if you "
                "like, prompt_len"
            )
        given = record.get(name, 1)
        number = _number(given)
        if number is None:
            raise PagealignError(f"{where}: {name} is {given!r}; give a number")
        if problem := _problem(name, number, before):
            raise PagealignError(f"{where}: {problem}")
        values.append(number)


def _number(given: object) -> float | None:
    """A cell as a number; None for anything else, also for true, which is an int in Python."""
    if isinstance(given, bool) or not isinstance(given, str | int | float) or "_" in str(given):
        return None
    try:
        return float(given)
    except (ValueError, OverflowError):
        return None


def _problem(name: str, value: float, before: float) -> str:
    """What is wrong with a value, and what to do; empty if nothing is. ``before`` is the
    arrival of the request before it."""
    if not math.isfinite(value):
        return f"{name} is {value}; give a finite number"
    if name == "arrival":
        if value < 0:
            return f"arrival is {value:g}, negative; count from 0"
        if value < before:
            return f"arrival {value:g} is before the one above it, {before:g}; sort by arrival"
        return ""
    if value != int(value):
        return f"{name} is {value:g}; give whole tokens"
    if value < 0:
        return f"{name} is {value:g}, negative; give the tokens"
    if value < LEAST[name]:
        return f"{name} is {value:g}; it is at least {LEAST[name]}"
    if value > MOST:
        return f"{name} is {value:g}; more than {MOST} tokens don't fit any pool"
    return ""
