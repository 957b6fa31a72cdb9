"""SGLang's FlashInfer backend on a CPU, for the length of a test."""

from __future__ import annotations

from pagealign.standins import flashinfer_cpu


def install(monkeypatch) -> None:
    """Make ``attention_backend="flashinfer"`` start on a CPU."""
    for owner, name, value in flashinfer_cpu.replacements():
        monkeypatch.setattr(owner, name, value, raising=False)
