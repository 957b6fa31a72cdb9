"""The command itself, in its short form, on the real trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from pagealign.paths import REPO


def test_parity_quick(tmp_path):
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pagealign", "parity", "--quick", "--out", str(out)],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.endswith("values compared, no difference that is not expected")
    result = json.loads((out / "parity.json").read_text())
    assert all(row["fault"] is None and row["entries"] for row in result["rows"])
    assert {row["workload"].split("/")[1] for row in result["rows"]} == {
        "fa3",
        "flashinfer",
        "intel_xpu",
        "torch_native",
    }
    # What is known to differ did, and nothing is left behind but the result.
    assert set(result["expected"]) == {
        "no-kernel-without-keys",
        "xpu-page-tables",
        "mllama-row-mask",
        "cut-encoder",
        "logprob-in-encoder",
    }
    assert [path.name for path in out.iterdir()] == ["parity.json"]
