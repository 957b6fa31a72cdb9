"""Read a CTranslate2 ``model.bin`` (binary version 6) into numpy arrays.

The layout, little-endian, as CTranslate2's ``model_spec.py`` writes it:

    u32 binary version
    string spec name, u32 spec revision
    u32 n variables: string name, u8 rank, u32 x rank shape, u8 type, u32 bytes, data
    u32 n aliases:   string alias, string variable

A string is a u16 length and that many bytes, the last of them NUL. Nothing is executed
and nothing is trusted: every length is checked against what is left of the file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pagealign.errors import PagealignError

BINARY_VERSION = 6
# CTranslate2's DataType enumeration; bfloat16 (5) has no numpy type and isn't needed.
DTYPES = {
    0: np.dtype("<f4"),
    1: np.dtype("i1"),
    2: np.dtype("<i2"),
    3: np.dtype("<i4"),
    4: np.dtype("<f2"),
}


@dataclass(frozen=True)
class Ct2Model:
    """A model file: ``variables`` by name, read-only views of the file's bytes."""

    spec: str
    revision: int
    variables: MappingProxyType[str, np.ndarray]


class _Reader:
    """A cursor over ``data`` that refuses to run past the end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise PagealignError(
                f"the CTranslate2 file ends early: {size} bytes wanted at offset {self.at}, "
                f"{len(self.data) - self.at} left"
            )
        view = memoryview(self.data)[self.at : self.at + size]
        self.at += size
        return view

    def number(self, fmt: str) -> int:
        return struct.unpack("<" + fmt, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        raw = bytes(self.take(self.number("H")))
        if not raw.endswith(b"\0"):
            raise PagealignError(f"the CTranslate2 file has a bad string at offset {self.at}")
        return raw[:-1].decode("utf-8")


def read_model(data: bytes) -> Ct2Model:
    """The model in ``data``; aliases become further names of the same array.

    Raises PagealignError for another binary version, an unknown type, a size that does
    not match its shape, a truncated file and trailing bytes.
    """
    r = _Reader(data)
    if (version := r.number("I")) != BINARY_VERSION:
        raise PagealignError(
            f"CTranslate2 binary version {version} isn't supported, only {BINARY_VERSION}"
        )
    spec, revision = r.string(), r.number("I")
    variables: dict[str, np.ndarray] = {}
    for _ in range(r.number("I")):
        name = r.string()
        shape = tuple(r.number("I") for _ in range(r.number("B")))
        type_id, size = r.number("B"), r.number("I")
        if (dtype := DTYPES.get(type_id)) is None:
            raise PagealignError(f"the CTranslate2 variable {name} has an unknown type {type_id}")
        if size != dtype.itemsize * math.prod(shape):
            raise PagealignError(f"the CTranslate2 variable {name} has {size} bytes for {shape}")
        variables[name] = np.frombuffer(r.take(size), dtype).reshape(shape)
    for _ in range(r.number("I")):
        alias, name = r.string(), r.string()
        if name not in variables:
            raise PagealignError(f"the CTranslate2 alias {alias} names a missing {name}")
        variables[alias] = variables[name]
    if r.at != len(data):
        raise PagealignError(f"the CTranslate2 file has {len(data) - r.at} bytes too many")
    return Ct2Model(spec, revision, MappingProxyType(variables))
