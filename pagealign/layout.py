"""The arithmetic of a row ``[E encoder slots | gap | decoder slots]``.

Pure functions on ints; everything else in the harness that needs a figure of the
layout takes it from here. The patches have their own copy of ``ceil_align`` inside
SGLang; ``tests/`` shows that the two agree.
"""

from __future__ import annotations

from dataclasses import dataclass


def ceil_align(n: int, page_size: int) -> int:
    """The smallest multiple of ``page_size`` that is >= ``n``; ``n`` itself at 1."""
    if n < 0 or page_size < 1:
        raise ValueError(f"need n >= 0 and page_size >= 1, got {n} and {page_size}")
    return -(-n // page_size) * page_size


@dataclass(frozen=True)
class Row:
    """One request's row of ``req_to_token``; all lengths in tokens (= slots).

    ``encoder_len`` is E (0 for a text-only request), ``decoder_len`` the decoder's
    tokens so far.
    """

    encoder_len: int
    decoder_len: int
    page_size: int

    @property
    def reserve(self) -> int:
        """R: slots reserved for the encoder, and the decoder's first position."""
        return ceil_align(self.encoder_len, self.page_size)

    @property
    def gap(self) -> int:
        """Slots between the encoder and the decoder: allocated, never touched."""
        return self.reserve - self.encoder_len

    @property
    def tail(self) -> int:
        """Unused slots after the decoder's last token in its last page."""
        return ceil_align(self.decoder_len, self.page_size) - self.decoder_len

    @property
    def encoder_pages(self) -> int:
        return self.reserve // self.page_size

    @property
    def decoder_pages(self) -> int:
        return ceil_align(self.decoder_len, self.page_size) // self.page_size
