"""Tests of the stock tree, which the runner puts first on PYTHONPATH."""

from bed_fixtures import alone, make_bed, mllama, whisper  # noqa: F401


def pytest_sessionstart():
    import importlib.util

    if importlib.util.find_spec("sglang.srt.mem_cache.encoder_reserve") is not None:
        raise RuntimeError("not the stock tree; run scripts/run_tests.sh stock")
