"""Tests of the varlen tree, which the runner puts first on PYTHONPATH."""

import os

# The tree leaves upstream 38840 in: decode tokens take slots beside the encoder's, which
# these two checks of SGLang report at the first step.
os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"
os.environ["SGLANG_CHECK_KV_PAGE_INVARIANTS"] = "0"

from bed_fixtures import alone, make_bed, mllama, whisper  # noqa: E402, F401


def pytest_sessionstart():
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("sglang.srt.layers.attention.xpu_backend")
    if "_forward_varlen_gather" not in Path(spec.origin).read_text():
        raise RuntimeError("not the varlen tree; run scripts/run_tests.sh varlen")
