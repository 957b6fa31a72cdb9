"""Tiny random Whisper and Mllama folders, small enough to prefill in milliseconds.

Built from transformers' own configurations, so that transformers with the same
weights is the reference. Deviations from the defaults have a reason each: a wide
initialisation, so that other audio gives other tokens; Mllama's gates at 0.8, since
at their default of 0 cross-attention has no effect.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

VOCAB = 1000
WHISPER_MELS = 80


def tiny_whisper(folder: Path, encoder_len: int, *, seed: int = 0) -> Path:
    """A Whisper of 2 + 2 layers, 1 head of size 64, E = ``encoder_len``.

    Its input features are float32 ``[1, 80, 2 * encoder_len]``. The head size is one
    that the XPU kernels are built for.
    """
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=WHISPER_MELS,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=encoder_len,
        max_target_positions=448,
        init_std=0.3,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=4,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    # transformers initialises biases to zero; cross-attention's out_proj bias decides
    # what an empty encoder contributes, so give every bias a value.
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".bias"):
                param.normal_(std=0.1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "feature_extractor_type": "WhisperFeatureExtractor",
                "feature_size": WHISPER_MELS,
                "chunk_length": 30,
            }
        )
    )
    return folder


MLLAMA_IMAGE, MLLAMA_PATCH, MLLAMA_TILES = 56, 14, 4
# 4 x 4 patches and a class token per tile, 4 tiles per image
MLLAMA_TILE_LEN = (MLLAMA_IMAGE // MLLAMA_PATCH) ** 2 + 1


def tiny_mllama(folder: Path, *, seed: int = 0) -> Path:
    """A Mllama of 4 text layers (1 and 3 cross), GQA 2:1, head size 64.

    ``pixel_values`` are float32 ``[1, images, tiles, 3, 56, 56]``; E = images x tiles
    x 17.
    """
    from transformers import MllamaConfig, MllamaForConditionalGeneration
    from transformers.models.mllama.configuration_mllama import (
        MllamaTextConfig,
        MllamaVisionConfig,
    )

    torch.manual_seed(seed)
    config = MllamaConfig(
        vision_config=MllamaVisionConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_global_layers=1,
            attention_heads=2,
            intermediate_size=64,
            # one intermediate layer beside the output: 64 + 64
            vision_output_dim=128,
            image_size=MLLAMA_IMAGE,
            patch_size=MLLAMA_PATCH,
            max_num_tiles=MLLAMA_TILES,
            intermediate_layers_indices=[1],
            initializer_range=0.2,
        ),
        text_config=MllamaTextConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=128,
            cross_attention_layers=[1, 3],
            max_position_embeddings=2048,
            initializer_range=0.2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=3,
        ),
        image_token_index=5,
    )
    model = MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("cross_attn_attn_gate", "cross_attn_mlp_gate")):
                param.fill_(0.8)
            elif (
                "vision_model" in name
                and name.endswith("gate")
                or "gate_" in name
                and param.numel() == 1
            ):
                param.fill_(0.5)
    model.save_pretrained(folder)
    return folder
