"""``python -m pagealign.parity.gpu_check STOCK ALIGNED``: recorded plans on real FlashInfer.

Needs PyTorch and FlashInfer alone. At page size 1 the outputs of stock's and of the aligned
tree's plans have to be the same bits; at 16 and 64 the aligned tree's are held against
float64, with an error of at most twice that of plain attention in the same precision. Then
cross-attention's decode is timed: whole pages in place, a gather and the ragged kernel, and
slots as pages of one. ``--device cpu`` runs it all on the stand-in, to test it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pagealign.parity.recording import DTYPES, Recording, Tensor

INPUT_SETS, REPEATS, WARM_UP = 5, 20, 3


@dataclass(frozen=True)
class Plan:
    """A recorded plan: its wrapper's kind, ``decode`` or ``prefill``, and its arguments."""

    case: str
    shape: dict
    kind: str
    cross: bool
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Check:
    """``kind``: what was compared; ``error`` and ``allowed`` are largest absolute errors."""

    case: str
    kind: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Timing:
    """Medians over input sets of a median over repeats, in microseconds."""

    case: str
    in_place: float
    gather_ragged: float
    page_size_1: float


def load(path: Path) -> list[Plan]:
    """The plans of a recording made by ``gpu_calls``."""
    recording = Recording(path)
    cases: dict[int, dict] = {}
    plans: dict[tuple, dict] = {}
    for entry in recording.entries:
        if entry.event == "case":
            cases.setdefault(entry.step, {})[entry.name] = entry.value
            continue
        value = entry.value
        if isinstance(value, Tensor):
            value = recording.tensor(value)
        elif isinstance(value, str) and value.startswith("torch."):
            value = DTYPES[value.removeprefix("torch.")]
        kind = entry.event.removesuffix(".plan")
        plans.setdefault((entry.step, kind, entry.nth), {})[entry.name] = value
    recording.close()
    return [
        Plan(cases[step]["name"], cases[step]["shape"], kind, nth == 1, arguments)
        for (step, kind, nth), arguments in plans.items()
    ]


class Wrappers:
    """FlashInfer's wrappers on a device: the real ones, or on a CPU the stand-in."""

    def __init__(self, device: str):
        if device == "cpu":
            from pagealign.standins import flashinfer_cpu as flashinfer
        else:
            import flashinfer
        self.flashinfer, self.device = flashinfer, device
        self.workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)

    def run(self, plan: Plan, inputs: SimpleNamespace) -> Callable[[], torch.Tensor]:
        """Plan as recorded; the call that runs it."""
        known, heads = plan.arguments, plan.shape
        move = {n: v.to(self.device) for n, v in known.items() if isinstance(v, torch.Tensor)}
        sizes = (heads["query_heads"], heads["kv_heads"], heads["head_size"], known["page_size"])
        types = dict(q_data_type=known["q_data_type"])
        if plan.kind == "decode":
            wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "NHD", backend="fa2", use_tensor_cores=heads["group"] >= 4
            )
            pages = (move["kv_indptr"], move["kv_indices"], move["last_page_len"])
            wrapper.plan(*pages, *sizes, kv_data_type=known["kv_data_type"], **types)
        else:
            wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, "NHD", backend="fa2"
            )
            pages = (move["qo_indptr"], move["kv_indptr"], move["kv_indices"])
            wrapper.plan(*pages, move["last_page_len"], *sizes, **types)
        causal = {} if plan.kind == "decode" else dict(causal=not plan.cross)
        cache = tuple(self._paged(c, known["page_size"]) for c in (inputs.k, inputs.v))
        return lambda: wrapper.forward(inputs.q, cache, sm_scale=inputs.scale, **causal)

    def ragged(self, plan: Plan, inputs: SimpleNamespace) -> Callable[[], torch.Tensor]:
        """Gather the keys and values of a plan's slots and run the ragged kernel on them."""
        known, heads = plan.arguments, plan.shape
        wrapper = self.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            self.workspace, "NHD", backend="fa2"
        )
        slots = known["kv_indices"].to(self.device).long()
        bounds = [known[n].to(self.device) for n in ("qo_indptr", "kv_indptr")]
        sizes = (heads["query_heads"], heads["kv_heads"], heads["head_size"])
        wrapper.plan(*bounds, *sizes, q_data_type=known["q_data_type"])

        def call() -> torch.Tensor:
            k, v = inputs.k[slots], inputs.v[slots]
            return wrapper.forward(inputs.q, k, v, causal=False, sm_scale=inputs.scale)

        return call

    def _paged(self, cache: torch.Tensor, page_size: int) -> torch.Tensor:
        return cache.view(-1, page_size, *cache.shape[1:])


def make_inputs(plan: Plan, device: str, seed: int) -> SimpleNamespace:
    """Random queries, and a pool of keys and values, in the plan's types."""
    shape = plan.shape
    generator = torch.Generator().manual_seed(seed)
    kv_shape = (shape["pool_slots"], shape["kv_heads"], shape["head_size"])
    q_type, kv_type = (plan.arguments[name] for name in ("q_data_type", "kv_data_type"))
    q_shape = (int(plan.arguments["qo_indptr"][-1]), shape["query_heads"], shape["head_size"])

    def normal(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype).to(device)

    return SimpleNamespace(
        q=normal(*q_shape, dtype=q_type),
        k=normal(*kv_shape, dtype=kv_type),
        v=normal(*kv_shape, dtype=kv_type),
        scale=shape["head_size"] ** -0.5,
    )


