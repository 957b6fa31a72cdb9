"""The GPU script as far as a machine without a GPU goes: its checks on the stand-in."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

import pytest
import torch

from pagealign.layout import ceil_align
from pagealign.parity import gpu_check
from pagealign.parity.gpu_calls import Case, cases, make_rows
from pagealign.parity.recording import Writer
from pagealign.paths import REPO

SHAPE = ("tiny", 4, 1, 64, (40, 0, 17, 64), (3, 70, 16, 1))
CASES = [
    Case(*SHAPE, prefix_lens, page_size)
    for page_size in (1, 16)
    for prefix_lens in (None, (0, 64, 0, 0))
]


def write(path, spoil=lambda case, cross, indices: indices):
    """Plans made by hand from the rows: what gpu_calls records of SGLang's updaters."""
    with Writer(path) as writer:
        for number, case in enumerate(CASES):
            rows, slots = make_rows(case)
            writer.add(number, "case", "name", case.name)
            writer.add(number, "case", "shape", dataclasses.asdict(case) | {"pool_slots": slots})
            decoding = case.prefix_lens is None
            new = [1] * 4 if decoding else [
                s - p for s, p in zip(case.seq_lens, case.prefix_lens, strict=True)
            ]  # fmt: skip
            for cross in (False, True):
                lens = case.encoder_lens if cross else case.seq_lens
                starts = [0 if cross else ceil_align(e, case.page_size) for e in case.encoder_lens]
                spans = zip(rows[1:], starts, lens, strict=True)
                own = [row[start : start + length] for row, start, length in spans]
                arguments = dict(
                    qo_indptr=bounds(new),
                    kv_indptr=bounds(lens),
                    kv_indices=spoil(case, cross, torch.cat(own)),
                    last_page_len=torch.ones(4, dtype=torch.int32),
                    page_size=1,
                    q_data_type="torch.bfloat16",
                    kv_data_type="torch.bfloat16",
                )
                for name, value in arguments.items():
                    writer.add(number, "decode.plan" if decoding else "prefill.plan", name, value)
    return path


def bounds(lens) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)


def run(stock, aligned, tmp_path):
    out = tmp_path / "out.json"
    code = gpu_check.main([str(stock), str(aligned), "--device", "cpu", "--out", str(out)])
    return code, json.loads(out.read_text())


def test_right(tmp_path, capsys):
    path = write(tmp_path / "plans.zip")
    code, result = run(path, path, tmp_path)
    assert code == 0
    kinds = [check["kind"] for check in result["checks"]]
    # two regions, decode and prefill; bits at page size 1 alone
    assert (kinds.count("stock's bits"), kinds.count("float64")) == (4, 8)
    assert all(check["right"] for check in result["checks"])
    assert [t["case"] for t in result["timings_us"]] == ["tiny/decode/page 16"]
    assert capsys.readouterr().out.splitlines()[-1] == "12 of 12 checks right"


def test_another_slot_is_found(tmp_path, capsys):
    """One index of stock's decode at page size 1 is another one's."""

    def spoil(case, cross, indices):
        if case is CASES[0] and cross:
            indices[5] = indices[6]
        return indices

    aligned = write(tmp_path / "aligned.zip")
    code, result = run(write(tmp_path / "stock.zip", spoil), aligned, tmp_path)
    assert code == 1
    wrong = [(c["case"], c["kind"]) for c in result["checks"] if not c["right"]]
    assert wrong == [("tiny/decode/page 1 cross", "stock's bits")]
    assert "WRONG tiny/decode/page 1 cross" in capsys.readouterr().out


@pytest.mark.parametrize("number", range(len(CASES)))
def test_whole_pages_are_the_same_keys(tmp_path, number):
    """The plan in pages and the gather read what the plan of slots reads."""
    wrappers = gpu_check.Wrappers("cpu")
    plans = gpu_check.load(write(tmp_path / "plans.zip"))
    for plan in plans[2 * number : 2 * number + 2]:
        plan.shape["group"] = 4
        inputs = gpu_check.make_inputs(plan, "cpu", 0)
        slots = wrappers.run(plan, inputs)()
        pages = gpu_check.in_pages(plan)
        assert pages.arguments["page_size"] == CASES[number].page_size
        assert torch.equal(wrappers.run(pages, inputs)(), slots)
        if plan.kind == "decode":
            assert torch.equal(wrappers.ragged(plan, inputs)(), slots)


def test_the_cases():
    """The released models' heads, and encoders that are no multiple of a page."""
    found = list(cases())
    assert {c.page_size for c in found} == {1, 16, 64}
    assert {(c.query_heads, c.kv_heads, c.head_size) for c in found} == {(20, 20, 64), (32, 8, 128)}
    for model, longest in (("whisper", 1500), ("mllama", 6404)):
        assert max(max(c.encoder_lens) for c in found if c.model == model) == longest
        assert any(0 in c.encoder_lens for c in found if c.model == model)


@pytest.mark.parametrize(
    ("arguments", "path", "said"),
    [
        (["run"], "/usr/bin:/bin", "no nvcc on PATH"),
        ([], "/usr/bin:/bin", "gpu_check.sh prepare"),
        (["other"], "/usr/bin:/bin", "gpu_check.sh prepare"),
    ],
)
def test_the_script_says_what_is_missing(arguments, path, said):
    done = subprocess.run(
        [REPO / "scripts" / "gpu_check.sh", *arguments],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_the_script_runs_the_check(tmp_path):
    """With stand-ins for nvcc, ninja and a PyTorch that sees a GPU: what it would call."""
    tools = tmp_path / "tools"
    tools.mkdir()
    log = tmp_path / "log"
    for name in ("nvcc", "python", "ninja"):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{log}\n')
        (tools / name).chmod(0o755)
    folder = tmp_path / "gpu"
    folder.mkdir()
    command = [REPO / "scripts" / "gpu_check.sh", "run", str(folder)]
    env = os.environ | {"PATH": f"{tools}:/usr/bin:/bin", "PYTHON": str(tools / "python")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        f"gpu_check: no {folder}/stock.zip: run scripts/gpu_check.sh prepare first\n",
    )
    for name in ("stock.zip", "aligned.zip", "site.tar.xz"):
        (folder / name).touch()
    subprocess.run(command, env=env, check=True)
    *_, unpack, check = log.read_text().splitlines()
    assert unpack == f"python -m tarfile -e {folder}/site.tar.xz {folder}"
    assert check == (
        f"python -m pagealign.parity.gpu_check {folder}/stock.zip {folder}/aligned.zip "
        f"--out {folder}/out/gpu_check.json"
    )
