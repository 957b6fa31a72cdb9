"""Burst fuzz of the aligned tree: nobody's answer depends on the page size or on others."""

import pytest

from pagealign import fuzz

SHORT = (
    fuzz.Setting("torch_native", 1, overlap=True, radix=True),
    fuzz.Setting("torch_native", 64, radix=True, tight=True),
    fuzz.Setting("intel_xpu", 64, overlap=True, tight=True),
    fuzz.Setting("intel_xpu", 128, radix=True),
    fuzz.Setting("torch_native", 128, overlap=True, radix=True, tight=True),
)


def run(model, catalogue, settings, **sizes):
    tally = fuzz.fuzz(model, catalogue, fuzz.references(model, catalogue), settings, **sizes)
    print(f"\n{model.name}: {tally}")
    assert not tally.crashes + tally.leaks, "\n".join(tally.crashes + tally.leaks)
    assert not tally.differences, "\n".join(map(str, tally.differences))
    # It has been where it should go.
    assert tally.retractions and tally.aborted and tally.mixed_extends and tally.mixed_decodes
    return tally


def test_whisper(whisper):
    tally = run(whisper(40), fuzz.whisper_catalogue(40, 24), SHORT, bursts=1)
    assert tally.requests == 100


def test_mllama(mllama):
    tally = run(mllama, fuzz.mllama_catalogue(24), SHORT, bursts=1)
    assert tally.requests == 100
    assert tally.cached_tokens


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whisper_long(whisper):
    """20 configurations, 40 requests each, for E below and across a page of 64."""
    for encoder_len in (40, 100):
        catalogue = fuzz.whisper_catalogue(encoder_len, 60, seed=1)
        tally = run(whisper(encoder_len), catalogue, fuzz.ALIGNED_SETTINGS, bursts=2, seed=5)
        assert tally.requests == 800


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mllama_long(mllama):
    """20 configurations, 60 requests each."""
    catalogue = fuzz.mllama_catalogue(60, seed=1)
    tally = run(mllama, catalogue, fuzz.ALIGNED_SETTINGS, bursts=3, seed=7)
    assert tally.requests == 1200
    assert tally.cached_tokens
