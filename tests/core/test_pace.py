"""The quorum-th fastest region sets the pace, and grace never outlasts its worth."""

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.core import pace
from diloco_cli.core.ledger import FragmentState
from diloco_cli.core.pace import Averages, Report
from diloco_cli.core.rounds import Receipt
from diloco_cli.spec.schema import GraceSpec, SyncSpec

SYNC = SyncSpec(fragments=1, every=10, quorum=2)


def says(**steps: float) -> dict[str, list[Report]]:
    """Every region reports its steps on version 5 of the only fragment."""
    return {region: [Report(5, count)] for region, count in steps.items()}


def due(reports, slot: FragmentState | None = None, sync: SyncSpec = SYNC, live=None) -> list[int]:
    return pace.due([slot or FragmentState(version=5)], reports, live or set(reports), sync)


def waiting(base: int) -> dict[str, Receipt]:
    return {"paris": Receipt("paris", 0, base, 10, "x", "", tokens=100, steps=4)}


def test_a_region_that_leaves_goes_along_and_calls_nobody_for_crumbs():
    def is_due(others: float, quorum: int = 1, live=("iowa", "paris")) -> bool:
        reports = {"iowa": [Report(1, 2.0)], "paris": [Report(1, others)]}
        sync = SyncSpec(fragments=1, every=8, quorum=quorum)
        slots = [FragmentState(version=1)]
        return pace.due(slots, reports, live, sync, retiring=("iowa",)) == [0]

    assert not is_due(7.0) and is_due(8.0)
    assert not is_due(7.0, quorum=2) and is_due(8.0, quorum=2)
    assert is_due(0.0, live=("iowa",)), "where there are no others, at once"


def test_a_fragment_is_due_when_the_quorum_th_fastest_region_has_enough():
    assert due(says(paris=30, tokyo=9, iowa=1)) == []
    assert due(says(paris=30, tokyo=10, iowa=1)) == [0]


def test_work_on_an_older_version_sets_no_pace():
    reports = {**says(paris=30), "tokyo": [Report(4, 30)]}
    assert due(reports) == []


def test_nothing_is_called_with_fewer_live_regions_than_the_quorum():
    assert due(says(paris=30, tokyo=30), live={"paris"}) == []


def test_a_dead_region_sets_no_pace():
    assert due(says(paris=30, tokyo=30, iowa=3), live={"paris", "iowa"}) == []


def test_a_live_region_that_has_not_reported_holds_nothing():
    assert due(says(paris=30), live={"paris", "tokyo"}) == []


@pytest.mark.parametrize("phase", ["called", "closing"])
def test_an_open_round_is_not_called_twice(phase):
    assert due(says(paris=30, tokyo=30), FragmentState(version=5, phase=phase)) == []


def test_first_rounds_are_staggered_and_later_ones_are_not():
    sync = SYNC.model_copy(update={"fragments": 2, "quorum": 1})
    fresh = {"paris": [Report(0, 5), Report(0, 5)]}
    assert pace.due([FragmentState(), FragmentState()], fresh, {"paris"}, sync) == [0]
    later = {"paris": [Report(1, 5), Report(1, 5)]}
    assert (
        pace.due([FragmentState(version=1), FragmentState(version=1)], later, {"paris"}, sync) == []
    )


def test_a_frame_that_came_late_calls_nothing_by_itself():
    assert due(says(paris=0, tokyo=0), FragmentState(version=5, waiting=waiting(base=4))) == []


def test_a_round_that_lost_all_its_members_is_called_again_for_whoever_still_waits():
    assert due(says(paris=0, tokyo=0), FragmentState(version=5, waiting=waiting(base=5))) == [0]


def test_after_the_end_whatever_waits_or_is_held_is_called():
    slots = [
        FragmentState(waiting=waiting(0)),
        FragmentState(),
        FragmentState(),
        FragmentState(phase="closing"),
    ]
    reports = {"paris": [Report(0, 0), Report(0, 1), Report(0, 0.5), Report(0, 9)]}
    assert pace.due_at_end(slots, reports, {"paris"}) == [0, 1]


def test_after_the_end_a_dead_region_is_not_waited_for():
    assert pace.due_at_end([FragmentState()], {"paris": [Report(0, 5)]}, {"tokyo"}) == []


# Grace

KNOWN = Averages(
    step={"paris": 1.0, "tokyo": 4.0}, answer={"paris": 2.0, "tokyo": 3.0}, quorum=1.0, sync=0.5
)
BOTH = {"paris", "tokyo"}


def grace(
    averages: Averages = KNOWN, live: Collection[str] = tuple(BOTH), **changes
) -> float | None:
    return pace.grace(averages, live, SyncSpec(**{"every": 24, "overlap": 2, **changes}))


def test_under_rebase_grace_covers_the_slowest_usual_answer():
    assert grace() == 3.0


