"""The budget binds the training: merged, held and still to be trained are no more than it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.core import budget
from diloco_cli.core.budget import BudgetStanding, HeldTokens
from diloco_cli.core.claims import FIRST_CREDIT, Allowance, ClaimTerms, PaceRecord
from diloco_cli.core.journal_records import RegionJoined, RunEnded, RunResumed
from diloco_cli.core.ledger import FragmentState, Ledger, Resumption
from diloco_cli.core.rounds import Receipt
from diloco_cli.core.unmerged_work import Work

STEP = 10.0


def until(region: str, standings, *, spoken: float = 0.0, tokens: float = 10_000.0, every=4):
    return budget.until(region, standings, budget=tokens, spoken=spoken, every=every)


def region(trained: float = 0.0, until: float | None = 0.0, pace: float = 10.0) -> BudgetStanding:
    return BudgetStanding(STEP, trained=trained, until=until, pace=pace)


def test_alone_a_region_may_train_all_that_is_left():
    assert until("iowa", {"iowa": region(trained=500.0)}, spoken=2000.0) == 500.0 + 8000.0


def test_room_goes_by_pace_and_never_twice():
    standings = {"iowa": region(pace=30.0), "paris": region(pace=10.0)}
    first = until("iowa", standings)
    assert first == 7500.0
    standings["iowa"] = region(until=first, pace=30.0)
    assert until("paris", standings) == (10_000 - 7500) / 4


def test_a_room_that_others_may_still_use_is_not_given_away():
    """Also where a smaller one was told meanwhile: it may not have been heard yet."""
    standings = {"iowa": region(trained=100.0, until=10_000.0), "paris": region()}
    assert until("paris", standings, spoken=100.0) == 0.0


def test_a_region_that_compiles_has_a_share_only_as_long_as_there_is_enough():
    standings = {"iowa": region(), "slow": region(pace=0.0)}
    assert until("slow", standings) == until("iowa", standings) == 5000.0
    near = 10_000.0 - 2 * 4 * 2 * STEP
    assert until("slow", standings, spoken=near) == 0.0
    assert until("iowa", standings, spoken=near) == 160.0, "the rest is for those who train"
    assert until("slow", {"slow": region(pace=0.0)}, spoken=near) == 160.0, "if there are any"


def test_a_region_that_is_stuck_does_not_keep_the_last_steps():
    stuck = replace(region(trained=50.0), still=True)
    standings = {"iowa": region(), "stuck": stuck}
    assert until("stuck", standings) > 4000.0
    assert until("stuck", standings, spoken=9_990.0) == 50.0
    assert until("iowa", standings, spoken=9_990.0) == STEP
    alone = {"stuck": stuck, "other": replace(region(), still=True)}
    assert until("stuck", alone, spoken=9_990.0) == 50.0 + STEP, "somebody has to"


def test_regions_that_never_had_room_get_some_if_the_others_make_no_quorum():
    """After a run was opened again, say: no pace without a step, and no step without room."""
    idle = region(pace=0.0)
    standings = {"iowa": region(), "lima": idle, "paris": idle}
    shares = [
        budget.until("lima", standings, budget=10_000.0, spoken=9_900.0, every=4, quorum=quorum)
        for quorum in (1, 2)
    ]
    assert shares == [0.0, pytest.approx(100 / 3)]
    standings["lima"] = replace(idle, still=True)
    assert until("lima", standings, spoken=9_900.0) == 0.0, "it had room and did not use it"


def test_a_stuck_region_keeps_one_round_and_no_share_of_the_rest():
    standings = {"iowa": region(), "stuck": replace(region(trained=50.0), stuck=True)}
    assert until("stuck", standings) == 50.0 + 4 * STEP
    standings["stuck"] = replace(standings["stuck"], until=50.0 + 4 * STEP)
    assert until("iowa", standings) == 10_000.0 - 4 * STEP


def test_what_is_left_is_worth_a_step_of_somebody():
    standings = {"iowa": region(trained=1e9), "paris": region(), "tokyo": region()}
    assert until("iowa", standings, spoken=9_999.5) == 1e9 + 0.5
    assert until("iowa", standings, spoken=10_000.0) == 1e9
    assert until("iowa", standings, spoken=9_985.0) == 1e9 + STEP, "not a third of it"


def test_before_everybody_was_heard_nobody_gets_more():
    standings = {"iowa": region(trained=50.0, until=80.0), "paris": region(until=None)}
    assert until("iowa", standings) == 80.0
    standings["iowa"] = region(trained=100.0, until=80.0)
    assert until("iowa", standings) == 100.0


@pytest.mark.parametrize(
    ("told", "fresh", "said"),
    [(None, 500.0, 500.0), (500.0, 510.0, 500.0), (500.0, 480.0, 500.0), (500.0, 400.0, 400.0)],
)
def test_a_room_that_is_about_right_stays_as_it_is(told, fresh, said):
    assert budget.steady(told, fresh, trained=300.0) == said


def test_a_room_that_is_used_up_is_always_renewed():
    assert budget.steady(300.0, 300.001, trained=300.0) == 300.001
    assert budget.steady(350.0, 500.0, trained=300.0) == 500.0


def receipt(tokens: float, counted: float | None = None) -> Receipt:
    worth = None if counted is None else Work(counted, 1.0)
    return Receipt("iowa", 0, 0, 1, "x", "", tokens, 1.0, counted=worth)


def test_spoken_for_is_what_counts_averaged_with_the_sizes():
    slots = [
        FragmentState(applied={"iowa": 100.0}, waiting={"iowa": receipt(1e9, counted=20.0)}),
        FragmentState(applied={"paris": 60.0}, closing={"paris": receipt(40.0)}),
    ]
    assert budget.spoken(slots, [1, 3], {}) == (120 + 3 * 100) / 4
    assert budget.spoken(slots, [1, 3], {"iowa": [40.0, 0.0]}) == (160 + 3 * 100) / 4


def allowance(at: float = 100.0, pace: float = 1.0) -> Allowance:
    terms = ClaimTerms(12.0, lambda region: STEP, declared={"iowa": pace})
    return Allowance([{}], {"iowa": PaceRecord(0.0)}, terms, at=at)


def countable(pending: float, *, waiting=0.0, trained=0.0, resumed=None, **more) -> float:
    held = HeldTokens("iowa", 0, pending=pending, waiting=waiting, trained=trained)
    return budget.countable(held, allowance(**more), STEP, resumed)


def test_held_work_counts_as_a_claim_would():
    assert countable(500.0) == 500.0
    assert countable(500.0, waiting=200.0) == 300.0
    assert countable(200.0, waiting=500.0) == 0.0
    assert countable(1e12) == (FIRST_CREDIT + 1.25 * 100) * STEP


def test_after_a_drain_only_what_was_trained_since_is_held():
    resumed = Resumption(at=90.0, trained={"iowa": 1000.0})
    assert countable(500.0, trained=1000.0, resumed=resumed) == 0.0
    assert countable(500.0, trained=1030.0, resumed=resumed) == 30.0
    assert countable(500.0, trained=1e9, resumed=resumed) == 1.25 * 10 * STEP
    assert countable(50.0, trained=50.0, resumed=Resumption(90.0, {"paris": 7.0})) == 50.0


def test_what_would_not_count_is_no_reason_for_more_room():
    """A region alone, whose long frame is on its way, would otherwise train for ever."""
    assert until("iowa", {"iowa": region(trained=9_000.0)}, spoken=4_000.0) == 15_000.0
    holds = replace(region(trained=9_000.0), unheard=6_000.0)
    assert until("iowa", {"iowa": holds}, spoken=4_000.0) == 9_000.0
    assert until("paris", {"iowa": holds, "paris": region()}, spoken=4_000.0) == 3_000.0


def test_a_run_is_short_if_a_round_is_left():
    assert budget.is_short(budget=1000.0, counted=920.0, round_tokens=80.0)
    assert not budget.is_short(budget=1000.0, counted=921.0, round_tokens=80.0)
    assert not budget.is_short(budget=1000.0, counted=1000.0, round_tokens=0.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("iowa", "lima", "paris")),
            st.sampled_from(("report", "train", "hear", "lose")),
        ),
        max_size=120,
    ),
    st.floats(50.0, 5000.0),
    st.sampled_from((0.0, 5.0, 40.0)),
)
def test_whatever_the_order_no_more_is_trained_than_the_budget_and_a_step_of_each(
    events, tokens, slow
):
    """Regions train, report, hear late or never; the server only knows what it was told."""
    paces = {"iowa": 10.0, "lima": 40.0, "paris": slow}
    trained = dict.fromkeys(paces, 0.0)
    stands = dict.fromkeys(paces, 0.0)
    told = dict.fromkeys(paces, 0.0)
    on_its_way: dict[str, float | None] = dict.fromkeys(paces)
    seen = {name: region(pace=pace) for name, pace in paces.items()}
    for name, act in events:
        if act == "report":
            seen[name] = replace(seen[name], trained=trained[name], until=stands[name])
            spoken = sum(each.trained for each in seen.values())
            standings = {
                each: replace(known, until=max(known.until or 0.0, told[each]))
                for each, known in seen.items()
            }
            fresh = until(name, standings, spoken=spoken, tokens=tokens)
            told[name] = budget.steady(told[name], fresh, trained[name])
            on_its_way[name] = told[name]
        elif act == "hear":
            heard = on_its_way[name]
            stands[name] = stands[name] if heard is None else heard
        elif act == "lose":
            on_its_way[name] = None
        elif trained[name] < stands[name]:
            trained[name] += STEP
        assert sum(trained.values()) < tokens + len(paces) * STEP


def test_regions_that_do_what_they_are_told_use_up_the_budget():
    trained, told = {"iowa": 0.0, "paris": 0.0}, {"iowa": 0.0, "paris": 0.0}
    beats = 0
    while sum(trained.values()) < 10_000.0 and beats < 120:
        beats += 1
        for name in trained:
            standings = {
                each: region(
                    trained=trained[each], until=told[each], pace=10.0 + 30.0 * (each > "l")
                )
                for each in trained
            }
            told[name] = budget.steady(
                told[name], until(name, standings, spoken=sum(trained.values())), trained[name]
            )
            steps = min(6, math.ceil((told[name] - trained[name]) / STEP))
            trained[name] += STEP * max(0, steps)
    assert 10_000.0 <= sum(trained.values()) < 10_000.0 + 2 * STEP
    assert beats < 120, "and are not kept waiting at the end"


def test_a_ledger_forgets_the_end_when_a_run_goes_on():
    records = [
        RegionJoined("iowa", "disk", 1, 1),
        RunEnded("held"),
        RunResumed("short", {"iowa": 500.0}, 60.0),
    ]
    ledger = Ledger.folded(1, enumerate(records, 1))
    assert not ledger.end and not ledger.ended and ledger.news == 3
    assert ledger.resumed == Resumption(60.0, {"iowa": 500.0})
    again = Ledger.empty(1)
    again.restore(ledger.snapshot())
    assert again == ledger
    ledger.apply(4, RegionJoined("iowa", "another disk", 1, 2))
    assert ledger.resumed == Resumption(60.0, {"iowa": 0.0}), "its books begin anew"
    ledger.apply(5, RunEnded("held"))
    assert ledger.ended == 5
