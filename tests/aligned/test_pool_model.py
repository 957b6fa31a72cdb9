"""The numpy model of ``pagealign.compare`` is the real scheduler and pool, step by step."""

import pytest
from pool_machine import Pools
from served_by_sglang import Served, random_trace

from pagealign.compare.scheduler_model import Limits

PAGE_SIZES = [1, 16, 64, 128]


def pools(make_bed, mllama, page_size, slots, **server_args):
    bed = make_bed(
        mllama,
        "torch_native",
        page_size,
        max_total_tokens=slots,
        max_running_requests=6,
        poison=False,
        **server_args,
    )
    return Pools(bed)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_model_is_the_real_pool(make_bed, mllama, page_size):
    bed = pools(make_bed, mllama, page_size, 4096)
    served = Served(bed, random_trace(1, 40, 200), "aligned", Limits(4096, 6))
    assert served.model.finished == 40
    assert served.forwards == served.model.steps > 200
    assert served.retractions == 0
    assert not any(served.most.values())  # nothing aliased, lost, freed or owned twice


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_retraction(make_bed, mllama, page_size):
    """A pool for two or three requests, filled as if none would generate anything."""
    slots = 1024 if page_size < 128 else 1536
    bed = pools(make_bed, mllama, page_size, slots)
    limits = Limits(slots, 6, new_token_ratio=0.0)
    served = Served(bed, random_trace(2, 30, 300), "aligned", limits)
    assert served.retractions == served.model.retractions > 0
    assert served.model.finished == 30
    assert not any(served.most.values())


def test_few_tokens_per_prefill(make_bed, mllama):
    bed = pools(make_bed, mllama, 16, 4096, max_prefill_tokens=256)
    limits = Limits(4096, 6, max_prefill_tokens=256)
    served = Served(bed, random_trace(3, 40, 60), "aligned", limits)
    assert served.model.finished == 40