def test_under_rebase_grace_covers_how_far_answers_are_from_their_average():
    uneven = replace(KNOWN, spread={"paris": 1.0, "tokyo": 0.5, "iowa": 9.0})
    assert grace(uneven) == 2.0 + 4 * 1.0, "paris may be the last although it is not on average"
    assert grace(uneven, live={"tokyo"}) == 3.0 + 4 * 0.5
    assert grace(uneven, every=4) == 2.0, "never beyond half of the fastest period"


def test_under_rebase_grace_is_bounded_by_a_share_of_the_fastest_period():
    assert grace(every=4) == 2.0
    assert grace(every=4, grace=GraceSpec(margin=0.25)) == 1.0


def test_a_region_that_never_answered_gets_the_longest_window():
    averages = Averages(step=KNOWN.step, answer={"paris": 2.0})
    assert grace(averages) == 12.0


@pytest.mark.parametrize("adopt", ["replace", "blend"])
def test_otherwise_grace_must_fit_into_the_overlap(adopt):
    assert grace(adopt=adopt) == pytest.approx(0.5 * (2 * 4.0 - 1.0 - 0.5))
    assert grace(adopt=adopt, overlap=0) == 0.0


def test_grace_can_be_fixed_or_left_out():
    assert grace(grace=GraceSpec(kind="fixed", seconds=7)) == 7
    assert grace(grace=GraceSpec(kind="none", seconds=7)) == 0


def test_before_anything_is_known_there_is_no_time_to_wait_by():
    assert grace(Averages()) is None
    assert grace(Averages(step={"iowa": 1.0})) is None, "it is not there"


def test_dead_regions_do_not_count():
    assert grace(live={"paris"}) == 2.0


def test_the_usual_answer_is_that_of_the_quorum_th_live_region():
    averages = Averages(answer={"paris": 2.0, "tokyo": 3.0, "iowa": 9.0})

    def usual(live: set[str], quorum: int, averages: Averages = averages) -> float:
        return pace.usual_answer(averages, live, quorum, every=4)

    assert [usual({*BOTH, "iowa"}, n) for n in (1, 2, 3)] == [2, 3, 9]
    assert usual({"iowa", "lima"}, 2) == 9 and usual({"lima"}, 1) == 0
    stepping = replace(averages, step={"paris": 2.0, "lima": 0.1})
    assert usual({*BOTH, "iowa"}, 3, stepping) == 8.0, "a period of the fastest that is here"
    slow = replace(stepping, quorum=8.5)
    assert usual({*BOTH, "iowa"}, 3, slow) == 8.5, "over lines on which all answers take longer"
    cut_off = replace(stepping, answer=dict.fromkeys(averages.answer, 7000.0), quorum=7000.0)
    assert usual({*BOTH, "iowa"}, 1, cut_off) == 32.0, "four periods, whatever an outage took"


def test_averages_begin_with_the_first_observation_and_follow_slowly():
    averages = pace.stepped(pace.stepped(Averages(), "paris", 1.0), "paris", 2.0)
    assert averages.step == {"paris": pytest.approx(1.3)}
    averages = pace.answered(averages, "tokyo", 4.0)
    assert averages.answer == {"tokyo": 4.0} and averages.step.keys() == {"paris"}
    assert averages.spread == {"tokyo": 2.0}
    averages = pace.answered(averages, "tokyo", 6.0)
    assert averages.answer == {"tokyo": pytest.approx(4.6)}
    assert averages.spread == {"tokyo": pytest.approx(2.0)}, "two from the average, as before"
    averages = pace.answered(averages, "tokyo", 4.6)
    assert averages.spread == {"tokyo": pytest.approx(1.4)}
    assert pace.met(averages, 5.0).quorum == 5.0 and pace.published(averages, 2.0).sync == 2.0


seconds = st.floats(0.01, 1e3)
observed = st.dictionaries(st.sampled_from(["iowa", "paris", "tokyo"]), seconds)


@given(step=observed, answer=observed, quorum=seconds, adopt=st.sampled_from(["rebase", "replace"]))
def test_adaptive_grace_is_never_negative_and_never_beyond_its_share(step, answer, quorum, adopt):
    live, sync = {"iowa", "paris", "tokyo"}, SyncSpec(every=24, overlap=2, adopt=adopt)
    window = pace.grace(Averages(step, answer, quorum, sync=0.1), live, sync)
    most = {
        "rebase": 24 * min(step.values(), default=0),
        "replace": 2 * max(step.values(), default=0),
    }
    assert (window is None) == (not step)
    assert window is None or 0 <= window <= 0.5 * most[adopt]


@given(steps=st.lists(st.floats(0, 100), min_size=1, max_size=6), quorum=st.integers(1, 6))
def test_more_work_never_makes_a_fragment_less_due(steps, quorum):
    sync = SYNC.model_copy(update={"quorum": quorum})
    reports = says(**{f"r{number}": count for number, count in enumerate(steps)})
    more = says(**{f"r{number}": count + 1 for number, count in enumerate(steps)})
    assert len(due(reports, sync=sync)) <= len(due(more, sync=sync))
    assert due(reports, sync=sync) == ([0] if sum(s >= 10 for s in steps) >= quorum else [])
