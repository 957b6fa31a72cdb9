"""Faults planted in copies of the aligned tree, one each: parity finds and names each.

Each takes a start of SGLang; most are slow tests therefore.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pagealign.parity.jobs import Job, run_jobs
from pagealign.parity.verdict import compare
from pagealign.pin import load_series
from pagealign.trees import build_tree, copy_tree

SCHEDULE_BATCH = "managers/schedule_batch.py"
FLASHINFER = "layers/attention/flashinfer_backend.py"


@dataclass(frozen=True)
class Mutant:
    """The first ``old`` in a file of ``sglang/srt`` becomes ``new``, and the first difference
    is ``found``; of the workload on FlashInfer, or on FA3. All but the ``quick`` are slow
    tests."""

    name: str
    file: str
    old: str
    new: str
    found: str
    backend: str = "flashinfer"
    quick: bool = False


MUTANTS = [
    Mutant(
        "kv_start_idx",
        FLASHINFER,
        "                kv_lens_cpu = seq_lens_cpu\n            else:",
        "                kv_lens_cpu = seq_lens_cpu\n"
        "                kv_start_idx = kv_start_idx - 1\n            else:",
        "request r000000, step 1, decode.plan.kv_indices[0]: ",
        quick=True,
    ),
    Mutant(
        "a reserve at page size 1",
        "mem_cache/encoder_reserve.py",
        "return encoder_len\n",
        "return encoder_len + (encoder_len > 0)\n",
        "request r000000, step 0, batch.out_cache_loc[0]: stock 41, other 42",
    ),
    Mutant(
        "a plan argument's dtype",
        FLASHINFER,
        "self.q_data_type = model_runner.dtype",
        "self.q_data_type = torch.float16",
        "request r000000, step 1, decode.plan.q_data_type: "
        "stock torch.float32, other torch.float16",
    ),
    Mutant(
        "out_cache_loc reordered",
        SCHEDULE_BATCH,
        "self.out_cache_loc = torch.cat(decoder_out_cache_loc)",
        "self.out_cache_loc = torch.cat(decoder_out_cache_loc).flip(0)",
        "request r000000, step 0, batch.out_cache_loc[0]: stock 41, other 44",
    ),
    Mutant(
        "prefix_lens",
        SCHEDULE_BATCH,
        "        prefix_lens = self.prefix_lens[:]\n        # The encoder",
        "        prefix_lens = [n + 1 for n in self.prefix_lens]\n        # The encoder",
        "request r000000, step 0, batch.prefix_lens[0]: stock 0, other 1",
    ),
    Mutant(
        "the row position of a decode token",
        "mem_cache/allocation.py",
        "page_size) + seq_lens_gpu",
        "page_size) + seq_lens_gpu + 1",
        "request r000000, step 1, batch.req_to_token[44]: ",
    ),
    Mutant(
        "the order of free slots",
        "mem_cache/allocator/token.py",
        "self.free_pages = self.free_pages[need_size:]",
        "self.free_pages = self.free_pages[need_size:].flip(0)",
        "step 0, pool.free_pages[0]: stock 45, other 2048",
        quick=True,
    ),
    Mutant(
        "a bit of the logits",
        "models/whisper.py",
        "        return logits\n",
        "        last = logits.next_token_logits[-1, 7:8]\n"
        "        last.copy_(torch.nextafter(last, last + 1))\n        return logits\n",
        "request r000000, step 0, model.logits[0][7]: ",
        quick=True,
    ),
    Mutant(
        "prompt_tokens",
        "managers/scheduler_components/output_streamer.py",
        "        self.prompt_tokens.append(req.prompt_len)",
        "        self.prompt_tokens.append(req.prompt_len + 1)",
        "request r000000, step 13, result.prompt_tokens: stock 44, other 45",
    ),
    Mutant(
        "a column of FA3's page table",
        "layers/attention/flashattention_backend.py",
        "cols.clamp(max=req_to_token.shape[1] - 1)",
        "cols.clamp(max=req_to_token.shape[1] - 1) - 1",
        "request r000000, step 0, metadata.page_table[0][0]: ",
        backend="fa3",
        quick=True,
    ),
]


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    """Per mutant that is asked for, and for the aligned tree as it is, the verdicts on both
    workloads."""
    asked_for = {
        item.callspec.params["mutant"]
        for item in request.session.items
        if item.path == request.path and "mutant" in item.fixturenames
    }
    folder = tmp_path_factory.mktemp("mutants")
    jobs = [
        Job(name, build_tree(name), "short", folder / "out" / name) for name in ("stock", "aligned")
    ]
    for i, mutant in enumerate(one for one in MUTANTS if one in asked_for):
        tree = copy_tree("aligned", folder / f"tree-{i}")
        file = tree / "sglang" / "srt" / mutant.file
        text = file.read_text()
        assert mutant.old in text, mutant.name
        file.unlink()  # it may be a link to the cache's
        file.write_text(text.replace(mutant.old, mutant.new, 1))
        jobs.append(Job(mutant.name, tree, "short", folder / "out" / f"mutant-{i}"))
    run_jobs(jobs, folder / "models", at_once=2)
    return {
        job.name: list(compare("short", jobs[0].out, job.out, job.name, load_series().all))
        for job in jobs
    }


def test_the_trees_themselves(verdicts):
    for name in ("stock", "aligned"):
        assert [v.fault for v in verdicts[name]] == [None, None]
        assert all(v.entries > 1000 for v in verdicts[name])


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(one, id=one.name, marks=[] if one.quick else pytest.mark.slow)
        for one in MUTANTS
    ],
)
def test_a_planted_fault_is_named(verdicts, mutant):
    flashinfer, fa3 = verdicts[mutant.name]
    fault = fa3.fault if mutant.backend == "fa3" else flashinfer.fault
    print(fault)
    assert fault.startswith(f"whisper/{mutant.backend}/short, single: {mutant.found}")
