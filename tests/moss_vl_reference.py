"""What a MossVL answers, in plain torch and float64, from its folder alone.

transformers has no MossVL and the published model's code is on a hub, so this is a second
implementation of the architecture that SGLang's ``models/moss_vl.py`` states: a vision
tower with interpolated positions and deepstack features, and a text decoder with
interleaved three-axis rotary positions, cross-attention layers, a mask by frames and row
gates. Greedy, without a cache: every step runs the whole text, so nothing of a KV layout can
enter. Log-probabilities are natural logs of the chosen tokens.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu, layer_norm, silu

from pagealign.moss_vl import Media

Answer = tuple[list[int], list[float]]


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + D/2) of ``x`` ``[N, heads, D]`` by ``angles`` ``[N, D/2]``."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Softmax attention; ``q`` ``[N, heads, D]``, ``k`` and ``v`` ``[M, kv_heads, D]``,
    ``seen`` bool ``[N, M]``. A row that sees nothing gives zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v)


class MossVL:
    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.image_token = config["image_token_id"]
        self.text = SimpleNamespace(**config["text_config"])
        self.vision = SimpleNamespace(**config["vision_config"])
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.double() for name, tensor in stored.items()}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weights[f"{name}.weight"].flatten(1).T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def rms_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.text.rms_norm_eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def layer_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return layer_norm(x, x.shape[-1:], weight, bias, eps=1e-6)

    # vision

    def frame(self, patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """One frame's tokens ``[h * w / merge^2, hidden]`` from ``[h * w, values]``."""
        vision, root = self.vision, "model.visual"
        merge, heads = vision.spatial_merge_size, vision.num_heads
        dim = vision.hidden_size // heads
        # Row and column of each patch; the patches of a merged block are together.
        place = torch.tensor(
            [
                (top + i, left + j)
                for top in range(0, height, merge)
                for left in range(0, width, merge)
                for i in range(merge)
                for j in range(merge)
            ]
        ).double()
        x = self.linear(f"{root}.patch_embed.proj", patches.double())
        x = x + self.position_embedding(place, height, width)
        frequencies = 10000.0 ** (-torch.arange(0, dim // 2, 2).double() / (dim // 2))
        angles = (place.unsqueeze(-1) * frequencies).flatten(1)
        seen = torch.ones(len(x), len(x), dtype=torch.bool)
        deepstack = []
        for i in range(vision.depth):
            layer = f"{root}.blocks.{i}"
            qkv = self.linear(f"{layer}.attn.qkv", self.layer_norm(f"{layer}.norm1", x))
            q, k, v = qkv.view(len(x), 3, heads, dim).unbind(1)
            context = attend(rotate(q, angles), rotate(k, angles), v, seen)
            x = x + self.linear(f"{layer}.attn.proj", context.flatten(1))
            inner = self.linear(f"{layer}.mlp.linear_fc1", self.layer_norm(f"{layer}.norm2", x))
            x = x + self.linear(f"{layer}.mlp.linear_fc2", gelu(inner, approximate="tanh"))
            if i in vision.deepstack_visual_indexes:
                deepstack.append(x)
        features = [
            self.layer_norm(f"{root}.merger.norms.{i}", part)
            for i, part in enumerate([x, *deepstack])
        ]
        blocks = torch.cat(features, dim=-1).view(len(x) // merge**2, -1)
        inner = gelu(self.linear(f"{root}.merger.linear_fc1", blocks))
        return self.linear(f"{root}.merger.linear_fc2", inner)

    def position_embedding(self, place: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The learnt square of positions, stretched over the frame, bilinearly."""
        side = int(self.vision.num_position_embeddings**0.5)
        square = self.weights["model.visual.pos_embed.weight"].view(side, side, -1)
        at = place * (side - 1) / (torch.tensor([height, width]).double() - 1)
        low = at.floor().long()
        high = (low + 1).clamp(max=side - 1)
        (dy, dx), (y0, x0), (y1, x1) = (at - low).T.unsqueeze(-1), low.T, high.T
        top = square[y0, x0] * (1 - dx) + square[y0, x1] * dx
        bottom = square[y1, x0] * (1 - dx) + square[y1, x1] * dx
        return top * (1 - dy) + bottom * dy

    def encode(self, media: Media) -> list[torch.Tensor]:
        """Per frame its tokens ``[n + 1, hidden]``, the separator last."""
        separator = self.weights["model.separator_token"].unsqueeze(0)
        frames, start = [], 0
        for t, height, width in media.grid_thw.tolist():
            for _ in range(t):
                patches = media.pixel_values[start : start + height * width]
                frames.append(torch.cat((self.frame(patches, height, width), separator)))
                start += height * width
        return frames

    # text

    def positions(
        self, marks: list[bool], media: Media | None
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """(time, row, column) of each text token and of each encoder token.

        ``marks``: which text tokens stand for a frame.

        A frame starts at the next free position; its separator and its image token both
        stand one past its longer side.
        """
        merge = self.vision.spatial_merge_size
        grid = [] if media is None else media.grid_thw.tolist()
        sizes = iter([(h // merge, w // merge) for t, h, w in grid for _ in range(t)])
        text, encoder, free = [], [], 0
        for mark in marks:
            if mark:
                height, width = next(sizes)
                for y in range(height):
                    encoder += [(free, free + y, free + x) for x in range(width)]
                free += max(height, width)
                encoder.append((free,) * 3)
            text.append((free,) * 3)
            free += 1
        return text, encoder

    def angles(self, positions: list[tuple[int, int, int]]) -> torch.Tensor:
        """``[N, D/2]``: of each three neighbouring pairs one turns by time, one by row and
        one by column, while the sections of rows and columns last; the rest by time."""
        half = self.text.head_dim // 2
        sections = self.text.rope_scaling["mrope_section"]
        axis = torch.tensor([i % 3 if i // 3 < sections[i % 3] else 0 for i in range(half)])
        frequencies = self.text.rope_theta ** (-torch.arange(half).double() / half)
        return torch.tensor(positions).double()[:, axis] * frequencies

    def attention(
        self, name: str, x: torch.Tensor, source: torch.Tensor, turns, seen: torch.Tensor
    ) -> torch.Tensor:
        dim = self.text.head_dim
        q = self.linear(f"{name}.q_proj", x).view(len(x), -1, dim)
        k = self.linear(f"{name}.k_proj", source).view(len(source), -1, dim)
        v = self.linear(f"{name}.v_proj", source).view(len(source), -1, dim)
        q = rotate(self.rms_norm(f"{name}.q_norm", q), turns[0])
        k = rotate(self.rms_norm(f"{name}.k_norm", k), turns[1])
        return self.linear(f"{name}.o_proj", attend(q, k, v, seen).flatten(1))

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", silu(gate) * up)

    def logits(
        self,
        prompt: tuple[int, ...],
        answer: list[int],
        media: Media | None,
        frames: list[torch.Tensor],
    ) -> torch.Tensor:
        """Of the next token; ``frames`` is what ``encode`` gave. An image token in the
        answer is a word like any other."""
        ids = [*prompt, *answer]
        marks = [token == self.image_token for token in prompt] + [False] * len(answer)
        text_at, encoder_at = self.positions(marks, media)
        turns = self.angles(text_at)
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        if frames:
            encoder, encoder_turns = torch.cat(frames), self.angles(encoder_at)
            # A token sees the frames whose image tokens are not behind it.
            number = torch.cat([torch.full((len(f),), i) for i, f in enumerate(frames)])
            begun = torch.tensor(marks).cumsum(0)
            seen = number < begun.unsqueeze(1)
            sees_any = seen.any(1, keepdim=True)
        x = self.weights["model.language_model.embed_tokens.weight"][ids]
        for i in range(self.text.num_hidden_layers):
            layer = f"model.language_model.layers.{i}"
            cross = i in self.text.cross_attention_layers
            if cross and not frames:
                continue
            source = normed = self.rms_norm(f"{layer}.input_layernorm", x)
            if cross:
                y = self.attention(
                    f"{layer}.cross_attn", normed, encoder, (turns, encoder_turns), seen
                )
                y = y * sees_any * self.weights[f"{layer}.cross_attn_attn_gate"].tanh()
            else:
                y = self.attention(f"{layer}.self_attn", normed, source, (turns, turns), causal)
            x = x + y
            y = self.mlp(f"{layer}.mlp", self.rms_norm(f"{layer}.post_attention_layernorm", x))
            if cross:
                y = y * sees_any * self.weights[f"{layer}.cross_attn_mlp_gate"].tanh()
            x = x + y
        last = self.rms_norm("model.language_model.norm", x[-1:])
        return self.linear("lm_head", last)[0]


_model = functools.cache(MossVL)


def moss_vl_answer(
    folder: Path, media: Media | None, prompt: tuple[int, ...], max_new_tokens: int
) -> Answer:
    """Greedy tokens and their log-probabilities."""
    model = _model(folder)
    ids, logprobs = [], []
    frames = [] if media is None else model.encode(media)
    for _ in range(max_new_tokens):
        row = model.logits(prompt, ids, media, frames).log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row[ids[-1]]))
    return ids, logprobs
