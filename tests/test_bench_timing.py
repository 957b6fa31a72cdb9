"""The benchmarks' arithmetic on planted times: medians, ratios, projection, cross-over."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pagealign.bench import bandwidth, machine, projection
from pagealign.bench.backends.interface import Variant
from pagealign.bench.measure import rows
from pagealign.bench.projection import Line, cross_overs, faster, steps
from pagealign.bench.records import Approach, Row
from pagealign.bench.shapes import HEADLINE, LARGE
from pagealign.bench.timing import Effort, interleaved, ratio, spread
from pagealign.kernels.reference import Errors

RIGHT = Errors(max_error=1e-3, max_allowed=2e-3, mean_error=0, mean_allowed=1)
WRONG = replace(RIGHT, max_error=math.nan)
PAGED_64 = Variant(Approach.in_place, 64, "paged")
OTHER_64 = Variant(Approach.in_place, 64, "other")
PAGED_128 = Variant(Approach.in_place, 128, "paged")
VIEW = Variant(Approach.page1_view, 64, "paged")


class Clock:
    """A clock that a planted call moves forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def calls(self, name: str, *seconds: float):
        def call(took: float) -> None:
            self.log.append(name)
            self.now += took

        return [lambda took=took: call(took) for took in seconds]


def test_ways_are_timed_in_turn_and_sets_rotate():
    clock = Clock()
    calls = {"a": clock.calls("a", 1.0, 2.0), "b": clock.calls("b", 10.0)}
    times = interleaved(calls, lambda: None, Effort(3, 3, 1e9), clock=clock)
    assert times == {"a": [1.0, 2.0, 1.0], "b": [10.0, 10.0, 10.0]}
    warm_up, rounds = clock.log[:3], clock.log[3:]
    assert sorted(warm_up) == ["a", "a", "b"]
    assert all(sorted(rounds[i : i + 2]) == ["a", "b"] for i in (0, 2, 4))


def test_the_order_changes_from_round_to_round():
    clock = Clock()
    calls = {name: clock.calls(name, 1.0) for name in "abcd"}
    interleaved(calls, lambda: None, Effort(6, 6, 1e9), clock=clock)
    rounds = {tuple(clock.log[i : i + 4]) for i in range(4, 28, 4)}
    assert len(rounds) > 1


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 3), (35, 4), (1e9, 6)])
def test_rounds_end_with_the_time(seconds, rounds):
    clock = Clock()
    times = interleaved(
        {"a": clock.calls("a", 10.0)}, lambda: None, Effort(3, 6, seconds), clock=clock, watch=clock
    )
    assert len(times["a"]) == rounds


def test_the_device_is_waited_for():
    clock, left = Clock(), []

    def wait() -> None:
        clock.now += sum(left)
        left.clear()

    times = interleaved({"a": [lambda: left.append(5.0)]}, wait, Effort(2, 2, 1e9), clock=clock)
    assert times["a"] == [5.0, 5.0]


def test_spread_by_hand():
    found = spread([4.0, 1.0, 3.0, 2.0, 100.0])
    assert (found.least, found.low, found.median, found.high, found.count) == (1, 2, 3, 4, 5)
    assert spread([7.0]).low == spread([7.0]).high == 7.0
    with pytest.raises(ValueError):
        spread([])


def test_ratios_are_taken_round_by_round():
    # the machine is ten times slower in the second round: medians alone would say 30 / 3
    assert ratio([3.0, 30.0, 30.0], [1.0, 10.0, 3.0]).median == 3.0
    with pytest.raises(ValueError):
        ratio([1.0, 2.0], [1.0])


def planted() -> dict[str, Row]:
    times = {
        PAGED_64: [2.0, 2.0, 20.0],
        OTHER_64: [4.0, 4.0, 40.0],
        PAGED_128: [1.0, 1.5, 12.0],
        VIEW: [70.0, 60.0, 700.0],
        bandwidth.READ: [1.5, 1.5, 15.0],
        bandwidth.COPY: [2.0, 4.0, 40.0],
    }
    errors = {v: RIGHT for v in times if isinstance(v, Variant)}
    errors[Variant(Approach.in_place, 16, "paged")] = WRONG
    found = rows(HEADLINE, "planted", 1, times, errors)
    return {f"{row.approach} {row.page_size} {row.kernel}": row for row in found}


def test_rows_by_hand():
    found = planted()
    view = found["page1_view 64 paged"]
    assert (view.median_s, view.ratio, view.least_s) == (70.0, 35.0, 60.0)
    assert found["in_place 64 other"].ratio == 2.0  # to the faster of the two at 64
    assert found["in_place 64 paged"].ratio == 1.0
    base = found["in_place 64 paged"]
    # floors: 1.0 (half a copy), 1.5, 15; over 2, 2, 20: 0.5, 0.75, 0.75
    assert (base.floor_s, base.floor_fraction) == (1.5, 0.75)
    assert (view.kv_bytes, view.batch, view.kv_len) == (61_440_000, 8, 1500)


def test_a_wrong_kernel_is_told_and_not_timed():
    wrong = planted()["in_place 16 paged"]
    assert not wrong.within and wrong.rounds == 0 and math.isnan(wrong.median_s)


