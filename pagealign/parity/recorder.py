"""Writes down what a bed's scheduler, pools, attention backend and model do, step by step.

Everything is observed from outside, through the attributes that both trees have; nothing
of what is observed is changed. Values are copied when they are used, not when they end up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pagealign.bed import Bed, Result
from pagealign.parity.kernels import Kernels
from pagealign.parity.recording import Writer

# What a ForwardBatch holds of the batch; the axis of each names its owners (see _counts).
FORWARD_FIELDS = {
    "input_ids": "tokens",
    "positions": "tokens",
    "out_cache_loc": "tokens",
    "encoder_out_cache_loc": "encoder",
    "req_pool_indices": "rows",
    "seq_lens": "rows",
    "seq_lens_cpu": "rows",
    "orig_seq_lens": "rows",
    "encoder_lens": "rows",
    "encoder_lens_cpu": "rows",
    "encoder_cached": "rows",
    "extend_seq_lens": "rows",
    "extend_seq_lens_cpu": "rows",
    "extend_prefix_lens": "rows",
    "extend_prefix_lens_cpu": "rows",
    "extend_start_loc": "rows",
    "extend_logprob_start_lens_cpu": "rows",
    "extend_num_tokens": None,
    "extend_input_logprob_token_ids_gpu": None,
    "seq_lens_sum": None,
    "batch_size": None,
    "return_logprob": None,
}
# The metadata of FA3 and intel_xpu that both trees build.
METADATA_FIELDS = (
    "cache_seqlens_int32",
    "max_seq_len_q",
    "max_seq_len_k",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "page_table",
    "encoder_lens_int32",
    "encoder_cu_seqlens_k",
    "encoder_max_seq_len_k",
    "encoder_page_table",
)


class Recorder:
    """Records ``bed``, and the calls of its backend's ``kernels``, into ``writer``."""

    def __init__(self, bed: Bed, kernels: Kernels, writer: Writer):
        self.bed, self.writer = bed, writer
        self.step = 0
        self.layer: int | None = None
        self.rids: tuple[str, ...] = ()
        self._owners: dict[str, list[int]] = {}
        self._encoder_lens: list[int] = []
        self._kind = "self"
        kernels.listener = self._kernel
        bed.probe = self._probe
        bed.on_batch = self._batch
        runner = bed.scheduler.tp_worker.model_runner
        self._row_table = bed.req_to_token_pool.req_to_token
        self.backend = runner.attn_backend
        self._wrap(self.backend, "init_forward_metadata", self._metadata)
        self._wrap(self.backend, "init_forward_metadata_out_graph", self._graph_metadata)
        self._wrap(self.backend, "forward_extend", self._attention)
        self._wrap(self.backend, "forward_decode", self._attention)
        self._wrap(runner.token_to_kv_pool, "set_kv_buffer", self._kv_write)
        self._wrap(runner.model, "forward", self._model)

    def finish(self, rids: Sequence[str], results: Sequence[Result]) -> None:
        """What each request was answered, and the pools afterwards."""
        self._pools()
        for rid, result in zip(rids, results, strict=True):
            for field in dataclasses.fields(result):
                value = getattr(result, field.name)
                if field.name.endswith("logprobs"):
                    missing = [float("nan") if x is None else x for x in value]
                    value = torch.tensor(missing, dtype=torch.float64)
                self.writer.add(self.step, "result", field.name, value, rids=[rid])

    def add(
        self,
        event: str,
        name: str,
        value: Any,
        counts: Sequence[int] | None = None,
        layer: int | None = None,
    ) -> None:
        """Record one value of the current step. Lists of numbers and tensors only."""
        layer = self.layer if layer is None else layer
        if not isinstance(value, torch.Tensor):
            value = _json(value)
        self.writer.add(self.step, event, name, value, layer=layer, rids=self.rids, counts=counts)

    def _wrap(self, owner: Any, name: str, observer: Callable) -> None:
        """Call ``observer(real, *args, **kwargs)`` in place of a bound method."""
        real = getattr(owner, name, None)
        if real is not None:
            setattr(owner, name, lambda *args, **kwargs: observer(real, *args, **kwargs))

    def _probe(self, step: int) -> None:
        self.rids = ()
        if step:
            self._pools()
        self.step = step

    def _pools(self) -> None:
        allocator, rows = self.bed.allocator, self.bed.req_to_token_pool
        self.rids = ()
        self.add("pool", "free_pages", allocator.get_all_free_pages())
        self.add("pool", "available_size", allocator.available_size())
        self.add("pool", "free_rows", list(rows.free_slots))
        self.add("pool", "cached_tokens", self.bed.scheduler.tree_cache.evictable_size())

    def _batch(self, batch) -> None:
        """The scheduler's batch, just before it is run."""
        self.rids = tuple(req.rid for req in batch.reqs)
        rows = [1] * len(self.rids)
        decoding = batch.forward_mode.is_decode()
        encoder_lens = list(batch.encoder_lens_cpu or [0] * len(rows))
        self.add("batch", "mode", batch.forward_mode.name)
        if not decoding:
            self.add("batch", "prefix_lens", list(batch.prefix_lens), rows)
            self.add("batch", "extend_lens", list(batch.extend_lens), rows)
        self._encoder_lens = encoder_lens
        self._own(decoding, batch.extend_lens, encoder_lens, batch.encoder_cached)
        self.add("batch", "encoder_lens_cpu", encoder_lens, rows)
        self.add("batch", "encoder_cached", list(batch.encoder_cached or []), rows)
        self.add("batch", "seq_lens", batch.seq_lens, rows)
        self.add("batch", "out_cache_loc", batch.out_cache_loc, self._owners.get("tokens"))
        if batch.encoder_out_cache_loc is not None:
            owners = self._owners.get("encoder")
            self.add("batch", "encoder_out_cache_loc", batch.encoder_out_cache_loc, owners)
        self.add("batch", "req_pool_indices", batch.req_pool_indices, rows)
        lengths = [e + int(s) for e, s in zip(encoder_lens, batch.seq_lens.tolist(), strict=True)]
        used = [
            self._row_table[row, :length]
            for row, length in zip(batch.req_pool_indices.tolist(), lengths, strict=True)
        ]
        self.add("batch", "req_to_token", torch.cat(used), lengths)

    def _own(self, decoding: bool, extend_lens, encoder_lens, encoder_cached) -> None:
        rows = [1] * len(self.rids)
        tokens = rows if decoding else [int(n) for n in extend_lens]
        cached = encoder_cached or [True] * len(rows)
        encoder = [0 if c else n for n, c in zip(encoder_lens, cached, strict=False)]
        self._owners = {"rows": rows, "tokens": tokens, "encoder": encoder}

    def _metadata(self, real, forward_batch, *args, **kwargs):
        for name, axis in FORWARD_FIELDS.items():
            value = getattr(forward_batch, name, None)
            if value is not None:
                self.add("forward", name, value, self._owners.get(axis))
        out = real(forward_batch, *args, **kwargs)
        self._fields("metadata")
        return out

    def _graph_metadata(self, real, forward_batch, *args, **kwargs):
        """What a graph's capture and each of its replays prepare outside the graph."""
        out = real(forward_batch, *args, **kwargs)
        self._fields("graph")
        return out

    def _fields(self, event: str) -> None:
        metadata = getattr(self.backend, "forward_metadata", None)
        rows = self._owners.get("rows")
        for name in METADATA_FIELDS:
            value = getattr(metadata, name, None)
            if value is not None:
                self.add(event, name, value, rows)

    def _attention(self, real, q, k, v, layer, forward_batch, *args, **kwargs):
        outer, self.layer = self.layer, layer.layer_id
        kind = self._kind = "cross" if layer.is_cross_attention else "self"
        try:
            tokens = self._owners.get("tokens")
            self.add(kind, "q", q, tokens)
            out = real(q, k, v, layer, forward_batch, *args, **kwargs)
            self.add(kind, "out", out, tokens)
            return out
        finally:
            self.layer = outer

    def _kv_write(self, real, layer, loc_info, cache_k, cache_v, *args, **kwargs):
        loc = getattr(loc_info, "loc", loc_info)
        counts = self._owners.get("encoder" if layer.is_cross_attention else "tokens")
        for name, value in (("loc", loc), ("k", cache_k), ("v", cache_v)):
            self.add("write", name, value, counts, layer=layer.layer_id)
        return real(layer, loc_info, cache_k, cache_v, *args, **kwargs)

    def _kernel(self, call: str, arguments: dict[str, Any]) -> None:
        """A kernel's arguments as they are, but for the caches and what nobody may read."""
        owners = {"last_page_len": self._owners.get("rows")}
        if call == "flash_attn_with_kvcache" and self.rids:  # not a graph's capture
            self._read(arguments)
        elif "kv_indices" in arguments:
            indptr, indices = arguments["kv_indptr"], arguments["kv_indices"]
            # Prefill packs into a longer tensor that is not initialised.
            self.add(call, "len(kv_indices)", len(indices))
            arguments = arguments | {"kv_indices": indices[: int(indptr[-1])]}
            owners["kv_indices"] = indptr.diff().tolist()
        for name, value in arguments.items():
            if name in ("k_cache", "v_cache"):
                value = list(value.shape)
            if value is not None:
                self.add(call, name, value, owners.get(name))

    def _read(self, call: dict[str, Any]) -> None:
        """The slots that each request reads, in order: what page tables mean, whatever their
        form. A request without an encoder reads none of it: it may be left out of the call,
        or its result be dropped."""
        table, lengths = call["page_table"], call["cache_seqlens"].tolist()
        page_size = call["k_cache"].shape[1]
        requests = list(range(len(self.rids)))
        if len(table) < len(requests):
            requests = [i for i, length in enumerate(self._encoder_lens) if length]
        counts, slots = [0] * len(self.rids), [table.new_zeros(0, dtype=torch.int64)]
        for row, i in enumerate(requests):
            if self._kind == "cross" and not self._encoder_lens[i]:
                continue
            position = torch.arange(lengths[row])
            pages = table[row, position // page_size].to(torch.int64)
            slots.append(pages * page_size + position % page_size)
            counts[i] = lengths[row]
        self.add("read", "slots", torch.cat(slots), counts)
        for name in ("softmax_scale", "causal", "softcap", "window_size"):
            self.add("read", name, call.get(name))

    def _model(self, real, *args, **kwargs):
        out = real(*args, **kwargs)
        if out is not None and getattr(out, "next_token_logits", None) is not None:
            self.add("model", "logits", out.next_token_logits, self._owners.get("rows"))
        for name in ("input_token_logprobs",):
            if (value := getattr(out, name, None)) is not None:
                self.add("model", name, value)
        return out


def _json(value: Any) -> Any:
    """Numbers and lists of them; anything else by its text."""
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, bool | int | float | str | None):
        return value
    return str(value)
