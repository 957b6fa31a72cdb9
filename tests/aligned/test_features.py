"""Features that hold NaN or infinity are refused where SGLang's processors make them."""

import asyncio
import math
import struct
from types import SimpleNamespace

import pytest
import torch
from bed_fixtures import image

from pagealign.moss_vl import Media, MossVLConfig, processor_output

SAMPLES = 16000
BAD = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])


def wav(value: float) -> bytes:
    """A second of silence as a WAV file of float32 samples, ``value`` in its middle."""
    samples = [0.0] * SAMPLES
    samples[SAMPLES // 2] = value
    data = struct.pack(f"<{SAMPLES}f", *samples)
    kind = struct.pack("<HHIIHH", 3, 1, SAMPLES, 4 * SAMPLES, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", 16) + kind + b"data" + struct.pack("<I", len(data))
    return b"RIFF" + struct.pack("<I", len(body) + len(data)) + body + data


def whisper_features(value: float) -> torch.Tensor:
    from sglang.srt.entrypoints.openai.transcription_adapters.whisper import FUSED_AUTODETECT_FLAG
    from sglang.srt.multimodal.processors.whisper import WhisperProcessor
    from transformers import WhisperFeatureExtractor

    processor = object.__new__(WhisperProcessor)
    processor.hf_config = SimpleNamespace(decoder_start_token_id=4)
    processor._processor = SimpleNamespace(feature_extractor=WhisperFeatureExtractor())
    request = SimpleNamespace(sampling_params={FUSED_AUTODETECT_FLAG: True})
    output = asyncio.run(processor.process_mm_data_async(None, [wav(value)], "", request))
    return output.mm_items[0].feature


def mllama_features(value: float) -> torch.Tensor:
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
    from sglang.srt.multimodal.processors.mlama import MllamaImageProcessor

    pixels = image(1, 10)
    pixels[0, 0, 0, 0, 0, 0] = value

    class Processor(MllamaImageProcessor):
        def __init__(self):
            self.mm_tokens = SimpleNamespace(image_token_id=5)
            self.use_cuda_ipc = self.precompute_hash_before_cpu_transfer = False

        async def load_mm_data(self, **_):
            return None

        async def process_and_combine_mm_data_async(self, *_):
            items = [MultimodalDataItem(modality=Modality.IMAGE, feature=pixels)]
            return self._finalize_mm_items(items, images=None), torch.tensor([2, 5]), None

    return asyncio.run(Processor().process_mm_data_async(None, "")).mm_items[0].feature


def moss_vl_features(value: float) -> torch.Tensor:
    pixels = torch.zeros(4, 96)
    pixels[1, 2] = value
    config = MossVLConfig(vision_config={"spatial_merge_size": 2})
    media = Media(pixels, torch.tensor([[1, 2, 2]]))
    return processor_output(config, (2, 5, 7), media, check_finite=True).mm_items[0].feature


MODELS = pytest.mark.parametrize(
    ("features", "modality", "shape"),
    [
        pytest.param(whisper_features, "audio", (80, 3000), id="whisper"),
        pytest.param(mllama_features, "image", (1, 1, 4, 3, 56, 56), id="mllama"),
        pytest.param(moss_vl_features, "image", (4, 96), id="moss_vl"),
    ],
)


@MODELS
def test_finite_features_pass(features, modality, shape):
    made = features(0.5)
    assert made.shape == shape and made.isfinite().all()
    if features is not whisper_features:
        assert (made == 0.5).sum() == 1


@BAD
@MODELS
def test_others_are_refused(features, modality, shape, value):
    with pytest.raises(ValueError, match=f"^The {modality} features are not finite"):
        features(value)


def test_the_answer_is_400(monkeypatch):
    """Of SGLang's own /generate, from a tokenizer manager that runs the processor."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def generate_request(obj, request):
        yield {"features": len(await asyncio.to_thread(whisper_features, math.nan))}

    manager = SimpleNamespace(generate_request=generate_request)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    response = asyncio.run(http_server.serve_generate_request(GenerateReqInput(text=""), None))
    assert response.status_code == 400
    assert b"The audio features are not finite" in response.body
