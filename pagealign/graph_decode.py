"""Decode through an attention backend's graph metadata, on a machine without graphs.

Stands in for SGLang's ``DecodeCudaGraphRunner``: its static input buffers, its padding
and its view for the backend are SGLang's own; what is not there is the recording. The
model runs in capture mode on the padded, static batch, so each step executes what a
recorded graph would replay.
"""

from __future__ import annotations

import bisect

import torch

from pagealign.bed import Bed

CAPTURE_SIZES = (1, 2, 4, 8)


class GraphDecode:
    """Takes over the decode steps of ``bed``; ``sizes`` records (real, padded) rows."""

    def __init__(self, bed: Bed):
        from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
        from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers

        self.model_runner = bed.scheduler.tp_worker.model_runner
        self.backend = self.model_runner.attn_backend
        self.sizes: set[tuple[int, int]] = set()
        config = self.model_runner.model_config
        self.is_encoder_decoder = config.is_encoder_decoder
        # As DecodeCudaGraphRunner.__init__: Whisper 1500, Mllama and MossVL 0.
        encoder_len_fill_value = getattr(config.hf_config, "max_source_positions", 0)
        max_bs = max(CAPTURE_SIZES)
        self.backend.init_cuda_graph_state(max_bs, max_bs)
        self.seq_len_fill_value = self.backend.get_cuda_graph_seq_len_fill_value()
        self.buffers = DecodeInputBuffers.create(
            device=torch.device("cpu"),
            max_bs=max_bs,
            max_num_token=max_bs,
            hidden_size=config.hidden_size,
            next_token_logits_buffer=torch.zeros(max_bs, config.vocab_size),
            dtype=config.dtype,
            num_dp_ranks=1,
            pp_size=1,
            is_encoder_decoder=self.is_encoder_decoder,
            require_mlp_tp_gather=False,
            seq_len_fill_value=self.seq_len_fill_value,
            encoder_len_fill_value=encoder_len_fill_value,
            num_tokens_per_req=1,
            cache_loc_dtype=torch.int64,
            enable_mamba_track=False,
        )
        self.registry = build_decode_registry(
            device=torch.device("cpu"),
            max_bs=max_bs,
            max_num_token=max_bs,
            seq_len_fill_value=self.seq_len_fill_value,
            cache_loc_dtype=torch.int64,
            is_encoder_decoder=self.is_encoder_decoder,
            encoder_len_fill_value=encoder_len_fill_value,
            share_pool=False,
            source=self.buffers,
        )
        self.static = {bs: self._static_batch(bs) for bs in CAPTURE_SIZES}
        # What each size was captured with, and what its graph therefore reads
        self.metadata = {}
        with torch.inference_mode():
            for bs, forward_batch in reversed(self.static.items()):
                self.backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
                self.metadata[bs] = self.backend.forward_metadata
                self._forward(forward_batch)
        self.model_runner.eager_runner._execute_decode = self.decode

    def decode(self, forward_batch, pp_proxy_tensors=None):
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
            build_replay_fb_view,
        )

        raw_bs = forward_batch.batch_size
        bs = CAPTURE_SIZES[bisect.bisect_left(CAPTURE_SIZES, raw_bs)]
        self.sizes.add((raw_bs, bs))
        self.registry.fill_from(
            forward_batch,
            raw_bs=raw_bs,
            padded_bs=bs,
            raw_num_tokens=raw_bs,
            padded_num_tokens=bs,
        )
        view = build_replay_fb_view(
            forward_batch=forward_batch,
            buffers=self.buffers,
            bs=bs,
            raw_bs=raw_bs,
            num_tokens=bs,
            global_num_tokens_cpu=None,
            seq_len_fill_value=self.seq_len_fill_value,
            capture_forward_mode=ForwardMode.DECODE,
            is_encoder_decoder=self.is_encoder_decoder,
        )
        self.replay(forward_batch, view, bs)
        self.backend.forward_metadata = self.metadata[bs]
        output = self._forward(self.static[bs])
        return LogitsProcessorOutput(next_token_logits=output.next_token_logits[:raw_bs])

    def replay(self, forward_batch, view, bs: int) -> None:
        """Prepare the metadata of a graph of ``bs`` rows for ``view``, a padded
        ``forward_batch``."""
        self.backend.init_forward_metadata_out_graph(view)

    def _static_batch(self, bs: int):
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )

        buffers = self.buffers
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=bs,
            input_ids=buffers.input_ids[:bs],
            req_pool_indices=buffers.req_pool_indices[:bs],
            seq_lens=buffers.seq_lens[:bs],
            seq_lens_cpu=buffers.seq_lens_cpu[:bs],
            orig_seq_lens=buffers.seq_lens[:bs],
            out_cache_loc=buffers.out_cache_loc[:bs],
            seq_lens_sum=bs * self.seq_len_fill_value,
            encoder_lens=buffers.encoder_lens[:bs] if self.is_encoder_decoder else None,
            positions=buffers.positions[:bs],
            return_logprob=False,
            spec_algorithm=self.model_runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_forward_mode=ForwardMode.DECODE,
        )
        self.model_runner.kv_index_translator.bind_runner_slots(forward_batch)
        return forward_batch

    def _forward(self, forward_batch):
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.model_executor.runner import model_capture_mode

        with (
            model_capture_mode(),
            forward_context(ForwardContext(attn_backend=self.backend), forward_batch=forward_batch),
        ):
            return self.model_runner.model.forward(
                forward_batch.input_ids, forward_batch.positions, forward_batch
            )
