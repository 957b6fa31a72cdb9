"""The shapes that a backend is given: heads, and a batch's lengths. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads, and the size of each."""

    query: int
    kv: int
    size: int


@dataclass(frozen=True)
class Batch:
    """Lengths in tokens, one per request.

    ``encoder_lens`` are E (0: text only) and ``seq_lens`` the decoder's tokens, those of
    this step included. ``new_lens`` are the tokens of this step in a prefill; None when
    decoding, where each request has one.
    """

    encoder_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    new_lens: tuple[int, ...] | None = None

    @property
    def decoding(self) -> bool:
        return self.new_lens is None

    @property
    def q_lens(self) -> tuple[int, ...]:
        return (1,) * len(self.seq_lens) if self.new_lens is None else self.new_lens

    @property
    def encoder_is_new(self) -> bool:
        """The encoder's keys and values come in this step: the prefill of a whole prompt."""
        return self.new_lens == self.seq_lens
