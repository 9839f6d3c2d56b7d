"""Merging weighs by tokens, keeps length under `radial`, and never amplifies noise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_cli.core.fragments import Fragment, Piece, norm
from diloco_cli.merge.rules import Mean, Radial, merge, weight


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def fragment(*sizes: int, embedding: bool = False) -> Fragment:
    """Pieces called a, b, …; only the last one is an embedding if asked for."""
    pieces, offset = [], 0
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        name = chr(ord("a") + number)
        pieces.append(Piece(name, 0, size, (size,), offset, embedding and last))
        offset += size
    return Fragment(0, tuple(pieces))


def radial(*members: tuple[float, np.ndarray]) -> np.ndarray:
    return merge(Radial(), fragment(members[0][1].size), members)


small = st.floats(-1e3, 1e3, width=32)
weights = st.floats(1, 1e9)
members_of_five = st.lists(
    st.tuples(weights, hnp.arrays(np.float32, 5, elements=small)), min_size=2
)


def test_the_mean_weighs_each_member():
    members = [(3.0, vector(4, 0)), (1.0, vector(0, 8))]
    assert merge(Mean(), fragment(2), members).tolist() == [3, 2]


@pytest.mark.parametrize("rule", [Mean(), Radial()])
def test_a_single_member_is_unchanged_bit_for_bit(rule):
    delta = np.random.default_rng(0).normal(size=999).astype(np.float32)
    delta[:2] = -0.0, 1e-44
    merged = merge(rule, fragment(500, 499, embedding=True), [(3.7, delta)])
    assert merged.tobytes() == delta.tobytes()


def test_nobody_cannot_be_merged():
    with pytest.raises(ValueError, match="fragment 0: no members"):
        merge(Mean(), fragment(2), [])


def test_a_member_of_the_wrong_size_is_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"2 float32 values, the member \(3,\)"):
        merge(Mean(), fragment(2), [(1.0, vector(1, 2)), (1.0, vector(1, 2, 3))])


def test_members_are_decoded_one_at_a_time():
    decoded: list[int] = []
    seen: list[int] = []

    class Watched:
        def start(self, fragment):
            return None

        def add(self, sums, delta, weight):
            seen.append(len(decoded))

        def finish(self, sums):
            return vector(0, 0)

    def members():
        for number in range(4):
            decoded.append(number)
            yield 1.0, vector(number, number)

    merge(Watched(), fragment(2), members())
    assert seen == [2, 2, 3, 4]  # Two before the first: a single one needs no merging.


def test_orthogonal_members_keep_their_length():
    merged = radial((1.0, vector(2, 0, 0, 0)), (1.0, vector(0, 2, 0, 0)), (1.0, vector(0, 0, 2, 0)))
    assert norm(merged) == pytest.approx(2)
    np.testing.assert_allclose(merged[:3], merged[0])


def test_the_longer_member_sets_the_length_but_not_the_direction():
    merged = radial((1.0, vector(9, 0)), (1.0, vector(0, 1)))
    np.testing.assert_allclose(merged, [5 / math.sqrt(2)] * 2, rtol=1e-6)


def test_each_tensor_has_its_own_length():
    delta_left, delta_right = vector(1, 0, 8, 0), vector(0, 1, 0, 8)
    merged = merge(Radial(), fragment(2, 2), [(1.0, delta_left), (1.0, delta_right)])
    assert norm(merged[:2]) == pytest.approx(1)
    assert norm(merged[2:]) == pytest.approx(8)


def test_embeddings_are_averaged_plainly():
    members = [(1.0, vector(2, 0, 2, 0)), (1.0, vector(0, 2, 0, 2))]
    merged = merge(Radial(), fragment(2, 2, embedding=True), members)
    np.testing.assert_allclose(merged, [math.sqrt(2), math.sqrt(2), 1, 1], rtol=1e-6)


def test_a_zero_member_has_no_direction_but_counts_in_the_mean_length():
    np.testing.assert_allclose(radial((1.0, vector(4, 0)), (1.0, vector(0, 0))), [2, 0])


def test_all_zeros_stay_zero():
    assert radial((1.0, vector(0, 0)), (1.0, vector(0, 0))).tolist() == [0, 0]


def test_opposite_members_are_not_stretched_to_full_length_along_noise():
    merged = radial((1.0, vector(1, 1e-6)), (1.0, vector(-1, 1e-6)))
    assert norm(merged) == pytest.approx(2 * math.sqrt(2) * 1e-6, rel=1e-3)


def test_exactly_opposite_members_give_zero():
    assert radial((1.0, vector(1, 2)), (1.0, vector(-1, -2))).tolist() == [0, 0]


def test_where_directions_cancel_the_weighted_mean_points_the_way():
    # The unit vectors leave only noise along the second axis; the mean is clearly (-1, 0).
    merged = radial((1.0, vector(1, 1e-6)), (1.0, vector(-3, 1e-6)))
    np.testing.assert_allclose(merged, [-2, 0], atol=1e-5)


@settings(deadline=None)
@given(members_of_five)
def test_the_radial_result_is_never_far_longer_than_the_mean_or_longer_than_its_members(members):
    merged = norm(radial(*members))
    straight = norm(merge(Mean(), fragment(5), members))
    longest = max(norm(delta) for _, delta in members)
    assert merged <= 2 * math.sqrt(len(members)) * straight * 1.001 + 1e-6
    assert merged <= longest * 1.001


@settings(deadline=None)
@given(hnp.arrays(np.float32, 5, elements=small), st.lists(weights, min_size=2, max_size=5))
def test_members_that_agree_are_merged_to_what_they_agree_on(delta, shares):
    merged = radial(*[(share, delta) for share in shares])
    np.testing.assert_allclose(merged, delta, rtol=1e-5, atol=1e-30)


def test_chunks_leave_no_seam(monkeypatch):
    rng = np.random.default_rng(1)
    members = [(float(w), rng.normal(size=50).astype(np.float32)) for w in (1, 2, 3)]
    whole = merge(Radial(), fragment(20, 30), members)
    monkeypatch.setattr("diloco_cli.core.fragments.CHUNK", 7)
    np.testing.assert_allclose(merge(Radial(), fragment(20, 30), members), whole, rtol=1e-6)


def test_the_weight_is_quantity_times_batch_size():
    assert weight(1000, 10, steps_cap=100) == 1000 * 100


def test_equal_batches_weigh_by_their_steps():
    assert weight(3000, 30, steps_cap=100) == pytest.approx(3 * weight(1000, 10, steps_cap=100))


def test_steps_beyond_the_cap_count_for_nothing():
    assert weight(500_000, 5000, steps_cap=72) == pytest.approx(weight(7200, 72, steps_cap=72))


@pytest.mark.parametrize("name", ["tokens", "steps", "steps_cap"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_weight_from_nonsense_is_refused_by_name(name, value):
    given_ = {"tokens": 10.0, "steps": 2.0, "steps_cap": 5.0} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is"):
        weight(given_["tokens"], given_["steps"], steps_cap=given_["steps_cap"])


@pytest.mark.parametrize("tokens, steps", [(1e200, 1), (1e-200, 1), (1e12, 1e-300)])
def test_a_weight_beyond_any_real_run_is_refused(tokens, steps):
    with pytest.raises(ValueError, match="absurd weight"):
        weight(tokens, steps, steps_cap=10)
