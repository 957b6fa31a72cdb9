"""Rows of a Hugging Face dataset or a Parquet file, with the media left as bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagealign.errors import PagealignError

Row = dict[str, Any]
HINT = "pip install datasets"
FILES = (".parquet", ".json", ".jsonl", ".csv", ".tsv", ".txt", ".zip", ".tar", ".gz", ".wav")
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # of a data set on the hub


def check_source(data: str) -> None:
    """Raises PagealignError where ``data`` is neither a ``.parquet`` file that is there nor
    can be a data set's name: the hub isn't asked for what is meant as a path."""
    path = Path(data)
    if path.is_file():
        if path.suffix != ".parquet":
            raise PagealignError(
                f"--data {data} is a file of a kind that isn't read: give a folder, a .parquet "
                "file or a data set's name"
            )
    elif path.suffix in FILES or not _NAME.fullmatch(data):
        raise PagealignError(f"--data {data} doesn't exist: give a folder, a file or a name")


def rows(
    data: str, config: str | None, split: str, media: tuple[str, ...], limit: int | None
) -> Iterator[Row]:
    """The first ``limit`` rows of ``data``: a ``.parquet`` file, or a data set's name.

    Columns of ``media`` that hold audio or images come as ``{"bytes": ..., "path": ...}``,
    not decoded. Raises PagealignError where the package ``datasets`` is missing or the set,
    the configuration or the split can't be had.
    """
    check_source(data)
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
        where = "" if Path(data).exists() else "is no folder or file here, and as a data set "
        raise PagealignError(
            f"--data {data} {where}can't be loaded ({type(error).__name__}: {why})"
        ) from error
    for number, row in enumerate(found):
        if number == limit:
            return
        yield row


def name_of(row: Row, column: str, number: int, *content: bytes | str) -> str:
    """The row's id, or where it has none, its number with a digest of ``content``: row 3 of
    another data set is another item."""
    given = row.get(column)
    if given is not None and str(given):
        return str(given)
    digest = hashlib.sha256()
    for part in content:
        digest.update(part.encode() if isinstance(part, str) else part)
    return f"{number:05d}-{digest.hexdigest()[:8]}" if content else f"{number:05d}"


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
