"""Random admits, decodes, retractions, aborts and finishes over random E, at four page sizes."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from pool_machine import Pools, machine


@pytest.mark.parametrize(
    ("backend", "page_size"),
    # intel_xpu has pages of 64 and 128 alone
    [("torch_native", 1), ("torch_native", 16), ("intel_xpu", 64), ("intel_xpu", 128)],
)
def test_owners_regions_and_tables(make_bed, mllama, backend, page_size):
    """2048 slots, so that admission waits and full pools retract by themselves too."""
    bed = make_bed(
        mllama,
        backend,
        page_size,
        max_total_tokens=2048,
        max_running_requests=6,
        poison=False,
        overcommit=True,
    )
    assert bed.page_size == page_size
    pools = Pools(bed)
    run_state_machine_as_test(
        machine(pools, layout=True),
        settings=settings(
            max_examples=10,
            stateful_step_count=20,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    # The machine has been where it should go.
    for what in ("extend, mixed", "decode, mixed", "retracted", "aborted", "finished"):
        assert pools.seen[what], pools.seen
