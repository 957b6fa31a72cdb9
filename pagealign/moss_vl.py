"""What a MossVL needs and neither SGLang nor transformers has: its configuration and processor.

Both are code on a hub beside the published weights. The fields of the configuration are
those that SGLang's ``models/moss_vl.py`` reads; the processor's output is what its
``multimodal/processors/moss_vl.py`` says it takes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import torch
from transformers import AutoConfig, PreTrainedConfig


class MossVLVisionConfig(PreTrainedConfig):
    model_type = "moss_vl_vision"
    base_config_key = "vision_config"


class MossVLTextConfig(PreTrainedConfig):
    model_type = "moss_vl_text"
    base_config_key = "text_config"
    # Declared, so that transformers 5 leaves both where SGLang's model looks for them.
    rope_theta: float = 1_000_000.0
    rope_scaling: dict | None = None


class MossVLConfig(PreTrainedConfig):
    """``MossVLForConditionalGeneration``; importing this module registers it."""

    model_type = "moss_vl"
    sub_configs = {"vision_config": MossVLVisionConfig, "text_config": MossVLTextConfig}
    vision_config: dict | PreTrainedConfig | None = None
    text_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 5

    def __post_init__(self, **kwargs):
        for name, config_class in self.sub_configs.items():
            value = getattr(self, name)
            if not isinstance(value, PreTrainedConfig):
                setattr(self, name, config_class(**(value or {})))
        super().__post_init__(**kwargs)


AutoConfig.register(MossVLConfig.model_type, MossVLConfig)


@dataclasses.dataclass(frozen=True)
class Media:
    """The images and videos of one request, in the order of their tokens in the prompt.

    ``pixel_values``: float32 ``[sum of t * h * w, 3 * 2 * patch * patch]``, a row per patch, the
    patches of a merged block together. ``grid_thw``: int64 ``[media, 3]``, frames and patches
    down and across. The prompt has one image token per frame.
    """

    pixel_values: torch.Tensor
    grid_thw: torch.Tensor


def processor_output(
    config: PreTrainedConfig,
    input_ids: tuple[int, ...],
    media: Media | None,
    check_finite: bool = False,
):
    """SGLang's ``MultimodalProcessorOutput`` of a request, with or without media.

    All by SGLang's own processor class, from what the hub's processor gives it. A token
    sees the frames whose image tokens are not behind it. ``check_finite``: let the processor
    refuse features with NaN or infinity, as a server's does; the bed takes any.
    """
    from sglang.srt.multimodal.processors.moss_vl import MossVLImageProcessor

    ids = torch.tensor([input_ids])
    output = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if media is not None:
        frames_so_far = (ids == config.image_token_id).cumsum(-1)
        frames = int(media.grid_thw[:, 0].sum())
        output |= {
            "pixel_values": media.pixel_values,
            "grid_thw": media.grid_thw,
            "media_nums_per_sample": [len(media.grid_thw)],
            # [1, 1, text, frames], True where masked
            "cross_attention_mask": torch.arange(frames) >= frames_so_far[:, None, :, None],
        }

    class Processor(MossVLImageProcessor):
        def __init__(self):
            self.hf_config = config
            self.image_token_id = config.image_token_id
            self.image_only_mm_tokens = None
            self.vision_seq_pad_multiple = 1
            self.use_cuda_ipc = False

        def _check_features_finite(self, mm_items):
            if check_finite:
                super()._check_features_finite(mm_items)

        async def load_mm_data(self, **_):
            return SimpleNamespace(input_text=None, images=None)

        def process_mm_data(self, **_):
            return output

    request = SimpleNamespace(video_data=None)
    return asyncio.run(Processor().process_mm_data_async(None, None, request))
