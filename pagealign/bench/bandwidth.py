"""The floor under attention: the time to read its keys and values once, whatever is done."""

from __future__ import annotations

from collections.abc import Callable

import torch

READ = "read"
COPY = "copy"


def calls(kv_bytes: int, sets: int, device: str) -> dict[str, list[Callable[[], object]]]:
    """Read and copy ``kv_bytes``, another part of memory for each of ``sets`` calls.

    ``read`` sums float32, which takes less arithmetic per byte than any attention. ``copy``
    reads and writes, so it moves twice the bytes.
    """
    count = max(1, kv_bytes // 4)
    # written, not zeros: pages that nobody wrote share one physical page
    source = torch.ones(sets, count, device=device)
    target = torch.ones_like(source)
    return {
        READ: [one.sum for one in source],
        COPY: [
            lambda to=to, one=one: to.copy_(one) for to, one in zip(target, source, strict=True)
        ],
    }


def floor_seconds(read: float, copy: float) -> float:
    """The stricter of the two: a copy's time pays for two transfers of the same bytes."""
    return min(read, copy / 2)
