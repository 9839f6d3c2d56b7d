"""A region that lies in the crudest ways changes nothing for the others."""

from functools import cache

import pytest

from tests.verify.poison.lying_region import LIAR, LIES, make_spec, make_tasks, play

REGIONS, ROUNDS = 4, 5


@cache
def tasks():
    return make_tasks(make_spec(REGIONS, ROUNDS))


@cache
def without() -> float:
    return play(make_spec(REGIONS, ROUNDS), tasks(), ROUNDS, None).loss


@pytest.mark.parametrize("lie", ["nan", "x1000", "tokens 9e15"])
def test_an_absurd_region_is_as_good_as_absent(lie):
    """From the first round on, when nothing is known yet about what is usual."""
    done = play(make_spec(REGIONS, ROUNDS), tasks(), ROUNDS, LIES[lie])
    assert done.loss == pytest.approx(without(), rel=1e-6)
    assert LIAR in done.state.ledger.quarantined()
    assert done.state.ledger.slots[0].applied.get(LIAR, 0.0) == 0.0


def test_recorded_bytes_count_once():
    done = play(make_spec(REGIONS, ROUNDS), tasks(), ROUNDS, LIES["stale bytes"])
    tokens = done.regions[LIAR].own.tokens_a_step * done.spec.sync.every
    assert 0 < done.state.ledger.slots[0].applied[LIAR] <= tokens


@pytest.mark.parametrize("lie", ["sign-flip", "random"])
def test_with_agreement_asked_for_a_wrong_direction_is_as_good_as_absent(lie):
    done = play(make_spec(REGIONS, ROUNDS, agreement=0.25), tasks(), ROUNDS, LIES[lie])
    assert done.loss == pytest.approx(without(), rel=0.01)
    assert done.state.ledger.refused[LIAR] >= ROUNDS
    assert set(done.state.ledger.refused) == {LIAR}
