"""Faults of the stock release in the metadata of graphs and of FA3."""

from types import SimpleNamespace

import fa3_on_cpu
import pytest
import torch
from bed_fixtures import PROMPT, audio

from pagealign.bed import Request


def replay(backend, *, encoder_len: int, seq_len: int):
    """One request's metadata as a graph's replay builds it, after a capture."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend.init_cuda_graph_state(2, 2)
    for in_capture in (True, False):
        length = 1 if in_capture else seq_len
        view = SimpleNamespace(
            batch_size=1,
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([length]),
            seq_lens_cpu=torch.tensor([length]),
            positions=torch.zeros(1, dtype=torch.int64),
            encoder_lens=torch.tensor([encoder_len]),
            out_cache_loc=torch.zeros(1, dtype=torch.int64),
            spec_info=None,
            kv_loc_plan=None,
        )
        backend.init_forward_metadata_out_graph(view, in_capture=in_capture)


def test_xpu_graph_tables_of_slots(make_bed, whisper):
    """S9: token tables written into page-wide buffers."""
    bed = make_bed(whisper(40), "intel_xpu", 64)
    backend = bed.scheduler.tp_worker.model_runner.attn_backend
    with pytest.raises(RuntimeError, match="size of tensor|expanded size"):
        replay(backend, encoder_len=40, seq_len=60)


@pytest.mark.parametrize("page_size", [1, 64])
def test_fa3_graph_tables(make_bed, whisper, monkeypatch, page_size):
    """S9 in FA3, and S4 at any page size: its replay has no length on the host, so the
    columns always span the context, and with the encoder's offset they pass the row."""
    fa3_on_cpu.install(monkeypatch)
    bed = make_bed(whisper(40), "fa3", page_size)
    backend = bed.scheduler.tp_worker.model_runner.attn_backend
    with pytest.raises((RuntimeError, IndexError)) as fault:
        replay(backend, encoder_len=40, seq_len=60)
    print(repr(fault.value))


def test_fa3_reads_pages_outside_the_pool(make_bed, whisper, monkeypatch):
    """S10: slots of the encoder given to the kernel as pages."""
    fa3_on_cpu.install(monkeypatch)
    bed = make_bed(whisper(100), "fa3", 64, max_total_tokens=2048)
    with pytest.raises(IndexError, match="of a pool of"):
        bed.run_one(Request(PROMPT, audio(100, 0), max_new_tokens=4))
