"""What a merge rule and an outer optimizer do, how one of your own can be fast, the registries.

Every rule is a fold (`MergeRule`), and every optimizer has a `step`. That is enough. With
one protocol more the server need not lay out every member's values:

    WeightedSum     rule        Σ count · delta in each piece, times a factor known afterwards
    ByColumn        rule        one value of all members at a time
    FusedOptimizer  optimizer   step, change and its largest number in one pass
    ByRound         optimizer   another step by the round: its number, who takes part, how old

The merge asks for these protocols and for no class by name. The fold and the plain step
say what is computed: a fast path gives the same bits, but for the order in which the
squares of a length are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from diloco_cli.core.fragments import Fragment
from diloco_cli.registry import Registry


class MergeRule(Protocol):
    """A fold over the flat vectors of one fragment: `start`, `add` for each member, `finish`.

    The sums belong to the fold: `add` may change them in place.
    """

    def start(self, fragment: Fragment) -> Any: ...
    def add(self, sums: Any, delta: np.ndarray, weight: float) -> Any: ...
    def finish(self, sums: Any) -> np.ndarray: ...


@dataclass(frozen=True)
class MergeMembers:
    """What a rule may know about a round's members before their deltas are added up."""

    fragment: Fragment
    weights: np.ndarray
    squares: Callable[[], np.ndarray]
    """The squared length of each member's each piece. Unless these were measured when the
    members came in, the first call costs a sweep over all of them."""

    @property
    def weight(self) -> float:
        return in_order(self.weights)


@dataclass(frozen=True)
class PieceSums:
    """Squared lengths of the sums over all members, piece by piece."""

    weighted: np.ndarray
    """Of Σ weight · delta."""
    counted: np.ndarray
    """Of Σ count · delta."""


@dataclass(frozen=True)
class PieceFactor:
    """What a piece of Σ count · delta ÷ Σ weight is multiplied with."""

    factor: float = 1.0
    weighted: bool = False
    """Take Σ weight · delta in this piece after all. Costs another sweep, so keep it rare."""


@runtime_checkable
class WeightedSum(Protocol):
    """A rule whose result is Σ count · delta in each piece, times a factor known afterwards."""

    def counts(self, members: MergeMembers) -> np.ndarray:
        """Says what each member's each piece counts with: an array (members, pieces)."""
        ...

    def factors(self, members: MergeMembers, sums: PieceSums) -> list[PieceFactor]:
        """Says what each piece of the sum is multiplied with."""
        ...


@runtime_checkable
class ByColumn(Protocol):
    """A rule that merges one value of all members at a time."""

    def combine(self, rows: np.ndarray) -> np.ndarray:
        """Merges rows, one per member; may reorder what it is given."""
        ...


class OuterOptimizer(Protocol):
    def start(self, size: int) -> np.ndarray:
        """Momentum before the first step: none, or as many values for every weight, the values of
        a weight side by side."""
        ...

    def step(
        self, theta: np.ndarray, momentum: np.ndarray, merged: np.ndarray, *, drain: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the next weights and momentum; the arguments stay as they are."""
        ...


@dataclass(frozen=True)
class OuterRound:
    """What an optimizer may know of a round; all of it is on record, so a replay knows it too."""

    version: int
    """That the step leads to."""
    share: float = 1.0
    """Members ÷ regions that could have been members; 1 in a drain."""
    age: float = 0.0
    """Versions between what the members trained on and what the step begins with: the mean by
    weight."""


@runtime_checkable
class ByRound(Protocol):
    """An optimizer whose step is not the same in every round."""

    def at(self, round: OuterRound) -> OuterOptimizer:
        """The optimizer of the step that this round takes."""
        ...


Vectors = tuple[np.ndarray, np.ndarray, np.ndarray]


@runtime_checkable
class FusedOptimizer(Protocol):
    """An optimizer whose step is one pass over the memory."""

    def fused_step(
        self, merged: np.ndarray, factor: float, old: Vectors, new: Vectors, *, drain: bool
    ) -> int:
        """Steps along `factor` · `merged`; returns the bits of the largest number it made.

        `old` is theta, momentum and published weights. Fills `new`: theta, momentum, and the
        change from the published weights to the new theta. `merged` is the memory of the
        new theta.
        """
        ...


merge_rules: Registry[MergeRule] = Registry("merge rule")
outer_optimizers: Registry[OuterOptimizer] = Registry("outer optimizer")


def optimizer_at(optimizer: OuterOptimizer, round: OuterRound) -> OuterOptimizer:
    """What takes the step of a round."""
    return optimizer.at(round) if isinstance(optimizer, ByRound) else optimizer


def is_weighted_sum(rule: object) -> TypeGuard[WeightedSum]:
    return isinstance(rule, WeightedSum) and _up_to_date(rule, "counts", "factors")


def is_by_column(rule: object) -> TypeGuard[ByColumn]:
    return isinstance(rule, ByColumn) and _up_to_date(rule, "combine")


def is_fused(optimizer: object) -> TypeGuard[FusedOptimizer]:
    return isinstance(optimizer, FusedOptimizer) and _up_to_date(optimizer, "fused_step")


def _up_to_date(thing: object, *fast: str) -> bool:
    """A subclass that changes the plain methods alone has inherited a fast path that is wrong."""
    classes = type(thing).__mro__

    def depth(name: str) -> int:
        return next((n for n, kind in enumerate(classes) if name in vars(kind)), len(classes))

    return max(map(depth, fast)) <= min(map(depth, ("start", "add", "finish", "step")))


def in_order(numbers: np.ndarray) -> float:
    """Adds up from first to last; numpy's own sum adds in pairs."""
    return float(sum(numbers.tolist()))
