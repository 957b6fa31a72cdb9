"""What stands in for a backend's hardware, and who is told of its kernels' calls."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

Listener = Callable[[str, dict[str, Any]], None]


class Kernels:
    """Tells ``listener`` of a backend's kernel calls, before each: ``call(name, arguments)``.

    Names: ``decode.plan``, ``prefill.run`` and so on of FlashInfer's wrappers,
    ``flash_attn_with_kvcache`` of FA3 and intel_xpu.
    """

    def __init__(self) -> None:
        self.listener: Listener = lambda name, arguments: None

    @contextlib.contextmanager
    def ready(self, backend: str) -> Iterator[None]:
        """Inside, a bed can be made with ``backend``."""
        with contextlib.ExitStack() as stack:
            for owner, name, value in self._replacements(backend):
                if isinstance(owner, dict):
                    stack.enter_context(mock.patch.dict(owner, {name: value}))
                else:
                    stack.enter_context(mock.patch.object(owner, name, value, create=True))
            if backend == "flashinfer":
                from pagealign.standins.flashinfer_cpu.calls import listening

                stack.enter_context(listening(lambda name, _, args: self.listener(name, args)))
            yield

    def _replacements(self, backend: str) -> list[tuple[Any, str, Any]]:
        name = "flash_attn_with_kvcache"
        match backend:
            case "flashinfer":
                from pagealign.standins import flashinfer_cpu

                return flashinfer_cpu.replacements()
            case "fa3":
                from pagealign.standins import fa3_cpu

                found = fa3_cpu.replacements()
                return [(o, n, self._told(n, v) if n == name else v) for o, n, v in found]
            case "intel_xpu":
                from sglang.srt.arg_groups import attention_hook
                from sglang.srt.layers.attention import xpu_backend

                return [
                    (xpu_backend, name, self._told(name, getattr(xpu_backend, name))),
                    # The release replaces page size 1 by 128 on this backend.
                    (attention_hook, "_intel_xpu_page_constraint", lambda view: {}),
                ]
        return []

    def _told(self, name: str, kernel: Callable) -> Callable:
        signature = inspect.signature(kernel)

        def call(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            arguments.update(arguments.pop("tuning", {}))
            self.listener(name, arguments)
            return kernel(*args, **kwargs)

        return call
