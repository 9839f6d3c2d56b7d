"""Merging frames chunk by chunk gives what merging whole vectors gives."""

from itertools import pairwise

import numpy as np
import pytest

from diloco_cli.core.fragments import Fragment, Piece
from diloco_cli.errors import WireError
from diloco_cli.merge import MergeRule, OuterOptimizer
from diloco_cli.merge.combine import MemberUnfit, combine
from diloco_cli.merge.optimizers import Adam, AgedNesterov, Nesterov, Sgd
from diloco_cli.merge.outer_step import Diverged, MergePlan, next_weights
from diloco_cli.merge.protocols import OuterRound
from diloco_cli.merge.robust import Clipped, Median, Trimmed
from diloco_cli.merge.rules import Mean, Radial, merge
from diloco_cli.wire.chunks import CHUNK
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Frame, open_frame, pack, seal
from tests.wire.forged_frames import delta, header

SIZE = CHUNK + 70_001
EDGES = [0, 30_000, 30_007, 500_000, CHUNK + 333, SIZE]
"""Pieces that begin and end inside of blocks and chunks; the third is an embedding."""


def fragment(edges: list[int] = EDGES) -> Fragment:
    pieces = [
        Piece(f"w{n}", 0, stop - start, (stop - start,), offset=start, embedding=n == 2)
        for n, (start, stop) in enumerate(pairwise(edges))
    ]
    return Fragment(3, tuple(pieces))


def members(count: int, codec: dict, size: int = SIZE) -> list[tuple[float, Frame]]:
    rng = np.random.default_rng(count)
    common = rng.standard_normal(size).astype(np.float32)
    found = []
    for number in range(count):
        own = common + 2 * rng.standard_normal(size).astype(np.float32)
        if number == 1:
            own[:30_000] = 0.0  # A piece without a direction.
        said = header(size, codec=codec, region=f"r{number}")
        found.append((1.0 + number / 3, open_frame(pack(said, own * 1e-3))))
    return found


