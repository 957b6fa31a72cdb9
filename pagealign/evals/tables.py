"""Rows of a Hugging Face dataset or a Parquet file, with the media left as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagealign.errors import PagealignError

Row = dict[str, Any]
HINT = "pip install datasets"


def rows(
    data: str, config: str | None, split: str, media: tuple[str, ...], limit: int | None
) -> Iterator[Row]:
    """The first ``limit`` rows of ``data``: a ``.parquet`` file, or a data set's name.

    Columns of ``media`` that hold audio or images come as ``{"bytes": ..., "path": ...}``,
    not decoded. Raises PagealignError where the package ``datasets`` is missing or the set,
    the configuration or the split can't be had.
    """
    try:
        import datasets
    except ImportError:
        raise PagealignError(f"--data {data} needs the package datasets: {HINT}") from None
    try:
        if data.endswith(".parquet"):
            found = datasets.load_dataset("parquet", data_files=data, split="train")
        else:
            streaming = limit is not None  # no need to fetch all of it
            found = datasets.load_dataset(data, config, split=split, streaming=streaming)
        for column, feature in (found.features or {}).items():
            if column in media and isinstance(feature, datasets.Audio | datasets.Image):
                found = found.cast_column(column, type(feature)(decode=False))
    except Exception as error:  # many kinds: of the hub, of a file format, of HTTP
        why = " ".join(str(error).split())[:200]
        raise PagealignError(f"--data {data} can't be loaded ({type(error).__name__}: {why})"
                             ) from error  # fmt: skip
    for number, row in enumerate(found):
        if number == limit:
            return
        yield row


def column(row: Row, names: tuple[str, ...], data: str, option: str) -> str:
    """The first of ``names`` that the row has; PagealignError naming ``option`` if none."""
    for name in names:
        if name in row:
            return name
    raise PagealignError(
        f"{data} has no column {' or '.join(names)}, but {', '.join(row)}: name one with {option}"
    )


def media_bytes(value: object, base: Path) -> bytes:
    """The bytes of a media cell: a dict with bytes or a path, bytes, or a path.

    Raises ValueError where it is none of these, OSError where the file can't be read.
    """
    if isinstance(value, dict):
        if value.get("bytes"):
            return value["bytes"]
        value = value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value:
        return (base / value).read_bytes()
    raise ValueError("there are no bytes and no path")
