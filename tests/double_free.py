"""A row at which pages are freed twice (upstream 38840), worked out by hand and then run.

Whisper's E = 1500, so the decoder begins in the middle of a page: at position 28 of one
of 64 and at 92 of one of 128. ``free_segment`` takes a row's slots at positions 0, P, 2P
... for its pages, one slot each. The first such position among the decoder's is 1536, for
P = 64 and for 128: the row has it from its 37th decoder token on (1500 + 36, counted from
0). Stock gives a decode token the slot after that of row position n - 1, n being the
decoder's length so far and the position thus the encoder's: token 36 gets the slot of
encoder token 36, in the row's first page, which is then named a second time.
"""

from __future__ import annotations

from collections import Counter

from bed_fixtures import PROMPT, audio

from pagealign.bed import Bed, Request

ENCODER_LEN = 1500
HARMLESS, TWICE = 36, 37  # decoder tokens in the row


def serve(bed: Bed, decoder_tokens: int, decoder_at: int = ENCODER_LEN) -> tuple[int, list[int]]:
    """Serve a clip whose row comes to hold so many decoder tokens, from ``decoder_at`` on.

    The prompt is among them, the last output is not: nothing is decoded after it. Returns
    the row's first page, and the decoder's lengths at which the row named a page twice.
    """
    first, twice = [], []

    def look(batch) -> None:
        length = int(batch.seq_lens[0])
        row = bed.req_to_token_pool.req_to_token[batch.req_pool_indices[0]]
        pages = (row[: decoder_at + length : bed.page_size] // bed.page_size).tolist()
        first.append(pages[0])
        if len(set(pages)) < len(pages):
            twice.append(length)

    bed.on_batch = look
    outputs = decoder_tokens - len(PROMPT) + 1
    result = bed.run_one(Request(PROMPT, audio(ENCODER_LEN, 0), max_new_tokens=outputs))
    assert len(result.output_ids) == len(first) == outputs
    return first[0], twice


def free_twice(bed: Bed) -> list[int]:
    """The pages that the allocator's free list names more than once."""
    free = Counter(bed.allocator.get_all_free_pages().tolist())
    return [page for page, times in free.items() if times > 1]
