"""Which devices do we know, how fast are they and how much fits into them?

Speeds are those of dense products in bfloat16, as the vendors state them; where they state
them with sparsity, half of that. MFU is a share of this figure whatever a region computes in,
so that regions can be compared. Importing this module loads no framework.
"""

from __future__ import annotations

from dataclasses import dataclass

TERA, GB = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Accelerator:
    name: str
    """What people call it."""
    known_by: str
    """Part of what JAX calls it."""
    peak: float
    """Floating-point operations per second, dense, in bfloat16."""
    memory: float
    """Bytes."""


ACCELERATORS = (
    # Of two that both fit, the first counts.
    Accelerator("a100-40gb", "A100-SXM4-40GB", 312 * TERA, 40 * GB),
    Accelerator("a100", "A100", 312 * TERA, 80 * GB),
    Accelerator("l40s", "L40S", 362 * TERA, 48 * GB),
    Accelerator("h100-nvl", "H100 NVL", 835 * TERA, 94 * GB),
    Accelerator("h100-pcie", "H100 PCIe", 756 * TERA, 80 * GB),
    Accelerator("h100", "H100", 989 * TERA, 80 * GB),
    Accelerator("h200", "H200", 989 * TERA, 141 * GB),
    Accelerator("b200", "NVIDIA B200", 2250 * TERA, 180 * GB),
    Accelerator("v4", "TPU v4", 275 * TERA, 32 * GB),
    Accelerator("v5e", "TPU v5 lite", 197 * TERA, 16 * GB),
    Accelerator("v5p", "TPU v5", 459 * TERA, 95 * GB),
    Accelerator("v6e", "TPU v6 lite", 918 * TERA, 32 * GB),
)


def known(kind: str) -> Accelerator | None:
    """Finds a device by what JAX calls it; None for a processor and for what is not listed."""
    return next((one for one in ACCELERATORS if one.known_by.lower() in kind.lower()), None)
