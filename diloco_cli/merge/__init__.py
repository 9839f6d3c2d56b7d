"""Contributions of one round in, the next version of a fragment out. Start with rules.py.

combine.py           many frames become one delta: the first two sweeps of a merge
kernels.py           the loops of a merge: lengths, weighted sums of many bodies, the outer …
outer_optimizers.py  A merged pseudo-gradient becomes the next version
outer_step.py        A closed round becomes the next version in three sweeps over its …
robust.py            merge rules for runs in which one region may lie
rules.py             many pseudo-gradients become one
"""

from diloco_cli.merge import robust, rules

__all__ = ["robust", "rules"]
