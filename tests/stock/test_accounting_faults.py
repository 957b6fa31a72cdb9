"""What the stock release does with requests that the aligned one answers or refuses."""

import pytest
from bed_fixtures import PROMPT, audio, image

from pagealign.bed import Request


@pytest.mark.parametrize("start", [1, 30, 67])
def test_logprobs_inside_a_cached_encoder_kill(make_bed, mllama, start):
    """S8: the match is cut inside the encoder, E = 68; page size 1."""
    bed = make_bed(mllama, "torch_native", 1, radix=True)
    text = (2, 5, 20, 11, 30)
    bed.run_one(Request(text, image(1, 0), max_new_tokens=4, logprob_start_len=start))
    with pytest.raises(AssertionError) as fault:
        bed.run_one(Request(text, image(1, 0), max_new_tokens=4, logprob_start_len=start))
    assert fault.traceback[-1].name == "prepare_encoder_info_extend"


@pytest.mark.parametrize("features", [None, audio(100, 0)], ids=["text", "audio"])
def test_a_prompt_within_two_pages_of_the_pool_blocks(make_bed, whisper, features):
    """Accepted, never admitted, and nothing behind it is either; page size 64, pool 1024."""
    bed = make_bed(whisper(100), "torch_native", 64, max_total_tokens=1024)
    assert bed.scheduler.max_req_input_len == 1018
    text = tuple(10 + i % 900 for i in range(1017 - (0 if features is None else 100)))
    with pytest.raises(TimeoutError):
        bed.run(
            [
                Request(text, features, max_new_tokens=1, ignore_eos=False),
                Request(PROMPT, max_new_tokens=1, ignore_eos=False),
            ],
            max_steps=60,
        )
    assert [len(req.origin_input_ids) for req in bed.scheduler.waiting_queue] == [1017, 3]
    assert bed.free() == bed.start
