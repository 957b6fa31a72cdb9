"""Which attention backends an encoder-decoder model may start with at which page size."""

from types import SimpleNamespace

import pytest

from pagealign.bed import Bed

FOLLOW = {"fa3", "fa4", "flashinfer", "intel_xpu", "torch_native"}


def registered() -> list[str]:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return sorted({*ATTENTION_BACKENDS, *ATTENTION_BACKEND_CHOICES})


@pytest.fixture
def check(monkeypatch):
    """The guard on hand-made arguments of an encoder-decoder model."""
    from sglang.srt.arg_groups import validation_hook

    def call(page_size, backend, prefill=None, decode=None, is_encoder_decoder=True):
        args = SimpleNamespace(
            page_size=page_size,
            attention_backend=backend,
            prefill_attention_backend=prefill,
            decode_attention_backend=decode,
        )
        config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
        monkeypatch.setattr(validation_hook, "resolving_view", lambda args: args)
        monkeypatch.setattr(validation_hook, "model_config_of", lambda args: config)
        validation_hook.check_encoder_decoder_page_size(args)

    return call


def test_every_registered_backend(check):
    names = registered()
    assert set(names) > FOLLOW
    for name in names:
        check(1, name)
        check(64, name, is_encoder_decoder=False)
        if name in FOLLOW:
            check(64, name)
        else:
            with pytest.raises(ValueError, match=f"Attention backend {name} does not support"):
                check(64, name)


def test_prefill_and_decode_backends_that_differ(check):
    check(64, "flashinfer", prefill="fa3", decode="intel_xpu")
    check(1, "flashinfer", prefill="aiter")
    with pytest.raises(ValueError, match="backend aiter does not"):
        check(64, "flashinfer", prefill="aiter")
    with pytest.raises(ValueError, match="backend wave does not"):
        check(64, "flashinfer", decode="wave")
    with pytest.raises(ValueError, match="backend aiter, wave does not"):
        check(64, "flashinfer", prefill="aiter", decode="wave")
    check(64, "aiter", prefill="fa3", decode="fa3")  # the base backend is not used


def test_at_start_up(whisper):
    """Through the real argument checks, before anything is loaded."""
    with pytest.raises(ValueError, match="--page-size 64 for encoder-decoder models"):
        Bed(whisper(40), "flex_attention", 64)
