"""What is refused, in one file.

Two kinds. ``RuntimeError`` with the real kernels' texts: what their host code checks. The
texts and limits are those of sgl-kernel-xpu's ``flash_attention.cpp`` (August 2026), minus
the demand that tensors be on an XPU: here all must be on the device of ``q``.
``StrictnessError``: what the real kernels do not check and then compute wrongly or not at
all. An empty key set is the third kind, ``DeviceLostError``.
"""

from __future__ import annotations

from numbers import Real

import torch

from ._call import Call, Path, Request
from ._errors import DeviceLostError, StrictnessError
from ._mode import Mode

# float32 is this stand-in's addition, for CPU servers; the real kernels take 16 bits only.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PAGED_HEAD_SIZES = (64, 96, 128, 192, 256, 512)
RAGGED_HEAD_SIZES = (64, 72, 80, 96, 128, 192, 256, 512)
MAX_DECODE_GROUP = 16


def require(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


def strict(condition: bool, text: str) -> None:
    if not condition:
        raise StrictnessError(text)


def check_dropped_arguments(**arguments: object) -> None:
    """The wrapper or the kernels ignore these; a caller who passes them expects an effect."""
    given = [name for name, value in arguments.items() if value is not None]
    strict(not given, f"silently ignored by the kernels: {', '.join(given)}")


def check_scalars(
    *, max_seqlen_q: object, max_seqlen_k: object, softmax_scale: object, softcap: object
) -> None:
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        require(isinstance(value, int), f"expected an int for {name}, got {type(value).__name__}")
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        require(
            isinstance(value, Real),
            f"expected a float for {name}, got {type(value).__name__}",
        )
    strict(softmax_scale > 0, f"softmax_scale must be > 0 for the masking to hold: {softmax_scale}")
    strict(softcap == 0, f"softcap={softcap} has no effect in the kernels")


def check_host(call: Call, mode: Mode) -> None:
    """The host code's own checks: types, shapes, sizes. Reads no tensor's contents."""
    _check_types(call)
    _check_shapes(call)
    _check_sizes(call, mode)
    _check_sinks(call)
    _check_out(call)


def check_contents(call: Call, requests: list[Request], mode: Mode) -> None:
    """Everything that needs the lengths and tables: never checked by the real kernels."""
    _check_packed(call)
    _check_queries(call, requests)
    _check_keys(call, requests)
    if not mode.faithful:
        empty = [r.index for r in requests if r.k_len == 0]
        if empty:
            raise DeviceLostError(
                "UR_RESULT_ERROR_DEVICE_LOST: attention over an empty key set, "
                f"request(s) {empty} of {call.batch}"
            )
        for r in requests:
            unwritten = r.rows_without_keys(call.window[1]) if call.paged else 0
            strict(
                not unwritten or call.causal_only,
                f"request {r.index}: {unwritten} row(s) have no key in the window; "
                "a paged windowed call may leave them unwritten",
            )


def _check_types(call: Call) -> None:
    q, k, v = call.q, call.k, call.v
    require(q.dtype in DTYPES, f"mha_fwd only supports Half and BFloat16, got{q.dtype}")
    if k.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise NotImplementedError("the CPU stand-in has no fp8 cache")
    require(k.dtype == q.dtype, "query and key must have the same dtype")
    require(v.dtype == q.dtype, "query and value must have the same dtype")
    if call.path is Path.MIXED:
        require(call.cu_seqlens_q.dtype == torch.int32, "cu_seqlens_q must be int32.")
    tensors = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    for name, tensor in tensors.items():
        require(tensor.dtype == torch.int32, f"{name} must have dtype torch.int32")
        require(tensor.is_contiguous(), f"{name} must be contiguous")
    if call.page_table is not None:
        tensors["page_table"] = call.page_table
        require(call.page_table.dtype == torch.int32, "page_table must have dtype torch.int32")
    for name, tensor in (tensors | {"key": k, "value": v}).items():
        require(tensor.device == q.device, f"{name} must be on {q.device}")


def _check_shapes(call: Call) -> None:
    q, k, v = call.q, call.k, call.v
    require(q.dim() == 3, "query must be in ragged format (total_q, h, d)")
    if call.page_table is not None:
        require(
            k.dim() == 4 and k.shape[3] == q.shape[2],
            "k must have shape (num_pages, page_size, num_heads_k, head_size)",
        )
        require(
            v.dim() == 4 and v.shape[:3] == k.shape[:3],
            "v must have shape (num_pages, page_size, num_heads_k, head_size_v)",
        )
        require(call.page_table.dim() == 2, "page_table must have two dimensions")
        require(call.page_table.shape[0] == call.batch, "batch_size must be equal to batch_size_k")
    else:
        require(
            k.dim() == 3 and k.shape[2] == q.shape[2],
            "key must be in ragged format (total_k, h_k, d)",
        )
        require(
            v.dim() == 3 and v.shape[:2] == k.shape[:2],
            "value must be in ragged format (total_k, h_k, d)",
        )
        require(
            call.cu_seqlens_k.shape == call.cu_seqlens_q.shape,
            "cu_seqlens_q and cu_seqlens_k must describe the same batch",
        )
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        require(tensor.stride(-1) == 1, f"{name} must be contiguous at last dimension")


def _check_sizes(call: Call, mode: Mode) -> None:
    kind = "paged" if call.paged else "non-paged"
    step = "prefill" if call.path is Path.PREFILL else "decode"
    head_size, kv_heads = call.q.shape[2], call.k.shape[-2]
    require(
        kv_heads > 0 and call.q.shape[1] % kv_heads == 0,
        "Number of heads in key/value must divide number of heads in query",
    )
    require(
        head_size in (PAGED_HEAD_SIZES if call.paged else RAGGED_HEAD_SIZES),
        f"Unsupported head size for {kind} {step} attention: {head_size}",
    )
    require(
        not call.paged or call.v.shape[-1] == head_size,
        "v must have shape (num_pages, page_size, num_heads_k, head_size_v)",
    )
    if step == "decode":
        require(
            call.group <= MAX_DECODE_GROUP,
            f"Unsupported q_group_size for decode attention: {call.group}",
        )
    if not call.paged:
        return
    if call.page_size not in mode.page_sizes:
        text = f"Unsupported page size for {step} attention: {call.page_size}"
        require(step != "decode", text)
        raise StrictnessError(f"{text} (not checked by the kernel, which reads wrong rows)")
    if step == "decode" and call.page_size > 1:
        most = 64 if call.page_size == 64 or (call.group > 8 and head_size >= 256) else 128
        require(
            call.num_splits <= most,
            f"num_splits ({call.num_splits}) exceeds the maximum the split-KV decode kernel "
            f"supports for page_size {call.page_size} ({most})",
        )


def _check_sinks(call: Call) -> None:
    if call.sinks is None:
        return
    heads, head_size = call.q.shape[1:]
    require(
        call.paged,
        "No-page attention does not support sink logits (softmax_sink_ptr must be null)",
    )
    require(head_size == 64, f"sink is only supported for head_size == 64, got {head_size}")
    require(call.page_size > 1, "sink is not supported for page_size 1")
    require(not call.want_lse, "return_softmax_lse is only supported without sink")
    strict(
        call.sinks.shape == (heads,)
        and call.sinks.dtype == call.q.dtype
        and call.sinks.is_contiguous(),
        f"sinks are read as ({heads},) of {call.q.dtype}, unchecked",
    )


def _check_out(call: Call) -> None:
    out = call.out
    if out is None:
        return
    require(out.dtype == call.q.dtype, "out dtype must match q dtype")
    require(
        out.shape == (*call.q.shape[:2], call.v.shape[-1]),
        "out shape must be [total_q, num_heads, head_size_v]",
    )
    require(out.device == call.q.device, "out must be on the same device as q")
    require(out.stride(-1) == 1, "out must have a contiguous last dimension")


def _check_packed(call: Call) -> None:
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    tensors |= {"page_table": call.page_table} if call.page_table is not None else {}
    tensors |= {"out": call.out} if call.out is not None else {}
    for name, tensor in tensors.items():
        strict(
            tensor.is_contiguous(),
            f"{name} is not contiguous: the kernels ignore strides and would misread it",
        )


def _check_queries(call: Call, requests: list[Request]) -> None:
    total, paged = call.q.shape[0], call.paged
    strict(bool(requests), "a call without requests")
    strict(requests[0].q_start == 0, "cu_seqlens_q must start at 0")
    for r in requests:
        strict(r.q_len >= 0, f"cu_seqlens_q decreases at request {r.index}")
        strict(r.q_len > 0, f"request {r.index} has no query: the kernels touch another row")
        strict(
            call.path is not Path.DECODE or r.q_len == 1,
            f"max_seqlen_q=1 but request {r.index} has {r.q_len} queries: one would be computed",
        )
        strict(
            call.max_seqlen_q >= r.q_len,
            f"max_seqlen_q={call.max_seqlen_q} is smaller than the {r.q_len} queries of request "
            f"{r.index}: the rest would stay unwritten",
        )
        strict(
            r.q_start + r.q_len <= total,
            f"cu_seqlens_q reaches {r.q_start + r.q_len}, q has {total} rows",
        )
        strict(
            call.max_seqlen_k >= r.k_len or (paged and call.max_seqlen_k <= 0),
            f"max_seqlen_k={call.max_seqlen_k} is smaller than the {r.k_len} keys of request "
            f"{r.index}: the oldest would be dropped",
        )


def _check_keys(call: Call, requests: list[Request]) -> None:
    for r in requests:
        strict(r.k_len >= 0, f"request {r.index} has {r.k_len} keys")
        if call.page_table is None:
            strict(
                r.k_start >= 0 and r.k_start + r.k_len <= call.k.shape[0],
                f"cu_seqlens_k reaches {r.k_start + r.k_len}, k has {call.k.shape[0]} rows",
            )
            continue
        room = call.page_table.shape[1] * call.page_size
        strict(
            r.k_len <= room,
            f"request {r.index} has {r.k_len} keys, its row of the page table holds {room}: "
            "the kernel would walk into the next row",
        )
        if r.k_len:
            lowest, highest = min(r.pages), max(r.pages)
            strict(
                lowest >= 0 and highest < call.k.shape[0],
                f"request {r.index}: page ids {lowest} .. {highest}, the cache has pages 0 .. "
                f"{call.k.shape[0] - 1}; the kernel would read zeros",
            )
