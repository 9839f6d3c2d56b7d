"""Loops at the speed of the memory: numba kernels, compiled on first use and then kept.

A kernel has one signature and one set of flags for ever. That makes the cache on disk
safe: whatever processes compile at the same time write the same entry, and no variant of
a function can be mistaken for another. numba by itself notices only changes of the file a
kernel is written in; an entry here is also stamped with a hash of all files of this folder,
so kernels may call each other's functions.

Kernels release the interpreter lock and start no threads of their own; frames spread
their chunks over threads instead. Importing numba takes a quarter of a second, so only
code that is about to move numbers imports a module of kernels.

    python -m diloco_cli.wire.kernels.jit    compiles every kernel ahead of time

Nothing needs that: a kernel without an entry is compiled when it is first called, which
takes about half a second each.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numba
from numba import types

FLAGS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
"""No fastmath: sums keep their order and products are not fused, on any processor."""

whole = types.int64
real = types.float64
single = types.float32
Floats = types.Array(types.float32, 1, "C", readonly=True)
FloatsOut = types.Array(types.float32, 1, "C")
Doubles = types.Array(types.float64, 1, "C", readonly=True)
DoublesOut = types.Array(types.float64, 1, "C")
Bytes = types.Array(types.uint8, 1, "C", readonly=True)
BytesOut = types.Array(types.uint8, 1, "C")
BodiesOut = types.Array(types.uint8, 2, "C")

MODULES = (
    "diloco_cli.wire.kernels.block",
    "diloco_cli.wire.kernels.planes",
    "diloco_cli.wire.kernels.sparse",
    "diloco_cli.wire.kernels.sums",
    "diloco_cli.merge.kernels",
)

_compiling = threading.Lock()


@cache
def sources_hash() -> str:
    """Changes with any file of this folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Kernel:
    """A function that becomes machine code when it is first called."""

    def __init__(self, function: Callable, signature: Any) -> None:
        self.__doc__ = function.__doc__
        self.name = function.__name__
        self._function = function
        self._signature = signature
        self._machine: Callable | None = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._machine or self.compile())(*arguments)

    def compile(self) -> Callable:
        """Loads the machine code from the cache, or makes it."""
        with _compiling:
            if self._machine is None:
                try:
                    self._machine = self._made(cache=True)
                except Exception:
                    # Nowhere to keep it, or what is kept was cut short by a power failure.
                    # A fault in the function itself shows again, and then rises.
                    self._machine = self._made(cache=False)
            return self._machine

    def _made(self, *, cache: bool) -> Callable:
        machine = numba.njit(cache=cache, **FLAGS)(self._function)
        if cache:
            # The public setting, one cache folder for the process, would move other people's
            # kernels, and leave a folder behind for every version of ours.
            index = cast(Any, machine)._cache._cache_file
            index._source_stamp = (index._source_stamp, sources_hash())
        machine.compile(self._signature)
        machine.disable_compile()
        return machine


def kernel(signature: Any) -> Callable[[Callable], Kernel]:
    """Makes a function a kernel that takes and gives exactly these types."""
    return lambda function: Kernel(function, signature)


inlined = numba.njit(**FLAGS)
"""For the small functions that kernels are made of."""

template = numba.njit(inline="always", **FLAGS)
"""For loops that take functions. Written into their caller by numba itself: a kernel that
passes a function on to compiled code cannot be kept on disk."""


def warm() -> int:
    """Compiles every kernel that has no entry yet; says how many kernels there are."""
    # Run as a program, this module is not the one that the kernels' classes come from.
    from diloco_cli.wire.kernels.jit import Kernel

    kernels = [
        value
        for name in MODULES
        for value in vars(import_module(name)).values()
        if isinstance(value, Kernel)
    ]
    for each in kernels:
        each.compile()
    return len(kernels)


if __name__ == "__main__":
    print(f"{warm()} kernels are ready")
