"""Traces: the generators' distributions, a user's file, and every way that one can be wrong."""

import numpy as np
import pytest

from pagealign.compare.traces import (
    Lengths,
    Trace,
    mllama_tiles,
    mllama_with_text,
    read_trace,
    whisper_service,
)
from pagealign.errors import PagealignError


def test_whisper_service():
    trace = whisper_service(20_000, rate=0.25, seed=1)
    assert set(trace.encoder_len) == {1500}
    assert set(trace.prompt_len) == {4}
    # 1 / rate = 4 steps between arrivals, whose deviation is that too (exponential)
    gaps = np.diff(trace.arrival)
    assert gaps.mean() == pytest.approx(4, rel=0.03)
    assert gaps.std() == pytest.approx(4, rel=0.03)
    assert np.median(trace.decode_len) == pytest.approx(85, abs=2)
    assert trace.decode_len.max() == 444  # 448 positions less the prompt


def test_lengths():
    random = np.random.default_rng(0)
    assert set(Lengths(7, 0).draw(100, random)) == {7}
    drawn = Lengths(100, 1, least=50, most=200).draw(10_000, random)
    assert (drawn.min(), drawn.max()) == (50, 200)
    # within one sigma of the median in a log-normal: 68.3 %
    wide = Lengths(1000, 0.5).draw(10_000, random)
    within = (wide > 1000 * np.exp(-0.5)) & (wide < 1000 * np.exp(0.5))
    assert within.mean() == pytest.approx(0.683, abs=0.02)


def test_mllama_tiles():
    lengths, counts = np.unique(mllama_tiles(9_000, 1).encoder_len, return_counts=True)
    assert lengths.tolist() == [1601, 3202, 6404]
    assert counts == pytest.approx(3_000, rel=0.1)


def test_text_only_requests_are_mixed_in():
    tiles, mixed = mllama_tiles(10_000, 1, seed=3), mllama_with_text(10_000, 1, 0.3, seed=3)
    text_only = mixed.encoder_len == 0
    assert text_only.mean() == pytest.approx(0.3, abs=0.02)
    assert (mixed.encoder_len[~text_only] == tiles.encoder_len[~text_only]).all()
    assert (mixed.arrival == tiles.arrival).all()


def test_a_seed_is_a_trace():
    one, same, other = (whisper_service(100, 1, seed=seed) for seed in (5, 5, 6))
    assert (one.arrival == same.arrival).all() and (one.decode_len == same.decode_len).all()
    assert (one.arrival != other.arrival).all()


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_above_0(rate):
    with pytest.raises(PagealignError, match="rate must be above 0"):
        whisper_service(10, rate)


CSV = "id,arrival,encoder_len,prompt_len,decode_len\nx,0,1500,4,20\n\ny,2.5,0,9,1\n"
JSON = (
    '{"arrival": 0, "encoder_len": 1500, "prompt_len": 4, "decode_len": 20.0, "id": "x"}\n'
    "\n"
    '{"arrival": 2.5, "encoder_len": 0, "prompt_len": 9, "decode_len": 1}\n'
)


@pytest.fixture
def write(tmp_path):
    def file(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return file


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.csv", CSV), ("t.csv", b"\xef\xbb\xbf" + CSV.encode()), ("t.jsonl", JSON)],
)
def test_read_trace(write, name, content):
    trace = read_trace(write(name, content))
    assert trace.name == "t"
    assert trace.arrival.tolist() == [0, 2.5]
    assert trace.encoder_len.tolist() == [1500, 0]
    assert trace.decode_len.tolist() == [20, 1]
    assert trace.prompt_len.tolist() == [4, 9]
    assert trace.decode_len.dtype == np.int64


def test_seconds_become_steps(write):
    path = write("t.ndjson", JSON)
    assert read_trace(path, steps_per_second=40).arrival.tolist() == [0, 100]
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(PagealignError, match="steps per second must be above 0"):
            read_trace(path, steps_per_second=wrong)


