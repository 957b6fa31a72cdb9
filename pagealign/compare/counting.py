"""A device that only counts: what real code would make an accelerator, and its host, do.

Counting on CPU tensors would not do: there, ``tensor.cpu()`` and ``tensor.to(device)`` are
nothing, and reading a length that SGLang keeps on the host looks like a wait for the device.
So tensors are put on a device of their own: ``Counter.put`` wraps a CPU tensor in one whose
``device`` is ``counted:0`` (PyTorch's PrivateUse1, which takes a backend in Python). Code
under test then makes, moves and reads tensors as on an XPU; the ``Counter``, a
``TorchDispatchMode``, sees each operator, notes what it costs, and runs it on the CPU.

What is counted, and what it stands for:

* a *sync* is an operator for which the host has to wait, because it needs a value of the
  device: ``item``, ``bool``, ``int``, ``.cpu()``, ``tolist`` and copies to the host, and those
  whose output's size is a value: ``nonzero``, masked selection, indexing by a mask,
  ``repeat_interleave`` without ``output_size``, ``unique``; ``equal`` too;
* an *upload* is a blocking copy from the host's memory (``non_blocking`` ones don't count):
  the host waits until it is done, and so for the queue before it, but no value is needed;
* an *operator* is any call that PyTorch dispatches, views and work on the host included:
  what the host has to do; a *launch* is one that runs a kernel on the device (no views, no
  ``empty``, no copies from or to the host), or one call of an attention kernel;
* *read* and *written* are the bytes of the operands and results on the device, each element
  once (an expanded dimension once, of a table that is indexed only what is taken);
* *copied* are the bytes of floating-point tensors (queries, keys, values, outputs) written by
  an operator that only moves or casts them; *stored* the same, written into the KV pool.

Not counted: what a kernel reads twice or wastes, Python's own time, and memory traffic that
a fused kernel would save.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

DEVICE = "counted"

# The size of the result, or the result itself, is a value that the host has to wait for.
READS_A_VALUE = frozenset(
    ("_local_scalar_dense", "equal", "nonzero", "masked_select")
    + ("_unique2", "unique_dim", "unique_consecutive")
)
# Not views by their schema, but no kernel runs.
NO_KERNEL = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    + ("_unsafe_view", "lift_fresh", "_local_scalar_dense")
)
MOVES = frozenset(
    ("_to_copy", "cat", "clone", "constant_pad_nd", "copy_", "gather", "index")
    + ("index_copy_", "index_put_", "index_select")
)
TAKES = frozenset(("gather", "index", "index_select"))  # read what they take, not the whole
OVERWRITES = frozenset(("copy_", "fill_", "index_copy_", "index_put_", "zero_"))
# In a name: an access pattern that is written down above or not at all.
PATTERNS = ("embedding", "gather", "index", "put", "scatter", "take", "unfold")


@dataclass(frozen=True)
class Counts:
    """Calls, and bytes for the last four; ``attention`` are launches of attention kernels."""

    syncs: int = 0
    uploads: int = 0
    operators: int = 0
    launches: int = 0
    attention: int = 0
    read: int = 0
    written: int = 0
    copied: int = 0
    stored: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Counts:
        return Counts(*(getattr(self, f.name) * times for f in fields(self)))


class OnDevice(Tensor):
    """A tensor on the counted device; ``held`` is what it holds, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(DEVICE, 0),
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on the counted device, outside of its Counter")

    def tolist(self) -> list:
        return self.cpu().tolist()  # what PyTorch's own does, but refuses a subclass

    def __repr__(self) -> str:  # the usual one would read the values
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"


class _Module:
    """``torch.counted``, as PyTorch wants one for a device; nobody is to choose it."""

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0


