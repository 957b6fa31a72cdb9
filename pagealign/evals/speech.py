"""Recordings with their words: the LibriVox clips, a folder, or a data set."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagealign import assets
from pagealign.errors import PagealignError
from pagealign.evals import tables

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".opus")
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript", "normalized_text")
LIMIT_SECONDS = 30.0  # Whisper's encoder takes no more


@dataclass(frozen=True)
class Speech:
    """A recording of ``seconds`` with the words spoken. ``content`` is the file's bytes,
    None where ``path`` has them; the server is told ``filename``."""

    name: str
    seconds: float
    transcript: str
    filename: str
    path: Path | None = None
    content: bytes | None = field(default=None, repr=False)

    def read(self) -> bytes:
        """The file's bytes."""
        if self.content is not None:
            return self.content
        assert self.path is not None
        return self.path.read_bytes()


@dataclass(frozen=True)
class Skipped:
    """What was left out of a data set, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Corpus:
    """The recordings to send, and those that can't be."""

    items: tuple[Speech, ...]
    skipped: tuple[Skipped, ...]


def load(
    data: str | None,
    config: str | None = None,
    split: str = "test",
    text_column: str | None = None,
    limit: int | None = None,
) -> Corpus:
    """``data`` as recordings: None for the LibriVox clips, a folder, a ``.parquet`` file or
    a Hugging Face name.

    A folder's words are in ``NAME.txt`` beside ``NAME.wav``, in LibriSpeech's
    ``*.trans.txt`` or in ``metadata.csv`` or ``.jsonl`` (``file_name`` and a text column).
    Broken recordings, those without words and those listed that aren't there are in
    ``skipped``. Raises PagealignError for what can't be had, and where no recording is left.
    """
    skipped: list[Skipped] = []
    if data is None:
        found = _librivox()
    elif Path(data).is_dir():
        found = _folder(Path(data), text_column, skipped)
    else:
        found = _rows(data, config, split, text_column, limit, skipped)
    items = []
    for item in found:
        if limit is not None and len(items) + len(skipped) >= limit:
            break
        items.append(item)
    if not items:
        first = f"; the first: {skipped[0].name}: {skipped[0].why}" if skipped else ""
        raise PagealignError(
            f"--data {data} holds no usable recording ({len(skipped)} skipped{first})"
        )
    if twice := _twice([item.name for item in items]):
        raise PagealignError(f"--data {data} has two recordings called {twice}: rename one")
    return Corpus(tuple(items), tuple(skipped))


def _librivox() -> Iterator[Speech]:
    for clip in assets.clips():
        assert clip.transcript is not None
        yield Speech(clip.name, clip.seconds, clip.transcript, clip.path.name, clip.path)


def _folder(folder: Path, text_column: str | None, skipped: list[Skipped]) -> Iterator[Speech]:
    listed = _listed(folder, text_column)
    known = {path: words for entry in listed.entries for path, words in entry.words.items()}
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    for path in paths:
        name = path.relative_to(folder).with_suffix("").as_posix()
        beside = path.with_suffix(".txt")
        try:
            words = _read(beside).strip() if beside.is_file() else known.get(path)
        except (OSError, ValueError) as error:
            skipped.append(Skipped(name, f"{beside.name} can't be read: {_why(error)}"))
            continue
        if not words:
            skipped.append(Skipped(name, f"no words: there is no {beside.name} beside it"))
            continue
        seconds = _seconds(path)
        if seconds is None:
            skipped.append(Skipped(name, "broken: libsndfile can't read it"))
            continue
        yield Speech(name, seconds, words, path.name, path)
    skipped += listed.unreadable
    for entry in listed.entries:
        if entry.words.keys().isdisjoint(paths):
            why = f"in {entry.listed_in}, but not among the folder's recordings"
            skipped.append(Skipped(entry.name, why))


@dataclass(frozen=True)
class _Entry:
    """A recording's line in a file that lists many: the paths it may have, with its words."""

    name: str
    listed_in: str
    words: dict[Path, str]


