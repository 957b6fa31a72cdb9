"""Other implementations on the same weights and recordings, where they are installed."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from pagealign.errors import PagealignError
from pagealign.evals import outcome
from pagealign.evals.journal import Record
from pagealign.evals.speech import LIMIT_SECONDS, Speech

# What a peer is called, and the packages that it needs.
PEERS = {"transformers": ("transformers",), "faster-whisper": ("faster_whisper", "ctranslate2")}
MAX_NEW_TOKENS = 444  # 448 decoder positions less the prompt's four


def chosen(names: Sequence[str]) -> list[str]:
    """``names``, or for "all" those that are installed; PagealignError for what isn't."""
    if list(names) == ["all"]:
        return [name for name in PEERS if _missing(name) is None]
    for name in names:
        if name not in PEERS:
            raise PagealignError(f"--peer {name}: use {', '.join(PEERS)} or all")
        if (package := _missing(name)) is not None:
            raise PagealignError(f"--peer {name} needs the package {package}: pip install {name}")
    return list(dict.fromkeys(names))


def check(names: Sequence[str], weights: Path, language: str, items: Sequence[Speech]) -> None:
    """Raises PagealignError for what a peer would fail at, or do another way, only after the
    server has answered all."""
    if not names:
        return
    try:
        kind = json.loads((weights / "config.json").read_text("utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        kind = None
    if kind != "whisper":
        raise PagealignError(f"--weights {weights} isn't a folder with a Whisper, which --peer "
                             "needs on this machine")  # fmt: skip
    if "transformers" not in names:
        return
    if language == "auto":
        raise PagealignError("--peer transformers is told the language: give --language CODE, "
                             "or another peer")  # fmt: skip
    long = [item for item in items if item.seconds > LIMIT_SECONDS]
    if long:
        raise PagealignError(
            f"--peer transformers hears {LIMIT_SECONDS:.0f} s of a clip, and {len(long)} are "
            f"longer (the first: {long[0].name}, {long[0].seconds:.1f} s): --long skip leaves "
            "them out, or name another peer"
        )


def transcribe(
    name: str, items: Sequence[Speech], weights: Path, language: str, console: Console
) -> list[Record]:
    """The peer's record of every recording, as ``asking.ask_all`` gives, without times.

    ``weights`` is a Hugging Face folder; float32 on the CPU, greedy, without timestamps, and
    the prompt that SGLang builds. Transformers hears 30 s, in a language that is named:
    ``check`` refuses the rest. Faster-whisper takes longer recordings in windows of 30 s, and
    finds out the language if it is "auto".
    """
    run = {"transformers": _transformers, "faster-whisper": _faster_whisper}[name]
    out: list[Record] = []
    with outcome.progress_bar(console, name, len(items)) as step:
        for item, text in zip(items, run(items, weights, language), strict=True):
            # loading is part of it, so no time of one recording means anything
            times = {"started": 0.0, "ended": 0.0, "seconds": float("nan")}
            out.append({"name": item.name, "text": text.strip(), **times})
            step()
    return out


def _missing(name: str) -> str | None:
    return next((package for package in PEERS[name] if find_spec(package) is None), None)


def _transformers(items: Sequence[Speech], weights: Path, language: str) -> Iterator[str]:
    from pagealign.hf_reference import compute

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, item in enumerate(items):
            path = item.path
            if path is None:
                path = Path(folder, f"{number}{Path(item.filename).suffix}")
                path.write_bytes(item.read())
            paths.append(path)
        for answer in compute(weights, paths, language, MAX_NEW_TOKENS):
            yield answer.text


def _faster_whisper(items: Sequence[Speech], weights: Path, language: str) -> Iterator[str]:
    from ctranslate2.converters import TransformersConverter
    from faster_whisper import WhisperModel

    spoken = None if language == "auto" else language
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder, "model")
        copied = [
            name
            for name in ("tokenizer.json", "preprocessor_config.json")
            if (weights / name).is_file()
        ]
        TransformersConverter(str(weights), copy_files=copied).convert(str(converted))
        model = WhisperModel(str(converted), device="cpu", compute_type="float32", cpu_threads=1)
        for item in items:
            segments, _ = model.transcribe(
                io.BytesIO(item.read()), language=spoken, beam_size=1, temperature=0.0,
                without_timestamps=True, condition_on_previous_text=False,
                compression_ratio_threshold=None, log_prob_threshold=None,
                no_speech_threshold=None, suppress_blank=False, suppress_tokens=None,
            )  # fmt: skip
            yield "".join(segment.text for segment in segments)