def test_prompt_len_may_be_left_out(write):
    trace = read_trace(write("t.csv", "decode_len,encoder_len,arrival\n5,0,1\n"))
    assert trace.prompt_len.tolist() == [1]


HEADER = "arrival,encoder_len,decode_len\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "arrival,decode_len\n0,1\n", "t.csv, line 2: no encoder_len; a trace has"),
        ("t.csv", HEADER + "0,1500,5\n1,many,5\n", "line 3: encoder_len is 'many'; give a number"),
        ("t.csv", HEADER + "0,1500,\n", "line 2: decode_len is ''; give a number"),
        ("t.csv", HEADER + "0,-1,5\n", "line 2: encoder_len is -1, negative"),
        ("t.csv", HEADER + "0,1500,0\n", "line 2: decode_len is 0; it is at least 1"),
        ("t.csv", HEADER + "0,1500.5,5\n", "line 2: encoder_len is 1500.5; give whole tokens"),
        ("t.csv", HEADER + "0,1e12,5\n", "more than 2147483647 tokens don't fit any pool"),
        ("t.csv", HEADER + "0,nan,5\n", "encoder_len is nan; give a finite number"),
        ("t.csv", HEADER + "inf,1,5\n", "arrival is inf; give a finite number"),
        ("t.csv", HEADER + "-1,1,5\n", "arrival is -1, negative; count from 0"),
        ("t.csv", HEADER + "2,1,5\n1,1,5\n", "line 3: arrival 1 is before the one above it, 2"),
        ("t.csv", HEADER + "0,1500\n", "line 2: 2 cells under a header of 3"),
        ("t.csv", "arrival," + HEADER + "0,0,1,1\n", "line 1: two columns named arrival"),
        ("t.csv", HEADER + '0,1500,"5\n', "not CSV"),
        ("t.csv", "", "no requests; give at least one"),
        ("t.csv", HEADER, "no requests; give at least one"),
        ("t.csv", b"\xff\xfe", "not UTF-8 text; save it as UTF-8"),
        ("t.jsonl", "", "no requests; give at least one"),
        ("t.jsonl", "{}", "line 1: no arrival"),
        ("t.jsonl", "\n[1]", "line 2: not an object"),
        ("t.jsonl", "{", "line 1: not JSON"),
        (
            "t.jsonl",
            '{"arrival": 0, "encoder_len": true, "decode_len": 1}',
            "encoder_len is True; give a number",
        ),
        ("t.txt", CSV, "a trace is a .csv or a .jsonl file, not .txt"),
        ("trace", CSV, "a trace is a .csv or a .jsonl file, not one without suffix"),
    ],
)
def test_a_file_that_is_no_trace(write, name, content, message):
    path = write(name, content)
    with pytest.raises(PagealignError) as error:
        read_trace(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(PagealignError, match="nowhere.csv: can't be read: No such file"):
        read_trace(tmp_path / "nowhere.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(PagealignError, match="folder.csv: can't be read: Is a directory"):
        read_trace(tmp_path / "folder.csv")


@pytest.mark.parametrize(
    ("arrival", "encoder_len", "decode_len", "message"),
    [
        ([], [], [], "no requests"),
        ([0, 1], [0], [1, 1], "1 values of encoder_len for 2 arrivals"),
        ([0, 1], [0, -3], [1, 1], "request 1: encoder_len is -3, negative"),
        ([0, 1], [0, 0], [0, 1], "request 0: decode_len is 0; it is at least 1"),
        ([1, 0], [0, 0], [1, 1], "request 1: arrival 0 is before the one above it, 1"),
        ([0, np.nan], [0, 0], [1, 1], "request 1: arrival is nan"),
    ],
)
def test_a_trace_that_is_none(arrival, encoder_len, decode_len, message):
    with pytest.raises(PagealignError, match=message):
        Trace(
            "t",
            np.array(arrival, float),
            np.array(encoder_len, np.int64),
            np.array(decode_len, np.int64),
            np.ones(len(arrival), np.int64),
        )