def state(size: int = SIZE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(9)
    theta = rng.standard_normal(size).astype(np.float32)
    momentum = rng.standard_normal(size).astype(np.float32) * np.float32(1e-3)
    return theta, momentum, theta + np.float32(1e-4)


def straightforward(how: MergePlan, given: list[tuple[float, Frame]], before: tuple) -> tuple:
    decoded = ((weight, frame.values()) for weight, frame in given)
    merged = merge(how.rule, fragment(), decoded)
    theta, momentum = how.optimizer.step(before[0], before[1], merged, drain=how.drain)
    change = theta - before[2]
    published = before[2] + how.down.decode(how.down.encode(change), change.size)
    return theta, momentum, published


@pytest.mark.parametrize("codec", [{"kind": "int4"}, {"kind": "bf16"}], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "rule", [Mean(), Radial(), Clipped(), Trimmed(), Median()], ids=lambda rule: type(rule).__name__
)
def test_a_scaled_member_counts_as_if_its_values_were_smaller(rule, count, codec):
    given, scales = members(count, codec), [0.125, 1.0, 0.3][:count]
    merged = combine(rule, fragment(), given, scales=scales)
    smaller = (
        (weight, frame.values() * np.float32(scale))
        for (weight, frame), scale in zip(given, scales, strict=True)
    )
    expected = merge(rule, fragment(), smaller)
    for number, (start, stop) in enumerate(pairwise(merged.edges)):
        values = merged.values[start:stop] * merged.factors[number]
        np.testing.assert_allclose(values, expected[start:stop], rtol=1e-5, atol=1e-10)


def method(
    rule: MergeRule | None = None,
    optimizer: OuterOptimizer | None = None,
    **more,
) -> MergePlan:
    down = codecs.build({"kind": "int8"})
    return MergePlan(rule or Radial(), optimizer or Nesterov(), down, **more)


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        Nesterov(),
        Sgd(lr=0.7),
        AgedNesterov().at(OuterRound(3, share=0.3, age=1.5)),
        Adam().at(OuterRound(3, share=0.3)),
    ],
    ids=["nesterov", "sgd", "aged-nesterov", "adam"],
)
@pytest.mark.parametrize("codec", [{"kind": "int4"}, {"kind": "bf16"}], ids=str)
def test_plain_means_are_the_same_to_the_bit(codec, optimizer, drain):
    theta, _, published = state()
    momentum = optimizer.start(SIZE)
    momentum += np.abs(np.random.default_rng(4).standard_normal(momentum.size, np.float32))
    before = (theta, momentum, published)
    given, how = members(3, codec), method(Mean(), optimizer, drain=drain)
    outcome = next_weights(how, fragment(), given, before)
    vectors = outcome.theta, outcome.momentum, outcome.published
    for found, wanted in zip(vectors, straightforward(how, given, before), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert outcome.digests == tuple(map(vector_digest, vectors))


@pytest.mark.parametrize("rule", [Trimmed(), Median()], ids=["trimmed", "median"])
@pytest.mark.parametrize("count", [2, 5])
def test_rules_by_column_are_the_same_to_the_bit(rule, count):
    given, how, before = members(count, {"kind": "int4"}), method(rule), state()
    outcome = next_weights(how, fragment(), given, before)
    theta, momentum, _ = straightforward(how, given, before)
    np.testing.assert_array_equal(outcome.theta, theta)
    np.testing.assert_array_equal(outcome.momentum, momentum)


@pytest.mark.parametrize("codec", [{"kind": "int4"}, {"kind": "int8"}], ids=str)
def test_clipping_goes_by_the_length_of_the_whole_fragment(codec):
    given, how, before = members(3, codec), method(Clipped()), state()
    long = open_frame(pack(given[2][1].header, 50 * given[2][1].values()))
    given[2] = (given[2][0], long)
    outcome = next_weights(how, fragment(), given, before)
    theta, momentum, _ = straightforward(how, given, before)
    np.testing.assert_allclose(outcome.theta, theta, rtol=0, atol=1e-6)
    np.testing.assert_allclose(outcome.momentum, momentum, rtol=3e-7, atol=1e-9)
    loose, *_ = straightforward(method(Clipped(most=100)), given, before)
    assert np.abs(loose - theta).max() > 1e-3, "the long member is clipped"


@pytest.mark.parametrize(
    "count, codec",
    [
        (2, {"kind": "int4"}),
        (3, {"kind": "uniform"}),
        (19, {"kind": "int4", "block": 64}),
        (2, {"kind": "sparse"}),
        (2, {"kind": "int8"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("drain", [False, True])
def test_radial_merges_differ_by_the_rounding_of_lengths_alone(count, codec, drain):
    given, how, before = members(count, codec), method(drain=drain), state()
    outcome = next_weights(how, fragment(), given, before)
    theta, momentum, published = straightforward(how, given, before)
    np.testing.assert_allclose(outcome.theta, theta, rtol=0, atol=1e-6)
    np.testing.assert_allclose(outcome.momentum, momentum, rtol=3e-7, atol=1e-9)
    # A code at a rounding boundary may go the other way, by one step of about 3e-5.
    np.testing.assert_allclose(outcome.published, published, rtol=0, atol=1e-4)
    assert (outcome.published != published).mean() < 1e-3


def test_threads_change_nothing():
    given, before = members(3, {"kind": "int4"}), state()
    alone = next_weights(method(threads=1), fragment(), given, before)
    many = next_weights(method(threads=3), fragment(), given, before)
    np.testing.assert_array_equal(many.theta, alone.theta)
    np.testing.assert_array_equal(many.momentum, alone.momentum)
    assert (many.digest, many.chunks) == (alone.digest, alone.chunks)


def test_the_chunks_are_the_delta_that_leads_to_what_is_published():
    given, before = members(2, {"kind": "int4"}), state()
    outcome = next_weights(method(), fragment(), given, before)
    vectors = (outcome.theta, outcome.momentum, outcome.published)
    assert outcome.digests == tuple(map(vector_digest, vectors))
    said = delta(SIZE, 41, codec={"kind": "int8"}, published=outcome.digest)
    frame = open_frame(seal(said, outcome.chunks), size=SIZE)
    np.testing.assert_array_equal(before[2] + frame.values(), outcome.published)
    np.testing.assert_array_equal(
        frame.values(), open_frame(pack(said, outcome.theta - before[2])).values()
    )


def test_one_member_is_its_own_merge_and_the_old_version_stays_as_it_is():
    given, before = members(1, {"kind": "int4"}), state()
    copies = [vector.copy() for vector in before]
    outcome = next_weights(method(), fragment(), given, before)
    theta, momentum, _ = straightforward(method(), given, before)
    np.testing.assert_array_equal(outcome.theta, theta)
    np.testing.assert_array_equal(outcome.momentum, momentum)
    for vector, copy in zip(before, copies, strict=True):
        np.testing.assert_array_equal(vector, copy)


def test_regions_may_use_different_codecs():
    given = members(2, {"kind": "int4"}) + members(2, {"kind": "int8"})
    outcome = next_weights(method(), fragment(), given, state())
    theta, *_ = straightforward(method(), given, state())
    np.testing.assert_allclose(outcome.theta, theta, rtol=0, atol=1e-6)


def test_where_directions_cancel_the_deltas_are_added_up_after_all():
    (weight, first), (_, second) = members(2, {"kind": "int4"})
    against = second.values()
    against[500_000 : CHUNK + 333] = -0.9 * first.values()[500_000 : CHUNK + 333]
    given = [(weight, first), (weight, open_frame(pack(first.header, against)))]
    outcome = next_weights(method(), fragment(), given, state())
    theta, momentum, _ = straightforward(method(), given, state())
    np.testing.assert_allclose(outcome.theta, theta, rtol=0, atol=1e-6)
    np.testing.assert_allclose(outcome.momentum, momentum, rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("rule", [Mean(), Radial(), Median(), Clipped()], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_a_member_that_does_not_decode_is_named(rule, count):
    given = members(count, {"kind": "int4"})
    weight, sound = given[-1]
    data = bytearray(sound.data)
    data[-40] ^= 1
    broken = Frame(sound.header, sound.digest, memoryview(data), sound.lengths, sound.codec)
    with pytest.raises(MemberUnfit, match="Chunk 1 does not decompress") as refusal:
        next_weights(method(rule), fragment(), [*given[:-1], (weight, broken)], state())
    assert refusal.value.number == count - 1
    assert isinstance(refusal.value.error, WireError)


@pytest.mark.parametrize("place", [5, SIZE - 1])
def test_weights_that_would_not_be_finite_are_not_made(place):
    theta, momentum, published = state()
    theta[place], momentum[place] = 3.4e38, -3.4e38
    with pytest.raises(Diverged):
        next_weights(
            method(), fragment(), members(2, {"kind": "int4"}), (theta, momentum, published)
        )


def test_a_round_needs_members():
    with pytest.raises(ValueError, match="fragment 3: no members"):
        next_weights(method(), fragment(), [], state())