def test_without_the_base_there_are_no_ratios():
    times = {VIEW: [1.0], bandwidth.READ: [1.0], bandwidth.COPY: [2.0]}
    (row,) = rows(HEADLINE, "planted", 1, times, {VIEW: RIGHT})
    assert math.isnan(row.ratio) and row.median_s == 1.0 and row.floor_fraction == 1.0


# -- whole steps -----------------------------------------------------------------------------


def row(approach: str, kind: str, kv_len: int, seconds: float, page_size: int = 64, **more) -> Row:
    any_row = next(iter(planted().values()))
    return replace(
        any_row,
        approach=approach,
        kind=kind,
        kv_len=kv_len,
        median_s=seconds,
        page_size=page_size,
        model=more.pop("model", LARGE.name),
        **more,
    )


def decode_rows() -> list[Row]:
    """In place: 2 s across, 1 s over 8 tokens, 5 s over 408. The view: 10 s, then 0.5 and 90.5.
    Varlen: 1 s across, then 3 and 4."""
    given = {"in_place": (2, 1, 5), "page1_view": (10, 0.5, 90.5), "gather_varlen": (1, 3, 4)}
    out = []
    for approach, (cross, short, long) in given.items():
        out += [row(approach, "cross", 1500, cross), row(approach, "cross", 1500, cross + 9)]
        out += [row(approach, "self", 8, short), row(approach, "self", 408, long)]
    return out


def test_a_step_is_all_layers():
    found = {(s.model, s.approach, s.decoded): s for s in steps(decode_rows())}
    assert found["whisper-large-v3", "in_place", 8].total_s == 32 * (2 + 1)
    assert found["whisper-large-v3", "page1_view", 408].total_s == 32 * (10 + 90.5)
    assert found["whisper-large-v3-turbo", "gather_varlen", 408].total_s == 4 * (1 + 4)
    assert not any(s.model == "whisper-base" for s in found.values())


def test_cross_overs_by_hand():
    found = {(c.model, c.approach, c.part): c.faster for c in cross_overs(decode_rows())}
    large = "whisper-large-v3"
    assert found[large, "page1_view", "step"] == ()
    # 0.5 + 90/400 (t - 8) = 1 + 4/400 (t - 8) at t - 8 = 0.5 * 400 / 86
    ((start, end),) = found[large, "page1_view", "self-attention"]
    assert (start, end) == (8, pytest.approx(8 + 200 / 86))
    # 1 + 3 + (t - 8) / 400 = 2 + 1 + 4 (t - 8) / 400 at t - 8 = 400 / 3
    ((start, end),) = found[large, "gather_varlen", "step"]
    assert (start, end) == (pytest.approx(8 + 400 / 3), 408)
    assert (large, "in_place", "step") not in found
    assert ("whisper-large-v3-turbo", "gather_varlen", "self-attention") not in found


def test_a_wrong_kernel_takes_no_part():
    wrong = row("in_place", "cross", 1500, 0.001, within=False)
    found = steps([*decode_rows(), wrong])
    assert next(s for s in found if s.approach == "in_place").cross_s == 64


def test_other_batches_stay_apart():
    other = [replace(r, batch=1, median_s=r.median_s / 2) for r in decode_rows()]
    found = {(s.batch, s.decoded): s for s in steps(decode_rows() + other) if s.layers == 32}
    assert found[8, 408].total_s == 2 * found[1, 408].total_s


@pytest.mark.parametrize(
    ("seconds", "lead", "want"),
    [
        ((1, 1, 1), 0, ()),
        ((0, 0, 0), 0, ((10, 30),)),
        ((0, 2, 0), 0, ((10, 15), (25, 30))),
        ((2, 0, 2), 0, ((15, 25),)),
        ((0, 0, 0), 1, ()),
        ((2, 2, 2), -1.5, ((10, 30),)),
    ],
)
def test_faster_against_a_level_base(seconds, lead, want):
    base = Line((10, 20, 30), (1, 1, 1))
    assert faster(Line((10, 20, 30), seconds), base, lead) == want


def test_a_line_is_not_continued():
    line = Line((10, 30), (1.0, 3.0))
    assert (line.at(10), line.at(15), line.at(30)) == (1.0, 1.5, 3.0)
    for outside in (9, 31):
        with pytest.raises(ValueError):
            line.at(outside)
    assert projection.Line((8,), (2.0,)).at(8) == 2.0


# -- the machine -----------------------------------------------------------------------------


def test_the_last_level_cache_is_the_highest(tmp_path):
    for index, (level, size) in enumerate((("1", "32K"), ("2", "512K"), ("3", "8M"), ("x", "9M"))):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(level)
        (folder / "size").write_text(f"{size}\n")
    assert machine.last_level_cache_bytes(tmp_path) == 8 << 20
    assert machine.last_level_cache_bytes(tmp_path / "none") == 0


def test_the_processor_is_told(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: X 1\nflags\t: fpu avx2 avx512_bf16\n\nmodel name\t: X 1\n")
    assert machine.processor(cpuinfo) == {
        "processor": "2 x X 1",
        "instruction sets": "avx2, avx512_bf16",
    }
    assert machine.processor(tmp_path / "none")["processor"] == "unknown"


def test_floor_is_the_stricter_one():
    assert bandwidth.floor_seconds(read=3.0, copy=4.0) == 2.0
    assert bandwidth.floor_seconds(read=3.0, copy=8.0) == 3.0
    (read,), (copy,) = bandwidth.calls(400, 1, "cpu").values()
    assert read() == 100 and copy().numel() == 100
