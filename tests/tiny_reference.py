"""What Hugging Face transformers answers with the tiny models' weights, in float32.

Greedy, without a cache: every step runs the whole text, so nothing of a KV layout can
enter. Log-probabilities are natural logs of the chosen tokens.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

Answer = tuple[list[int], list[float]]


def _once_per_input(answer):
    """Cache by content: the same case comes again for each backend and page size."""
    cache: dict[tuple, Answer] = {}

    @functools.wraps(answer)
    def cached(folder, features, prompt, max_new_tokens, *rest):
        content = None if features is None else features.numpy().tobytes()
        key = (folder, content, prompt, max_new_tokens, *rest)
        if key not in cache:
            cache[key] = answer(folder, features, prompt, max_new_tokens, *rest)
        return cache[key]

    return cached


def _greedy(logits_of, prompt: tuple[int, ...], max_new_tokens: int) -> Answer:
    ids, chosen, logprobs = list(prompt), [], []
    for _ in range(max_new_tokens):
        row = logits_of(torch.tensor([ids]))[0, -1].log_softmax(-1)
        token = int(row.argmax())
        ids.append(token)
        chosen.append(token)
        logprobs.append(float(row[token]))
    return chosen, logprobs


@functools.cache
def _whisper(folder: Path, no_encoder: bool):
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    if no_encoder:
        # Values of zero give cross-attention a zero context, whatever its keys are:
        # what an empty key set gives. out_proj and its bias stay.
        for layer in model.model.decoder.layers:
            layer.encoder_attn.v_proj.weight.data.zero_()
            layer.encoder_attn.v_proj.bias.data.zero_()
    return model


@_once_per_input
@torch.inference_mode()
def whisper_answer(
    folder: Path, features: torch.Tensor | None, prompt: tuple[int, ...], max_new_tokens: int
) -> Answer:
    """``features``: float32 ``[1, 80, 2E]``, or None for a request without audio."""
    model = _whisper(folder, features is None)
    if features is None:
        features = torch.zeros(1, 80, 2 * model.config.max_source_positions)
    states = model.model.encoder(features).last_hidden_state
    return _greedy(
        lambda ids: model(encoder_outputs=(states,), decoder_input_ids=ids).logits,
        prompt,
        max_new_tokens,
    )


@functools.cache
def _mllama(folder: Path):
    from transformers import MllamaForConditionalGeneration

    model = MllamaForConditionalGeneration.from_pretrained(folder).eval()
    # The intermediate states are the inputs of the indexed layers, in Meta's model and
    # in SGLang; transformers 5.19 takes their outputs.
    vision = model.model.vision_model
    vision.intermediate_layers_indices = [i - 1 for i in vision.intermediate_layers_indices]
    return model


@_once_per_input
@torch.inference_mode()
def mllama_answer(
    folder: Path,
    features: torch.Tensor | None,
    prompt: tuple[int, ...],
    max_new_tokens: int,
    real_tiles: int = 4,
) -> Answer:
    """``features``: float32 ``[1, images, 4, 3, 56, 56]``, or None for text only.

    ``real_tiles``: how many of each image's four tiles are not padding.
    """
    model = _mllama(folder)

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        if features is None:
            return model(input_ids=ids, use_cache=False).logits
        _, count, tiles = features.shape[:3]
        images = {
            "pixel_values": features,
            # transformers numbers 1x4 tiles as 4
            "aspect_ratio_ids": torch.full((1, count), real_tiles),
            "aspect_ratio_mask": (torch.arange(tiles) < real_tiles).long().repeat(1, count, 1),
            # Every token sees every tile, as in SGLang. Without a mask transformers 5.19 makes
            # cross-attention causal.
            "cross_attention_mask": torch.ones(1, ids.shape[1], count, tiles),
        }
        return model(input_ids=ids, use_cache=False, **images).logits

    return _greedy(logits_of, prompt, max_new_tokens)
