"""Merge rules for runs in which one region may lie.

A mean has no defence: one member of a thousand can move it anywhere. These rules bound
what a minority can do, and each has its price, said with it. None of them sees through
poison that looks like honest work; norms and finiteness are looked at before (`guard`).

`Trimmed` and `Median` merge by column, so the server gives them the members chunk by
chunk. `Clipped` is a weighted sum that needs each member's length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import numpy as np
from pydantic import Field

from diloco_cli.core.fragments import Fragment, norm, spans
from diloco_cli.merge.protocols import MergeMembers, PieceFactor, PieceSums, merge_rules
from diloco_cli.merge.rules import Mean


@dataclass(slots=True)
class MemberDeltas:
    """All members so far, for a rule that must see every one of them."""

    fragment: Fragment
    deltas: list[np.ndarray]
    weights: list[float]


class KeepsMembers:
    """Keeps every member; only where members are few and small."""

    def start(self, fragment: Fragment) -> MemberDeltas:
        return MemberDeltas(fragment, [], [])

    def add(self, sums: MemberDeltas, delta: np.ndarray, weight: float) -> MemberDeltas:
        sums.deltas.append(delta)
        sums.weights.append(weight)
        return sums


class KeepsColumns(KeepsMembers, ABC):
    """The fold of a rule that merges by column."""

    @abstractmethod
    def combine(self, rows: np.ndarray) -> np.ndarray:
        """Merges rows, one per member; may reorder what it is given."""

    def finish(self, sums: MemberDeltas) -> np.ndarray:
        merged = np.empty(sums.fragment.size, np.float32)
        for span in spans(merged.size):
            merged[span] = self.combine(np.stack([delta[span] for delta in sums.deltas]))
        return merged


@merge_rules.register("trimmed")
@dataclass(frozen=True)
class Trimmed(KeepsColumns):
    """The mean of each value without its largest and smallest; weights do not count.
    Holds while fewer regions than are trimmed on one side lie, and needs at least three in
    a round. Costs the honest extremes: the step is shorter than the mean's.
    """

    trim: Annotated[float, Field(gt=0, lt=0.5)] = 0.2
    """Share of the members dropped on each side; one at least, from three members on."""

    def combine(self, rows: np.ndarray) -> np.ndarray:
        members = len(rows)
        cut = min(max(1, int(self.trim * members)), (members - 1) // 2)
        rows.sort(axis=0)
        return rows[cut : members - cut].mean(axis=0, dtype=np.float64).astype(np.float32)


@merge_rules.register("median")
@dataclass(frozen=True)
class Median(KeepsColumns):
    """The middle of each value; weights do not count.
    Holds while fewer than half of a round's members lie. Costs most of the step: regions'
    pseudo-gradients are nearly orthogonal, and the middle of many unlike values is near zero.
    """

    def combine(self, rows: np.ndarray) -> np.ndarray:
        members = len(rows)
        rows.sort(axis=0)
        middle = rows[(members - 1) // 2 : members // 2 + 1]
        return middle.mean(axis=0, dtype=np.float64).astype(np.float32)


@merge_rules.register("clipped")
@dataclass(frozen=True)
class Clipped(KeepsMembers):
    """The weighted mean, with no member longer than `most` times the median member.
    Against work that is too large, from a broken optimizer or a liar, without refusing
    anyone. It does not help against a wrong direction of the usual length.
    """

    most: Annotated[float, Field(gt=0)] = 1.5
    """Longest a member may be, in lengths of the round's median member."""

    def shares(self, lengths: Sequence[float]) -> list[float]:
        """With what each member's values are multiplied."""
        limit = self.most * median(lengths)
        return [limit / length if length > limit else 1.0 for length in lengths]

    def counts(self, members: MergeMembers) -> np.ndarray:
        lengths = np.sqrt(np.sum(members.squares(), axis=1))
        return Mean().counts(members) * np.array(self.shares(lengths.tolist()))[:, None]

    def factors(self, members: MergeMembers, sums: PieceSums) -> list[PieceFactor]:
        return Mean().factors(members, sums)

    def finish(self, sums: MemberDeltas) -> np.ndarray:
        shares = self.shares([norm(delta) for delta in sums.deltas])
        total = np.zeros(sums.fragment.size, np.float64)
        for delta, weight, share in zip(sums.deltas, sums.weights, shares, strict=True):
            total += np.multiply(delta, weight * share, dtype=np.float64)
        return (total / sum(sums.weights)).astype(np.float32)
