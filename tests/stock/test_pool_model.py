"""The numpy model of ``pagealign.compare`` has stock's faults, page for page (upstream 38840)."""

import pytest
from bed_fixtures import pool_checks_off
from pool_machine import Pools
from served_by_sglang import Served, random_trace

from pagealign.compare.scheduler_model import Limits


@pytest.fixture
def pools(make_bed, mllama, monkeypatch):
    pool_checks_off(monkeypatch)

    def make(page_size, slots):
        bed = make_bed(
            mllama,
            "torch_native",
            page_size,
            max_total_tokens=slots,
            max_running_requests=6,
            poison=False,
        )
        return Pools(bed)

    return make


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_the_model_has_the_faults(pools, page_size):
    served = Served(pools(page_size, 8192), random_trace(1, 40, 200), "stock", Limits(8192, 6))
    assert served.forwards == served.model.steps > 200
    assert all(served.most[fault] for fault in ("aliased", "freed twice", "free_twice", "lost"))
    assert served.most["owned_twice"]


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_full_pool_kills_both(pools, page_size):
    """S3: the memory check passes, so nobody is retracted, and the allocation fails."""
    limits = Limits(1024, 6, new_token_ratio=0.0)
    served = Served(pools(page_size, 1024), random_trace(2, 30, 300), "stock", limits)
    assert served.died
    assert served.model.stopped == "decode out of memory"
    assert served.model.finished < 30


def test_retraction_at_page_size_1(pools):
    limits = Limits(1024, 6, new_token_ratio=0.0)
    served = Served(pools(1, 1024), random_trace(2, 30, 300), "stock", limits)
    assert served.model.retractions == served.retractions > 0
    assert served.model.finished == 30


def test_page_size_1_is_sound(pools):
    served = Served(pools(1, 4096), random_trace(1, 40, 200), "stock", Limits(4096, 6))
    assert served.model.finished == 40
    assert not any(served.most.values())
