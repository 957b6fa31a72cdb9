"""SGLang's real ScheduleBatch, pools and allocators against rows worked out by hand.

The requests come through the real scheduler; only the model's forward is left out. A
fresh paged pool hands out pages 1, 2, 3, ... (page 0 is padding), so a row's slots can be
written down.
"""

import pytest
import torch
from bed_fixtures import audio

from pagealign.bed import Request

# R by hand: E rounded up to whole pages
RESERVE = {
    1: {0: 0, 1: 1, 63: 63, 64: 64, 65: 65, 1500: 1500, 1536: 1536},
    16: {0: 0, 1: 16, 63: 64, 64: 64, 65: 80, 1500: 1504, 1536: 1536},
    64: {0: 0, 1: 64, 63: 64, 64: 64, 65: 128, 1500: 1536, 1536: 1536},
    128: {0: 0, 1: 128, 63: 128, 64: 128, 65: 128, 1500: 1536, 1536: 1536},
}
TEXT = (10, 11, 12)


class Rows:
    """A bed whose requests have any E, and whose model is never run."""

    def __init__(self, bed):
        self.bed = bed
        self.scheduler = bed.scheduler

    def prefill(self, encoder_lens):
        """One extend batch of ``[E ids | TEXT]`` requests, allocated and split."""
        for i, encoder_len in enumerate(encoder_lens):

            def pad(input_ids, mm_inputs, encoder_len=encoder_len):
                mm_inputs.num_image_tokens = encoder_len
                return type(input_ids)("q", [7] * encoder_len) + input_ids

            self.scheduler.pad_input_ids_func = pad
            features = audio(4, 0) if encoder_len else None
            self.scheduler.handle_generate_request(
                self.bed._tokenized(f"row{i}", Request(TEXT, features, return_logprob=False))
            )
        plan = self.scheduler.get_next_batch_to_run(
            running_batch=self.scheduler.running_batch, last_batch=None
        )
        return plan.batch_to_run

    def decode(self, batch):
        for req in batch.reqs:
            req.output_ids.append(9)
        batch.prepare_for_decode()
        return batch.out_cache_loc.tolist()

    def row(self, batch, i):
        return self.bed.req_to_token_pool.req_to_token[batch.req_pool_indices[i]].tolist()


@pytest.fixture
def rows(make_bed, mllama):
    return lambda page_size: Rows(
        make_bed(mllama, "torch_native", page_size, max_total_tokens=16384, poison=False)
    )


@pytest.mark.parametrize("page_size", RESERVE)
@pytest.mark.parametrize("encoder_len", RESERVE[1])
def test_one_request(rows, page_size, encoder_len):
    bed = rows(page_size)
    batch = bed.prefill([encoder_len])
    reserve, first = RESERVE[page_size][encoder_len], page_size
    assert batch.encoder_lens_cpu == [encoder_len]
    assert batch.encoder_out_cache_loc.tolist() == list(range(first, first + encoder_len))
    start = first + reserve
    assert batch.out_cache_loc.tolist() == [start, start + 1, start + 2]
    assert batch.prefill_input_ids_cpu.tolist() == list(TEXT)
    assert batch.seq_lens.tolist() == [3]
    assert batch.extend_lens == [3]
    assert batch.prefix_lens == [0]
    assert batch.extend_num_tokens == 3
    # Alone in the pool, a row is one run of slots, page after page.
    for step in range(130):
        assert bed.decode(batch) == [start + 3 + step]
    assert bed.row(batch, 0)[: reserve + 133] == list(range(first, start + 133))


def test_a_batch_of_different_encoders(rows):
    """P = 16, E = 20, 0, 33, 16 and three text tokens each.

    Pages by hand: 20 -> R 32, text in a third page: pages 1-3; 0 -> page 4; 33 -> R 48,
    text in a fourth page: pages 5-8; 16 -> R 16, text in a second page: pages 9-10.
    """
    bed = rows(16)
    batch = bed.prefill([20, 0, 33, 16])
    encoder = [*range(16, 36), *range(80, 113), *range(144, 160)]
    decoder = [48, 49, 50, 64, 65, 66, 128, 129, 130, 160, 161, 162]
    assert batch.encoder_out_cache_loc.tolist() == encoder
    assert batch.out_cache_loc.tolist() == decoder
    assert batch.encoder_lens.tolist() == [20, 0, 33, 16]
    assert batch.seq_lens.tolist() == [3, 3, 3, 3]
    assert batch.extend_lens == [3, 3, 3, 3]
    # 13 steps fill each request's page of text; the 14th opens pages 11 to 14.
    for step in range(13):
        assert bed.decode(batch) == [51 + step, 67 + step, 131 + step, 163 + step]
    assert bed.decode(batch) == [176, 192, 208, 224]
    assert bed.decode(batch) == [177, 193, 209, 225]
    assert bed.row(batch, 0)[:50] == [*range(16, 64), 176, 177]
    assert bed.row(batch, 1)[:18] == [*range(64, 80), 192, 193]
    assert bed.row(batch, 2)[:66] == [*range(80, 144), 208, 209]
    assert bed.row(batch, 3)[:34] == [*range(144, 176), 224, 225]


def test_the_gap_repeats_the_last_encoder_id(rows):
    """Equal content gives equal ids, so that the radix cache can match it."""
    bed = rows(16)
    req = bed.prefill([20]).reqs[0]
    assert req.origin_input_ids.tolist() == [7] * 32 + list(TEXT)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_reserve_of_ints_and_tensors(page_size):
    from sglang.srt.mem_cache.encoder_reserve import get_encoder_reserve_len

    by_hand = RESERVE[page_size]
    assert {e: get_encoder_reserve_len(e, page_size) for e in by_hand} == by_hand
    for dtype in (torch.int32, torch.int64):
        lens = torch.tensor(list(by_hand), dtype=dtype)
        reserve = get_encoder_reserve_len(lens, page_size)
        assert reserve.tolist() == list(by_hand.values())
        assert reserve.dtype == dtype
    assert get_encoder_reserve_len(lens, 1) is lens
