"""intel_xpu's metadata by itself, on hand-made batches: padding, idle, any rank."""

from types import SimpleNamespace

import pytest
import torch

from pagealign.layout import ceil_align

PAGE = 64
ROW_WIDTH = 1024


class NoHeads:
    """Only what metadata is made of. A builder that asked for a rank's head count, or for
    anything else that differs between tensor-parallel ranks, would raise."""

    def __init__(self, req_to_token: torch.Tensor):
        from sglang.srt.layers.attention.xpu_backend import XPUAttentionBackend as Backend

        self.req_to_token = req_to_token
        self.req_to_token_pool = SimpleNamespace(req_to_token=req_to_token)
        self.page_size, self.max_context_len, self.device = PAGE, ROW_WIDTH, "cpu"
        self.dcp_size, self.topk, self.attention_chunk_size = 1, 0, None
        self.is_encoder_decoder = True
        self.use_mla = self.use_sliding_window_kv_pool = self.has_swa = False
        self.decode_cuda_graph_metadata = {}
        for name in (
            "init_forward_metadata",
            "init_cuda_graph_state",
            "init_forward_metadata_out_graph",
            "_init_encoder_decoder_metadata",
            "_init_local_attn_metadata",
            "_spec_query_kv_offsets",
        ):
            setattr(self, name, getattr(Backend, name).__get__(self))

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cuda_graph_seq_len_fill_value = get_cpu_graph_seq_len_fill_value


def make_table() -> torch.Tensor:
    """Four rows of whole pages; row 0 is the padding row, as the pool makes it."""
    pages = torch.arange(4 * ROW_WIDTH // PAGE).view(4, -1)
    table = (pages.unsqueeze(-1) * PAGE + torch.arange(PAGE)).view(4, -1).to(torch.int32)
    table[0] = 0
    return table


def make_batch(mode, encoder_lens, seq_lens, extend_lens=None, with_encoder=True):
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    bs = len(seq_lens)
    tokens = sum(extend_lens) if extend_lens else bs
    batch = ForwardBatch(
        forward_mode=ForwardMode[mode],
        batch_size=bs,
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        req_pool_indices=torch.arange(1, bs + 1),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_sum=sum(seq_lens),
        out_cache_loc=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.zeros(tokens, dtype=torch.int64),
    )
    if with_encoder:
        batch.encoder_lens = torch.tensor(encoder_lens)
        batch.encoder_lens_cpu = list(encoder_lens)
    if extend_lens:
        prefix_lens = [s - e for s, e in zip(seq_lens, extend_lens, strict=True)]
        batch.extend_seq_lens = torch.tensor(extend_lens)
        batch.extend_seq_lens_cpu = list(extend_lens)
        batch.extend_prefix_lens = torch.tensor(prefix_lens)
        batch.extend_prefix_lens_cpu = prefix_lens
    return batch


def pages_of(table, row: int, start: int, length: int) -> list[int]:
    return (table[row, start : start + length : PAGE] // PAGE).tolist()


@pytest.mark.parametrize(
    ("encoder_lens", "seq_lens"), [([100, 0, 300], [70, 5, 9]), ([64, 64, 64], [1, 64, 65])]
)
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_data_parallel_padding(mode, encoder_lens, seq_lens):
    """Padded to 5 requests by SGLang: ``encoder_lens`` gets zeros, the host list nothing."""
    table = make_table()
    backend = NoHeads(table)
    extend_lens = [s - s // 2 for s in seq_lens] if mode == "EXTEND" else None
    batch = make_batch(mode, encoder_lens, seq_lens, extend_lens)
    plain = make_batch(mode, encoder_lens, seq_lens, extend_lens)
    backend.init_forward_metadata(plain)
    expected = backend.forward_metadata

    tokens = len(batch.input_ids) + 2
    batch._pad_inputs_to_size(SimpleNamespace(attn_backend=backend), tokens, 5)
    batch.batch_size = 5
    assert batch.encoder_lens.tolist() == [*encoder_lens, 0, 0]
    assert batch.encoder_lens_cpu == encoder_lens
    backend.init_forward_metadata(batch)
    got = backend.forward_metadata

    assert got.page_table.shape[0] == 5
    for i, (encoder_len, seq_len) in enumerate(zip(encoder_lens, seq_lens, strict=True)):
        pages = pages_of(table, i + 1, ceil_align(encoder_len, PAGE), seq_len)
        assert got.page_table[i, : len(pages)].tolist() == pages
    assert not got.page_table[3:].any()
    # Cross-attention sees the same requests, and so the same rows, as without padding.
    q_lens = extend_lens or [1] * 3
    starts = [sum(q_lens[:i]) for i in range(3)]
    rows = [starts[i] + t for i in range(3) if encoder_lens[i] for t in range(q_lens[i])]
    assert got.encoder_q_rows.tolist() == rows
    assert got.encoder_lens_int32.tolist() == [e for e in encoder_lens if e]
    assert torch.equal(got.encoder_page_table, expected.encoder_page_table)
    assert torch.equal(
        got.encoder_cu_seqlens_q, expected.encoder_cu_seqlens_q[: len(got.encoder_cu_seqlens_q)]
    )
    for i, pages in zip(
        [i for i in range(3) if encoder_lens[i]], got.encoder_page_table, strict=True
    ):
        own = pages_of(table, i + 1, 0, encoder_lens[i])
        assert pages[: len(own)].tolist() == own


def test_idle_batch():
    """A rank without requests: no ``encoder_lens``, padded to two rows of the padding row."""
    backend = NoHeads(make_table())
    batch = make_batch("IDLE", [], [], with_encoder=False)
    batch._pad_inputs_to_size(SimpleNamespace(attn_backend=backend), 2, 2)
    batch.batch_size = 2
    backend.init_forward_metadata(batch)
    metadata = backend.forward_metadata
    assert batch.encoder_lens is None
    assert metadata.page_table.tolist() == [[0], [0]]
    assert metadata.encoder_page_table is None  # cross-attention launches nothing


def test_graph_of_any_rank():
    """The graph builder too asks for nothing that depends on the rank's heads."""
    table = make_table()
    backend = NoHeads(table)
    backend.init_cuda_graph_state(4, 4)
    batch = make_batch("DECODE", [100, 0, 300], [70, 5, 9])
    batch.encoder_lens_cpu = None  # as in a replay
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    metadata = backend.forward_metadata
    for i, (encoder_len, seq_len) in enumerate([(100, 70), (0, 5), (300, 9)]):
        for row, start, length in (
            (metadata.page_table[i], ceil_align(encoder_len, PAGE), seq_len),
            (metadata.encoder_page_table[i], 0, encoder_len),
        ):
            pages = pages_of(table, i + 1, start, length)
            assert row.tolist() == pages + [0] * (len(row) - len(pages))
    assert metadata.encoder_lens_int32.tolist() == [100, 1, 300]
    assert metadata.encoder_is_empty.tolist() == [[False], [True], [False]]
