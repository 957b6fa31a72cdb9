"""Page-aligned encoder KV for SGLang: the patch series' harness."""

__version__ = "0.1.0"
