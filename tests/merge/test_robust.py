"""A minority cannot move a robust merge far, and each rule's price is what it says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.core.fragments import Fragment, Piece, norm
from diloco_cli.merge.robust import Clipped, Median, Trimmed
from diloco_cli.merge.rules import Mean, merge

finite = st.floats(-1e3, 1e3, width=32)


def merged(rule, *values: float, weights: tuple[float, ...] = ()) -> float:
    """Merges members of a single value each."""
    fragment = Fragment(0, (Piece("a", 0, 1, (1,), 0, False),))
    weights = weights or (1.0,) * len(values)
    members = [(w, np.array([v], np.float32)) for w, v in zip(weights, values, strict=True)]
    return float(merge(rule, fragment, members)[0])


@pytest.mark.parametrize("rule", [Trimmed(), Median(), Clipped()])
def test_one_member_alone_is_unchanged(rule):
    assert merged(rule, 3.25) == 3.25


def test_the_median_is_the_middle_whatever_the_claimed_weight():
    assert merged(Median(), 1, 2, 9, weights=(1, 1, 1e9)) == 2
    assert merged(Median(), 1, 2, 4, 9) == 3


def test_trimming_drops_as_many_on_both_sides():
    assert merged(Trimmed(), 1, 2, 900) == 2
    assert merged(Trimmed(trim=0.4), 1, 2, 3, 4, 900) == 3
    assert merged(Trimmed(trim=0.2), *range(9), 900) == sum(range(2, 8)) / 6
    assert merged(Trimmed(), 1, 3) == 2, "of two nobody can be dropped"


@given(st.lists(finite, min_size=5, max_size=9), st.floats(-(2.0**99), 2.0**99, width=32))
def test_one_liar_stays_within_what_the_honest_say(honest, lie):
    for rule in (Trimmed(), Median()):
        found = merged(rule, *honest, lie)
        slack = 1e-6 * max(map(abs, honest))
        assert min(honest) - slack <= found <= max(honest) + slack


def test_clipping_shortens_the_long_and_leaves_the_rest():
    fragment = Fragment(0, (Piece("a", 0, 2, (2,), 0, False),))
    plain = [(1.0, np.array(v, np.float32)) for v in ([1, 0], [0, 1], [0.5, 0.5])]
    np.testing.assert_array_equal(merge(Clipped(), fragment, plain), merge(Mean(), fragment, plain))
    with_liar = [*plain, (1.0, np.array([0, 1e6], np.float32))]
    found = merge(Clipped(most=2.0), fragment, with_liar)
    np.testing.assert_allclose(found, [1.5 / 4, (1.5 + 2.0) / 4], rtol=1e-6)
    assert norm(found) < 1


def test_clipping_survives_members_of_no_length():
    fragment = Fragment(0, (Piece("a", 0, 1, (1,), 0, False),))
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    assert merge(Clipped(), fragment, [(1.0, zero), (1.0, zero), (1.0, one)]).tolist() == [0]
