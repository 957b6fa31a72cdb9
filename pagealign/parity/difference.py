"""Two recordings of one workload, compared byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from pagealign.parity.recording import Entry, Recording, Tensor


@dataclass(frozen=True)
class Difference:
    """Where two recordings differ. ``index``: into the tensor or list, () for the whole of
    it; ``stock`` and ``other``: the two values there, or what the two are."""

    workload: str
    step: int
    request: str | None
    layer: int | None
    event: str
    tensor: str
    index: tuple[int, ...]
    stock: Any
    other: Any

    @property
    def where(self) -> str:
        """``event.tensor``, which the list of expected differences goes by."""
        return f"{self.event}.{self.tensor}"

    def __str__(self) -> str:
        place = [f"step {self.step}"]
        if self.request is not None:
            place.insert(0, f"request {self.request}")
        if self.layer is not None:
            place.append(f"layer {self.layer}")
        index = "".join(f"[{i}]" for i in self.index)
        return (
            f"{self.workload}: {', '.join(place)}, {self.where}{index}: "
            f"stock {self.stock}, other {self.other}"
        )


def differences(workload: str, stock: Path, other: Path) -> Iterator[Difference]:
    """Where ``other`` differs from ``stock``, in the order in which stock did things: at
    most one per entry, what only ``other`` has last."""
    a, b = Recording(stock), Recording(other)
    name = workload
    try:
        found = {entry.key: entry for entry in b.entries}
        for entry in a.entries:
            if entry.event == "burst":
                workload = f"{name}, {entry.value}"
            match = found.pop(entry.key, None)
            if match is None:
                yield _missing(workload, entry, _short(entry.value), "nothing")
            elif not _same(entry.value, match.value):
                yield _differing(workload, a, entry, b, match)
            elif entry.rids != match.rids or entry.counts != match.counts:
                yield _missing(workload, entry, _owners(entry), _owners(match))
        for entry in found.values():
            yield _missing(workload, entry, "nothing", _short(entry.value))
    finally:
        a.close()
        b.close()


def _same(x: Any, y: Any) -> bool:
    """JSON values by their text: 1 is not 1.0, -0.0 is not 0.0, and NaN is NaN."""
    return x == y if isinstance(x, Tensor) else repr(x) == repr(y)


def _differing(workload: str, a: Recording, entry: Entry, b: Recording, match: Entry) -> Difference:
    x, y = entry.value, match.value
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if (x.dtype, x.shape) == (y.dtype, y.shape):
            left, right = a.tensor(x), b.tensor(y)
            index = _first_byte(left, right)
            values = _exact(left[index]), _exact(right[index])
            return _at(workload, entry, index, *values)
        return _shapes(workload, a, entry, b, match)
    if isinstance(x, list) and isinstance(y, list):
        for i, (p, q) in enumerate(zip(x, y, strict=False)):
            if repr(p) != repr(q):
                return _at(workload, entry, (i,), p, q)
        return _at(workload, entry, (), f"{len(x)} elements", f"{len(y)} elements")
    return _at(workload, entry, (), _short(x), _short(y))


def _shapes(workload: str, a: Recording, entry: Entry, b: Recording, match: Entry) -> Difference:
    """Other types or shapes; with the first other value, if the common part has one."""
    x, y = entry.value, match.value
    if x.dtype == y.dtype and len(x.shape) == len(y.shape) == 1 and min(x.shape + y.shape):
        n = min(x.shape[0], y.shape[0])
        left, right = a.tensor(x)[:n].contiguous(), b.tensor(y)[:n].contiguous()
        if not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            i = _first_byte(left, right)
            values = f"{_exact(left[i])} ({x})", f"{_exact(right[i])} ({y})"
            return _at(workload, entry, i, *values)
        return _at(workload, entry, (n,), str(x), str(y))
    return _at(workload, entry, (), str(x), str(y))


def _first_byte(left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...]:
    """The index of the first element whose bytes differ."""
    size = left.element_size()
    pairs = (t.reshape(-1).view(torch.uint8).view(-1, size) for t in (left, right))
    unequal = torch.ne(*pairs).any(1)
    flat = int(unequal.to(torch.uint8).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), left.shape))


def _exact(value: torch.Tensor) -> Any:
    return value.item()


def _at(workload: str, entry: Entry, index: tuple[int, ...], x: Any, y: Any) -> Difference:
    request = _request(entry, index)
    return Difference(
        workload, entry.step, request, entry.layer, entry.event, entry.name, index, x, y
    )


def _request(entry: Entry, index: tuple[int, ...]) -> str | None:
    """The request that owns the element, as the entry's ``counts`` tell."""
    if len(entry.rids) == 1:
        return entry.rids[0]
    if not index or entry.counts is None:
        return None
    for rid, end in zip(entry.rids, accumulate(entry.counts), strict=False):
        if index[0] < end:
            return rid
    return None


def _missing(workload: str, entry: Entry, x: str, y: str) -> Difference:
    return _at(workload, entry, (), x, y)


def _owners(entry: Entry) -> str:
    return f"requests {', '.join(entry.rids)} with {entry.counts}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
