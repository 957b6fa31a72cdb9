"""Parity: stock and aligned trees on the same workloads, compared byte by byte.

In a process per tree ``record`` runs workloads through the scheduler's bed while a
``recorder`` writes down all that the series could change. ``difference`` compares two
recordings, ``expected`` lists where they may differ, and ``run`` is the command.
"""
