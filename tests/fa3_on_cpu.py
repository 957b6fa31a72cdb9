"""SGLang's FlashAttention 3 backend on a CPU, for the length of a test."""

from __future__ import annotations

from bed_fixtures import replace_all

from pagealign.standins import fa3_cpu


def install(monkeypatch) -> None:
    """Make ``attention_backend="fa3"`` start on a CPU."""
    replace_all(monkeypatch, fa3_cpu.replacements())
