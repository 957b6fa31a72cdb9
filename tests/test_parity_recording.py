"""Recordings and how two of them are compared, on values written by hand."""

from __future__ import annotations

import pytest
import torch

from pagealign.errors import PagealignError
from pagealign.parity.difference import differences
from pagealign.parity.recording import Recording, Tensor, Writer

NAN = float("nan")


@pytest.fixture
def compare(tmp_path):
    """The differences between two lists of ``add``'s arguments."""

    def of(*sides):
        paths = []
        for i, side in enumerate(sides):
            paths.append(tmp_path / f"{i}.zip")
            with Writer(paths[-1]) as writer:
                for args, kwargs in side:
                    writer.add(*args, **kwargs)
        return [str(d) for d in differences("w", *paths)]

    return of


def entry(value, step=2, event="plan", name="x", **kwargs):
    return (step, event, name, value), kwargs


def test_what_is_written_is_read(tmp_path):
    values = [
        torch.tensor([[1.5, NAN], [-0.0, 3.0]]),
        torch.arange(6, dtype=torch.int32).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.empty(0, 4, dtype=torch.bfloat16),
        torch.tensor(7, dtype=torch.int64),
    ]
    with Writer(tmp_path / "r.zip") as writer:
        for value in values:
            writer.add(0, "e", "n", value, rids=["a"], counts=[2])
        writer.add(1, "e", "list", [1, None, "text"])
    recording = Recording(tmp_path / "r.zip")
    for nth, (found, value) in enumerate(zip(recording.entries, values, strict=False)):
        assert (found.nth, found.rids, found.counts) == (nth, ("a",), (2,))
        assert isinstance(found.value, Tensor)
        read = recording.tensor(found.value)
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        assert read.numel() == 0 or torch.equal(
            read.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        )
    assert recording.entries[-1].value == [1, None, "text"]


def test_a_tensor_is_copied_when_it_is_added(tmp_path):
    value = torch.zeros(3)
    with Writer(tmp_path / "r.zip") as writer:
        writer.add(0, "e", "n", value)
        value.fill_(1)
    recording = Recording(tmp_path / "r.zip")
    assert recording.tensor(recording.entries[0].value).tolist() == [0, 0, 0]


def test_an_interrupted_recording_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), Writer(tmp_path / "r.zip"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a zip file"])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "r.zip"
    path.write_bytes(content)
    with pytest.raises(PagealignError, match="is no recording .*: record it again"):
        Recording(path)


@pytest.mark.parametrize("value", [NAN, [0.5, NAN], torch.tensor([NAN, -0.0]), None, "x"])
def test_equal(compare, value):
    assert compare([entry(value)], [entry(value)]) == []


@pytest.mark.parametrize(
    ("stock", "other", "said"),
    [
        (1, 2, "plan.x: stock 1, other 2"),
        (1, 1.0, "plan.x: stock 1, other 1.0"),
        (0.0, -0.0, "plan.x: stock 0.0, other -0.0"),
        ([4, 5, 6], [4, 7, 8], "plan.x[1]: stock 5, other 7"),
        ([4], [4, 5], "plan.x: stock 1 elements, other 2 elements"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "plan.x[0]: stock 0.0, other -0.0"),
        (
            torch.tensor([[1, 2], [3, 4]]),
            torch.tensor([[1, 2], [5, 6]]),
            "plan.x[1][0]: stock 3, other 5",
        ),
        (
            torch.tensor([1, 2]),
            torch.tensor([1, 2], dtype=torch.int32),
            "plan.x: stock int64 [2], other int32 [2]",
        ),
        (torch.tensor([1]), torch.tensor([1, 2]), "plan.x[1]: stock int64 [1], other int64 [2]"),
        (
            torch.tensor([3]),
            torch.tensor([1, 2]),
            "plan.x[0]: stock 3 (int64 [1]), other 1 (int64 [2])",
        ),
        (torch.tensor([1]), 1, "plan.x: stock int64 [1], other 1"),
    ],
)
def test_a_difference_is_named(compare, stock, other, said):
    assert compare([entry(stock)], [entry(other)]) == [f"w: step 2, {said}"]


def test_one_ulp(compare):
    one = torch.ones(3, 5)
    more = one.clone()
    more[1, 4] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert compare([entry(one)], [entry(more)]) == [
        "w: step 2, plan.x[1][4]: stock 1.0, other 1.0000001192092896"
    ]


def test_the_request_that_owns_it(compare):
    """Seven slots of three requests, of which the second has none: the fifth is the third's."""
    owners = dict(rids=["a", "b", "c"], counts=[4, 0, 3], layer=5)
    slots = torch.arange(7)
    changed = slots.clone()
    changed[4] = 9
    found = compare([entry(slots, **owners)], [entry(changed, **owners)])
    assert found == ["w: request c, step 2, layer 5, plan.x[4]: stock 4, other 9"]


def test_owners_are_compared(compare):
    sides = ([entry(1, rids=["a", "b"], counts=[1, 1])], [entry(1, rids=["b", "a"], counts=[1, 1])])
    assert len(compare(*sides)) == 1


def test_entries_of_one_side(compare):
    """By name, not by place; in stock's order, what only the other has last; the burst is
    named."""
    stock = [
        entry("first", event="burst", name="name"),
        entry(1, name="x"),
        entry(2, name="gone"),
        entry(3, name="x"),
    ]
    other = [stock[0], entry(8, name="new"), entry(3, name="x"), entry(1, name="x")]
    assert compare(stock, other) == [
        "w, first: step 2, plan.x: stock 1, other 3",
        "w, first: step 2, plan.gone: stock 2, other nothing",
        "w, first: step 2, plan.x: stock 3, other 1",
        "w, first: step 2, plan.new: stock nothing, other 8",
    ]
