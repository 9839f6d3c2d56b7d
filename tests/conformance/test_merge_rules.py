"""What every merge rule must do, whoever wrote it; a new kind is tested once it is registered."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_cli.core.fragments import Fragment, Piece
from diloco_cli.merge import merge_rules
from diloco_cli.merge.rules import merge

KINDS = merge_rules.kinds()
TWO = Fragment(0, (Piece("a", 0, 3, (3,), 0), Piece("embed", 0, 2, (2,), 3, True)))
deltas = hnp.arrays(np.float32, 5, elements=st.floats(-100, 100, width=32))
members = st.lists(st.tuples(st.floats(1, 1e6), deltas), min_size=2, max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(given_=members)
def test_the_result_is_finite_float32_of_the_same_size(kind, given_):
    merged = merge(merge_rules.build({"kind": kind}), TWO, given_)
    assert merged.dtype == np.float32 and merged.shape == (5,)
    assert np.isfinite(merged).all()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(given_=members)
def test_the_same_members_give_the_same_bits(kind, given_):
    rule = merge_rules.build({"kind": kind})
    first = merge(rule, TWO, given_)
    assert merge(rule, TWO, given_).tobytes() == first.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(weight=st.floats(1, 1e6), delta=deltas)
def test_a_single_member_comes_back_bit_for_bit(kind, weight, delta):
    merged = merge(merge_rules.build({"kind": kind}), TWO, [(weight, delta)])
    assert merged.tobytes() == delta.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(given_=members)
def test_no_member_is_changed(kind, given_):
    before = [delta.copy() for _, delta in given_]
    merge(merge_rules.build({"kind": kind}), TWO, given_)
    for (_, delta), copy in zip(given_, before, strict=True):
        assert delta.tobytes() == copy.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(given_=members, scale=st.sampled_from([0.5, 2.0, 1024.0]))
def test_only_the_proportion_of_weights_matters(kind, given_, scale):
    rule = merge_rules.build({"kind": kind})
    scaled = [(weight * scale, delta) for weight, delta in given_]
    np.testing.assert_array_equal(merge(rule, TWO, scaled), merge(rule, TWO, given_))


@pytest.mark.parametrize("kind", ["mean", "radial"])
def test_memory_does_not_grow_with_the_number_of_members(kind):
    size = 1 << 18
    fragment = Fragment(0, (Piece("w", 0, size, (size,), 0),))
    rule = merge_rules.build({"kind": kind})

    def peak(count: int) -> int:
        tracemalloc.start()
        try:
            merge(rule, fragment, ((1.0, np.full(size, k, np.float32)) for k in range(count)))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(20) <= peak(3) * 1.05
