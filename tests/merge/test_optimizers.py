"""The outer step is the textbook's: the same numbers as optax, and plain while draining."""

import numpy as np
import optax
import pytest

from diloco_cli.core.fragments import Fragment, Piece
from diloco_cli.errors import RegistryError
from diloco_cli.merge import OuterOptimizer, outer_optimizers
from diloco_cli.merge.optimizers import Adam, AgedNesterov, Nesterov, Sgd
from diloco_cli.merge.protocols import OuterRound, optimizer_at
from diloco_cli.merge.rules import Mean, Radial, merge

SIZE = 1000
WHOLE = Fragment(0, (Piece("w", 0, SIZE, (SIZE,), 0),))


def nesterov(lr: float, momentum: float) -> OuterOptimizer:
    return outer_optimizers.build({"kind": "nesterov", "lr": lr, "momentum": momentum})


def sgd(lr: float) -> OuterOptimizer:
    return outer_optimizers.build({"kind": "sgd", "lr": lr})


def random_vectors(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=SIZE).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (nesterov(lr=0.4, momentum=0.9), optax.sgd(0.4, momentum=0.9, nesterov=True)),
        (nesterov(lr=0.7, momentum=0.0), optax.sgd(0.7)),
        (sgd(lr=0.7), optax.sgd(0.7)),
    ],
)
def test_eight_steps_give_what_optax_gives(ours: OuterOptimizer, theirs):
    theta, *deltas = random_vectors(9)
    expected, state = theta, theirs.init(theta)
    momentum = ours.start(SIZE)
    for delta in deltas:
        theta, momentum = ours.step(theta, momentum, delta, drain=False)
        updates, state = theirs.update(delta, state)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(theta, np.asarray(expected), rtol=1e-5, atol=1e-5)


def test_a_drain_round_is_a_plain_step_and_leaves_the_momentum_alone():
    theta, momentum, delta = random_vectors(3)
    drained, kept = nesterov(lr=0.5, momentum=0.9).step(theta, momentum, delta, drain=True)
    np.testing.assert_array_equal(drained, theta - np.float32(0.5) * delta)
    np.testing.assert_array_equal(kept, momentum)


def test_a_step_changes_none_of_its_arguments():
    theta, momentum, delta = given = random_vectors(3)
    copies = [each.copy() for each in given]
    Nesterov().step(theta, momentum, delta, drain=False)
    for each, copy in zip(given, copies, strict=True):
        np.testing.assert_array_equal(each, copy)


def test_results_are_float32():
    theta, momentum, delta = random_vectors(3)
    assert {each.dtype for each in Nesterov().step(theta, momentum, delta, drain=False)} == {
        np.dtype(np.float32)
    }


def test_chunks_give_the_same_bits(monkeypatch):
    theta, momentum, delta = random_vectors(3)
    whole = Nesterov().step(theta, momentum, delta, drain=False)
    monkeypatch.setattr("diloco_cli.core.fragments.CHUNK", 7)
    cut = Nesterov().step(theta, momentum, delta, drain=False)
    for left, right in zip(whole, cut, strict=True):
        assert left.tobytes() == right.tobytes()


def test_an_outer_step_merges_and_then_descends():
    theta, left, right = random_vectors(3)
    members = [(1.0, left), (3.0, right)]
    merged = merge(Mean(), WHOLE, iter(members))
    after, _ = sgd(lr=1.0).step(theta, np.zeros(0, np.float32), merged, drain=False)
    np.testing.assert_allclose(after, theta - (left + 3 * right) / 4, rtol=1e-5, atol=1e-6)


def test_one_member_moves_the_weights_by_exactly_its_delta():
    theta, delta = random_vectors(2)
    nothing = np.zeros(0, np.float32)
    merged = merge(Radial(), WHOLE, [(5.0, delta)])
    after, _ = sgd(lr=1.0).step(theta, nothing, merged, drain=False)
    assert after.tobytes() == (theta - delta).tobytes()


@pytest.mark.parametrize(
    "asked",
    [
        {"kind": "nesterov", "lr": 0},
        {"kind": "nesterov", "momentum": 1.0},
        {"kind": "sgd", "lr": float("nan")},
    ],
)
def test_rates_that_cannot_train_are_refused(asked):
    with pytest.raises(RegistryError):
        outer_optimizers.build(asked)


def test_momentum_remembers_a_tenth_of_the_rounds_so_far_and_the_rate_makes_up_for_it():
    whole = Nesterov()
    steps = [whole.at(OuterRound(version)) for version in (1, 25, 50, 100, 1000)]
    assert [round(step.momentum, 9) for step in steps] == [0.6, 0.6, 0.8, 0.9, 0.9]
    assert [round(step.lr, 9) for step in steps] == [0.7, 0.7, 0.5, 0.4, 0.4]
    other = OuterRound(3)
    assert all(step.at(other) == step for step in steps), "a step of a round is that of no other"
    between = [whole.at(OuterRound(version)).momentum for version in range(1, 120)]
    assert between == sorted(between)


@pytest.mark.parametrize(
    "given", [Nesterov(0.7, 0.6), Nesterov(0.7, 0.3), Nesterov(0.4, 0.9, warmup=0)]
)
def test_little_momentum_needs_no_warm_up_and_none_may_be_wanted(given: Nesterov):
    for version in (1, 7, 300):
        step = given.at(OuterRound(version))
        assert (step.lr, step.momentum) == (pytest.approx(given.lr), given.momentum)


def test_adam_gives_what_optax_gives_by_the_number_of_the_version():
    ours, theirs = Adam(lr=0.02), optax.adam(0.02, b1=0.9, b2=0.95, eps=1e-5)
    theta, *deltas = random_vectors(9)
    expected, state, moments = theta, theirs.init(theta), ours.start(SIZE)
    for version, delta in enumerate(deltas, 1):
        step = optimizer_at(ours, OuterRound(version))
        theta, moments = step.step(theta, moments, delta, drain=False)
        updates, state = theirs.update(delta, state)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(theta, np.asarray(expected), rtol=1e-4, atol=1e-5)
    step = optimizer_at(ours, OuterRound(9))
    drained, kept = step.step(theta, moments, deltas[-1], drain=True)
    assert kept.tobytes() == moments.tobytes() and np.abs(drained - theta).max() < 0.1
    fresh, _ = step.step(theta, ours.start(SIZE), deltas[-1], drain=True)
    assert np.abs(fresh - theta).max() < 0.1, "weights without squares so far go no further"


@pytest.mark.parametrize("kind", [Nesterov, AgedNesterov, Sgd, Adam])
def test_few_members_move_the_weights_in_proportion(kind):
    theta, delta = random_vectors(2)

    def moved(of: OuterOptimizer, share: float) -> np.ndarray:
        step = optimizer_at(of, OuterRound(200, share=share))
        return theta - step.step(theta, of.start(SIZE), delta, drain=False)[0]

    whole = moved(kind(), 1.0)
    np.testing.assert_allclose(moved(kind(), 0.25), whole / 4, atol=1e-5)
    np.testing.assert_array_equal(moved(kind(proportional=False), 0.25), whole)


def test_old_work_moves_the_weights_less_far():
    rates = [AgedNesterov(damping=2).at(OuterRound(200, age=age)).lr for age in (0, 1, 3)]
    assert rates == pytest.approx([0.4, 0.1, 0.025])
    assert AgedNesterov(damping=0).at(OuterRound(9, age=5)).lr == Nesterov().at(OuterRound(9)).lr
