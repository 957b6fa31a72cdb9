"""The fuzz of the aligned group finds what is wrong with stock, at page size 1 and at 64."""

import pytest
from bed_fixtures import pool_checks_off

from pagealign import fuzz


@pytest.fixture(scope="module")
def mllama_references(mllama):
    catalogue = fuzz.mllama_catalogue(24)
    return catalogue, fuzz.references(mllama, catalogue)


def test_wrong_answers_at_page_size_1(mllama, mllama_references):
    """40476 (S6): the rows of bursts that mix images and text."""
    setting = fuzz.Setting("torch_native", 1)
    tally = fuzz.fuzz(mllama, *mllama_references, [setting], bursts=2)
    print(f"\n{tally}")
    assert not tally.crashes
    assert tally.requests == 40
    assert tally.differences


def test_failures_at_page_size_64(mllama, whisper, mllama_references):
    """38840 (S1): no burst gets through SGLang's own checks."""
    setting = fuzz.Setting("torch_native", 64)
    tally = fuzz.fuzz(mllama, *mllama_references, [setting], bursts=2)
    catalogue = fuzz.whisper_catalogue(40, 8)
    expected = fuzz.references(whisper(40), catalogue)
    other = fuzz.fuzz(whisper(40), catalogue, expected, [setting], bursts=2)
    print(f"\n{tally}\n{other}")
    assert len(tally.crashes) == len(other.crashes) == 2


def test_wrong_answers_at_page_size_64(whisper, monkeypatch):
    """38840 (S2): without those checks and without load, wrong answers."""
    pool_checks_off(monkeypatch)
    catalogue = fuzz.whisper_catalogue(40, 8)
    expected = fuzz.references(whisper(40), catalogue)
    tally = fuzz.fuzz(
        whisper(40), catalogue, expected, [fuzz.Setting("torch_native", 64)], bursts=3, size=8
    )
    print(f"\n{tally}")
    assert tally.differences
