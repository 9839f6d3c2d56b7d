"""One look at the rounds: what is done now, and when to look again. It changes nothing."""

import copy
from dataclasses import replace

from diloco_cli.core.conductor import (
    PATIENCE,
    Attendance,
    CallFragment,
    CloseRound,
    EndRun,
    FinishRun,
    ResumeRun,
    RoundTable,
    RunTerms,
    tick,
)
from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    RegionJoined,
    RoundClosed,
    RunEnded,
    VersionPublished,
)
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.pace import Report
from diloco_cli.core.rounds import Receipt, called
from diloco_cli.spec.schema import GraceSpec, SyncSpec

SYNC = SyncSpec(fragments=1, every=4, quorum=1, grace=GraceSpec(kind="fixed", seconds=5.0))
TERMS = RunTerms(SYNC, [10], budget=1000, lease=10.0, step_tokens=lambda region: 10.0)
JOINED = [RegionJoined(region, "disk", 1, 1) for region in ("iowa", "paris")]
REPORTS = {"iowa": [Report(0, 4.0)], "paris": [Report(0, 1.0)]}


def decided(region: str, tokens: float = 100.0) -> FrameDecided:
    return FrameDecided(Receipt(region, 0, 0, 1, region, "", tokens, 4.0), "pending")


def look(*records, now=100.0, table=None, terms=TERMS, **seen):
    ledger = Ledger.folded(1, enumerate([*JOINED, *records], 1))
    table = table or RoundTable.reopened(ledger, terms.sync, now=min(now, 100.0))
    before = copy.deepcopy((ledger, table))
    found = tick(ledger, table, Attendance(**{**PRESENT, **seen}), terms, now=now)
    assert (ledger, table) == before
    return found


PRESENT = {"here": {"iowa", "paris"}, "reports": {}, "empty": [()]}


def test_a_due_fragment_is_called_and_its_round_opened():
    found = look(reports=REPORTS)
    (call,) = found.actions
    assert isinstance(call, CallFragment) and (call.fragment, call.version) == (0, 0)
    assert call.round.called_at == 100.0 and found.waiting == {0: "0 of 1 contributions needed"}


def test_a_round_that_everyone_has_joined_is_called_and_closed_in_one_look():
    found = look(decided("iowa"), decided("paris"), reports=REPORTS)
    call, close = found.actions
    assert isinstance(call, CallFragment) and isinstance(close, CloseRound)
    assert close.verdict.members == ("iowa", "paris")


def test_a_round_in_its_grace_window_says_when_to_look_again():
    found = look(decided("iowa"), FragmentCalled(0, 0))
    assert not found.actions and found.until == 105.0


def merged(tokens: float) -> list:
    closed = RoundClosed(0, 0, ("iowa",), False)
    return [decided("iowa", tokens), FragmentCalled(0, 0), closed, VersionPublished(0, 1, "w")]


def test_a_merged_budget_ends_the_run_before_anything_else():
    found = look(*merged(2000.0), reports=REPORTS)
    assert found.actions == [EndRun("2000 of 1000 tokens are merged or held", 2000.0)]
    assert found.until == 100.0


def test_what_waits_and_what_is_held_is_spoken_for():
    held = {"iowa": [100.0], "paris": [300.0]}
    assert not any(isinstance(it, EndRun) for it in look(*merged(500.0), unsent=held).actions)
    (end,) = look(*merged(600.0), unsent=held).actions
    assert end == EndRun("1000 of 1000 tokens are merged or held", 600.0)
    (end,) = look(decided("iowa", 900.0), unsent={"paris": [100.0]}).actions
    assert end == EndRun("1000 of 1000 tokens are merged or held", 0.0)


def test_a_drained_run_that_is_short_by_a_round_goes_on():
    """A round of both regions is four steps of ten tokens each."""
    found = look(*merged(920.0), RunEnded("held"))
    assert found.actions == [ResumeRun("920 of 1000 tokens came out of the drain")]
    assert found.until == 100.0, "and looks again at once"
    assert look(*merged(921.0), RunEnded("held")).actions == [FinishRun("token budget reached")]
    alone = look(*merged(955.0), RunEnded("held"), here={"iowa"})
    assert isinstance(alone.actions[0], ResumeRun), "a round of those who are there is less"


def test_a_run_whose_held_work_never_comes_goes_on_too():
    """Whoever claims to hold what is left cannot end a run by keeping it."""
    held, limit = [*merged(500.0), RunEnded("held")], 100 + PATIENCE * 10.0
    assert not look(*held, undrained=["paris"], now=limit - 1).actions
    (resumed,) = look(*held, undrained=["paris"], now=limit).actions
    assert isinstance(resumed, ResumeRun)


