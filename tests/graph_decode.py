"""Decode through an attention backend's graph metadata, on a machine without graphs.

Stands in for SGLang's ``DecodeCudaGraphRunner``: its static input buffers, its padding
and its view for the backend are SGLang's own; what is not there is the recording. The
model runs in capture mode on the padded, static batch, so each step executes what a
recorded graph would replay, and the metadata is compared with the eager builder's.
"""

from __future__ import annotations

import bisect
import dataclasses

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagealign.bed import Bed

CAPTURE_SIZES = (1, 2, 4, 8)


class HostReads(TorchDispatchMode):
    """Counts the operators that wait for the device: scalars read and ``nonzero``."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
        ):
            self.count += 1
        return func(*args, **(kwargs or {}))


def tensors(metadata) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Address and shape of every tensor a recorded graph would read."""
    return {
        field.name: (value.data_ptr(), tuple(value.shape))
        for field in dataclasses.fields(metadata)
        if isinstance(value := getattr(metadata, field.name), torch.Tensor)
    }


class GraphDecode:
    """Takes over the decode steps of ``bed``; ``sizes`` records (real, padded) rows."""

    def __init__(self, bed: Bed):
        from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
        from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers

        self.model_runner = bed.scheduler.tp_worker.model_runner
        self.backend = self.model_runner.attn_backend
        self.sizes: set[tuple[int, int]] = set()
        self.host_reads: set[int] = set()
        config = self.model_runner.model_config
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
            is_encoder_decoder=True,
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
            is_encoder_decoder=True,
            encoder_len_fill_value=encoder_len_fill_value,
            share_pool=False,
            source=self.buffers,
        )
        self.static = {bs: self._static_batch(bs) for bs in CAPTURE_SIZES}
        self.addresses = {}
        with torch.inference_mode():
            for bs, forward_batch in reversed(self.static.items()):
                self.backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
                self.addresses[bs] = tensors(self.backend.forward_metadata)
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
        self.backend.init_forward_metadata(forward_batch)
        eager = self.backend.forward_metadata
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
            is_encoder_decoder=True,
        )
        with HostReads() as host_reads:
            self.backend.init_forward_metadata_out_graph(view)
        self.host_reads.add(host_reads.count)
        graph = self.backend.forward_metadata
        assert tensors(graph) == self.addresses[bs]
        self._compare(forward_batch, eager, graph)
        output = self._forward(self.static[bs])
        return LogitsProcessorOutput(next_token_logits=output.next_token_logits[:raw_bs])

    def _compare(self, forward_batch, eager, graph) -> None:
        """The graph's tables against the eager ones and against ``req_to_token``.

        intel_xpu's eager encoder table has rows for the requests with an encoder only,
        and is None without any.
        """
        page_size = self.backend.page_size
        has_encoder = forward_batch.encoder_lens > 0
        every_row = list(range(forward_batch.batch_size))
        encoder_rows = has_encoder.nonzero().flatten().tolist()
        if eager.encoder_page_table is not None:
            eager_encoder_rows = dict(
                zip(
                    encoder_rows
                    if eager.encoder_page_table.shape[0] == len(encoder_rows)
                    else every_row,
                    eager.encoder_page_table,
                    strict=True,
                )
            )
        for i in every_row:
            row = self.backend.req_to_token[forward_batch.req_pool_indices[i]].long()
            encoder_len = int(forward_batch.encoder_lens[i])
            seq_len = int(forward_batch.seq_lens[i])
            reserve = -(-encoder_len // page_size) * page_size
            assert int(graph.cache_seqlens_int32[i]) == seq_len
            self._compare_row(graph.page_table[i], eager.page_table[i], row[reserve:][:seq_len])
            if encoder_len:
                assert int(graph.encoder_lens_int32[i]) == encoder_len
                self._compare_row(
                    graph.encoder_page_table[i], eager_encoder_rows[i], row[:encoder_len]
                )
            else:
                assert not graph.encoder_page_table[i].any()

    def _compare_row(self, got, eager, slots) -> None:
        """Page by page the eager row's, slot by slot ``slots``; then the padding page."""
        page_size = self.backend.page_size
        pages = -(-len(slots) // page_size)
        assert torch.equal(got[:pages], eager[:pages])
        assert not got[pages:].any()
        t = torch.arange(len(slots))
        assert torch.equal(got[t // page_size] * page_size + t % page_size, slots)

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
            encoder_lens=buffers.encoder_lens[:bs],
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
