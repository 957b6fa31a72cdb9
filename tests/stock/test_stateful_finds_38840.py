"""The state machine of the aligned group, which knows nothing of 38840, finds it."""

import pytest
from bed_fixtures import pool_checks_off
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from pool_machine import Pools, machine


def run(make_bed, mllama, page_size):
    bed = make_bed(
        mllama,
        "torch_native",
        page_size,
        max_total_tokens=2048,
        max_running_requests=6,
        poison=False,
        overcommit=True,
    )
    run_state_machine_as_test(
        machine(Pools(bed), layout=False),
        # No shrinking: this one is found for sure, and it takes time.
        settings=settings(
            max_examples=4,
            stateful_step_count=25,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_slot_at_two_positions(make_bed, mllama, monkeypatch, page_size):
    pool_checks_off(monkeypatch)
    with pytest.raises(AssertionError, match="slots at two positions"):
        run(make_bed, mllama, page_size)


def test_page_size_1_is_sound(make_bed, mllama):
    run(make_bed, mllama, 1)
