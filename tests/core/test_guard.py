"""What is not finite, absurd or far too long is turned away with a reason; the rest is not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_cli.core.fragments import Fragment, Piece
from diloco_cli.core.guard import (
    ENOUGH,
    PAROLE,
    STRIKES,
    WINDOW,
    GuardRecord,
    Norms,
    inspect,
    outlier,
    stranger,
    unusual,
)

TWO_TENSORS = Fragment(0, (Piece("embed", 5, 9, (4, 2), 0, True), Piece("w", 0, 4, (4,), 8)))
USUAL = Norms((1.0,) * ENOUGH)


def delta(length: float = 1.0) -> np.ndarray:
    return np.full(12, length / np.sqrt(12), np.float32)


def test_an_ordinary_contribution_is_fit():
    assert inspect(delta(), TWO_TENSORS, USUAL) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_refused_by_the_name_of_its_tensor(bad):
    spoiled = delta()
    spoiled[10] = bad
    assert inspect(spoiled, TWO_TENSORS, USUAL) == "1 of 4 values of w (rows 0:4) are not finite"


def test_rows_of_a_split_tensor_are_named():
    why = inspect(np.full(12, np.nan, np.float32), TWO_TENSORS, Norms())
    assert why == "8 of 8 values of embed (rows 5:9) are not finite"


def test_a_length_beyond_the_limit_is_refused_with_both_numbers():
    why = inspect(delta(21), TWO_TENSORS, USUAL)
    assert why and "its norm is 21, the usual one here is 1; more than 20 times" in why
    assert inspect(delta(19), TWO_TENSORS, USUAL) is None
    assert inspect(delta(19), TWO_TENSORS, USUAL, limit=10) is not None


def test_work_that_was_held_for_long_may_be_longer_in_proportion():
    norms = Norms()
    for _ in range(ENOUGH):
        norms = norms.seen(0.25, 1.6)
    assert unusual(12.3, norms, steps=67) is None  # As eight honest regions once sent.
    assert unusual(12.3, norms, steps=1.6) is not None
    why = unusual(250.0, norms, steps=67)
    assert why and "it holds 41.9 times as many steps" in why


def test_no_claim_of_steps_excuses_everything():
    known = Norms((1.0,) * ENOUGH, (1.0,) * ENOUGH)
    assert unusual(20 * 100.5, known, steps=1e18) is not None
    assert unusual(20 * 99.5, known, steps=1e18) is None


def test_nothing_is_too_long_before_the_usual_length_is_known():
    few = Norms((1.0,) * (ENOUGH - 1))
    assert inspect(delta(1e6), TWO_TENSORS, few) is None
    assert inspect(delta(1e6), TWO_TENSORS, few.seen(1.0)) is not None


def test_a_value_near_the_limit_of_float32_is_refused_even_then():
    spoiled = delta()
    spoiled[9] = 1e30
    why = inspect(spoiled, TWO_TENSORS, Norms())
    assert why and why.startswith("w (rows 0:4) has a value of 1e+30")


def test_one_outlier_does_not_move_the_usual_length():
    assert USUAL.seen(1e9).usual == 1.0


def test_the_usual_length_follows_the_latest():
    norms = USUAL
    for _ in range(WINDOW):
        norms = norms.seen(0.01)
    assert norms.usual == 0.01 and len(norms.recent) == WINDOW


def test_silence_says_nothing_about_the_usual_length():
    norms = Norms()
    for _ in range(WINDOW):
        norms = norms.seen(0.0)
    assert norms.usual is None
    assert inspect(np.zeros(12, np.float32), TWO_TENSORS, USUAL) is None


@settings(deadline=None)
@given(hnp.arrays(np.float32, 12, elements=st.floats(width=32)))
def test_whatever_passes_is_finite(values):
    if inspect(values, TWO_TENSORS, Norms()) is None:
        assert np.isfinite(values).all()
    else:
        assert not (np.abs(values) <= 1e15).all()


def after(*found: str | None) -> GuardRecord:
    conduct = GuardRecord()
    for unfit in found:
        conduct = conduct.found(unfit)
    return conduct


def test_a_region_is_kept_out_after_several_unfit_contributions_in_a_row():
    assert not after(*["nan"] * (STRIKES - 1)).quarantined
    assert after(*["nan"] * STRIKES).quarantined
    # With sound work in between it is an accident, however often.
    assert not after(*["nan", None] * 10).quarantined


def test_quarantine_ends_with_sound_work_in_a_row_and_says_how_much_is_missing():
    kept = after(*["nan"] * STRIKES, *[None] * (PAROLE - 1))
    assert kept.quarantined and "the last: nan" in kept.why and f"{PAROLE - 1} so far" in kept.why
    assert kept.found(None) == GuardRecord() and GuardRecord().why == ""
    back = kept.found("too long")
    assert back.quarantined and back.sound == 0 and "the last: too long" in back.why


def test_a_member_far_longer_than_the_others_of_its_round_is_named():
    number, why = outlier([1.0, 1.2, 900.0, 0.9], [8.0] * 4) or (None, "")
    assert number == 2 and "its norm is 900, that of the round's other members 1;" in why
    assert outlier([1.0, 1.2, 15.0], [8.0] * 3) is None
    # Of two nobody can say who is wrong, and beside nothing everything is long.
    assert outlier([1.0, 900.0], [8.0] * 2) is None
    assert outlier([0.0, 0.0, 1.0], [8.0] * 3) is None


def test_many_steps_excuse_a_long_delta():
    assert outlier([1.0, 1.0, 60.0], [1.0, 1.0, 100.0]) is None
    assert outlier([1.0, 1.0, 60.0], [1.0, 1.0, 2.0]) is not None


def rows(members: int, agreement: float, seed: int = 0) -> np.ndarray:
    """Directions that share a part of this length with each other."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=20_000), rng.normal(size=(members, 20_000))
    return (agreement * common + own).astype(np.float32)


@pytest.mark.parametrize(
    "lie", [lambda row: -row, lambda row: np.random.default_rng(9).normal(size=row.size)]
)
def test_a_direction_the_others_do_not_know_is_named(lie):
    given = rows(5, 0.3)
    assert stranger(given, share=0.25) is None
    given[3] = lie(given[3])
    number, why = stranger(given, share=0.25) or (None, "")
    assert number == 3 and "its direction agrees with the others' by" in why
    assert stranger(given, share=0.0) is None, "only where it is asked for"


def test_without_clear_agreement_nobody_is_a_stranger():
    assert all(stranger(rows(6, 0.0, seed), share=0.9) is None for seed in range(20))
    given = rows(3, 0.3)
    given[0] *= -1
    assert stranger(given, share=0.25) is None, "two are no majority"
    assert stranger(np.zeros((5, 100), np.float32), share=0.25) is None
