"""Answers as JSON lines that outlive a kill: appended and synced one by one, read on resume."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from pagealign.errors import PagealignError

Record = dict[str, Any]


class Journal:
    """The file ``path``: its first line says which run it is, each further one has a ``key``.

    Open it in a ``with``; ``append`` may be called from any thread and returns when the line
    is on the disk. One process has it at a time. A last line without its end, which a kill
    leaves, is dropped: that answer is asked for again, all others are kept.

    Raises PagealignError where the file is another run's, is in use, has a broken line that
    isn't the last, or is there and ``resume`` is False.
    """

    def __init__(self, path: Path, run: Record, *, resume: bool = False) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._open(run, resume)
        except BaseException:
            self._file.close()
            raise

    def _open(self, run: Record, resume: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PagealignError(f"{self.path} is in use by another run: wait, or use another "
                                 "--out") from None  # fmt: skip
        self._file.seek(0)
        whole, end, _ = self._file.read().rpartition(b"\n")
        lines = whole.split(b"\n") if end else []
        if lines and not resume:
            raise PagealignError(
                f"{self.path.parent} holds the answers of an earlier run: --resume goes on with "
                "it, another --out begins anew"
            )
        os.ftruncate(self._file.fileno(), len(whole) + len(end))
        # as JSON has it: a tuple comes back as a list
        wanted = json.loads(json.dumps({"run": run}))
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                key = None if number == 1 else found["key"]
            except (ValueError, KeyError, TypeError):
                raise PagealignError(
                    f"{self.path}:{number} can't be read: delete that line, or use another --out"
                ) from None
            if key is not None:
                self.records[key] = found
            elif found != wanted:
                raise PagealignError(f"{self.path} is of another run ({_differs(found, wanted)}): "
                                     "use another --out")  # fmt: skip
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
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _differs(found: Record, wanted: Record) -> str:
    old, new = found.get("run"), wanted["run"]
    if not isinstance(old, dict):
        return "its first line doesn't say of which"
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "; ".join(f"{name}: {old.get(name)!r} there, {new.get(name)!r} now" for name in names)
