"""The varlen backend's attention, against float64."""

import pytest
from backend_accuracy import CASES, assert_right


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case):
    assert_right(case, page_size=64, aligned=False)
