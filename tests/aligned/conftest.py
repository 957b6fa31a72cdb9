"""Tests of the aligned tree, which the runner puts first on PYTHONPATH."""

from bed_fixtures import alone, make_bed, mllama, whisper  # noqa: F401


def pytest_sessionstart():
    import importlib.util

    spec = importlib.util.find_spec("sglang.srt.mem_cache.encoder_reserve")
    if spec is None:
        raise RuntimeError("not the aligned tree; run scripts/run_tests.sh aligned")
