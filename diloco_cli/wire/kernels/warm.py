"""Compiles every kernel and keeps the machine code, so that no run waits for it.

python -m diloco_cli.wire.kernels.warm

Nothing needs this: a kernel that is not kept yet is compiled when it is first called,
which takes about half a second each.
"""

from __future__ import annotations

from importlib import import_module

MODULES = (
    "merge.kernels",
    "wire.kernels.block",
    "wire.kernels.planes",
    "wire.kernels.sparse",
    "wire.kernels.sums",
)


def warm() -> int:
    """Compiles what is not kept yet; says how many kernels there are."""
    from diloco_cli.wire.kernels.jit import Kernel

    found = 0
    for name in MODULES:
        for value in vars(import_module(f"diloco_cli.{name}")).values():
            if isinstance(value, Kernel):
                value.compile()
                found += 1
    return found


if __name__ == "__main__":
    print(f"{warm()} kernels are ready")
