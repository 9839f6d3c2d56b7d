"""A round closes on call, quorum and grace: never before, never hanging after."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.core import rounds
from diloco_cli.core.rounds import (
    Accept,
    Ahead,
    Close,
    Decision,
    Fenced,
    Foreign,
    Receipt,
    Recorded,
    Refused,
    RegionRecord,
    Returned,
    Round,
    Wait,
    decide,
)

LIVE = frozenset({"paris", "tokyo", "iowa"})
HERE = RegionRecord(epoch=3, version=7, merged="x", known=Decision(40, "x", "merged"))


def frame(**changes) -> Receipt:
    sent = Receipt("paris", 0, base=7, clock=50, digest="y", prev="x", tokens=1000, steps=10)
    return replace(sent, **changes)


def admit(receipt: Receipt, standing: RegionRecord = HERE, **changes) -> rounds.Answer:
    return rounds.admit(receipt, standing, **{"epoch": 3, "alpha": 1.0, "staleness": 2, **changes})


def gathered(*arrivals: tuple[str, float], called: float = 0.0, usual=0.0, grace=30.0, need=2):
    state = rounds.called(Round(), need=need, usual=usual, grace=grace, now=called)
    for region, now in arrivals:
        state = rounds.joined(state, region, need=need, now=now)
    return state


# May a contribution enter?


def test_a_frame_that_follows_the_last_merged_one_enters():
    assert isinstance(admit(frame()), Accept)


def test_the_first_frame_of_a_region_follows_nothing():
    nobody = replace(HERE, merged="", known=None)
    assert isinstance(admit(frame(prev=""), nobody), Accept)


def test_a_frame_of_an_older_epoch_is_fenced_before_anything_else():
    answer = admit(frame(digest="x"), epoch=2)
    assert answer == Fenced("epoch 2 of paris is over, 3 is current")


@pytest.mark.parametrize("fate", ["pending", "merged", "returned", "refused"])
@pytest.mark.parametrize("finished", [False, True])
def test_a_retry_gets_the_recorded_answer_even_after_the_end(fate, finished):
    known = Decision(50, "y", fate, "because")
    standing = replace(HERE, known=known, finished=finished, merged="z", version=2)
    assert admit(frame(), standing, alpha=0.0, unfit="not finite") == Recorded(known)


def test_work_that_comes_after_the_end_is_returned():
    answer = admit(frame(), replace(HERE, finished=True))
    assert answer == Returned("the run is finished")


def test_a_late_copy_does_not_take_the_place_of_a_newer_frame_of_a_finished_run():
    """The run may be opened again, and its region ask what became of the newer one."""
    known = Decision(9, "x", "merged", "")
    answer = admit(frame(clock=8), replace(HERE, known=known, finished=True))
    assert isinstance(answer, Foreign)


def test_a_worker_that_has_seen_more_than_the_server_is_told_so():
    answer = admit(frame(base=8))
    assert answer == Ahead("base version 8, but 7 is the newest published")


@pytest.mark.parametrize("clock", [39, 40])
def test_an_older_or_equal_name_with_other_bytes_is_foreign(clock):
    assert admit(frame(clock=clock)) == Foreign(f"clock {clock}, but 40 was decided before")


def test_a_second_frame_is_foreign_while_the_first_is_pending():
    known = Decision(45, "first", "pending")
    answer = admit(frame(), replace(HERE, known=known))
    assert answer == Foreign("frame 45 of this region is still waiting to be merged")


def test_a_frame_that_does_not_know_the_last_merged_one_is_foreign():
    answer = admit(frame(prev=""))
    assert isinstance(answer, Foreign)
    assert answer.why == "it follows frame none, but x was merged last for this region"


@pytest.mark.parametrize("alpha, answer", [(1.0, Accept), (0.5, Returned), (0.0, Returned)])
def test_age_is_punished_only_under_replace_and_blend(alpha, answer):
    assert isinstance(admit(frame(base=4), alpha=alpha), answer)


def test_a_frame_at_the_age_limit_still_enters():
    assert isinstance(admit(frame(base=5), alpha=0.0), Accept)
    assert admit(frame(base=4), alpha=0.0) == Returned("3 versions behind, 2 allowed")


def test_unfit_content_is_refused_with_the_reason():
    assert admit(frame(), unfit="blocks.0 is not finite") == Refused("blocks.0 is not finite")


def test_a_receipt_survives_the_journal():
    assert Receipt(**frame().as_record()) == frame()
    assert frame().id == "7-50"


# May a round close?


def test_an_uncalled_round_never_closes_whoever_is_in_it():
    waiting = Round(members=("iowa", "paris", "tokyo"))
    assert decide(waiting, live=LIVE, need=1, now=1e9) == Wait("not called yet")


def test_one_region_is_not_a_quorum_however_long_it_waits():
    answer = decide(gathered(("paris", 1)), live=LIVE, need=2, now=1e9)
    assert answer == Wait("1 of 2 contributions needed")


def test_a_quorum_waits_for_the_slow_region_until_grace_is_over():
    state = gathered(("paris", 1), ("tokyo", 10))
    assert decide(state, live=LIVE, need=2, now=39.9) == Wait(
        "quorum met, giving iowa time to arrive", until=40
    )
    answer = decide(state, live=LIVE, need=2, now=40)
    assert answer == Close("grace window over without iowa", ("paris", "tokyo"), live=3)


def test_a_late_arrival_does_not_extend_the_window():
    state = gathered(("paris", 1), ("tokyo", 10), ("iowa", 35))
    answer = decide(state, live=LIVE | {"lima"}, need=2, now=39)
    assert answer == Wait("quorum met, giving lima time to arrive", until=40)


def test_nobody_waits_when_everybody_has_arrived():
    state = gathered(("tokyo", 1), ("paris", 2), ("iowa", 3))
    answer = decide(state, live=LIVE, need=2, now=3)
    assert answer == Close("every live region has arrived", ("iowa", "paris", "tokyo"), live=3)


def test_nobody_waits_for_a_dead_region():
    state = gathered(("paris", 0), ("tokyo", 10))
    assert isinstance(decide(state, live=LIVE - {"iowa"}, need=2, now=10), Close)


def test_nobody_waits_for_a_region_that_has_nothing_left():
    state = gathered(("paris", 0), ("tokyo", 10))
    assert isinstance(decide(state, live=LIVE, need=2, drained={"iowa"}, now=10), Close)


def test_a_frame_of_a_region_that_died_since_still_counts():
    state = gathered(("paris", 0), ("tokyo", 10))
    answer = decide(state, live={"tokyo"}, need=2, now=10)
    assert isinstance(answer, Close) and answer.members == ("paris", "tokyo")


def test_a_frame_that_was_early_does_not_shorten_the_time_for_fresh_answers():
    early = Round(members=("paris",))
    state = rounds.called(early, need=1, usual=12, grace=5, now=100)
    assert decide(state, live=LIVE, need=1, now=100) == Wait(
        "quorum met, giving iowa, tokyo time to arrive", until=117
    )


def test_the_end_lowers_the_quorum_of_an_open_round_and_the_window_does_not_slide():
    state = gathered(("paris", 20), called=10, usual=15, grace=30)
    waits = [decide(state, live=LIVE, need=1, now=now) for now in (26, 40, 54)]
    assert {wait.until for wait in waits if isinstance(wait, Wait)} == {55}
    state = rounds.joined(state, "iowa", need=1, now=54)
    assert isinstance(decide(state, live=LIVE, need=1, now=55), Close)


regions = st.lists(st.sampled_from(["iowa", "lima", "paris", "tokyo"]), unique=True)
moments = st.floats(0, 1e3)


@given(order=st.permutations(["iowa", "lima", "paris", "tokyo"]), count=st.integers(1, 4))
def test_members_come_in_name_order_whatever_the_network_did(order, count):
    state = gathered(*((region, 1.0) for region in order[:count]), need=1)
    answer = decide(state, live=LIVE, need=1, now=1e6)
    assert isinstance(answer, Close) and list(answer.members) == sorted(order[:count])


@given(
    arrivals=st.lists(moments, min_size=1, max_size=4).map(sorted),
    called=moments,
    usual=st.floats(0, 50),
    grace=st.floats(0, 50),
    need=st.integers(1, 4),
    live=regions,
    now=st.floats(0, 1e4),
)
def test_a_called_round_with_its_quorum_never_waits_beyond_floor_and_grace(
    arrivals, called, usual, grace, need, live, now
):
    times = [called + arrival for arrival in arrivals]
    names = ("iowa", "lima", "paris", "tokyo")
    state = gathered(
        *zip(names, times, strict=False), called=called, usual=usual, grace=grace, need=need
    )
    now = max(now, times[-1])
    answer = decide(state, live=live, need=need, now=now)
    if len(times) < need:
        assert isinstance(answer, Wait) and answer.until is None
        return
    deadline = max(times[need - 1], called + usual) + grace
    everybody = set(live) <= set(state.members)
    assert isinstance(answer, Close) == (everybody or now >= deadline)
    if isinstance(answer, Wait):
        assert answer.until == deadline
