"""The soak's judgement of what comes back; the soak itself runs on a real server."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pagealign.assets import Clip
from pagealign.client import Generation
from pagealign.errors import PagealignError
from pagealign.hf_reference import Reference
from pagealign.soak import KINDS, Findings, Traffic, memory_growth, small_pool, verdict

CLIP = Clip("one", Path("one.wav"), 2.0, "a b c d")
TOKENS = (7, 8, 9, 2)
WANT = Reference(TOKENS, " one two three", (-0.5,) * 4, (1.0,) * 4)
TEXT = Generation(tuple(range(100, 250)), "", (), {})
KIND = {kind.name: kind for kind in KINDS}


def answer(tokens=TOKENS, text="one two three", finish="stop", retractions=0) -> Generation:
    meta = {"finish_reason": {"type": finish}, "num_retractions": retractions}
    return Generation(tuple(tokens), text, (), meta)


class Answers:
    """A client whose server gives ``got`` whatever it is asked, or raises it."""

    def __init__(self, got) -> None:
        self.got, self.asked, self.aborted = got, [], []

    def transcribe_tokens(self, path, **how):
        self.asked.append(how)
        if isinstance(self.got, Exception):
            raise self.got
        return self.got

    def generate_text(self, text, limit):
        self.asked.append(limit)
        return replace(self.got, tokens=self.got.tokens[:limit])

    def abort(self, rid):
        self.aborted.append(rid)


def send(kind: str, got) -> tuple[Findings, Answers]:
    client, found = Answers(got), Findings()
    traffic = Traffic(client, [CLIP], {"one": WANT}, TEXT, found, until=0)
    found.sent(KIND[kind])
    traffic.send(KIND[kind], CLIP, "rid", random.Random(1))
    return found, client


def counts(found: Findings, kind: str) -> tuple[int, int, int, int]:
    row = found.rows[kind]
    return row.whole, row.cut, row.wrong, row.lost


@pytest.mark.parametrize(
    ("kind", "got", "want"),
    [
        ("recording", answer(), (1, 0, 0, 0)),
        ("recording", answer(TOKENS[:3]), (0, 0, 1, 0)),
        ("recording", answer((7, 1, 9, 2)), (0, 0, 1, 0)),
        ("text only", answer(TEXT.tokens), (1, 0, 0, 0)),
        ("text only", answer((5, *TEXT.tokens)), (0, 0, 1, 0)),
        ("one token", answer((7,)), (1, 0, 0, 0)),
        ("one token", answer((8,)), (0, 0, 1, 0)),
        ("one token", answer((7, 8)), (0, 0, 1, 0)),
        ("client goes away", httpx.ReadTimeout("late"), (0, 1, 0, 0)),
        ("client goes away", answer(), (1, 0, 0, 0)),
        ("client goes away", answer((7, 1)), (0, 0, 1, 0)),
        ("abort by id", answer(TOKENS[:2], finish="abort"), (0, 1, 0, 0)),
        ("abort by id", answer((), finish="abort"), (0, 1, 0, 0)),
        ("abort by id", answer((7, 1), finish="abort"), (0, 0, 1, 0)),
        ("abort by id", answer(), (1, 0, 0, 0)),
        ("abort by id", answer((7, 8)), (0, 0, 1, 0)),
    ],
)
def test_what_counts_as_right(monkeypatch, kind, got, want):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    found, client = send(kind, got)
    assert counts(found, kind) == want
    assert bool(found.problems) is bool(want[2])
    assert client.aborted == (["rid"] if kind == "abort by id" else [])


@pytest.mark.parametrize(
    ("text", "tokens", "right"),
    [
        ("one", (7,), True),
        ("one", (7, 8), True),
        ("one", (1,), False),
        ("one two three", TOKENS, False),
        ("", (), False),
    ],
)
def test_a_stop_string_cuts_the_text_before_it(monkeypatch, text, tokens, right):
    monkeypatch.setattr(random.Random, "randrange", lambda *args: 1)  # " two"
    found, client = send("stop string", answer(tokens, text))
    assert client.asked == [{"stop": " two"}]
    assert counts(found, "stop string") == ((1, 0, 0, 0) if right else (0, 0, 1, 0))


def good() -> Findings:
    found = Findings(probes=9, retractions=1, pool_start=6464, pool_end=6464)
    for row in found.rows.values():
        row.sent = row.whole = 2
    found.rss = [(float(i), 10**9) for i in range(16)]
    return found


def test_a_good_soak():
    assert verdict(good(), 6464) == []


def test_what_a_soak_does_not_forgive():
    found = good()
    found.rows["recording"].whole -= 1
    assert verdict(found, 6464) == ["recording: 1 of 2 had no answer"]
    found = good()
    found.rows["text only"].sent = found.rows["text only"].whole = 0
    assert verdict(found, 6464) == ["never sent: text only"]
    found = good()
    found.retractions = 0
    assert verdict(found, 6464) == []  # a short one need not come to that
    found.seconds = 1800.0
    assert verdict(found, 6464) == [
        "nothing was retracted: the pool was not small enough to show it"
    ]
    found = good()
    found.pool_end -= 64
    assert verdict(found, 6464) == [
        "free slots: 6464 at the start, 6400 at the end, the pool has 6464"
    ]
    found = good()
    found.rss[12:] = [(float(i), 1_030_000_000) for i in range(12, 16)]
    assert verdict(found, 6464) == ["the memory of the last quarter is +3.0% of the one before"]


def test_memory_growth():
    """By hand, over 16 s: the third quarter is 8 to 12 s, the last 12 to 16 s."""
    rss = [(float(i), size) for i, size in enumerate([1] * 8 + [100] * 4 + [110] * 5)]
    assert memory_growth(rss) == pytest.approx(0.10)
    rss[14] = (14.0, 10**6)  # one peak does not move a median
    assert memory_growth(rss) == pytest.approx(0.10)
    with pytest.raises(PagealignError, match="longer"):
        memory_growth(rss[:7])


def test_the_pool_holds_two_recordings_and_some_text():
    assert small_pool(64) == 2 * (1536 + 64) + 4 * 64
    assert small_pool(128) == 2 * (1536 + 128) + 2 * 128
