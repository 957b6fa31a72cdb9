"""What Hugging Face transformers gives: greedy tokens in float32, on the CPU.

The prompt is the one that SGLang builds for a transcription with a known language and
without timestamps, and the features come from the same processor, padded to 30 s. SGLang
applies none of Whisper's suppressed tokens, so neither does this: a plain argmax over
the model's logits until end-of-text, the whole of ``model.generate``'s extras left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagealign.fetch import sha256_of
from pagealign.paths import cache_dir

SAMPLE_RATE = 16_000
MAX_NEW_TOKENS = 200  # the longest clip needs about 85


def prompt(language: str = "en") -> tuple[str, ...]:
    """The decoder's prompt, as tokens, for a language code."""
    return ("<|startoftranscript|>", f"<|{language}|>", "<|transcribe|>", "<|notimestamps|>")


@dataclass(frozen=True)
class Reference:
    """One recording's answer: ``tokens`` with the end-of-text that stopped it, its ``text``,
    and per token the ``logprobs`` (natural log) and the ``margins`` of the two best logits."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


def _load(path: Path):
    """float32 samples, mono, at 16 kHz: the loader of a stock server without ffmpeg."""
    import soundfile
    import torch
    import torchaudio

    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    mono = torch.from_numpy(samples).mean(dim=1)
    if rate != SAMPLE_RATE:
        mono = torchaudio.functional.resample(mono, rate, SAMPLE_RATE)
    return mono.numpy()


def compute(model: Path, audio: Sequence[Path], language: str, limit: int) -> list[Reference]:
    """The answers, computed now; at most ``limit`` tokens each."""
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor
    from transformers.utils import logging

    logging.disable_progress_bar()
    processor = WhisperProcessor.from_pretrained(model)
    whisper = WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer, end = processor.tokenizer, whisper.config.eos_token_id
    start = tokenizer.convert_tokens_to_ids(list(prompt(language)))
    out = []
    for path in audio:
        features = processor.feature_extractor(
            _load(path), sampling_rate=SAMPLE_RATE, padding="max_length", return_tensors="pt"
        ).input_features
        tokens, logprobs, margins = [], [], []
        with torch.inference_mode():
            encoded = whisper.model.encoder(features)
            fed, past = torch.tensor([start]), None
            while len(tokens) < limit and (not tokens or tokens[-1] != end):
                step = whisper(
                    encoder_outputs=encoded,
                    decoder_input_ids=fed,
                    past_key_values=past,
                    use_cache=True,
                )
                past, logits = step.past_key_values, step.logits[0, -1].double()
                best, second = logits.topk(2).values.tolist()
                tokens.append(int(logits.argmax()))
                logprobs.append(best - float(logits.logsumexp(0)))
                margins.append(best - second)
                fed = torch.tensor([[tokens[-1]]])
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        out.append(Reference(tuple(tokens), text, tuple(logprobs), tuple(margins)))
    return out


def references(
    model: Path,
    audio: Sequence[Path],
    language: str = "en",
    limit: int = MAX_NEW_TOKENS,
    fresh: bool = False,
) -> list[Reference]:
    """The answers for ``audio``, from the cache where ``model`` and the recordings are the
    same bytes and transformers and torch the same versions; ``fresh`` computes them anew."""
    key = hashlib.sha256()
    weights = [p for p in sorted(model.iterdir()) if p.suffix in {".json", ".safetensors", ".bin"}]
    for path in (*weights, *audio):
        key.update(sha256_of(path).encode())
    key.update(repr((language, limit, _versions())).encode())
    stored = cache_dir("references") / f"{key.hexdigest()[:32]}.json"
    if not fresh and stored.is_file():
        rows = json.loads(stored.read_text())
        return [
            Reference(tuple(r["tokens"]), r["text"], tuple(r["logprobs"]), tuple(r["margins"]))
            for r in rows
        ]
    found = compute(model, audio, language, limit)
    with tempfile.NamedTemporaryFile("w", dir=stored.parent, delete=False) as f:
        json.dump([vars(r) for r in found], f)
    os.replace(f.name, stored)
    return found


def reference_tokens(model: Path, audio: Sequence[Path], language: str = "en") -> list[list[int]]:
    """Per recording, the greedy token ids, end-of-text last."""
    return [list(r.tokens) for r in references(model, audio, language)]


def _versions() -> tuple[str, str]:
    from importlib.metadata import version

    return version("transformers"), version("torch")
