"""The KV indices that FlashInfer's updaters plan with, read off the real classes on a CPU.

Only the wrappers, which need a GPU, are left out: each records what it is given. The
Triton kernel that packs the indices runs in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch


@contextlib.contextmanager
def _interpreted() -> Iterator[None]:
    """The kernel that packs the indices, and what it calls, in Triton's interpreter."""
    import triton.language as tl
    from sglang.srt.mem_cache import kv_index_translator
    from triton.runtime.interpreter import InterpretedFunction

    with contextlib.ExitStack() as stack:
        for module, name in (
            (kv_index_translator, "create_flashinfer_kv_indices_triton"),
            (tl, "cdiv"),
        ):
            interpreted = InterpretedFunction(getattr(module, name).fn)
            stack.enter_context(mock.patch.object(module, name, interpreted))
        yield


@dataclass
class _Wrapper:
    """Stands for a paged wrapper of FlashInfer; ``buffer`` is where indices are packed."""

    buffer: torch.Tensor
    indptr: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    # The eager decode path allocates on "cuda"; with a graph's buffer it needs none.
    is_cuda_graph_enabled: bool = True

    @property
    def _paged_kv_indices_buf(self) -> torch.Tensor:
        return self.buffer

    def begin_forward(self, *args, **kwargs) -> None:
        # decode: indptr, indices, ...; prefill: qo_indptr, indptr, indices, ...
        first = 1 if "kv_data_type" in kwargs else 0
        self.indptr, self.indices = args[first].clone(), args[first + 1].clone()

    def slots(self) -> list[list[int]]:
        """Per request the slots it reads, in order."""
        bounds = self.indptr.tolist()
        return [self.indices[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


class FlashInferTables:
    """Runs the index updaters of a scheduler's model runner on its forward batches."""

    def __init__(self, model_runner):
        from sglang.srt.layers.attention import flashinfer_backend as flashinfer

        requests = model_runner.req_to_token_pool.size + 1
        backend = SimpleNamespace(
            page_size=model_runner.page_size,
            kv_index_translator=model_runner.kv_index_translator,
            flashinfer_kv_cache_dtype=model_runner.kv_cache_dtype,
            dispatch_reason=flashinfer.WrapperDispatch.CROSS_ATTENTION,
            num_wrappers=2,
            kv_indptr=[torch.zeros(requests + 1, dtype=torch.int32) for _ in range(2)],
            qo_indptr=[torch.zeros(requests + 1, dtype=torch.int32) for _ in range(2)],
            kv_last_page_len=torch.ones(requests, dtype=torch.int32),
            prefill_wrapper_ragged=None,
            dq_paged_kernel_lens=None,
            _swa_kv_pool=None,
        )
        size = model_runner.req_to_token_pool.req_to_token.numel()
        self._wrappers = [_Wrapper(torch.zeros(size, dtype=torch.int32)) for _ in range(2)]
        self._decode = flashinfer.FlashInferIndicesUpdaterDecode(model_runner, backend)
        self._prefill = flashinfer.FlashInferIndicesUpdaterPrefill(model_runner, backend)

    def of(self, batch) -> tuple[list[list[int]], list[list[int]]]:
        """Slots per request of a ForwardBatch: what self- and cross-attention read."""
        shared = dict(
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            seq_lens_sum=batch.seq_lens_sum,
            encoder_lens=batch.encoder_lens,
            spec_info=None,
            req_pool_indices=batch.req_pool_indices,
            plan=batch.kv_loc_plan,
        )
        with _interpreted():
            if batch.forward_mode.is_decode():
                self._decode.update(decode_wrappers=self._wrappers, **shared)
            else:
                self._prefill.update(
                    prefix_lens=batch.extend_prefix_lens,
                    prefill_wrappers=self._wrappers,
                    use_ragged=False,
                    **shared,
                )
        decoder, encoder = self._wrappers
        return decoder.slots(), encoder.slots()
