"""Recordings with their words: the LibriVox clips, a folder, or a data set."""

from __future__ import annotations

import csv
import io
import json
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
    Broken recordings and those without words are in ``skipped``. Raises PagealignError for
    what can't be had, and where no recording is left.
    """
    skipped: list[Skipped] = []
    if data is None:
        found = _librivox()
    elif Path(data).is_dir():
        found = _folder(Path(data), text_column, skipped)
    elif _is_path(data) and not (data.endswith(".parquet") and Path(data).is_file()):
        raise PagealignError(f"--data {data} doesn't exist: give a folder of audio, or a name")
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
    known = _transcripts(folder, text_column)
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES):
        name = path.relative_to(folder).with_suffix("").as_posix()
        beside = path.with_suffix(".txt")
        words = beside.read_text("utf-8").strip() if beside.is_file() else known.get(path)
        if not words:
            skipped.append(Skipped(name, f"no words: there is no {beside.name} beside it"))
            continue
        seconds = _seconds(path)
        if seconds is None:
            skipped.append(Skipped(name, "broken: libsndfile can't read it"))
            continue
        yield Speech(name, seconds, words, path.name, path)


def _transcripts(folder: Path, text_column: str | None) -> dict[Path, str]:
    """Words by recording, from the files that hold those of many."""
    found: dict[Path, str] = {}
    for path in folder.rglob("*.trans.txt"):
        for line in path.read_text("utf-8").splitlines():
            name, _, words = line.partition(" ")
            found |= {path.parent / f"{name}{suffix}": words.strip() for suffix in SUFFIXES}
    for path in (*folder.rglob("metadata.csv"), *folder.rglob("metadata.jsonl")):
        try:
            text = path.read_text("utf-8")
            if path.suffix == ".csv":
                rows = list(csv.DictReader(io.StringIO(text)))
            else:
                rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            for row in rows:
                names = (text_column,) if text_column else TEXT_COLUMNS
                words = row[tables.column(row, names, str(path), "--text-column")]
                found[path.parent / row["file_name"]] = words.strip()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PagealignError(f"{path} can't be read ({error!r}): each row needs file_name "
                                 "and the words") from error  # fmt: skip
    return found


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
        words = row[tables.column(row, texts, data, "--text-column")]
        cell = row[audio]
        path = cell.get("path") if isinstance(cell, dict) else None
        filename = Path(path).name if path else "audio.wav"
        name = str(row.get("id") or f"{number:05d}")
        try:
            content = tables.media_bytes(cell, Path(data).parent)
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


def _is_path(data: str) -> bool:
    return Path(data).is_absolute() or data.startswith(("./", "../", "~")) or data.count("/") > 1


def _twice(names: list[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
