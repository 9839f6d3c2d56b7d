"""Loops at the speed of the memory: numba kernels, compiled on first use and then kept.

A kernel has one signature and one set of flags for ever. That makes the cache on disk
safe: whatever processes compile at the same time write the same entry, and no variant of
a function can be mistaken for another. A kernel calls no compiled function of another
file, because numba notices only changes of the file a kernel is written in.

Kernels release the interpreter lock and start no threads of their own; frames spread
their chunks over threads instead. Importing numba takes a quarter of a second, so only
code that is about to move numbers imports a module of kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

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

_compiling = threading.Lock()


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
        machine.compile(self._signature)
        machine.disable_compile()
        return machine


def kernel(signature: Any) -> Callable[[Callable], Kernel]:
    """Makes a function a kernel that takes and gives exactly these types."""
    return lambda function: Kernel(function, signature)


inlined = numba.njit(**FLAGS)
"""For the small functions that kernels of the same file are made of."""
