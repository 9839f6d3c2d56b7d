"""Many pseudo-gradients become one: mean and radial.

`merge` is what every rule means: a fold that decodes one contribution at a time, so memory
does not grow with the number of regions. A rule that must see everything keeps a list.
`counts` and `factors` say the same to the server's fast path (combine.py).

Sums and weights are float64, results float32. Members come in name order, so the same
members give the same bits whatever the network did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from diloco_cli.core.fragments import Fragment, Piece, norm, spans
from diloco_cli.merge.protocols import (
    MergeMembers,
    MergeRule,
    PieceFactor,
    PieceSums,
    in_order,
    merge_rules,
)

LIGHTEST, HEAVIEST = 1e-40, 1e40
"""Weights of any real run lie within; beyond, squares of weighted sums leave float64."""


def merge(
    rule: MergeRule, fragment: Fragment, members: Iterable[tuple[float, np.ndarray]]
) -> np.ndarray:
    """Folds (weight, delta) pairs into one delta; a single one comes back bit for bit."""
    arrivals = iter(members)
    first = next(arrivals, None)
    if first is None:
        raise ValueError(f"fragment {fragment.number}: no members to merge")
    second = next(arrivals, None)
    if second is None:
        return _fitting(first[1], fragment)
    sums = rule.start(fragment)
    for weight, delta in (first, second):
        sums = rule.add(sums, _fitting(delta, fragment), weight)
    del first, second  # Decoded vectors are large: only the current one is kept.
    for weight, delta in arrivals:
        sums = rule.add(sums, _fitting(delta, fragment), weight)
    return rule.finish(sums)


def _fitting(delta: np.ndarray, fragment: Fragment) -> np.ndarray:
    if delta.shape != (fragment.size,) or delta.dtype != np.float32:
        raise ValueError(
            f"fragment {fragment.number} has {fragment.size} float32 values, "
            f"the member {delta.shape} of {delta.dtype}"
        )
    return delta


def weight(tokens: float, steps: float, *, steps_cap: float) -> float:
    """Says how much a contribution counts: tokens² ÷ steps, quantity times batch size.

    A region that comes back after a long silence holds thousands of steps and would
    outvote all others together. So it counts as if it had stopped after `steps_cap`
    steps, its tokens scaled along.
    """
    for name, value in (("tokens", tokens), ("steps", steps), ("steps_cap", steps_cap)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}, it must be a positive number")
    result = tokens * (tokens / steps) * length_share(steps, steps_cap=steps_cap)
    if not LIGHTEST <= result <= HEAVIEST:
        raise ValueError(f"{tokens} tokens in {steps} steps give the absurd weight {result:g}")
    return result


def length_share(steps: float, *, steps_cap: float) -> float:
    """Says how much of a contribution's length is merged: as much as `steps_cap` steps have.

    A weight that is limited is not enough: with other members of a few steps each, half a
    run's way is still the longest by far, and its direction is that of weights long gone.
    """
    return min(1.0, steps_cap / steps)


@dataclass(slots=True)
class MeanSums:
    total: np.ndarray
    weight: float = 0.0


@merge_rules.register("mean")
@dataclass(frozen=True)
class Mean:
    """The weighted average of the pseudo-gradients."""

    def start(self, fragment: Fragment) -> MeanSums:
        return MeanSums(np.zeros(fragment.size, np.float64))

    def add(self, sums: MeanSums, delta: np.ndarray, weight: float) -> MeanSums:
        _add_scaled(sums.total, delta, weight)
        sums.weight += weight
        return sums

    def finish(self, sums: MeanSums) -> np.ndarray:
        merged = np.empty(sums.total.size, np.float32)
        _put_scaled(merged, sums.total, 1 / sums.weight)
        return merged

    def counts(self, members: MergeMembers) -> np.ndarray:
        return np.repeat(members.weights[:, None], len(members.fragment.pieces), axis=1)

    def factors(self, members: MergeMembers, sums: PieceSums) -> list[PieceFactor]:
        return [PieceFactor()] * len(members.fragment.pieces)


@dataclass(slots=True)
class RadialSums:
    fragment: Fragment
    total: np.ndarray
    """Σ weight · delta."""
    directions: np.ndarray
    """Σ weight · delta ÷ |delta|, each piece on its own."""
    lengths: list[float]
    """Σ weight · |delta|, one for each piece."""
    weight: float = 0.0
    members: int = 0


@merge_rules.register("radial")
@dataclass(frozen=True)
class Radial:
    """Mean length times mean direction, tensor by tensor; plain mean for embeddings.

    Regions' pseudo-gradients are nearly orthogonal, so their mean shrinks as more regions
    take part. Averaging length and direction apart keeps the step as long as one
    region's, whatever their number.
    """

    def start(self, fragment: Fragment) -> RadialSums:
        total, directions = np.zeros(fragment.size), np.zeros(fragment.size)
        return RadialSums(fragment, total, directions, [0.0] * len(fragment.pieces))

    def add(self, sums: RadialSums, delta: np.ndarray, weight: float) -> RadialSums:
        _add_scaled(sums.total, delta, weight)
        for number, piece in enumerate(sums.fragment.pieces):
            length = 0.0 if piece.embedding else norm(delta[piece.span])
            if length > 0:  # A zero has no direction, but it counts in the mean length.
                _add_scaled(sums.directions[piece.span], delta[piece.span], weight / length)
                sums.lengths[number] += weight * length
        sums.weight += weight
        sums.members += 1
        return sums

    def finish(self, sums: RadialSums) -> np.ndarray:
        merged = np.empty(sums.total.size, np.float32)
        for number, piece in enumerate(sums.fragment.pieces):
            if piece.embedding:
                source, scale = sums.total, 1 / sums.weight
            else:
                source, scale = _radial(sums, piece, sums.lengths[number] / sums.weight)
            _put_scaled(merged[piece.span], source[piece.span], scale)
        return merged

    def counts(self, members: MergeMembers) -> np.ndarray:
        counts = Mean().counts(members)
        for number, piece in enumerate(members.fragment.pieces):
            if not piece.embedding:
                lengths = np.sqrt(members.squares()[:, number])
                counts[:, number] = 0.0  # A delta without a length has no direction.
                np.divide(members.weights, lengths, out=counts[:, number], where=lengths > 0)
        return counts

    def factors(self, members: MergeMembers, sums: PieceSums) -> list[PieceFactor]:
        weight, factors = members.weight, Mean().factors(members, sums)
        for number, piece in enumerate(members.fragment.pieces):
            if not piece.embedding:
                lengths = np.sqrt(members.squares()[:, number])
                by_direction, factor = radial_factor(
                    len(lengths),
                    weight,
                    in_order(members.weights * lengths) / weight,
                    math.sqrt(sums.weighted[number]),
                    math.sqrt(sums.counted[number]),
                )
                factors[number] = PieceFactor(factor * weight, weighted=not by_direction)
        return factors


def _radial(sums: RadialSums, piece: Piece, mean_length: float) -> tuple[np.ndarray, float]:
    """Picks the direction of the merged piece and the factor that gives it its length."""
    straight = norm(sums.total[piece.span])
    agreement = norm(sums.directions[piece.span])
    by_direction, factor = radial_factor(
        sums.members, sums.weight, mean_length, straight, agreement
    )
    return (sums.directions if by_direction else sums.total), factor


def radial_factor(
    members: int, weight: float, mean_length: float, straight: float, agreement: float
) -> tuple[bool, float]:
    """Says whether a merged piece is the sum of directions or of deltas, and times what factor.

    `straight` and `agreement` are the lengths of Σ weight · delta and of Σ weight ·
    direction. Where directions cancel, what is left of them is noise, and full length
    along noise is harmful. So the result is at most 2√members times as long as the
    weighted mean (orthogonal members ask for √members), and once the mean direction is
    shorter than half of what orthogonal members leave, the weighted mean points the way.
    """
    most = 2 * math.sqrt(members)
    length = min(mean_length, most * straight / weight)
    if length == 0:
        return False, 0.0
    if agreement * most < weight:
        return False, length / straight
    return True, length / agreement


def _add_scaled(total: np.ndarray, values: np.ndarray, factor: float) -> None:
    for span in spans(total.size):
        total[span] += np.multiply(values[span], factor, dtype=np.float64)


def _put_scaled(out: np.ndarray, values: np.ndarray, factor: float) -> None:
    for span in spans(out.size):
        out[span] = values[span] * factor
