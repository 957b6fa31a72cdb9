"""A recording: what a tree did on one workload, entry by entry, in one zip file.

The file holds each distinct tensor once, as raw bytes named by its SHA-256, and
``index.json`` with the entries in order. Nothing in it is executed when it is read.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagealign.errors import PagealignError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}


@dataclass(frozen=True)
class Tensor:
    """A tensor's type, shape and the SHA-256 of its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Entry:
    """One value, where it was seen.

    ``step``: the scheduler's iteration, from 0; ``event``: what was going on (``batch``,
    ``forward``, ``plan``, ``attention``, ...); ``layer``: the attention layer's id, if any;
    ``nth``: how many entries of the same step, event, layer and name came before.
    ``rids``: the requests of the step's batch; ``counts``: how many elements of the first
    axis belong to each of them, where they do. ``value``: a Tensor, or a JSON value.
    """

    step: int
    event: str
    layer: int | None
    name: str
    nth: int
    rids: tuple[str, ...]
    counts: tuple[int, ...] | None
    value: Tensor | Any

    @property
    def key(self) -> tuple:
        """What makes it the same entry in another tree's recording."""
        return (self.step, self.event, self.layer, self.name, self.nth)


class Writer:
    """Writes a recording; use it as a context manager. The file appears when it closes."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._work = path, path.with_name(f".{path.name}")
        self._zip = zipfile.ZipFile(self._work, "w", zipfile.ZIP_STORED)
        self._index: list[list] = []
        self._seen: set[str] = set()
        self._nth: dict[tuple, int] = {}

    def add(
        self,
        step: int,
        event: str,
        name: str,
        value: Any,
        *,
        layer: int | None = None,
        rids: Sequence[str] = (),
        counts: Sequence[int] | None = None,
    ) -> None:
        """Append an entry; a tensor is copied as it is now."""
        key = (step, event, layer, name)
        nth = self._nth[key] = self._nth.get(key, -1) + 1
        counts = None if counts is None else [int(n) for n in counts]
        body = self._tensor(value) if isinstance(value, torch.Tensor) else {"value": value}
        self._index.append([*key, nth, list(rids), counts, body])

    def _tensor(self, tensor: torch.Tensor) -> dict:
        tensor = tensor.detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        sha = hashlib.sha256(data).hexdigest()
        if sha not in self._seen:
            self._seen.add(sha)
            self._zip.writestr(sha, data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(tensor.shape), "sha256": sha}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind, error, trace) -> None:
        with self._zip:
            if kind is None:
                self._zip.writestr("index.json", json.dumps(self._index), zipfile.ZIP_DEFLATED)
        if kind is None:
            self._work.replace(self._path)
        else:
            self._work.unlink()


class Recording:
    """Reads a recording. PagealignError where the file is not one."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            index = json.loads(self._zip.read("index.json"))
        except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
            raise PagealignError(f"{path} is no recording ({error}): record it again") from error
        self.entries = [_entry(*line) for line in index]

    def tensor(self, value: Tensor) -> torch.Tensor:
        """The values of a tensor of this recording."""
        data = bytearray(self._zip.read(value.sha256))
        if not data:
            return torch.empty(value.shape, dtype=DTYPES[value.dtype])
        return torch.frombuffer(data, dtype=DTYPES[value.dtype]).view(value.shape)

    def close(self) -> None:
        self._zip.close()


def _entry(step, event, layer, name, nth, rids, counts, body) -> Entry:
    if "sha256" in body:
        value = Tensor(body["dtype"], tuple(body["shape"]), body["sha256"])
    else:
        value = body["value"]
    counts = None if counts is None else tuple(counts)
    return Entry(step, event, layer, name, nth, tuple(rids), counts, value)