@dataclass
class _Listed:
    entries: list[_Entry] = field(default_factory=list)
    unreadable: list[Skipped] = field(default_factory=list)


def _listed(folder: Path, text_column: str | None) -> _Listed:
    """What the files that hold the words of many recordings say."""
    found = _Listed()
    for path in sorted(folder.rglob("*.trans.txt")):
        name = path.relative_to(folder).as_posix()
        try:
            lines = _read(path).splitlines()
        except (OSError, ValueError) as error:
            found.unreadable.append(Skipped(name, f"can't be read: {_why(error)}"))
            continue
        for line in filter(str.strip, lines):
            key, _, words = line.partition(" ")
            paths = {path.parent / f"{key}{suffix}": words.strip() for suffix in SUFFIXES}
            found.entries.append(_Entry(key, name, paths))
    for path in sorted((*folder.rglob("metadata.csv"), *folder.rglob("metadata.jsonl"))):
        name = path.relative_to(folder).as_posix()
        try:
            text = _read(path)
            if path.suffix == ".csv":
                rows = list(csv.DictReader(io.StringIO(text)))
            else:
                rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            for row in rows:
                names = (text_column,) if text_column else TEXT_COLUMNS
                words = row[tables.column(row, names, str(path), "--text-column")]
                inner = os.path.normpath(path.parent.relative_to(folder) / row["file_name"])
                words = {folder / inner: words.strip()}
                found.entries.append(_Entry(row["file_name"], name, words))
        except (OSError, UnicodeError) as error:
            found.unreadable.append(Skipped(name, f"can't be read: {_why(error)}"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PagealignError(f"{path} can't be read ({error!r}): each row needs file_name "
                                 "and the words") from error  # fmt: skip
    return found


def _read(path: Path) -> str:
    """The text, without the byte-order mark that some editors write before it."""
    return path.read_text("utf-8-sig")


def _why(error: Exception) -> str:
    return "it isn't UTF-8" if isinstance(error, UnicodeError) else str(error)


def _rows(
    data: str,
    config: str | None,
    split: str,
    text_column: str | None,
    limit: int | None,
    skipped: list[Skipped],
) -> Iterator[Speech]:
    texts = (text_column,) if text_column else TEXT_COLUMNS
    for number, row in enumerate(tables.rows(data, config, split, ("audio", "file"), limit)):
        audio = tables.column(row, ("audio", "file"), data, "a column of that name")
        named = tables.column(row, texts, data, "--text-column")
        words = row[named]
        if not isinstance(words, str | None):
            raise PagealignError(
                f"{data}: the column {named} holds {type(words).__name__}, not text: name "
                "another with --text-column"
            )
        cell = row[audio]
        path = cell.get("path") if isinstance(cell, dict) else None
        filename = Path(path).name if path else "audio.wav"
        name = tables.name_of(row, "id", number)
        try:
            content = tables.media_bytes(cell, Path(data).parent)
            name = tables.name_of(row, "id", number, content)
        except (OSError, ValueError) as error:
            skipped.append(Skipped(name, f"no audio: {error}"))
            continue
        seconds = _seconds(io.BytesIO(content))
        if seconds is None:
            skipped.append(Skipped(name, "broken: libsndfile can't read it"))
        elif not (words or "").strip():
            skipped.append(Skipped(name, "no words"))
        else:
            yield Speech(name, seconds, words.strip(), filename, content=content)


def _seconds(source: Path | io.BytesIO) -> float | None:
    """The length of a recording that can be decoded to its end, else None."""
    import soundfile

    try:
        with soundfile.SoundFile(source) as sound:
            read = sum(len(block) for block in sound.blocks(1 << 16, dtype="int16"))
            return read / sound.samplerate if read else None
    except (soundfile.LibsndfileError, OSError, ZeroDivisionError, TypeError):
        return None


def _twice(names: list[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
