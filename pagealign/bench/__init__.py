"""Attention kernels timed on real hardware: whole pages in place, copies, single slots.

It runs in an environment of its own (``scripts/setup_bench_env.sh``): Intel Extension for
PyTorch needs a torch that the pinned SGLang can't live with. So nothing here imports SGLang,
and of pagealign only ``errors``, ``paths``, ``report`` and ``kernels.reference``.

``shapes`` says what is attended, ``inputs`` makes it, ``backends`` do it, ``timing`` and
``bandwidth`` time it, ``measure`` puts these together for one shape, ``projection`` adds the
layers of a model up, ``results`` and ``tables`` write it down.
"""
