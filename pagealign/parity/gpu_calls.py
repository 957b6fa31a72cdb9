"""What a tree plans FlashInfer's wrappers with, at the sizes of real models.

The index updaters are SGLang's own, from the tree that is first on the path; the batches and
their rows of ``req_to_token`` are made by hand. ``gpu_check`` carries the calls out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from pagealign.layout import ceil_align
from pagealign.parity.recording import Writer


@dataclass(frozen=True)
class Case:
    """A batch of a model: a new token per request, or with ``prefix_lens`` a prefill."""

    model: str
    query_heads: int
    kv_heads: int
    head_size: int
    encoder_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...] | None
    page_size: int

    @property
    def name(self) -> str:
        mode = "decode" if self.prefix_lens is None else "prefill"
        return f"{self.model}/{mode}/page {self.page_size}"


def cases() -> Iterator[Case]:
    """Whisper-large-v3 and Llama-3.2-11B-Vision, decode and prefill, at 1, 16 and 64."""
    models = (
        ("whisper", 20, 20, 64, (1500, 1500, 0, 1500)),
        ("mllama", 32, 8, 128, (6404, 0, 1601, 3202)),
    )
    for page_size in (1, 16, 64):
        for name, heads, kv_heads, size, encoder_lens in models:
            shape = (name, heads, kv_heads, size, encoder_lens)
            yield Case(*shape, (37, 64, 5, 120), None, page_size)
            yield Case(*shape, (4, 64, 5, 30), (0, 0, 0, 0), page_size)


def make_rows(case: Case) -> tuple[torch.Tensor, int]:
    """``req_to_token`` (int32, a row per request, row 0 is padding) of whole random pages, and
    the number of slots of their pool."""
    size = case.page_size
    lens = [ceil_align(e, size) + s for e, s in zip(case.encoder_lens, case.seq_lens, strict=True)]
    counts = [ceil_align(n, size) // size for n in lens]
    generator = torch.Generator().manual_seed(size)
    pages = torch.randperm(sum(counts), generator=generator) + 1
    rows = torch.zeros(len(lens) + 1, max(counts) * size, dtype=torch.int32)
    for i, own in enumerate(pages.split(counts)):
        slots = own[:, None] * size + torch.arange(size)
        rows[i + 1, : slots.numel()] = slots.flatten()
    return rows, (sum(counts) + 1) * size


def record(models: str, out: str) -> None:
    """Write the plans of every case to the recording ``out``."""
    from pagealign.bed import Bed
    from pagealign.parity.kernels import Kernels

    kernels = Kernels()
    bed = Bed(Path(models) / "whisper", "torch_native", 1)  # what updaters ask of the runtime
    with kernels.ready("flashinfer"), Writer(Path(out)) as writer:
        for number, case in enumerate(cases()):
            rows, slots = make_rows(case)
            writer.add(number, "case", "name", case.name)
            writer.add(number, "case", "shape", asdict(case) | {"pool_slots": slots})

            def listen(call: str, arguments: dict, number: int = number) -> None:
                for name, value in arguments.items():
                    if name == "kv_indices":
                        value = value[: int(arguments["kv_indptr"][-1])]
                    if isinstance(value, torch.dtype):
                        value = str(value)
                    writer.add(number, call, name, value)

            kernels.listener = listen
            _plan(case, rows)
    bed.close()


def _plan(case: Case, rows: torch.Tensor) -> None:
    from sglang.srt.layers.attention import flashinfer_backend as backend
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    decoding = case.prefix_lens is None
    translator = KVIndexTranslator(
        req_to_token=rows,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=case.page_size,
        device="cpu",
    )
    kind = "Decode" if decoding else "Prefill"
    updater = object.__new__(getattr(backend, f"FlashInferIndicesUpdater{kind}"))
    updater.attn_backend = SimpleNamespace(
        page_size=case.page_size, kv_index_translator=translator, dq_paged_kernel_lens=None
    )
    batch = len(case.seq_lens)
    updater.kv_indptr = [torch.zeros(batch + 1, dtype=torch.int32) for _ in range(2)]
    updater.qo_indptr = [torch.zeros(batch + 1, dtype=torch.int32) for _ in range(2)]
    updater.kv_last_page_len = torch.ones(batch, dtype=torch.int32)
    updater.num_qo_heads, updater.num_kv_heads = case.query_heads, case.kv_heads
    updater.head_dim = case.head_size
    updater.data_type = updater.q_data_type = torch.bfloat16
    updater.prefill_wrapper_ragged = None
    workspace = torch.empty(16, dtype=torch.uint8)
    wrappers = [
        getattr(backend, f"Batch{kind}WithPagedKVCacheWrapper")(workspace, "NHD", backend="fa2")
        for _ in range(2)
    ]
    indices = torch.arange(1, batch + 1)
    seq_lens = torch.tensor(case.seq_lens)
    shared = dict(
        encoder_lens=torch.tensor(case.encoder_lens),
        spec_info=None,
        plan=translator.plan(
            req_pool_indices=indices, seq_lens=seq_lens, seq_lens_cpu=seq_lens, write_virtual=None
        ),
    )
    if decoding:
        updater.update_cross_attention(
            seq_lens,
            seq_lens,
            int(seq_lens.sum()),
            decode_wrappers=wrappers,
            req_pool_indices=indices,
            **shared,
        )
    else:
        updater.update_cross_attention(
            indices,
            seq_lens,
            seq_lens,
            int(seq_lens.sum()),
            prefix_lens=torch.tensor(case.prefix_lens),
            prefill_wrappers=wrappers,
            use_ragged=False,
            **shared,
        )
