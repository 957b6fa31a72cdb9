"""Questions about document images: DocVQA's own files, a Parquet file, or a data set."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagealign.errors import PagealignError
from pagealign.evals import tables
from pagealign.evals.speech import Skipped

ID, QUESTION, IMAGE, ANSWERS = "questionId", "question", "image", "answers"
AS_THEY_ARE = {"PNG": "image/png", "JPEG": "image/jpeg"}  # other formats are sent as PNG


@dataclass(frozen=True)
class Question:
    """A question on one page image, with the answers that count as right. ``content`` is
    the image file's bytes, None where ``path`` has them."""

    name: str
    question: str
    answers: tuple[str, ...]
    path: Path | None = None
    content: bytes | None = field(default=None, repr=False)

    def image_url(self) -> str:
        """The image as a data URL. Raises OSError or ValueError where it is broken."""
        content = self.content
        if content is None:
            assert self.path is not None
            content = self.path.read_bytes()
        mime, content = _sendable(content)
        return f"data:{mime};base64,{base64.b64encode(content).decode()}"


@dataclass(frozen=True)
class Questions:
    """The questions to ask, and those that can't be."""

    items: tuple[Question, ...]
    skipped: tuple[Skipped, ...]


def load(
    data: str, config: str | None = None, split: str = "validation", limit: int | None = None
) -> Questions:
    """The first ``limit`` questions of ``data``: the challenge's ``.json`` (or JSON lines with
    the same fields) or a folder that holds one, a ``.parquet`` file, or a Hugging Face name.

    Fields: ``questionId``, ``question``, ``image`` (a path beside the file, or bytes) and
    ``answers``. Questions whose image is missing or broken are in ``skipped``. Raises
    PagealignError for what can't be had, and where no question is left.
    """
    path = Path(data)
    if path.is_dir():
        path = _annotations(path)
    if path.suffix in (".json", ".jsonl") and path.is_file():
        found, base = _read(path), path.parent
    else:
        # a data set's name, unless the path is a file's
        name = str(path) if path.is_file() else data
        found, base = tables.rows(name, config, split, (IMAGE,), limit), path.parent
    items: list[Question] = []
    skipped: list[Skipped] = []
    seen: set[str] = set()
    for number, row in enumerate(found):
        if number == limit:
            break
        item = _question(row, number, base, data, skipped)
        if item is None:
            continue
        if item.name in seen:
            raise PagealignError(f"--data {data} has the question id {item.name} twice")
        seen.add(item.name)
        items.append(item)
    if not items:
        first = f"; the first: {skipped[0].name}: {skipped[0].why}" if skipped else ""
        raise PagealignError(
            f"--data {data} holds no usable question ({len(skipped)} skipped{first})"
        )
    return Questions(tuple(items), tuple(skipped))


def _annotations(folder: Path) -> Path:
    found = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jsonl", ".parquet"))
    if len(found) != 1:
        named = ", ".join(p.name for p in found) or "none"
        raise PagealignError(
            f"{folder} must hold one .json, .jsonl or .parquet file ({named}): name the file"
        )
    return found[0]


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text("utf-8-sig")
        if path.suffix == ".jsonl":
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            found = json.loads(text)
            found = found["data"] if isinstance(found, dict) else found
        if not all(isinstance(row, dict) for row in found):
            raise TypeError("a question isn't an object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PagealignError(
            f"{path} isn't DocVQA's {{\"data\": [...]}} nor JSON lines: {error!r}"
        ) from error
    return found


def _question(
    row: dict[str, Any], number: int, base: Path, data: str, skipped: list[Skipped]
) -> Question | None:
    for name in (QUESTION, IMAGE, ANSWERS):
        tables.column(row, (name,), data, "a field of that name")
    name = tables.name_of(row, ID, number)
    answers = row[ANSWERS]
    answers = [answers] if isinstance(answers, str) else answers
    texts = isinstance(answers, list | tuple) and all(isinstance(text, str) for text in answers)
    if not (texts and answers):
        skipped.append(Skipped(name, "no answers"))
        return None
    if not isinstance(row[QUESTION], str):
        skipped.append(Skipped(name, "no question"))
        return None
    cell = row[IMAGE]
    try:
        content = tables.media_bytes(cell, base)
        _sendable(content)
        name = tables.name_of(row, ID, number, row[QUESTION], content)
    except (OSError, ValueError) as error:
        skipped.append(Skipped(name, _image_error(cell, error)))
        return None
    # files are read again when they are asked about: a data set's images needn't fit in memory
    path = base / cell if isinstance(cell, str) else None
    return Question(name, row[QUESTION], tuple(answers), path, content if path is None else None)


def _sendable(content: bytes) -> tuple[str, bytes]:
    """The MIME type and bytes to send. Raises OSError or ValueError for a broken image."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()  # to its end: a cut file opens
            if image.format in AS_THEY_ARE:
                return AS_THEY_ARE[image.format], content
            png = io.BytesIO()
            image.convert("RGB").save(png, "PNG")
    except (SyntaxError, Image.DecompressionBombError) as error:  # what PIL says of some
        raise ValueError(str(error)) from error
    return "image/png", png.getvalue()


def _image_error(cell: object, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no image {cell}"
    return f"broken image{f' {cell}' if isinstance(cell, str) else ''}: {error}"
