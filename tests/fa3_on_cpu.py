"""SGLang's FlashAttention 3 backend on a CPU, for the length of a test."""

from __future__ import annotations

from pagealign.standins import fa3_cpu


def install(monkeypatch) -> None:
    """Make ``attention_backend="fa3"`` start on a CPU."""
    for owner, name, value in fa3_cpu.replacements():
        if isinstance(owner, dict):
            monkeypatch.setitem(owner, name, value)
        else:
            monkeypatch.setattr(owner, name, value, raising=False)
