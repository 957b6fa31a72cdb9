"""What every test process shares."""

from __future__ import annotations

import signal

import hypothesis

# A shell starts background jobs with some of these ignored, nohup another, and bash can't trap
# what it inherits so.
for ignored in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(ignored, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Same examples on every run and machine; no deadline, since machines differ in speed.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
