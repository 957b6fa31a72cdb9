"""``python -m forking_launcher``: ``sglang.launch_server`` on a CPU, its processes forked.

SGLang spawns its scheduler and its detokenizer, so each of the three processes imports
everything for itself, which takes a slow core most of a minute. Forked, they share one
import. A device's context would not survive that; a CPU has none. FlashInfer, which a
machine with an XPU does not have, is not imported either: 10 seconds less. With
``PAGEALIGN_FLASHINFER=1`` a stand-in takes the place of its wrappers (``flashinfer_cpu``).
"""

import gc
import multiprocessing
import os
import runpy
import sys

_set_start_method = multiprocessing.set_start_method


def _fork(method, force=False):
    """SGLang calls this when all is imported, just before it starts its processes."""
    if os.environ.get("PAGEALIGN_FLASHINFER") == "1":
        from flashinfer_cpu import replacements

        for owner, name, value in replacements():
            setattr(owner, name, value)
    gc.freeze()
    gc.enable()
    _set_start_method("fork", force=force)


if __name__ == "__main__":
    sys.modules["flashinfer"] = None
    multiprocessing.set_start_method = _fork
    gc.disable()  # what is imported is no garbage
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
