"""The ``sgl_kernel`` stand-in under a name of its own.

Loaded from its files as ``pagealign_sgl_kernel``, so that these tests neither need SGLang nor
disturb tests in the same process that import ``sgl_kernel`` by its real name.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from pagealign.paths import STANDINS

_ALIAS = "pagealign_sgl_kernel"


def load_standin() -> ModuleType:
    """The package; its modules are attributes, ``load_standin().flash_attn`` for one."""
    if _ALIAS in sys.modules:
        return sys.modules[_ALIAS]
    folder = STANDINS / "sgl_kernel"
    spec = importlib.util.spec_from_file_location(
        _ALIAS, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules[_ALIAS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
