"""The stock backend's attention, against float64."""

import pytest
from backend_accuracy import CASES, assert_right


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case, monkeypatch):
    monkeypatch.setenv("PAGEALIGN_KERNELS", "page1")
    assert_right(case, page_size=64, aligned=False)
