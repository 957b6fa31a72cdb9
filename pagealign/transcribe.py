"""``pagealign transcribe``: recordings in, a table of transcripts out."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagealign import report, wer
from pagealign.assets import Clip, clip_of, clips, whisper_base
from pagealign.client import Client, at_once, explained
from pagealign.errors import PagealignError
from pagealign.paths import cache_dir
from pagealign.server import PoolChecks, Server, ServerDied, ServerSpec, resolve_device, terminable


@dataclass(frozen=True)
class Transcript:
    """One recording's answer; ``wer`` (0 .. 1 and more) where its words are known.
    ``seconds`` is the recording's length, ``took`` the time from request to answer."""

    name: str
    seconds: float
    text: str
    wer: float | None
    took: float


COLUMNS = (
    report.Column("recording", lambda t: t.name),
    report.Column("length", lambda t: f"{t.seconds:.1f} s", right=True),
    report.Column("took", lambda t: f"{t.took:.1f} s", right=True),
    report.Column("WER", lambda t: "" if t.wer is None else f"{t.wer:.1%}", right=True),
    report.Column("transcript", lambda t: t.text),
)


def recordings(audio: Sequence[Path]) -> list[Clip]:
    """The clips to send: ``audio``, or the fetched ones if empty.

    A recording's words are known if it is one of the fetched ones, or if a text file of
    the same name lies beside it (``talk.wav``, ``talk.txt``).
    """
    if not audio:
        return clips()
    out = []
    for path in audio:
        words = path.with_suffix(".txt")
        known = words.read_text("utf-8").strip() if words.is_file() else _fetched(path)
        out.append(clip_of(path.absolute(), known))
    return out


def _fetched(path: Path) -> str | None:
    """The words of ``path`` if it is a fetched clip, by its place in the cache."""
    if path.resolve().parent.parent != cache_dir("assets", to_write=False).resolve():
        return None
    return next((c.transcript for c in clips() if c.path.resolve() == path.resolve()), None)


def model_of(model: Path | None) -> Path:
    """The weights: Whisper-base if None, a folder, or a hub name such as
    ``openai/whisper-tiny``, which the server then fetches."""
    if model is None:
        return whisper_base()
    if (model / "config.json").is_file():
        return model.absolute()
    if not model.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        return model
    raise PagealignError(
        f"--model {model} isn't a Hugging Face Whisper folder (no config.json there)"
    )


def run(
    audio: Sequence[Path],
    tree: str = "aligned",
    sglang: Path | None = None,
    page_size: int = 64,
    backend: str = "intel_xpu",
    device: str = "auto",
    model: Path | None = None,
    concurrency: int = 1,
    language: str = "en",
) -> int:
    """Start a server, transcribe, print, stop the server; 0, or 1 if it died.

    ``sglang``, a checkout or an unpacked or installed package, takes the place of
    ``tree``. Raises PagealignError for what the user can put right.
    """
    from pagealign.trees import build_tree, tree_of

    console = report.console()
    device = resolve_device(device)
    spoken, weights = recordings(audio), model_of(model)
    spec = ServerSpec(
        tree=tree_of(sglang) if sglang else build_tree(tree),
        model=weights,
        backend=backend,
        page_size=page_size,
        device=device,
        # the real kernels take half precision only
        dtype="float32" if device == "cpu" else "float16",
        pool_checks=PoolChecks.IDLE,
        concurrency=concurrency,
    )
    log = cache_dir("logs") / f"transcribe-{time.strftime('%Y%m%d-%H%M%S')}.log"
    try:
        with terminable():
            found = _transcribe(Server(spec, log), spoken, concurrency, language)
    except ServerDied as death:
        console.print(f"The server died: {death.reason}", style="red", markup=False)
        console.print(f"log: {log}", soft_wrap=True)
        return 1
    console.print(report.table(found, COLUMNS))
    console.print(f"{backend} on {device}, page size {page_size}; log: {log}", soft_wrap=True)
    return 0


def _transcribe(
    server: Server, spoken: Sequence[Clip], concurrency: int, language: str
) -> list[Transcript]:
    def one(clip: Clip) -> Transcript:
        started = time.monotonic()
        text = client.transcribe(clip.path)
        took = time.monotonic() - started
        known = clip.transcript
        rate = None if known is None else wer.word_error_rate(known, text, language)
        return Transcript(clip.name, clip.seconds, text, rate, took)

    with report.progress(report.console()) as say:
        say("starting the server")
        with server, explained(server), Client(server.url, language) as client:
            say(f"transcribing {len(spoken)}, {concurrency} at once")
            return at_once(one, spoken, concurrency)
