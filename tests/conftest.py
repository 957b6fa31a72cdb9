"""What every test process shares."""

from __future__ import annotations

import hypothesis

# Same examples on every run and machine; no deadline, since machines differ in speed.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
