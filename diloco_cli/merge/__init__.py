"""Contributions of one round in, the next version of a fragment out. Start with protocols.py.

    protocols.py   what rules and optimizers do, how one is made fast, the registries
    rules.py       mean and radial; the fold that every rule stands for
    robust.py      rules for runs in which one region may lie: trimmed, median, clipped
    optimizers.py  Nesterov momentum, also by age, Adam and plain descent
    combine.py     frames of all members become one delta, chunk by chunk
    outer_step.py  the merged delta becomes new weights and the delta frame's chunks
    kernels.py     the compiled loops of the outer step

Importing this package registers every kind.
"""

from diloco_cli.merge import optimizers, robust, rules
from diloco_cli.merge.protocols import MergeRule, OuterOptimizer, merge_rules, outer_optimizers

__all__ = [
    "MergeRule",
    "OuterOptimizer",
    "merge_rules",
    "optimizers",
    "outer_optimizers",
    "robust",
    "rules",
]
