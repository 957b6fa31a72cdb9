"""Tiny random Whisper, Mllama, MossVL and Llama folders, small enough to prefill in milliseconds.

All but MossVL are built from transformers' own configurations, so that transformers
with the same weights is the reference; transformers has no MossVL. Deviations from the
defaults have a reason each: a wide initialisation, so that other audio gives other
tokens; the gates of Mllama and MossVL at 0.8, since at their default of 0
cross-attention has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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


_MLLAMA_SPECIAL = (
    "<unk>", "<pad>", "<s>", "</s>", "<start>", "<|image|>", "<|python_tag|>", "<|eot_id|>"
)  # fmt: skip
_MLLAMA_CHAT = """\
{{ bos_token }}{% for message in messages %}{% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<|image|>{% endif %}\
{% endfor %}{% endif %}<|eot_id|>{% endfor %}"""


def tiny_mllama_processor(folder: Path) -> Path:
    """Give a ``tiny_mllama`` folder what a server needs: tokenizer, image processor, template.

    The tokenizer has one token per byte and no merges, after the special ones; the ids that
    are left have letters each, so that whatever the model says is text.
    """
    from itertools import islice, product
    from string import ascii_lowercase

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import MllamaImageProcessor, MllamaProcessor, PreTrainedTokenizerFast

    pieces = [*_MLLAMA_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = ("".join(pair) for pair in product(ascii_lowercase, repeat=2))
    # 26 * 26 pairs are fewer than the ids that are left, so three letters follow
    triples = ("".join(three) for three in product(ascii_lowercase, repeat=3))
    pieces += islice((p for group in (pairs, triples) for p in group), VOCAB - len(pieces))
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in _MLLAMA_SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    images = MllamaImageProcessor(
        size={"height": MLLAMA_IMAGE, "width": MLLAMA_IMAGE}, max_image_tiles=MLLAMA_TILES
    )
    MllamaProcessor(images, fast, chat_template=_MLLAMA_CHAT).save_pretrained(folder)
    return folder


def tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """A decoder-only Llama of 2 layers, GQA 2:1, head size 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=2048,
        initializer_range=0.2,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


MOSS_VL_PATCH, MOSS_VL_TEMPORAL_PATCH, MOSS_VL_MERGE = 4, 2, 2
MOSS_VL_PATCH_VALUES = 3 * MOSS_VL_TEMPORAL_PATCH * MOSS_VL_PATCH**2


def tiny_moss_vl(folder: Path, *, seed: int = 0) -> Path:
    """A MossVL of 4 text layers (1 and 3 cross), GQA 2:1, head size 64; 3 vision layers.

    A frame of h x w patches has h * w / 4 + 1 encoder tokens, the last one a separator.
    Names and shapes of the weights are those that ``load_weights`` of SGLang's
    ``models/moss_vl.py`` maps. Loading the folder needs ``pagealign.moss_vl`` imported.
    """
    from safetensors.torch import save_file

    from pagealign.moss_vl import MossVLConfig

    config = MossVLConfig(
        architectures=["MossVLForConditionalGeneration"],
        vision_config=dict(
            hidden_size=32,
            num_heads=2,
            depth=3,
            deepstack_visual_indexes=[0, 1],
            intermediate_size=48,
            hidden_act="gelu_pytorch_tanh",
            in_channels=3,
            patch_size=MOSS_VL_PATCH,
            temporal_patch_size=MOSS_VL_TEMPORAL_PATCH,
            spatial_merge_size=MOSS_VL_MERGE,
            num_position_embeddings=36,
            out_hidden_size=128,
        ),
        text_config=dict(
            vocab_size=VOCAB,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            intermediate_size=128,
            hidden_act="silu",
            rms_norm_eps=1e-6,
            attention_bias=False,
            cross_attention_layers=[1, 3],
            max_position_embeddings=2048,
            rope_theta=10000.0,
            rope_scaling={
                "rope_type": "default",
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=3,
        ),
        dtype="float32",
    )
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _moss_vl_shapes(config):
        if name.endswith("_gate"):
            weights[name] = torch.full(shape, 0.8)
        elif "norm" in name and name.endswith("weight"):
            weights[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            weights[name] = 0.2 * torch.randn(shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _moss_vl_shapes(config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a MossVL checkpoint's weights."""
    text, vision = config.text_config, config.vision_config
    hidden, width = text.hidden_size, text.intermediate_size
    queries = text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim

    yield "lm_head.weight", (text.vocab_size, hidden)
    yield "model.separator_token", (vision.out_hidden_size,)
    yield "model.language_model.embed_tokens.weight", (text.vocab_size, hidden)
    yield "model.language_model.norm.weight", (hidden,)
    for i in range(text.num_hidden_layers):
        layer = f"model.language_model.layers.{i}"
        attention = f"{layer}.self_attn"
        if i in text.cross_attention_layers:
            attention = f"{layer}.cross_attn"
            yield f"{layer}.cross_attn_attn_gate", (1,)
            yield f"{layer}.cross_attn_mlp_gate", (1,)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{attention}.q_proj.weight", (queries, hidden)
        yield f"{attention}.k_proj.weight", (keys, hidden)
        yield f"{attention}.v_proj.weight", (keys, hidden)
        yield f"{attention}.o_proj.weight", (hidden, queries)
        yield f"{attention}.q_norm.weight", (text.head_dim,)
        yield f"{attention}.k_norm.weight", (text.head_dim,)
        yield f"{layer}.mlp.gate_proj.weight", (width, hidden)
        yield f"{layer}.mlp.up_proj.weight", (width, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, width)

    hidden, width = vision.hidden_size, vision.intermediate_size
    patch = (vision.in_channels, vision.temporal_patch_size, *[vision.patch_size] * 2)
    features = 1 + len(vision.deepstack_visual_indexes)
    merged = hidden * vision.spatial_merge_size**2 * features

    def linear(name: str, rows: int, *columns: int):
        yield f"model.visual.{name}.weight", (rows, *columns)
        yield f"model.visual.{name}.bias", (rows,)

    yield "model.visual.pos_embed.weight", (vision.num_position_embeddings, hidden)
    yield from linear("patch_embed.proj", hidden, *patch)
    for i in range(vision.depth):
        yield from linear(f"blocks.{i}.norm1", hidden)
        yield from linear(f"blocks.{i}.norm2", hidden)
        yield from linear(f"blocks.{i}.attn.qkv", 3 * hidden, hidden)
        yield from linear(f"blocks.{i}.attn.proj", hidden, hidden)
        yield from linear(f"blocks.{i}.mlp.linear_fc1", width, hidden)
        yield from linear(f"blocks.{i}.mlp.linear_fc2", hidden, width)
    for i in range(features):
        yield from linear(f"merger.norms.{i}", hidden)
    yield from linear("merger.linear_fc1", merged, merged)
    yield from linear("merger.linear_fc2", vision.out_hidden_size, merged)