@functools.cache
def _register_device() -> None:
    """Make the device known to PyTorch, once per process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(DEVICE, backend_module=_Module)


class Counter(TorchDispatchMode):
    """Counts what happens while it is entered, outside of inference mode (which would hide
    what operators are made of); ``take`` returns the counts and starts anew."""

    def __init__(self) -> None:
        super().__init__()
        _register_device()
        self._counts = Counts()
        self._pool: set[int] = set()

    def put(self, tensor: Tensor, pool: bool = False) -> OnDevice:
        """``tensor``, on the CPU, as one on the device; ``pool`` says that it is KV pool."""
        if pool:
            self._pool.add(_address(tensor))
        return OnDevice(tensor)

    def take(self) -> Counts:
        counts, self._counts = self._counts, Counts()
        return counts

    def add(self, **more: int) -> None:
        """Add to the counts by their names, for what is no ATen operator."""
        self._counts += Counts(**more)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        self.add(operators=1)
        here = [t for t in tree_iter((args, kwargs)) if isinstance(t, OnDevice)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == DEVICE
        if not here and not to_device:
            return func(*args, **kwargs)

        if target is not None:
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(held, args), **tree_map(held, kwargs))
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            arrives = isinstance(args[0], OnDevice) if target is None else to_device
            if arrives != isinstance(source, OnDevice):
                blocking = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:3]))
                self._transfer(source, arrives, blocking)
                return _wrapped(out, here) if arrives else out
        self._note(func, name, args, kwargs, out)
        return _wrapped(out, here)

    def _transfer(self, source: Tensor, arrives: bool, blocking: bool) -> None:
        if arrives:
            self.add(uploads=int(blocking), written=nbytes(source))
        else:
            self.add(syncs=1, read=nbytes(source))

    def _note(self, func, name: str, args: tuple, kwargs: dict, out: Any) -> None:
        """One operator whose operands and results are on the device."""
        if func.is_view:
            return
        if any(pattern in name for pattern in PATTERNS) and name not in MOVES:
            raise NotImplementedError(f"what {func} reads and writes is not known to the Counter")
        indices = _indices(name, args)
        self._check_devices(func, args, kwargs, indices)
        masks = [i for i in indices if i.dtype == torch.bool and isinstance(i, OnDevice)]
        if name == "index_put_" and _is_host_scalar(args[2]):
            masks = []  # PyTorch turns this into masked_fill
        sized_by_values = name == "repeat_interleave" and kwargs.get("output_size") is None
        self.add(
            syncs=int(name in READS_A_VALUE) + len(masks) + int(sized_by_values),
            uploads=sum(not isinstance(i, OnDevice) for i in indices),
        )
        if name == "_local_scalar_dense":
            self.add(read=nbytes(args[0]))
        if name in NO_KERNEL:
            return

        written = self._written(func, name, args, kwargs, out)
        operands = [*tree_iter((args, kwargs))]
        if name in TAKES or name in OVERWRITES:
            operands = operands[1:]
        if name.startswith("new_") or name.endswith("_like"):
            operands = []  # the first one is only a model for shape and type
        read = sum(nbytes(t) for t in operands if isinstance(t, OnDevice))
        read += written if name in TAKES else 0
        self.add(launches=1, read=read, written=written)
        if name in MOVES:
            dest = args[0] if name in OVERWRITES else out
            if dest.is_floating_point():
                pool = isinstance(dest, OnDevice) and _address(dest.held) in self._pool
                self.add(**{"stored" if pool else "copied": written})

    @staticmethod
    def _written(func, name: str, args: tuple, kwargs: dict, out: Any) -> int:
        if name == "index_put_":
            return _taken(args[0], args[1]) * args[0].element_size()
        if name == "index_copy_":
            return nbytes(args[3])
        changed = [
            kwargs[a.name] if a.name in kwargs else args[n]
            for n, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        results = changed or [t for t in tree_iter(out) if isinstance(t, Tensor)]
        return sum(nbytes(t) for t in results)

    @staticmethod
    def _check_devices(func, args: tuple, kwargs: dict, indices: Sequence[Tensor]) -> None:
        """A tensor of the host among the device's: refused, but for scalars and indices."""
        allowed = {id(index) for index in indices}
        for t in tree_iter((args, kwargs)):
            on_host = isinstance(t, Tensor) and not isinstance(t, OnDevice)
            if on_host and t.dim() and id(t) not in allowed:
                raise RuntimeError(f"{func}: tensors on the host and on the device")


def held(x: Any) -> Any:
    """The CPU tensor behind one on the device; anything else as it is."""
    return x.held if isinstance(x, OnDevice) else x


def _wrapped(out: Any, operands: list[OnDevice]) -> Any:
    """``out`` on the device; an operand that was changed in place stays the same object."""
    known = {id(t.held): t for t in operands}

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return known[id(x)] if id(x) in known else OnDevice(x)

    return tree_map(wrap, out)


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def nbytes(t: Tensor) -> int:
    """Bytes of a tensor's elements; a dimension that is only expanded counts once."""
    distinct = (n if stride else min(n, 1) for n, stride in zip(t.shape, t.stride(), strict=True))
    return math.prod(distinct) * t.element_size()


def _indices(name: str, args: tuple) -> list[Tensor]:
    return [i for i in args[1] if i is not None] if name in ("index", "index_put_") else []


def _is_host_scalar(t: Tensor) -> bool:
    return not isinstance(t, OnDevice) and t.numel() == 1


def _taken(source: Tensor, indices: Sequence[Tensor | None]) -> int:
    """Elements of ``source[indices]``; a mask stands for as many dimensions as it has."""
    shapes, rest, dim = [], 1, 0
    for index in indices:
        if index is None:
            rest *= source.shape[dim]
            dim += 1
        elif index.dtype == torch.bool:
            shapes.append((int(held(index).sum()),))
            dim += index.dim()
        else:
            shapes.append(tuple(index.shape))
            dim += 1
    return math.prod(torch.broadcast_shapes(*shapes)) * rest * math.prod(source.shape[dim:])
