"""The stock backend's attention, against float64."""

import pytest
from backend_accuracy import CASES, assert_right
from sgl_kernel import DeviceLostError

from pagealign.compare.approaches import approach
from pagealign.compare.attention_accuracy import MHA, Case, attend


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case, monkeypatch):
    monkeypatch.setenv("PAGEALIGN_KERNELS", approach("page1").kernels)
    assert_right(case, page_size=64, aligned=False)


@pytest.mark.parametrize("decoding", [False, True], ids=["prefill", "decode"])
def test_a_request_without_keys_reaches_the_kernel(monkeypatch, decoding):
    """Beside requests that have an encoder. The strict kernel refuses it: a device is lost."""
    monkeypatch.setenv("PAGEALIGN_KERNELS", "page1")
    with pytest.raises(DeviceLostError):
        attend(Case("float32", MHA, (0, 150), decoding), page_size=64, aligned=False)
