"""From a checked call to its output: gather each request's keys, attend, write its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ._attend import attend
from ._call import Call, Request, requests_of
from ._checks import check_contents, check_host
from ._mode import current_mode
from ._poison import poison_unwritten

# The prefill kernel loads keys and values in tiles of so many slots, by head size (64
# otherwise), and queries in tiles of 128 up to head size 96, of 256 above.
PREFILL_KEY_TILE = {128: 32}


@dataclass(frozen=True)
class Result:
    """``out`` ``(total_q, H, Dv)``; ``lse`` float32 ``(H, total_q)`` if it was asked for."""

    out: Tensor
    lse: Tensor | None
    poisoned_slots: int


class NoKeys(Enum):
    """What the real kernels leave in a row that has no key to read."""

    NAN = "0/0"
    ZERO = "written as 0"
    UNWRITTEN = "whatever was there"


def launch(call: Call) -> Result:
    """Run one call in the current mode."""
    mode = current_mode()
    check_host(call, mode)
    requests = requests_of(call)
    check_contents(call, requests, mode)
    poisoned = poison_unwritten(call, requests) if mode.poison and call.paged else 0

    out = call.out
    if out is None:
        # The real output of a paged call is uninitialised memory: rows that no request owns
        # and rows that the kernel skips show as NaN.
        blank = math.nan if call.paged else 0.0
        out = call.q.new_full((*call.q.shape[:2], call.v.shape[-1]), blank)
    lse = None
    if call.want_lse:
        lse = call.q.new_full((call.q.shape[1], call.q.shape[0]), math.nan, dtype=torch.float32)
    for request in requests:
        _run_request(call, request, out, lse)
    return Result(out, lse, poisoned)


def _run_request(call: Call, r: Request, out: Tensor, lse: Tensor | None) -> None:
    rows = slice(r.q_start, r.q_start + r.q_len)
    without_keys = r.rows_without_keys(call.window[1])
    if without_keys < r.q_len:
        k, v, v_tail = _read(call, r)
        o, row_lse = attend(
            call.q[rows],
            k,
            v,
            scale=call.softmax_scale,
            window=call.window,
            sinks=call.sinks,
            want_lse=call.want_lse,
        )
        # The sum alone may overflow: it only says when to look closer.
        if v_tail is not None and v_tail.numel() and not math.isfinite(float(v_tail.sum())):
            o = o + _times_zero(v_tail, call.group)
        written = slice(rows.start + without_keys, rows.stop)
        out[written] = o[without_keys:]
        if lse is not None:
            lse[:, written] = row_lse[:, without_keys:]
    if without_keys:
        _leave_rows_without_keys(call, r, without_keys, out, lse)


def _read(call: Call, r: Request) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values ``(k_len, Hk, D)``, and what else of V lies in the last tile."""
    if r.pages is None:
        rows = slice(r.k_start, r.k_start + r.k_len)
        return call.k[rows], call.v[rows], None
    tile = call.page_size if r.decode else PREFILL_KEY_TILE.get(call.q.shape[2], 64)
    loaded = min(len(r.pages) * call.page_size, -(-r.k_len // tile) * tile)
    k, v = (_pages(cache, r.pages) for cache in (call.k, call.v))
    return k[: r.k_len], v[: r.k_len], v[r.k_len : loaded]


def _pages(cache: Tensor, pages: list[int]) -> Tensor:
    """Whole pages as slots ``(len(pages) * page_size, Hk, D)``; no copy if they adjoin."""
    first, after = pages[0], pages[0] + len(pages)
    if pages == list(range(first, after)):
        return cache[first:after].flatten(0, 1)
    return cache.index_select(0, torch.tensor(pages, device=cache.device)).flatten(0, 1)


def _times_zero(v_tail: Tensor, group: int) -> Tensor:
    """The tail's weights are exactly 0, and 0 * NaN is NaN: what leaks, ``(H, Dv)``.

    K's tail cannot leak: its scores are overwritten by the mask. The real kernel spoils the
    rows that share the tile; here all rows of the request are.
    """
    return (v_tail * 0).sum(0).repeat_interleave(group, dim=0)


def _leave_rows_without_keys(
    call: Call, r: Request, count: int, out: Tensor, lse: Tensor | None
) -> None:
    """The first ``count`` rows of a request may read no key."""
    rows = slice(r.q_start, r.q_start + count)
    left_behind = _no_keys(call, r)
    if left_behind is NoKeys.UNWRITTEN:
        if count < r.q_len:  # a tile with at least one live row is written whole
            tile = 128 if call.q.shape[2] <= 96 else 256
            rows = slice(rows.start + count // tile * tile, rows.stop)
            left_behind = NoKeys.ZERO
        else:
            return
    zero = left_behind is NoKeys.ZERO
    out[rows] = 0.0 if zero else math.nan
    if lse is not None:
        lse[:, rows] = -math.inf if zero else math.nan


def _no_keys(call: Call, r: Request) -> NoKeys:
    if r.k_len and (call.causal_only or not call.paged):
        return NoKeys.ZERO
    if call.paged and call.page_size == 1:
        return NoKeys.NAN
    if not call.masked:
        return NoKeys.ZERO if r.decode and call.sinks is not None else NoKeys.NAN
    if not call.paged or (call.causal_only and not r.decode):
        return NoKeys.ZERO
    return NoKeys.UNWRITTEN
