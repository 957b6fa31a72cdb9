"""Functions of the aligned tree, called alone: the skipped layer and the gap's arithmetic."""

import types
from array import array

import pytest
import torch

from pagealign import bed  # noqa: F401  (sets SGLang's environment before its import)


def test_whisper_skips_the_kernel_and_keeps_the_bias():
    from sglang.srt.models.whisper import WhisperAttention

    def unused(*args, **kwargs):
        raise AssertionError("called without an encoder")

    layer = types.SimpleNamespace(
        is_cross_attention=True, num_heads=2, head_dim=3, scaling=1.0,
        q_proj=unused, attn=unused, out_proj=lambda x: (x + 0.5, None),
    )  # fmt: skip
    batch = types.SimpleNamespace(skip_cross_attention=True)
    answer = WhisperAttention.forward(layer, torch.ones(4, 6), batch)
    assert answer.tolist() == [[0.5] * 6] * 4


@pytest.mark.parametrize(("page_size", "gap"), [(1, 0), (4, 3), (5, 0)])
def test_padding_returns_the_gap(page_size, gap):
    """E = 5: pages of 4 reserve 8."""
    from sglang.srt.managers.mm_utils import duplicate_pad_mm_input_ids

    inputs = types.SimpleNamespace(num_image_tokens=5)
    ids, returned = duplicate_pad_mm_input_ids(
        array("q", [1, 2]), inputs, lambda ids, _: array("q", [9] * 5) + ids, page_size
    )
    assert (ids.tolist(), returned) == ([9] * (5 + gap) + [1, 2], gap)


@pytest.mark.parametrize(
    ("offset", "kept"), [(7, [9] * 8 + [1, 2]), (5, [9] * 8), (-1, [9] * 8 + [1, 2, 3])]
)
def test_a_sessions_offset_counts_without_the_gap(offset, kept):
    """E = 5 and a gap of 3, a text of 1, 2, 3 and the answer 4."""
    from sglang.srt.session.session_controller import Session

    last = types.SimpleNamespace(
        origin_input_ids=array("q", [9] * 8 + [1, 2, 3]),
        origin_input_ids_unpadded=array("q", [1, 2, 3]),
        output_ids=array("q", [4]),
        sampling_params=types.SimpleNamespace(max_new_tokens=1),
        encoder_gap_len=3,
    )
    req = types.SimpleNamespace(input_ids=array("q", [7]))
    params = types.SimpleNamespace(drop_previous_output=False, offset=offset)
    ids, _ = Session._concat_token_arrays(last, req, params)
    assert ids.tolist() == [*kept, 7]


def test_the_rust_servers_abort_counts_without_the_gap():
    import msgspec
    from sglang.srt.rust_server.server import RustServer

    sent = []
    server = types.SimpleNamespace(
        push_decode_result_batch=lambda header, rows: sent.append(header) or True
    )
    abort = types.SimpleNamespace(
        rid="r", finished_reason={"type": "abort"}, abort_message=None, weight_versions=None
    )
    req = types.SimpleNamespace(
        origin_input_ids=[9] * 11, prompt_len=8, cached_tokens=0, reasoning_tokens=0
    )
    RustServer.push_abort(types.SimpleNamespace(server=server), abort, req)
    assert msgspec.msgpack.decode(sent[0])[2] == [8]
