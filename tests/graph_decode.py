"""Decode through graph metadata, compared at every step with the eager builder's."""

from __future__ import annotations

import dataclasses

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagealign import graph_decode
from pagealign.bed import Bed


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


class GraphDecode(graph_decode.GraphDecode):
    """Takes over the decode steps of ``bed``; ``host_reads`` records how many lengths a
    replay read from the device."""

    def __init__(self, bed: Bed):
        self.host_reads: set[int] = set()
        super().__init__(bed)
        self.addresses = {bs: tensors(metadata) for bs, metadata in self.metadata.items()}

    def replay(self, forward_batch, view, bs: int) -> None:
        self.backend.init_forward_metadata(forward_batch)
        eager = self.backend.forward_metadata
        with HostReads() as host_reads:
            super().replay(forward_batch, view, bs)
        self.host_reads.add(host_reads.count)
        graph = self.backend.forward_metadata
        assert tensors(graph) == self.addresses[bs]
        self._compare(forward_batch, eager, graph)

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
