"""A rule, an optimizer and a codec from outside are as fast as ours, bit for bit."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from diloco_cli.merge import merge_rules, outer_optimizers
from diloco_cli.merge.combine import combine
from diloco_cli.merge.optimizers import Nesterov, Sgd
from diloco_cli.merge.outer_step import MergePlan, next_weights
from diloco_cli.merge.protocols import (
    MergeMembers,
    PieceFactor,
    PieceSums,
    Vectors,
    is_by_column,
    is_fused,
    is_weighted_sum,
)
from diloco_cli.merge.robust import Clipped, Median, Trimmed
from diloco_cli.merge.rules import Mean, Radial, merge
from diloco_cli.wire.codecs import Foldable, InPlace, codecs
from diloco_cli.wire.frame import Frame, open_frame, pack
from tests.merge.test_outer_step import SIZE, fragment, members, state
from tests.wire.forged_frames import header


class Slow:
    """The fold alone: a sum in which each member counts half of the one before it."""

    def start(self, fragment):
        return [np.zeros(fragment.size), 0.0, 1.0]

    def add(self, sums, delta, weight):
        sums[0] += np.multiply(delta, weight * sums[2], dtype=np.float64)
        sums[1] += weight
        sums[2] /= 2
        return sums

    def finish(self, sums):
        return (sums[0] * (1 / sums[1])).astype(np.float32)


@dataclass(frozen=True)
class Halving(Slow):
    def counts(self, members: MergeMembers) -> np.ndarray:
        shares = 0.5 ** np.arange(len(members.weights))
        return np.outer(members.weights * shares, np.ones(len(members.fragment.pieces)))

    def factors(self, members: MergeMembers, sums: PieceSums) -> list[PieceFactor]:
        return [PieceFactor()] * len(members.fragment.pieces)


@dataclass(frozen=True)
class Largest(Slow):
    """By column; its fold would raise."""

    def start(self, fragment):
        raise AssertionError("one by one")

    def combine(self, rows: np.ndarray) -> np.ndarray:
        return rows.max(axis=0)


@dataclass(frozen=True)
class Bytes(InPlace):
    """One byte per value, in steps of 2**-10; knows how to add up many bodies."""

    def body_size(self, size: int) -> int:
        return size

    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        body.view(np.int8)[:] = np.clip(np.rint(values * 1024), -127, 127)

    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        values[:] = body.view(np.int8) * np.float32(2**-10)


@dataclass(frozen=True)
class FoldedBytes(Bytes):
    def squares(self, body, size, edges):
        squares = np.square(body.view(np.int8).astype(np.float64) / 1024)
        return np.array([squares[a:b].sum() for a, b in pairwise(edges)])

    def fold(self, bodies, size, begin, weights, counts, factor, merged, squares):
        straight, along = np.zeros((2, merged.size))
        for body, weight, count in zip(bodies, weights, counts, strict=True):
            values = body[begin : begin + merged.size].view(np.int8) / 1024
            straight += values * weight
            along += values * count
        merged[:] = along * factor
        squares[:] = np.square(straight).sum(), np.square(along).sum()
        return -1


@pytest.fixture(autouse=True)
def from_outside(monkeypatch):
    for registry in (merge_rules, outer_optimizers, codecs):
        monkeypatch.setattr(registry, "_choices", dict(registry._choices))
    merge_rules.register("halving")(Halving)
    codecs.register("bytes")(Bytes)
    codecs.register("folded-bytes")(FoldedBytes)


def refuse_to_decode(*_, **__):
    raise AssertionError("values were laid out")


def in_codec(kind: str, given: list[tuple[float, Frame]]) -> list[tuple[float, Frame]]:
    return [
        (weight, open_frame(pack(header(SIZE, codec={"kind": kind}), frame.values())))
        for weight, frame in given
    ]


@pytest.mark.parametrize("kind", ["int4", "folded-bytes"])
def test_a_rule_from_outside_is_merged_packed_with_the_bits_of_its_fold(kind, monkeypatch):
    rule = merge_rules.build({"kind": "halving"})
    given = in_codec(kind, members(3, {"kind": "int4"}))
    expected = merge(rule, fragment(), ((weight, frame.values()) for weight, frame in given))
    monkeypatch.setattr(Frame, "read", refuse_to_decode)
    monkeypatch.setattr(Frame, "values", refuse_to_decode)
    merged = combine(rule, fragment(), given)
    np.testing.assert_array_equal(merged.values, expected)
    assert merged.factors == [1.0] * len(fragment().pieces)


@pytest.mark.parametrize("rule", [Mean(), Clipped(), Halving()], ids=str)
def test_a_codec_from_outside_is_folded_with_the_bits_of_its_values(rule, monkeypatch):
    given = members(3, {"kind": "int4"})
    slow = combine(rule, fragment(), in_codec("bytes", given))
    folded = in_codec("folded-bytes", given)
    assert isinstance(folded[0][1].codec, Foldable)
    monkeypatch.setattr(FoldedBytes, "read", refuse_to_decode)
    np.testing.assert_array_equal(combine(rule, fragment(), folded).values, slow.values)


def test_lengths_are_taken_from_packed_bodies_too(monkeypatch):
    given = members(3, {"kind": "int4"})
    slow = combine(Radial(), fragment(), in_codec("bytes", given))
    folded = in_codec("folded-bytes", given)
    monkeypatch.setattr(FoldedBytes, "read", refuse_to_decode)
    fast = combine(Radial(), fragment(), folded)
    np.testing.assert_allclose(fast.factors, slow.factors, rtol=1e-12)
    np.testing.assert_allclose(fast.values, slow.values, rtol=1e-6)


def test_a_rule_by_column_from_outside_sees_rows():
    given = members(3, {"kind": "int4"})
    merged = combine(Largest(), fragment(), given)
    expected = np.max([frame.values() for _, frame in given], axis=0)
    np.testing.assert_array_equal(merged.values, expected)


@dataclass(frozen=True)
class PlainSgd:
    """Without a fused step."""

    def start(self, size):
        return np.zeros(size, np.float32)

    def step(self, theta, momentum, merged, *, drain):
        return theta - np.float32(0.5) * merged, momentum


@dataclass(frozen=True)
class FusedSgd(PlainSgd):
    def fused_step(
        self, merged: np.ndarray, factor: float, old: Vectors, new: Vectors, *, drain: bool
    ) -> int:
        delta = np.multiply(merged, factor, dtype=np.float64).astype(np.float32)
        new[0][:], new[1][:] = old[0] - np.float32(0.5) * delta, old[1]
        np.subtract(new[0], old[2], out=new[2])
        return 0


@pytest.mark.parametrize("rule", [Mean(), Radial()], ids=str)
def test_an_optimizer_from_outside_may_fuse_its_step(rule, monkeypatch):
    given, down = members(2, {"kind": "int4"}), codecs.build({"kind": "int8"})
    plain = next_weights(MergePlan(rule, PlainSgd(), down), fragment(), given, state())
    ours = next_weights(MergePlan(rule, Sgd(lr=0.5), down), fragment(), given, state())
    monkeypatch.setattr(PlainSgd, "step", refuse_to_decode)
    fused = next_weights(MergePlan(rule, FusedSgd(), down), fragment(), given, state())
    assert fused.digests == plain.digests == ours.digests
    assert fused.chunks == plain.chunks == ours.chunks


def test_every_rule_and_optimizer_of_ours_is_fast():
    assert all(map(is_weighted_sum, (Mean(), Radial(), Clipped())))
    assert all(map(is_by_column, (Trimmed(), Median())))
    assert all(map(is_fused, (Nesterov(), Sgd())))


def test_a_subclass_that_changes_the_slow_way_alone_is_not_merged_the_fast_way():
    class Doubled(Mean):
        def finish(self, sums):
            return 2 * super().finish(sums)

    class Renamed(Mean):
        pass

    class Slower(Nesterov):
        def step(self, theta, momentum, merged, *, drain):
            return super().step(theta, momentum, merged / 2, drain=drain)

    class OtherFinish(Median):
        def finish(self, sums):
            return -super().finish(sums)

    assert is_weighted_sum(Renamed())
    assert not is_weighted_sum(Doubled())
    assert not is_fused(Slower())
    assert not is_by_column(OtherFinish())
    given = members(2, {"kind": "int4"})
    twice, once = (combine(rule, fragment(), given).values for rule in (Doubled(), Mean()))
    np.testing.assert_array_equal(twice, 2 * once)