def test_without_any_step_time_a_round_waits_until_a_member_is_ready_again():
    adaptive = SYNC.model_copy(update={"grace": GraceSpec()})
    terms = replace(TERMS, sync=adaptive)
    opened = [decided("iowa"), FragmentCalled(0, 0)]

    def closes(**seen) -> bool:
        found = look(*opened, terms=terms, now=1e6, **seen)
        return any(isinstance(action, CloseRound) for action in found.actions)

    assert not closes(reports={"iowa": [Report(0, 3.0)], "paris": [Report(0, 9.0)]})
    assert closes(reports={"iowa": [Report(0, 4.0)]})


def test_what_a_member_reported_before_it_answered_says_nothing():
    adaptive = SYNC.model_copy(update={"grace": GraceSpec()})
    terms = replace(TERMS, sync=adaptive)
    opened = [decided("iowa"), FragmentCalled(0, 0)]
    ledger = Ledger.folded(1, enumerate([*JOINED, *opened], 1))
    table = RoundTable.reopened(ledger, adaptive, now=100.0)
    table.rounds[0] = replace(table.rounds[0], members=())
    table.arrived(0, "iowa", need=1, now=100.0)

    def actions() -> list:
        return look(*opened, terms=terms, table=table, reports={"iowa": [Report(0, 4.0)]}).actions

    assert not actions()
    table.heard("iowa", 0.0, live=lambda: {"iowa", "paris"}, sync=adaptive)
    (close,) = actions()
    assert isinstance(close, CloseRound) and "ready again" in close.verdict.why


def test_a_step_time_that_becomes_known_gives_open_rounds_their_window():
    adaptive = SYNC.model_copy(update={"grace": GraceSpec()})
    ledger = Ledger.folded(1, enumerate([*JOINED, decided("iowa"), FragmentCalled(0, 0)], 1))
    table = RoundTable.reopened(ledger, adaptive, now=100.0)
    assert table.rounds[0].grace is None
    table.heard("iowa", 2.0, live=lambda: {"iowa", "paris"}, sync=adaptive)
    assert table.rounds[0].grace == 0.5 * 4 * 2.0
    table.heard("iowa", 20.0, live=lambda: {"iowa", "paris"}, sync=adaptive)
    assert table.rounds[0].grace == 0.5 * 4 * 2.0, "it never moves"


def test_late_answers_count_among_the_usual_ones():
    """Of those in time alone a window would learn to be too short."""
    table = RoundTable.reopened(Ledger.folded(1, enumerate(JOINED, 1)), SYNC, now=0.0)
    table.rounds[0] = called(table.rounds[0], need=1, usual=0.0, grace=1.0, now=10.0)
    table.arrived(0, "iowa", need=1, now=12.0)
    table.closed(0)
    assert table.rounds[0].called_at is None and table.rounds[0].members == ()
    table.arrived(0, "paris", need=1, now=17.0)
    assert table.averages.answer == {"iowa": 2.0, "paris": 7.0}
    assert table.averages.quorum == 2.0, "of the round that was called"
    # It is a member of the next round; what comes after that call answers it.
    table.rounds[0] = called(table.rounds[0], need=1, usual=0.0, grace=1.0, now=20.0)
    table.arrived(0, "iowa", need=1, now=22.0)
    assert table.rounds[0].members == ("paris", "iowa") and table.averages.answer["iowa"] == 2.0


def test_a_drained_run_is_finished_and_names_those_it_did_not_wait_for():
    done = [*merged(1000.0), RunEnded("budget")]
    assert look(*done).actions == [FinishRun("token budget reached")]
    (finish,) = look(*done, gone=["paris"]).actions
    assert isinstance(finish, FinishRun) and "not waited for: paris" in finish.why


def test_a_run_waits_for_held_work_and_gives_up_when_none_comes():
    done = [*merged(1000.0), RunEnded("budget")]
    waits = look(*done, undrained=["paris"], gone=["paris"])
    assert not waits.actions and waits.until == 120.0
    table = RoundTable(
        [RoundTable.reopened(Ledger.empty(1), SYNC, now=0.0).rounds[0]], ended_at=0.0
    )
    late = look(*done, undrained=["paris"], table=table, now=PATIENCE * 10.0)
    assert late.actions == [FinishRun("paris gave nothing for 120 s")]
