"""Ask a server for every item's answer, some at once, each answer kept as it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import httpx

from pagealign.client import threads
from pagealign.errors import PagealignError
from pagealign.evals.journal import Journal, Record

STOP_AFTER = 8  # failures in a row: the server is gone, or isn't what was meant


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


def key(concurrency: int, name: str) -> str:
    """An answer's key in the journal."""
    return f"{concurrency}/{name}"


def ask_all(
    items: Sequence[T],
    ask: Callable[[T], dict[str, Any]],
    concurrency: int,
    journal: Journal,
    step: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> list[Record]:
    """The record of every item, in order, at most ``concurrency`` asked at a time.

    Items that the journal has an answer for aren't asked. A record has ``key``, ``name``,
    ``concurrency``, ``started`` and ``ended`` (seconds since 1970) and ``seconds`` (from the
    request to the whole answer), and what ``ask`` gives or an ``error``. ``step`` is called
    after each item, ``check`` after a failure: it may raise. Raises PagealignError after
    STOP_AFTER failures in a row; the answers until then are in the journal.
    """
    from openai import OpenAIError

    # the last four: what code says of an answer that has another shape than it was made for
    failures = (
        OpenAIError, httpx.HTTPError, OSError, ValueError, AttributeError, TypeError, LookupError
    )  # fmt: skip
    failed_in_a_row = 0
    lock, stop = threading.Lock(), threading.Event()

    def one(item: T) -> None:
        nonlocal failed_in_a_row
        name = key(concurrency, item.name)
        if journal.answered(name) or stop.is_set():
            step()
            return
        record: Record = {"key": name, "name": item.name, "concurrency": concurrency}
        started, begun = time.time(), time.monotonic()
        try:
            record |= ask(item)
        except failures as error:
            record["error"] = _line(error)
        if stop.is_set() and "error" in record:
            return  # its connection was cut by us
        seconds = time.monotonic() - begun
        record |= {"started": started, "ended": started + seconds, "seconds": seconds}
        journal.append(record)
        step()
        with lock:
            failed_in_a_row = failed_in_a_row + 1 if "error" in record else 0
            too_many = failed_in_a_row >= STOP_AFTER
        if "error" in record:
            check()
        if too_many:
            raise PagealignError(
                f"{STOP_AFTER} requests in a row failed, the last one: {record['error']}; what "
                f"was answered is in {journal.path}: run this again with --resume to go on"
            )

    with threads(concurrency) as pool:
        futures = [pool.submit(one, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stop.set()
            raise
    return [journal.records[key(concurrency, item.name)] for item in items]


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    cause = error.__cause__
    if cause is not None and str(cause) and str(cause) not in text:
        text += f" ({' '.join(str(cause).split())})"
    return text[:300]
