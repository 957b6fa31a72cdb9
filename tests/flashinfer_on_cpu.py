"""SGLang's FlashInfer backend on a CPU, for the length of a test."""

from __future__ import annotations

from bed_fixtures import replace_all

from pagealign.standins import flashinfer_cpu


def install(monkeypatch) -> None:
    """Make ``attention_backend="flashinfer"`` start on a CPU."""
    replace_all(monkeypatch, flashinfer_cpu.replacements())
