"""FlashInfer's index updaters, eager and under a graph, against rows made by hand.

The backend itself asks for a CUDA device; its updaters and their Triton kernel (in
Triton's interpreter) do not.
"""

from types import SimpleNamespace

import pytest
import torch

from pagealign.layout import ceil_align

ENCODER_LENS = [100, 0, 40, 128, 7]
SEQ_LENS = [70, 5, 64, 1, 129]


class Wrapper:
    """A FlashInfer wrapper that remembers what it was planned with."""

    def __init__(self, graph_indices: torch.Tensor | None = None):
        self.is_cuda_graph_enabled = graph_indices is not None
        self._paged_kv_indices_buf = graph_indices

    def begin_forward(self, *args, **kwargs):
        self.args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]


def make_rows(page_size: int) -> tuple[torch.Tensor, torch.Tensor, list, list]:
    """``req_to_token`` of scattered slots, its rows in a mixed order, and per request
    the slots of its decoder and of its encoder."""
    generator = torch.Generator().manual_seed(page_size)
    width = max(ceil_align(e, page_size) + s for e, s in zip(ENCODER_LENS, SEQ_LENS, strict=True))
    table = torch.randperm(7 * width, generator=generator).view(7, width).to(torch.int32)
    rows = torch.tensor([3, 6, 1, 5, 2])
    decoder, encoder = [], []
    for row, e, s in zip(rows.tolist(), ENCODER_LENS, SEQ_LENS, strict=True):
        reserve = ceil_align(e, page_size)
        decoder.append(table[row, reserve : reserve + s])
        encoder.append(table[row, :e])
    return table, rows, decoder, encoder


def make_updater(cls, page_size: int, table: torch.Tensor):
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    translator = KVIndexTranslator(
        req_to_token=table,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=page_size,
        device="cpu",
    )
    updater = cls.__new__(cls)
    updater.attn_backend = SimpleNamespace(page_size=page_size, kv_index_translator=translator)
    updater.kv_indptr = [torch.zeros(9, dtype=torch.int32) for _ in range(2)]
    updater.qo_indptr = [torch.zeros(9, dtype=torch.int32) for _ in range(2)]
    updater.kv_last_page_len = torch.ones(8, dtype=torch.int32)
    updater.num_qo_heads, updater.num_kv_heads, updater.head_dim = 2, 1, 64
    updater.data_type = updater.q_data_type = torch.float32
    updater.prefill_wrapper_ragged = None
    return updater, translator


def check(indptr: torch.Tensor, indices: torch.Tensor, slots: list[torch.Tensor]) -> None:
    assert indptr.tolist() == [0, *torch.tensor([len(s) for s in slots]).cumsum(0).tolist()]
    assert torch.equal(indices[: indptr[-1]], torch.cat(slots))


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("encoder_lens_dtype", [torch.int32, torch.int64])
def test_decode_under_a_graph(make_bed, whisper, page_size, encoder_lens_dtype):
    make_bed(whisper(40), "torch_native", 1)  # what the updaters ask of the runtime
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterDecode

    table, rows, decoder, encoder = make_rows(page_size)
    updater, translator = make_updater(FlashInferIndicesUpdaterDecode, page_size, table)
    buffers = [torch.full((2000,), -1, dtype=torch.int32) for _ in range(2)]
    wrappers = [Wrapper(buffer) for buffer in buffers]
    seq_lens = torch.tensor(SEQ_LENS)
    updater.update_cross_attention(
        seq_lens,
        seq_lens,
        int(seq_lens.sum()),
        decode_wrappers=wrappers,
        encoder_lens=torch.tensor(ENCODER_LENS, dtype=encoder_lens_dtype),
        spec_info=None,
        plan=translator.plan(
            req_pool_indices=rows, seq_lens=seq_lens, seq_lens_cpu=seq_lens, write_virtual=None
        ),
        req_pool_indices=rows,
    )
    for wrapper, buffer, slots in zip(wrappers, buffers, (decoder, encoder), strict=True):
        check(wrapper.args[0], buffer, slots)
        assert (buffer[sum(map(len, slots)) :] == -1).all()


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_prefill(make_bed, whisper, page_size):
    make_bed(whisper(40), "torch_native", 1)
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterPrefill

    table, rows, decoder, encoder = make_rows(page_size)
    updater, translator = make_updater(FlashInferIndicesUpdaterPrefill, page_size, table)
    wrappers = [Wrapper(), Wrapper()]
    seq_lens = torch.tensor(SEQ_LENS)
    prefix_lens = torch.tensor([64, 0, 0, 0, 128])
    updater.update_cross_attention(
        rows,
        seq_lens,
        seq_lens,
        int(seq_lens.sum()),
        prefix_lens=prefix_lens,
        prefill_wrappers=wrappers,
        use_ragged=False,
        encoder_lens=torch.tensor(ENCODER_LENS),
        spec_info=None,
        plan=translator.plan(
            req_pool_indices=rows, seq_lens=seq_lens, seq_lens_cpu=seq_lens, write_virtual=None
        ),
    )
    for wrapper, slots in zip(wrappers, (decoder, encoder), strict=True):
        qo_indptr, kv_indptr, kv_indices = wrapper.args[:3]
        check(kv_indptr, kv_indices, slots)
        assert qo_indptr.tolist() == [0, *(seq_lens - prefix_lens).cumsum(0).tolist()]


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_unified_pools_plan(monkeypatch, page_size):
    """A translated read reaches the end of the decoder, behind the encoder's pages."""
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    translator = KVIndexTranslator.__new__(KVIndexTranslator)
    translator.page_size = page_size
    monkeypatch.setattr(KVIndexTranslator, "reads_are_translated", True)
    monkeypatch.setattr(KVIndexTranslator, "plan", lambda self, **fields: fields)
    plan = translator.own_plan(
        SimpleNamespace(
            out_cache_loc=torch.zeros(5),
            seq_lens=torch.tensor(SEQ_LENS),
            seq_lens_cpu=torch.tensor(SEQ_LENS),
            encoder_lens=torch.tensor(ENCODER_LENS),
            encoder_lens_cpu=ENCODER_LENS,
            batch_size=5,
        )
    )
    reach = [ceil_align(e, page_size) + s for e, s in zip(ENCODER_LENS, SEQ_LENS, strict=True)]
    assert plan["seq_lens"].tolist() == plan["seq_lens_cpu"].tolist() == reach
