"""The CPU graph runner's two captures, with and without cross-attention.

In this release only intel_amx has the three methods that the runner calls, and its
kernels need a CPU with AMX. torch_native needs nothing prepared, so it is given trivial
ones, and the model runs uncompiled: what is tested is which of the two captures a batch
takes, what it computes, and that ``skip_cross_attention`` is the capture's constant.
"""

import contextlib

import pytest
from bed_fixtures import PROMPT, assert_same, audio, image
from tiny_reference import mllama_answer, whisper_answer

from pagealign.bed import Request


@pytest.fixture
def cpu_graph_bed(make_bed, monkeypatch):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import cpu_graph_runner

    for name, value in (
        ("init_cpu_graph_state", None),
        ("init_forward_metadata_capture_cpu_graph", None),
        ("get_cpu_graph_seq_len_fill_value", 1),
    ):
        assert not hasattr(TorchNativeAttnBackend, name)  # else use the real ones
        monkeypatch.setattr(
            TorchNativeAttnBackend, name, lambda *args, value=value: value, raising=False
        )
    monkeypatch.setattr(cpu_graph_runner, "register_fake_ops", lambda tp_size: None)
    monkeypatch.setattr(cpu_graph_runner, "set_torch_compile_config", lambda: None)
    monkeypatch.setattr(
        cpu_graph_runner,
        "patch_model",
        lambda model, *args, **kwargs: contextlib.nullcontext(model.forward),
    )
    replays: list[tuple[int, bool]] = []
    execute = cpu_graph_runner.CPUGraphRunner.execute

    def recorded(self, forward_batch, pp_proxy_tensors=None):
        replays.append((forward_batch.batch_size, self._get_skip_cross_attention(forward_batch)))
        return execute(self, forward_batch, pp_proxy_tensors)

    monkeypatch.setattr(cpu_graph_runner.CPUGraphRunner, "execute", recorded)

    def make(model, page_size):
        bed = make_bed(
            model,
            "torch_native",
            page_size,
            disable_cuda_graph=False,
            enable_torch_compile=True,
            cuda_graph_bs_decode=[1, 2, 4],
        )
        return bed, replays

    return make


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("name", ["whisper", "mllama"])
def test_both_captures(cpu_graph_bed, whisper, mllama, name, page_size):
    if name == "whisper":
        model, answer = whisper(40), whisper_answer
        cases = [(audio(40, 0), PROMPT), (None, PROMPT), (audio(40, 1), PROMPT + (12,))]
    else:
        model, answer = mllama, mllama_answer
        cases = [(image(1, 0), (2, 5, 20, 11)), (None, (2, 10, 11)), (image(1, 1), (2, 5, 21))]
    bed, replays = cpu_graph_bed(model, page_size)
    text = cases[1]
    for batch in (cases, [text], [text] * 3, cases[:2], cases):
        results = bed.run([Request(prompt, f, max_new_tokens=20) for f, prompt in batch])
        for case, result in zip(batch, results, strict=True):
            assert_same(result, *answer(model, *case, 20))
    # a mixed batch takes the one with cross-attention; three rows are padded to four
    assert set(replays) == {(3, False), (1, True), (3, True), (2, False)}
