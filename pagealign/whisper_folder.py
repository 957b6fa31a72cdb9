"""Turn a CTranslate2 Whisper model into a Hugging Face folder.

The two differ in names, in fused projections (``linear_0`` of self-attention is q, k, v;
``linear_1`` of cross-attention is k, v) and in Whisper's k having no bias, for which the
fused vector holds zeros. Weights keep their dtype, float16 for the pinned files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagealign.ctranslate2 import Ct2Model
from pagealign.errors import PagealignError

# Flags and scalars of CTranslate2's runtime; the ones that matter are read by name.
_FLAGS = {
    "decoder/activation",
    "decoder/alibi",
    "decoder/alignment_heads",
    "decoder/alignment_layer",
    "decoder/num_heads",
    "decoder/pre_norm",
    "decoder/scale_embeddings",
    "decoder/start_from_zero_embedding",
    "decoder/projection/weight",  # tied to the embeddings
    "encoder/num_heads",
}


@dataclass(frozen=True)
class WhisperShape:
    """A Whisper's sizes; lengths in positions, ``vocab_size`` in tokens."""

    vocab_size: int
    width: int
    ffn: int
    mels: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    source_positions: int
    target_positions: int


def shape_of(model: Ct2Model) -> WhisperShape:
    """The sizes, read from the variables' shapes and the stored number of heads."""
    v = model.variables

    def layers(stack: str) -> int:
        return len(
            {name.split("/")[1] for name in v if name.startswith(f"{stack}/layer_")}
            - {"layer_norm"}
        )

    try:
        if model.spec != "WhisperSpec":
            raise PagealignError(f"a CTranslate2 Whisper is wanted, this is a {model.spec}")
        vocab_size, width = v["decoder/embeddings/weight"].shape
        return WhisperShape(
            vocab_size=vocab_size,
            width=width,
            ffn=v["encoder/layer_0/ffn/linear_0/weight"].shape[0],
            mels=v["encoder/conv1/weight"].shape[1],
            encoder_layers=layers("encoder"),
            decoder_layers=layers("decoder"),
            heads=int(v["decoder/num_heads"]),
            source_positions=v["encoder/position_encodings/encodings"].shape[0],
            target_positions=v["decoder/position_encodings/encodings"].shape[0],
        )
    except KeyError as error:
        raise PagealignError(f"the CTranslate2 Whisper lacks the variable {error}") from None


