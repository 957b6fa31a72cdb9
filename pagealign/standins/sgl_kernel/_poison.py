"""``PAGEALIGN_POISON=1``: make every read of a slot that was never written show.

A pool starts as zeros, and zeros are what hides a wrong page table. Before each paged call,
in the pages that the call is about to read:

* the slots after a request's last key in its last page are unwritten by definition (the
  encoder's gap, the decoder's tail; pages are never shared in part): they are overwritten,
  so that what a finished request left there cannot pass for the right value;
* slots whose K and V are both exactly zero have not been written since the pool was made.

They get K = NaN, which the real kernels never let through from behind a request's length,
and V = a large finite value, since they do multiply V's tail by 0. Read as a key, such a slot
makes the output NaN. Page 0 is SGLang's padding page and stays as it is.

What a wrong table reads from *another request's written slots* is that request's own data:
it changes the result too, but not to NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._call import Call, Request

V_POISON = 1.0e4  # finite in fp16 too


@torch.inference_mode()  # a pool made under inference mode can only be written under it
def poison_unwritten(call: Call, requests: list[Request]) -> int:
    """Poison in place; returns the number of slots that were not poisoned before."""
    device = call.k.device
    pages = sorted({page for r in requests for page in r.pages if page})
    unwritten = _zero_slots(call.k, call.v, torch.tensor(pages, dtype=torch.long, device=device))
    tails = [slot for r in requests for slot in _tail_slots(r, call.page_size)]
    slots = torch.cat([unwritten, torch.tensor(tails, dtype=torch.long, device=device)]).unique()
    k, v = call.k.flatten(0, 1), call.v.flatten(0, 1)
    slots = slots[~k[slots, 0, 0].isnan()]
    k[slots] = math.nan
    v[slots] = V_POISON
    return len(slots)


def _zero_slots(k_cache: Tensor, v_cache: Tensor, pages: Tensor) -> Tensor:
    """Slot ids in ``pages`` whose K and V are all zero."""
    page_size = k_cache.shape[1]
    slots = (
        pages.unsqueeze(1) * page_size + torch.arange(page_size, device=pages.device)
    ).flatten()
    k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    slots = slots[k[slots, 0, 0] == 0]  # one element rules nearly all written slots out
    return slots[((k[slots] == 0) & (v[slots] == 0)).flatten(1).all(1)]


def _tail_slots(r: Request, page_size: int) -> range:
    """The slots behind the request's last key in its last page; none in page 0."""
    used = r.k_len % page_size
    if not used or not r.pages[-1]:
        return range(0)
    return range(r.pages[-1] * page_size + used, (r.pages[-1] + 1) * page_size)
