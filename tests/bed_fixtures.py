"""Fixtures of the groups that run SGLang's scheduler in the test's process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagealign.bed import Bed, Request, Result
from pagealign.server import POOL_CHECKS
from pagealign.tiny_models import tiny_mllama, tiny_whisper

PROMPT = (4, 10, 11)


@pytest.fixture(scope="session")
def whisper(tmp_path_factory):
    """Folder of a tiny Whisper with a given E, made once."""
    made: dict[int, Path] = {}

    def get(encoder_len: int) -> Path:
        if encoder_len not in made:
            made[encoder_len] = tiny_whisper(
                tmp_path_factory.mktemp(f"whisper{encoder_len}"), encoder_len
            )
        return made[encoder_len]

    return get


@pytest.fixture(scope="session")
def mllama(tmp_path_factory) -> Path:
    return tiny_mllama(tmp_path_factory.mktemp("mllama"))


@pytest.fixture
def make_bed():
    """Make beds one after another; the last one is closed after the test."""
    open_beds: list[Bed] = []

    def make(*args, **kwargs) -> Bed:
        while open_beds:
            open_beds.pop().close()
        bed = Bed(*args, **kwargs)
        open_beds.append(bed)
        return bed

    yield make
    while open_beds:
        open_beds.pop().close()


@pytest.fixture
def alone(make_bed):
    """Each request by itself at page size 1 on torch_native: the reference."""

    def run(model: Path, requests: list[Request]) -> list[Result]:
        bed = make_bed(model, "torch_native", 1)
        return [bed.run_one(request) for request in requests]

    return run


def pool_checks_off(monkeypatch) -> None:
    """Without SGLang's own checks of the pool, as a server runs by default."""
    for name in POOL_CHECKS:
        monkeypatch.setenv(name, "0")


def replace_all(monkeypatch, replacements) -> None:
    """Put a stand-in's values in place: triples of an owner (or a dict), a name and a value."""
    for owner, name, value in replacements:
        if isinstance(owner, dict):
            monkeypatch.setitem(owner, name, value)
        else:
            monkeypatch.setattr(owner, name, value, raising=False)


def audio(encoder_len: int, seed: int) -> torch.Tensor:
    """Random input features float32 ``[1, 80, 2E]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 80, 2 * encoder_len, generator=generator)


def image(count: int, seed: int) -> torch.Tensor:
    """Random images of four tiles, float32 ``[1, count, 4, 3, 56, 56]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, 4, 3, 56, 56, generator=generator)


def assert_same(result: Result, ids: list[int], logprobs: list[float]) -> None:
    assert result.output_ids == ids
    assert result.output_logprobs == pytest.approx(logprobs, abs=1e-4)