def _layer(ct2: str, hf: str, cross: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(CTranslate2 prefix, the HF prefixes that its rows are split into) of one layer."""
    attention = f"{ct2}/self_attention"
    yield f"{attention}/layer_norm", (f"{hf}.self_attn_layer_norm",)
    yield f"{attention}/linear_0", tuple(f"{hf}.self_attn.{p}_proj" for p in "qkv")
    yield f"{attention}/linear_1", (f"{hf}.self_attn.out_proj",)
    if cross:
        attention = f"{ct2}/attention"
        yield f"{attention}/layer_norm", (f"{hf}.encoder_attn_layer_norm",)
        yield f"{attention}/linear_0", (f"{hf}.encoder_attn.q_proj",)
        yield f"{attention}/linear_1", tuple(f"{hf}.encoder_attn.{p}_proj" for p in "kv")
        yield f"{attention}/linear_2", (f"{hf}.encoder_attn.out_proj",)
    yield f"{ct2}/ffn/layer_norm", (f"{hf}.final_layer_norm",)
    yield f"{ct2}/ffn/linear_0", (f"{hf}.fc1",)
    yield f"{ct2}/ffn/linear_1", (f"{hf}.fc2",)


def _modules(shape: WhisperShape) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every (CTranslate2 prefix, HF prefixes) pair of the model."""
    for stack, count in (("encoder", shape.encoder_layers), ("decoder", shape.decoder_layers)):
        for i in range(count):
            yield from _layer(
                f"{stack}/layer_{i}", f"model.{stack}.layers.{i}", cross=stack == "decoder"
            )
        yield f"{stack}/layer_norm", (f"model.{stack}.layer_norm",)
        yield f"{stack}/position_encodings", (f"model.{stack}.embed_positions",)
    yield "encoder/conv1", ("model.encoder.conv1",)
    yield "encoder/conv2", ("model.encoder.conv2",)
    yield "decoder/embeddings", ("model.decoder.embed_tokens",)


def state_dict(model: Ct2Model) -> dict[str, np.ndarray]:
    """The weights under Hugging Face's names, each contiguous, in their own dtype.

    Every variable of the file is used once or is a known flag; anything else, or a k bias
    that isn't zero, raises PagealignError. ``proj_out`` is tied and left out.
    """
    leaves = {
        "weight": "weight",
        "encodings": "weight",
        "gamma": "weight",
        "bias": "bias",
        "beta": "bias",
    }
    left, out = dict(model.variables), {}
    for prefix, names in _modules(shape_of(model)):
        for leaf, hf_leaf in leaves.items():
            fused = left.pop(f"{prefix}/{leaf}", None)
            if fused is None:
                continue
            if fused.shape[0] % len(names):
                raise PagealignError(f"{prefix}/{leaf} doesn't split into {len(names)} parts")
            for name, part in zip(names, np.split(fused, len(names)), strict=True):
                if hf_leaf == "bias" and name.endswith(".k_proj"):
                    if part.any():
                        raise PagealignError(f"{prefix}/{leaf} has a k bias, Whisper has none")
                    continue
                out[f"{name}.{hf_leaf}"] = np.ascontiguousarray(part)
    if unknown := sorted(set(left) - _FLAGS):
        raise PagealignError(f"unknown variables in the CTranslate2 Whisper: {unknown[:5]}")
    return out


def _tokenizer(tokenizer: dict, vocab_size: int) -> dict:
    """``tokenizer`` with the timestamp tokens <|0.00|> .. that fill the vocabulary up."""
    added = list(tokenizer["added_tokens"])
    first = max(token["id"] for token in added) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added += [
        {"id": i, "content": f"<|{(i - first) * 0.02:.2f}|>", **flags}
        for i in range(first, vocab_size)
    ]
    return {**tokenizer, "added_tokens": added}


def _configs(shape: WhisperShape, ids: Mapping[str, int], runtime: Mapping) -> tuple:
    """transformers' own config, generation config and feature extractor objects."""
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor

    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    special = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
    }
    config = WhisperConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.width,
        num_mel_bins=shape.mels,
        encoder_layers=shape.encoder_layers,
        decoder_layers=shape.decoder_layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=shape.ffn,
        decoder_ffn_dim=shape.ffn,
        max_source_positions=shape.source_positions,
        max_target_positions=shape.target_positions,
        architectures=["WhisperForConditionalGeneration"],
        dtype="float16",
        **special,
    )
    generation = GenerationConfig(
        **special,
        max_length=shape.target_positions,
        is_multilingual=True,
        return_timestamps=False,
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        lang_to_id={token: i for token, i in ids.items() if i in set(runtime.get("lang_ids", ()))},
        task_to_id={"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        suppress_tokens=list(runtime.get("suppress_ids", ())),
        begin_suppress_tokens=list(runtime.get("suppress_ids_begin", ())),
        alignment_heads=[list(pair) for pair in runtime.get("alignment_heads", ())],
        max_initial_timestamp_index=50,
    )
    extractor = WhisperFeatureExtractor(
        feature_size=shape.mels,
        sampling_rate=16000,
        # two mel frames, 10 ms apart, per encoder position
        chunk_length=shape.source_positions * 2 // 100,
    )
    extractor._processor_class = "WhisperProcessor"
    return config, generation, extractor


def check_keys(weights: Mapping[str, np.ndarray], config: object) -> None:
    """PagealignError unless ``weights`` has exactly the model's keys and shapes.

    The model is built on torch's meta device, so it costs no memory; ``proj_out`` is
    tied to the embeddings and not stored.
    """
    import torch
    from transformers import WhisperForConditionalGeneration

    with torch.device("meta"):
        expected = WhisperForConditionalGeneration(config).state_dict()
    wanted = {k: tuple(t.shape) for k, t in expected.items() if k != "proj_out.weight"}
    found = {k: a.shape for k, a in weights.items()}
    if wrong := sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k)):
        raise PagealignError(f"the converted Whisper doesn't match transformers': {wrong[:5]}")


def write_folder(model: Ct2Model, tokenizer: dict, runtime: Mapping, folder: Path) -> None:
    """Write a complete Hugging Face Whisper into the existing ``folder``.

    ``tokenizer`` is the shipped ``tokenizer.json``, ``runtime`` CTranslate2's
    ``config.json`` (language ids, suppressed ids, alignment heads).
    """
    from safetensors.numpy import save_file

    shape = shape_of(model)
    full = _tokenizer(tokenizer, shape.vocab_size)
    ids = {token["content"]: token["id"] for token in full["added_tokens"]}
    config, generation, extractor = _configs(shape, ids, runtime)
    weights = state_dict(model)
    check_keys(weights, config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for part in (config, generation, extractor):
        part.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(full, ensure_ascii=False), "utf-8")
    end = "<|endoftext|>"
    tokenizer_config = {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "add_prefix_space": False,
        "model_max_length": shape.target_positions,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), end),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
