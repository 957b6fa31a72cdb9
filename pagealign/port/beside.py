"""Two versions of a piece of code side by side, line by line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

MOST = 60  # rows to show of one hunk; a function that was rewritten may be far longer
CONTEXT = 2  # lines around what the old lines became


@dataclass(frozen=True)
class Row:
    """One line of the pinned code beside the new code's; None where the other has more.

    ``mark`` as ``diff -y`` has it: a space for equal lines, ``|`` changed, ``<`` only
    pinned, ``>`` only new. ``old_line`` and ``new_line`` count from 1.
    """

    mark: str
    old_line: int | None
    old: str | None
    new_line: int | None
    new: str | None


def beside(old: Sequence[str], new: Sequence[str], line: int, size: int) -> tuple[Row, ...]:
    """The ``size`` lines of ``old`` from ``line`` (from 1), beside what ``new`` has there.

    Where they lie in ``new`` is found by aligning the two files. All old lines are shown;
    of new ones that the hunk's own lines grew into, as many as ``MOST`` leaves room for.
    """
    start, end = max(0, line - 1), max(0, line - 1) + size
    blocks = _aligned(tuple(old), tuple(new))
    first, last = _where(blocks, start, len(new)), _where(blocks, end, len(new), end=True)
    if not new:
        return tuple(_rows("delete", old, new, start, end, 0, 0))
    first, last = max(0, first - CONTEXT), min(len(new), last + CONTEXT)
    rows = []
    inner = difflib.SequenceMatcher(None, old[start:end], new[first:last], autojunk=False)
    for tag, i, j, k, m in inner.get_opcodes():
        rows += _rows(tag, old, new, start + i, start + j, first + k, first + m)
    return tuple(_shortened(rows))


@lru_cache(4)
def _aligned(old: tuple[str, ...], new: tuple[str, ...]) -> list[tuple]:
    return difflib.SequenceMatcher(None, old, new).get_opcodes()


def _where(blocks: Sequence[tuple], at: int, size: int, *, end: bool = False) -> int:
    """The line of the new file at which old line ``at`` (from 0) now is, or would be."""
    for tag, i, j, k, m in blocks:
        if i <= at - end < j:
            if tag == "equal":
                return k + at - i
            return m if end else k
    return size


def _rows(
    tag: str, old: Sequence[str], new: Sequence[str], i: int, j: int, k: int, m: int
) -> list[Row]:
    rows = []
    for n in range(max(j - i, m - k)):
        left = i + n if i + n < j else None
        right = k + n if k + n < m else None
        mark = " " if tag == "equal" else "|" if None not in (left, right) else "<>"[left is None]
        rows.append(
            Row(
                mark,
                None if left is None else left + 1,
                None if left is None else old[left].rstrip("\n"),
                None if right is None else right + 1,
                None if right is None else new[right].rstrip("\n"),
            )
        )
    return rows


def _shortened(rows: list[Row]) -> list[Row]:
    """At most MOST rows; what goes is lines that only the new code has, from the middle."""
    extra = len(rows) - MOST
    if extra <= 0:
        return rows
    only_new = [n for n, row in enumerate(rows) if row.mark == ">"]
    middle = (len(only_new) - extra) // 2
    doomed = set(only_new[max(0, middle) : max(0, middle) + extra])
    if not doomed:
        return rows
    kept, cut = [], 0
    for n, row in enumerate(rows):
        if n in doomed:
            cut += 1
            if n + 1 not in doomed:
                kept.append(Row(">", None, None, None, f"... {cut} more lines"))
                cut = 0
        else:
            kept.append(row)
    return kept
