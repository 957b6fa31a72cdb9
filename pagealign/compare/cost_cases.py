"""What cost is counted for: two real models, and steps of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pagealign.compare.batches import Batch


@dataclass(frozen=True)
class Model:
    """What attention costs depend on; ``prompt_len`` and ``encoder_len`` in tokens."""

    name: str
    query_heads: int
    kv_heads: int
    head_size: int
    self_layers: int
    cross_layers: int
    encoder_len: int
    prompt_len: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's key and value in one layer, in 16 bit."""
        return 2 * self.kv_heads * self.head_size * 2


MODELS = (
    # openai/whisper-large-v3, config.json: decoder_layers 32, decoder_attention_heads 20,
    # d_model 1280, max_source_positions 1500. Each decoder layer has both kinds. The prompt is
    # <|startoftranscript|><|en|><|transcribe|><|notimestamps|>.
    Model("Whisper-large-v3", 20, 20, 64, 32, 32, 1500, 4),
    # meta-llama/Llama-3.2-11B-Vision, config.json, text: num_hidden_layers 40, of which
    # cross_attention_layers [3, 8, 13, 18, 23, 28, 33, 38]; num_attention_heads 32,
    # num_key_value_heads 8, hidden_size 4096. Vision: image_size 560, patch_size 14, so
    # (560 / 14)^2 + 1 = 1601 tokens a tile, max_num_tiles 4. The prompt's length is ours.
    Model("Llama-3.2-11B-Vision", 32, 8, 128, 32, 8, 4 * 1601, 32),
)


@dataclass(frozen=True)
class Case:
    """One step: ``batch`` requests, each with E = ``encoder_len`` and ``decoded`` decoder
    tokens; a prefill of so many if ``decoding`` is False. The first ``text_only`` requests
    have no encoder."""

    model: str
    page_size: int
    batch: int
    encoder_len: int
    decoded: int
    decoding: bool
    text_only: int = 0


def model(name: str) -> Model:
    return next(m for m in MODELS if m.name == name)


def cases(quick: bool) -> list[Case]:
    """A base point per model, and from it each figure changed by itself."""
    found: list[Case] = []
    for m in MODELS:
        base = Case(m.name, 64, 4, m.encoder_len, 64, decoding=True)
        change = dataclasses.replace
        found += [base, change(base, decoded=m.prompt_len, decoding=False)]
        found += [change(base, text_only=n) for n in (1, 4)]
        if quick:
            continue
        found.append(change(base, page_size=128))
        found += [change(base, batch=n) for n in (1, 2, 8)]
        found += [change(base, decoded=n) for n in (1, 16, 128, 256, 448)]
        found += [
            change(base, encoder_len=n) for n in (64, 500, 1500, 1601, 3202) if n != m.encoder_len
        ]
        prefill = change(base, decoded=m.prompt_len, decoding=False)
        found += [change(prefill, batch=n) for n in (1, 8)] + [change(prefill, text_only=1)]
    return found


def batch_of(case: Case) -> Batch:
    """The lengths of a case."""
    encoders = (0,) * case.text_only + (case.encoder_len,) * (case.batch - case.text_only)
    decoded = (case.decoded,) * case.batch
    return Batch(encoders, decoded, None if case.decoding else decoded)