def plain(plan: Plan, inputs: SimpleNamespace, dtype: torch.dtype) -> torch.Tensor:
    """Attention written out, in ``dtype``; zeros for a request without keys."""
    qo, kv = plan.arguments["qo_indptr"].tolist(), plan.arguments["kv_indptr"].tolist()
    slots = plan.arguments["kv_indices"].long().to(inputs.q.device)
    group = plan.shape["group"]
    out = torch.zeros_like(inputs.q, dtype=dtype)
    for i in range(len(qo) - 1):
        rows, own = slice(qo[i], qo[i + 1]), slots[kv[i] : kv[i + 1]]
        if len(own) == 0:
            continue
        k, v = (t[own].to(dtype).repeat_interleave(group, 1) for t in (inputs.k, inputs.v))
        scores = torch.einsum("qhd,khd->hqk", inputs.q[rows].to(dtype), k) * inputs.scale
        if plan.kind == "prefill" and not plan.cross:
            count = qo[i + 1] - qo[i]
            later = torch.ones(count, len(own), dtype=torch.bool, device=k.device).triu(
                len(own) - count + 1
            )
            scores = scores.masked_fill(later, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out


def in_pages(plan: Plan) -> Plan:
    """The same keys as whole pages of the pool's own size, which start on pages."""
    size = plan.shape["page_size"]
    indptr = plan.arguments["kv_indptr"].tolist()
    indices, ends, last = [], [0], []
    for start, end in zip(indptr, indptr[1:], strict=False):
        slots = plan.arguments["kv_indices"][start:end]
        indices.append(slots[::size] // size)
        ends.append(ends[-1] + len(indices[-1]))
        last.append((end - start - 1) % size + 1 if end > start else 1)
    changed = dict(
        kv_indptr=torch.tensor(ends, dtype=torch.int32),
        kv_indices=torch.cat(indices),
        last_page_len=torch.tensor(last, dtype=torch.int32),
        page_size=size,
    )
    return Plan(plan.case, plan.shape, plan.kind, plan.cross, plan.arguments | changed)


def check(stock: list[Plan], aligned: list[Plan], wrappers: Wrappers) -> Iterator[Check]:
    """Page size 1 bit for bit between the trees, and every aligned output against float64."""
    for number, (old, new) in enumerate(zip(stock, aligned, strict=True)):
        inputs = make_inputs(new, wrappers.device, number)
        out = wrappers.run(new, inputs)()
        region = f"{new.case} {'cross' if new.cross else 'self'}"
        if new.shape["page_size"] == 1:
            other = wrappers.run(old, inputs)()
            equal = torch.equal(out.view(torch.int16), other.view(torch.int16))
            yield Check(region, "stock's bits", 0.0 if equal else float("inf"), 0.0)
        truth = plain(new, inputs, torch.float64)
        rough = plain(new, inputs, inputs.q.dtype).double()
        allowed = 2 * float((rough - truth).abs().max()) + 1e-6
        yield Check(region, "float64", float((out.double() - truth).abs().max()), allowed)


def timings(aligned: list[Plan], wrappers: Wrappers) -> Iterator[Timing]:
    """Cross-attention of each decode case above page size 1, the three ways."""
    for plan in aligned:
        if plan.kind != "decode" or not plan.cross or plan.shape["page_size"] == 1:
            continue
        found: list[tuple[float, float, float]] = []
        for seed in range(INPUT_SETS if wrappers.device != "cpu" else 1):
            inputs = make_inputs(plan, wrappers.device, seed)
            calls = (
                wrappers.run(in_pages(plan), inputs),
                wrappers.ragged(plan, inputs),
                wrappers.run(plan, inputs),
            )
            found.append(tuple(_median(call, wrappers.device) for call in calls))
        yield Timing(plan.case, *(statistics.median(column) for column in zip(*found, strict=True)))


def _median(call: Callable[[], torch.Tensor], device: str) -> float:
    """Microseconds of one call, by CUDA events; by the clock on a CPU."""
    if device == "cpu":
        started = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - started)
    for _ in range(WARM_UP):
        call()
    pairs = []
    for _ in range(REPEATS):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        call()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in pairs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Recorded plans on FlashInfer.")
    parser.add_argument("stock", type=Path)
    parser.add_argument("aligned", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    options = parser.parse_args(argv)
    started = time.monotonic()
    stock, aligned = load(options.stock), load(options.aligned)
    for plan in (*stock, *aligned):
        plan.shape["group"] = plan.shape["query_heads"] // plan.shape["kv_heads"]
    wrappers = Wrappers(options.device)
    checks = list(check(stock, aligned, wrappers))
    times = list(timings(aligned, wrappers))
    device = torch.cuda.get_device_name() if options.device != "cpu" else "CPU, stand-in"
    wrong = [c for c in checks if not c.right]
    result = {
        "device": device,
        "torch": torch.__version__,
        "checks": [asdict(c) | {"right": c.right} for c in checks],
        "timings_us": [asdict(t) for t in times],
        "seconds": round(time.monotonic() - started, 1),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{device}, {result['seconds']} s; microseconds per layer of cross-attention's decode")
    print(f"{'case':28} {'in place':>9} {'gather+ragged':>14} {'page size 1':>12}")
    for t in times:
        print(f"{t.case:28} {t.in_place:9.1f} {t.gather_ragged:14.1f} {t.page_size_1:12.1f}")
    for c in wrong:
        print(f"WRONG {c.case}, {c.kind}: error {c.error:.3g}, allowed {c.allowed:.3g}")
    print(f"{len(checks) - len(wrong)} of {len(checks)} checks right")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
