"""``pagealign port``: try the series on another release of SGLang, hunk by hunk."""
