"""The three approaches that are compared."""

from __future__ import annotations

from dataclasses import dataclass

from pagealign.errors import PagealignError


@dataclass(frozen=True)
class Approach:
    """``kernels`` is the stand-in's mode. Only stock needs the page-size-1 kernel, and only
    stock hands it a request without keys, beside others that have some: that is computed as
    the kernel's source does, not refused as the device loss that was seen with it."""

    name: str
    tree: str
    kernels: str
    title: str


APPROACHES = (
    Approach("aligned", "aligned", "strict", "page-aligned"),
    Approach("varlen", "varlen", "strict", "varlen gather"),
    Approach("page1", "stock", "faithful,page1", "page-size-1 view"),
)


def approach(name: str) -> Approach:
    """The approach of that name; PagealignError if there is none."""
    for one in APPROACHES:
        if one.name == name:
            return one
    raise PagealignError(
        f"no approach {name!r}: use one of {', '.join(a.name for a in APPROACHES)}"
    )
