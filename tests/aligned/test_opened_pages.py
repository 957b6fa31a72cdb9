"""Which slots' values are zeroed in a step: those of the partly used pages that it opens."""

from types import SimpleNamespace

import pytest
import torch

PAGE = 4


def zeroed(*, decode: bool, **fields) -> set[int]:
    """The slots of a pool of 16 pages whose values a step zeroes."""
    from sglang.srt.mem_cache.encoder_reserve import zero_opened_pages
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    v_buffers = [torch.full((16 * PAGE, 2, 3), float("nan")) for _ in range(2)]
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND, **fields
    )
    zero_opened_pages(batch, SimpleNamespace(v_buffer=v_buffers), PAGE)
    slots = [set((v == 0).all(2).all(1).nonzero().flatten().tolist()) for v in v_buffers]
    assert slots[0] == slots[1]
    assert sum(v.isnan().sum().item() for v in v_buffers) == 2 * 6 * (16 * PAGE - len(slots[0]))
    return slots[0]


@pytest.mark.parametrize("on_host", [True, False])
def test_decode(on_host):
    """Tokens 5, 6, 8 and 1 of four decoders: the first and the last begin a page, 3 and 9."""
    seq_lens = torch.tensor([5, 6, 8, 1])
    slots = zeroed(
        decode=True,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens if on_host else None,
        out_cache_loc=torch.tensor([12, 21, 27, 36]),
        encoder_out_cache_loc=None,
    )
    assert slots == {12, 13, 14, 15, 36, 37, 38, 39}


def test_extend():
    """Three requests:

    * an encoder of 6 in pages 2 and 3, of which 3 has a gap; 3 tokens in page 5;
    * no encoder; 8 tokens fill pages 6 and 7;
    * a cached encoder; 2 tokens behind 1 of an older step, in a page that is open.
    """
    slots = zeroed(
        decode=False,
        seq_lens_cpu=torch.tensor([3, 8, 3]),
        extend_seq_lens_cpu=[3, 8, 2],
        encoder_lens_cpu=[6, 0, 5],
        encoder_cached=[False, True, True],
        out_cache_loc=torch.tensor([20, 21, 22, *range(24, 32), 33, 34]),
        encoder_out_cache_loc=torch.arange(8, 14),
    )
    assert slots == {12, 13, 14, 15, 20, 21, 22, 23}


def test_a_step_that_opens_no_page_touches_nothing():
    slots = zeroed(
        decode=True,
        seq_lens_cpu=torch.tensor([2, 8]),
        out_cache_loc=torch.tensor([5, 15]),
        encoder_out_cache_loc=None,
    )
    assert slots == set()


def test_page_size_1_asks_for_nothing():
    from sglang.srt.mem_cache.encoder_reserve import zero_opened_pages

    zero_opened_pages(None, None, 1)
