"""Answers as JSON lines that outlive a kill: appended and synced one by one, read on resume."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from pagealign.errors import PagealignError

Record = dict[str, Any]


class Journal:
    """The file ``path``: its first line says which run it is, each further one has a ``key``.

    Open it in a ``with``; ``append`` may be called from any thread and returns when the line
    is on the disk. One process has it at a time. A last line without its end, which a kill
    leaves, is dropped: that answer is asked for again, all others are kept.

    Raises PagealignError where the file is another run's, is in use, can't be opened or
    written, has a broken line that isn't the last, or is there and ``resume`` is False.
    """

    def __init__(self, path: Path, run: Record, *, resume: bool = False) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._open(run, resume)
        except BaseException:
            self._file.close()
            raise

    def _open(self, run: Record, resume: bool) -> None:
        lines, size = _locked_lines(self._file, self.path, resume)
        os.ftruncate(self._file.fileno(), size)
        # as JSON has it: a tuple comes back as a list
        wanted = json.loads(json.dumps({"run": run}))
        for number, line in enumerate(lines, 1):
            found = _parsed(self.path, number, line)
            if number > 1:
                self.records[found["key"]] = found
            elif found != wanted:
                raise _another(self.path, _differs(found, wanted))
        if not lines:
            self._write(wanted)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._file.close()

    def answered(self, key: str) -> bool:
        """Whether ``key`` has an answer; a failure isn't one, and is tried again."""
        return key in self.records and "error" not in self.records[key]

    def append(self, record: Record) -> None:
        """Keep ``record``, which has a ``key``; the newest of a key counts."""
        with self._lock:
            self._write(record)
            self.records[record["key"]] = record

    def _write(self, record: Record) -> None:
        try:
            self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unusable(self.path, error) from error


def check(path: Path, known: Record, *, resume: bool) -> None:
    """Refuse now what a ``Journal`` at ``path`` would refuse later, when a server has been
    started for it: ``known`` is what is known of the run by now. Changes nothing."""
    try:
        with path.open("rb") as file:
            lines, _ = _locked_lines(file, path, resume)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(path, error) from error
    if lines:
        old = _parsed(path, 1, lines[0])
        run = old.get("run") if isinstance(old, dict) else None
        if not isinstance(run, dict):
            raise _another(path, _differs(old, {"run": known}))
        wanted = json.loads(json.dumps({"run": known}))
        found = {"run": {name: run.get(name) for name in known}}
        if found != wanted:
            raise _another(path, _differs(found, wanted))
    for number, line in enumerate(lines[1:], 2):
        _parsed(path, number, line)


def _locked_lines(file: BinaryIO, path: Path, resume: bool) -> tuple[list[bytes], int]:
    """The whole lines of ``file``, locked by us until it is closed, and their size."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise PagealignError(f"{path} is in use by another run: wait, or use another --out"
                             ) from None  # fmt: skip
    file.seek(0)
    whole, end, _ = file.read().rpartition(b"\n")
    lines = whole.split(b"\n") if end else []
    if lines and not resume:
        raise PagealignError(
            f"{path.parent} holds the answers of an earlier run: --resume goes on with it, "
            "another --out begins anew"
        )
    return lines, len(whole) + len(end)


def _parsed(path: Path, number: int, line: bytes) -> Any:
    """A line's JSON; each but the first has a key that is a text."""
    try:
        found = json.loads(line)
        if number > 1 and not isinstance(found["key"], str):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise PagealignError(
            f"{path}:{number} can't be read: delete that line, or use another --out"
        ) from None
    return found


def _unusable(path: Path, error: OSError) -> PagealignError:
    why = error.strerror or type(error).__name__
    return PagealignError(f"{path} can't be used ({why}): use another --out")


def _another(path: Path, how: str) -> PagealignError:
    return PagealignError(f"{path} is of another run ({how}): use another --out")


def _differs(found: Record, wanted: Record) -> str:
    old, new = found.get("run") if isinstance(found, dict) else None, wanted["run"]
    if not isinstance(old, dict):
        return "its first line doesn't say of which"
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "; ".join(f"{name}: {old.get(name)!r} there, {new.get(name)!r} now" for name in names)
