"""A tree's own ``XPUAttentionBackend`` on hand-made batches, without model and scheduler.

The backend, its metadata, the layers and the KV pool are SGLang's, from the tree that is
first on ``PYTHONPATH``; the kernels are the stand-in's. What is made by hand is the batch and
the rows of ``req_to_token``: whole pages at random places in the pool, filled in order, as
the paged allocator gives them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

import pagealign.bed  # noqa: F401  sets what SGLang reads when it is imported
from pagealign.compare.batches import Batch, Heads
from pagealign.compare.counting import DEVICE, Counter, held, nbytes
from pagealign.layout import ceil_align

SELF, CROSS = 0, 1  # layer ids
_NO_MODEL = "dummy"
UNWRITTEN_K, UNWRITTEN_V = float("nan"), 1.0e4  # as pagealign.bed poisons a pool


class Rig:
    """A backend with its pool, and a batch for it.

    ``aligned``: the rows have whole pages for the encoder, as in the aligned tree, not E
    slots. With a ``counter`` all that a device would hold lies on the counted device.
    """

    def __init__(
        self,
        heads: Heads,
        dtype: torch.dtype,
        page_size: int,
        batch: Batch,
        *,
        aligned: bool,
        seed: int = 0,
        counter: Counter | None = None,
    ) -> None:
        from sglang.srt.layers.attention.xpu_backend import XPUAttentionBackend
        from sglang.srt.layers.radix_attention import RadixAttention

        _publish()
        self.batch, self.page_size = batch, page_size
        self.offsets = [ceil_align(e, page_size) if aligned else e for e in batch.encoder_lens]
        self._put = counter.put if counter else _as_it_is
        rows, pages = self._rows(seed)
        self._rows_on_host = rows
        self.pool = self._make_pool(heads, dtype, pages, counter)
        self.layers = [
            RadixAttention(
                heads.query,
                heads.size,
                heads.size**-0.5,
                heads.kv,
                layer_id,
                is_cross_attention=layer_id == CROSS,
            )
            for layer_id in (SELF, CROSS)
        ]
        self.backend = XPUAttentionBackend(
            SimpleNamespace(
                device=DEVICE if counter else "cpu",
                dtype=dtype,
                page_size=page_size,
                req_to_token_pool=SimpleNamespace(req_to_token=self._put(rows)),
                token_to_kv_pool=self.pool,
                kv_cache_dtype=dtype,
                kv_cache_dtype_str="auto",
                sliding_window_size=None,
                is_hybrid_swa=False,
                is_draft_worker=False,
                model_config=_model_config(heads, rows.shape[1]),
            )
        )
        self.forward_batch = self._forward_batch()

    def slots(self, request: int, layer: int) -> Tensor:
        """The pool's slots of a request's decoder (SELF) or encoder (CROSS), int64."""
        row = self._rows_on_host[request + 1].long()
        if layer == CROSS:
            return row[: self.batch.encoder_lens[request]]
        return row[self.offsets[request] :][: self.batch.seq_lens[request]]

    def write(self, layer: int, request: int, k: Tensor, v: Tensor) -> None:
        """Put the first ``len(k)`` keys and values of a request into the pool, as an
        earlier step has."""
        slots = self.slots(request, layer)[: len(k)]
        held(self.pool.k_buffer[layer])[slots] = k
        held(self.pool.v_buffer[layer])[slots] = v

    def build_metadata(self) -> None:
        """What the backend does once per step."""
        self.backend.init_forward_metadata(self.forward_batch)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """What it does once per layer: store ``k`` and ``v`` (unless None) and attend.

        ``q`` is ``(tokens, query heads x size)``, ``k`` and ``v`` ``(tokens, kv heads,
        size)``; returns ``(tokens, query heads x size)``.
        """
        forward = (
            self.backend.forward_decode if self.batch.decoding else self.backend.forward_extend
        )
        return forward(q, k, v, self.layers[layer], self.forward_batch)

    @property
    def table_bytes(self) -> int:
        """Bytes of this step's tables of pages or slots, and of varlen's lists of slots."""
        metadata = self.backend.forward_metadata
        tables = [metadata.page_table, metadata.encoder_page_table]
        for name in ("encoder_varlen_metadata", "decoder_varlen_metadata"):
            if lists := getattr(self.backend, name, None):
                tables.append(lists.slots)
        return sum(nbytes(table) for table in tables if table is not None)

    def _rows(self, seed: int) -> tuple[Tensor, int]:
        """``req_to_token`` (int32, row 0 is padding) and the number of pages of the pool."""
        batch, page_size = self.batch, self.page_size
        lengths = [r + s for r, s in zip(self.offsets, batch.seq_lens, strict=True)]
        counts = [ceil_align(n, page_size) // page_size for n in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1
        # A short text's columns go as far as the longest's, from its own encoder's end on.
        width = max(self.offsets) + ceil_align(max(batch.seq_lens), page_size)
        rows = torch.zeros(len(lengths) + 1, width, dtype=torch.int32)
        for i, pages in enumerate(order.split(counts)):
            slots = pages.unsqueeze(1) * page_size + torch.arange(page_size)
            rows[i + 1, : lengths[i]] = slots.flatten()[: lengths[i]]
        return rows, sum(counts)

    def _make_pool(self, heads: Heads, dtype: torch.dtype, pages: int, counter: Counter | None):
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool = MHATokenToKVPool(
            size=pages * self.page_size,
            page_size=self.page_size,
            dtype=dtype,
            head_num=heads.kv,
            head_dim=heads.size,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        if counter:
            pool.k_buffer = [counter.put(k, pool=True) for k in pool.k_buffer]
            pool.v_buffer = [counter.put(v, pool=True) for v in pool.v_buffer]
        else:
            for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True):
                k.fill_(UNWRITTEN_K)
                v.fill_(UNWRITTEN_V)
        return pool

    def _forward_batch(self):
        """The batch as SGLang's scheduler hands it over."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        batch, size, put = self.batch, len(self.batch.seq_lens), self._put
        tokens = sum(batch.q_lens)
        new_slots = [
            self.slots(i, SELF)[-q_len:] if q_len else self.slots(i, SELF)[:0]
            for i, q_len in enumerate(batch.q_lens)
        ]
        made = ForwardBatch(
            forward_mode=ForwardMode.DECODE if batch.decoding else ForwardMode.EXTEND,
            batch_size=size,
            input_ids=put(torch.zeros(tokens, dtype=torch.int64)),
            req_pool_indices=put(torch.arange(1, size + 1)),
            seq_lens=put(torch.tensor(batch.seq_lens)),
            seq_lens_cpu=torch.tensor(batch.seq_lens),
            seq_lens_sum=sum(batch.seq_lens),
            out_cache_loc=put(torch.cat(new_slots)),
            positions=put(torch.zeros(tokens, dtype=torch.int64)),
        )
        made.encoder_lens = put(torch.tensor(batch.encoder_lens))
        made.encoder_lens_cpu = list(batch.encoder_lens)
        if batch.new_lens is not None:
            prefix_lens = [s - n for s, n in zip(batch.seq_lens, batch.new_lens, strict=True)]
            made.extend_seq_lens = put(torch.tensor(batch.new_lens))
            made.extend_seq_lens_cpu = list(batch.new_lens)
            made.extend_prefix_lens = put(torch.tensor(prefix_lens))
            made.extend_prefix_lens_cpu = prefix_lens
            made.encoder_cached = [not batch.encoder_is_new] * size
            if batch.encoder_is_new:
                encoder_slots = [self.slots(i, CROSS) for i in range(size)]
                made.encoder_out_cache_loc = put(torch.cat(encoder_slots))
        return made


