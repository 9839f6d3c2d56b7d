"""One look at the rounds: what is done now, and when to look again. It changes nothing."""

import copy

from diloco_cli.core.conductor import (
    PATIENCE,
    Attendance,
    CallFragment,
    CloseRound,
    EndRun,
    FinishRun,
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
from diloco_cli.core.rounds import Receipt
from diloco_cli.spec.schema import GraceSpec, SyncSpec

SYNC = SyncSpec(fragments=1, every=4, quorum=1, grace=GraceSpec(kind="fixed", seconds=5.0))
TERMS = RunTerms(SYNC, [10], budget=1000, lease=10.0)
JOINED = [RegionJoined(region, "disk", 1, 1) for region in ("iowa", "paris")]
REPORTS = {"iowa": [Report(0, 4.0)], "paris": [Report(0, 1.0)]}


def decided(region: str, tokens: float = 100.0) -> FrameDecided:
    return FrameDecided(Receipt(region, 0, 0, 1, region, "", tokens, 4.0), "pending")


def look(*records, now=100.0, table=None, **seen):
    ledger = Ledger.folded(1, enumerate([*JOINED, *records], 1))
    table = table or RoundTable.reopened(ledger, SYNC, now=now)
    before = copy.deepcopy((ledger, table))
    found = tick(ledger, table, Attendance(**{**PRESENT, **seen}), TERMS, now=now)
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


def test_a_merged_budget_ends_the_run_before_anything_else():
    records = [decided("iowa", 2000.0), FragmentCalled(0, 0), RoundClosed(0, 0, ("iowa",), False)]
    found = look(*records, VersionPublished(0, 1, "w"), reports=REPORTS)
    assert found.actions == [EndRun("2000 of 1000 tokens are merged", 2000.0)]
    assert found.until == 100.0


def test_a_drained_run_is_finished_and_names_those_it_did_not_wait_for():
    assert look(RunEnded("budget")).actions == [FinishRun("token budget reached")]
    (finish,) = look(RunEnded("budget"), gone=["paris"]).actions
    assert isinstance(finish, FinishRun) and "not waited for: paris" in finish.why


def test_a_run_waits_for_held_work_and_gives_up_when_none_comes():
    waits = look(RunEnded("budget"), undrained=["paris"], gone=["paris"])
    assert not waits.actions and waits.until == 120.0
    table = RoundTable(
        [RoundTable.reopened(Ledger.empty(1), SYNC, now=0.0).rounds[0]], ended_at=0.0
    )
    late = look(RunEnded("budget"), undrained=["paris"], table=table, now=PATIENCE * 10.0)
    assert late.actions == [FinishRun("paris gave nothing for 120 s")]
