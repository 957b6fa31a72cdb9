"""Who wants to know of plans and runs: ``listeners`` are called with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# called with ``decode.plan`` and the like, the wrapper, and the arguments by name
Listener = Callable[[str, Any, dict[str, Any]], None]
listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` for each plan and run inside, after the plan is made and before the
    run computes."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def emit(call: str, wrapper: Any, arguments: dict[str, Any]) -> None:
    for listener in listeners:
        listener(call, wrapper, arguments)