@contextlib.contextmanager
def counted_kernels(counter: Counter) -> Iterator[None]:
    """Within, the backend's attention kernels take tensors of the counted device.

    A call is one launch. It reads the queries, each key and value once, and the table's
    entries that it needs; it writes the output. What the stand-in does inside isn't counted.
    """
    from sglang.srt.layers.attention import xpu_backend

    with contextlib.ExitStack() as stack:
        for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
            kernel = _counted(getattr(xpu_backend, name), counter)
            stack.enter_context(mock.patch.object(xpu_backend, name, kernel))
        yield


def _counted(kernel: Callable[..., Tensor], counter: Counter) -> Callable[..., Tensor]:
    signature = inspect.signature(kernel)

    def launch(*args, **kwargs) -> Tensor:
        given = tree_map(held, signature.bind(*args, **kwargs).arguments)
        with _disable_current_modes():
            out = kernel(**given)
            read = nbytes(given["q"]) + _kv_bytes(given)
        counter.add(launches=1, attention=1, read=read, written=nbytes(out))
        return counter.put(out)

    return launch


def _kv_bytes(given: dict) -> int:
    """Bytes of keys, values and table entries that a kernel's call has to read."""
    if "k_cache" not in given:
        return nbytes(given["k"]) + nbytes(given["v"])
    k, v, table = given["k_cache"], given["v_cache"], given["page_table"]
    lengths = given["cache_seqlens"].tolist()
    slot = sum(t.shape[2] * t.shape[3] * t.element_size() for t in (k, v))
    pages = sum(ceil_align(n, k.shape[1]) // k.shape[1] for n in lengths)
    return sum(lengths) * slot + pages * table.element_size()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _model_config(heads: Heads, context_len: int):
    from sglang.srt.configs.model_config import AttentionArch

    return SimpleNamespace(
        context_len=context_len,
        hf_text_config=SimpleNamespace(num_attention_heads=heads.query),
        attention_arch=AttentionArch.MHA,
        is_encoder_decoder=True,
    )


def _publish() -> None:
    """The process-wide configuration that SGLang's classes ask for, unless it is there. A
    scheduler in the same process replaces it, and takes it away when it ends."""
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        CudaGraphConfig,
        Phase,
        PhaseConfig,
    )
    from sglang.srt.runtime_context import (
        SpawnRanks,
        get_context,
        get_parallel,
        get_server_args,
        publish,
    )

    try:
        if get_server_args().model_path == _NO_MODEL and get_parallel().attn_dcp_rank == 0:
            return
    except (RuntimeError, ValueError):
        pass  # how SGLang says that nothing was published
    publish(_server_args(), role="scheduler", ranks=SpawnRanks(0, None, 0))
    # stock's backend asks for it; without a model it isn't taken from the arguments
    off = {phase: PhaseConfig(backend=Backend.DISABLED) for phase in Phase.ALL}
    get_context().override("pagealign", cuda_graph_config=CudaGraphConfig(**off))


@functools.cache
def _server_args():
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=_NO_MODEL, device="cpu")
    args.resolve_once()
    return args
