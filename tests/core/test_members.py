"""Members are those who joined and are not retired; a name outlives all that happens to it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from diloco_cli.core import members
from diloco_cli.core.conductor import (
    Attendance,
    CloseRound,
    FinishRun,
    RetireRegion,
    RoundTable,
    RunTerms,
    tick,
)
from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    Record,
    RegionJoined,
    RegionRetired,
    RoundClosed,
    RunEnded,
    Snapshot,
    TermsAmended,
    VersionPublished,
    decode,
    encode,
)
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.members import (
    Admission,
    AdmissionRule,
    Admitted,
    RegionOwner,
    Retirement,
    TurnedAway,
    admit_name,
    admit_worker,
)
from diloco_cli.core.pace import Report
from diloco_cli.core.rounds import Accept, Fenced, Foreign, Receipt, admit
from diloco_cli.spec.schema import GraceSpec, SyncSpec

SYNC = SyncSpec(fragments=1, every=4, quorum=1, grace=GraceSpec(kind="fixed", seconds=5.0))
TERMS = RunTerms(SYNC, [10], budget=1000, lease=10.0, forget=60.0)
DAY = 86_400.0


def joined(region: str, epoch: int = 1) -> RegionJoined:
    return RegionJoined(region, f"disk of {region}", epoch, epoch)


def receipt(region: str, clock: int = 1, prev: str = "", base: int = 0) -> Receipt:
    return Receipt(region, 0, base, clock, f"{region}-{clock}", prev, 100.0, 4.0)


def removed(*names: str) -> TermsAmended:
    return TermsAmended(1, "id", remove=names, by="admin:eve", why="sold", time=DAY)


def added(*names: str) -> TermsAmended:
    return TermsAmended(2, "id-2", add=tuple({"name": name} for name in names))


def folded(*records: Record) -> Ledger:
    return Ledger.folded(1, enumerate(records, 1))


def merged(region: str, clock: int = 1, version: int = 1) -> list[Record]:
    return [
        FrameDecided(receipt(region, clock), "pending"),
        FragmentCalled(0, version - 1),
        RoundClosed(0, version - 1, (region,), drain=False),
        VersionPublished(0, version, "w", seconds=10.0 * version),
    ]


def answer(ledger: Ledger, sent: Receipt, epoch: int = 1):
    record = ledger.region_record(sent.region, 0)
    return admit(sent, record, epoch=epoch, alpha=1.0, staleness=2)


def look(*records: Record, now: float = 100.0, **seen):
    ledger = folded(*records)
    table = RoundTable.reopened(ledger, SYNC, now=now)
    present = Attendance(**{"here": set(ledger.regions), "reports": {}, "empty": [()], **seen})
    return tick(ledger, table, present, TERMS, now=now)


def test_a_member_has_joined_and_is_not_retired():
    ledger = folded(joined("iowa"), joined("paris"), RegionRetired("iowa", "left for good"))
    assert ledger.members == ("paris",) and set(ledger.regions) == {"iowa", "paris"}
    ledger.apply(4, joined("iowa", epoch=2))
    assert set(ledger.members) == {"iowa", "paris"} and not ledger.retired


def test_the_epoch_of_a_retired_region_is_over_at_the_moment_of_its_retirement():
    ledger = folded(joined("paris"))
    assert isinstance(answer(ledger, receipt("paris")), Accept)
    ledger.apply(2, RegionRetired("paris", "silent for 7 days"))
    told = answer(ledger, receipt("paris"))
    assert isinstance(told, Fenced) and "silent for 7 days" in told.why


def test_what_was_accepted_of_a_retired_region_is_merged_exactly_once():
    first, *rest = merged("paris")
    ledger = folded(joined("paris"), first, removed("paris"), *rest)
    assert ledger.slots[0].merged == {"paris": "paris-1"}
    assert ledger.slots[0].applied == {"paris": 100.0}
    # It returns under its name and sends the same frame again: the recorded answer.
    ledger.apply(9, added("paris"))
    ledger.apply(10, joined("paris", epoch=2))
    known = ledger.region_record("paris", 0).known
    assert known and (known.digest, known.fate) == ("paris-1", "merged")


def test_a_region_that_was_removed_is_barred_until_it_is_added_again():
    ledger = folded(joined("paris"), removed("paris"))
    rule = AdmissionRule("credentialed", ("iowa",), 256)

    def may(name: str) -> TurnedAway | None:
        known, gone = ledger.regions.get(name), ledger.retired.get(name)
        return admit_name(name, rule, members=ledger.members, known=known, retired=gone, key="")

    turned_away = may("paris")
    assert turned_away and turned_away.code == "retired" and turned_away.why == "sold"
    assert ledger.retired["paris"] == Retirement("sold", "admin:eve", DAY, barred=True, record=2)
    ledger.apply(3, added("paris"))
    assert may("paris") is None and ledger.members == ()
    ledger.apply(4, RegionRetired("paris", "silent for 7 days"))
    assert may("paris") is None, "a forgotten one is simply let in"


def test_a_name_that_never_joined_can_be_removed_and_added_again():
    ledger = folded(removed("oslo"))
    assert ledger.retired["oslo"].barred
    ledger.apply(2, added("oslo"))
    assert not ledger.retired


def test_a_region_that_returns_gets_a_new_epoch_even_with_the_same_boot():
    member = RegionOwner("disk", 4, 9)
    assert admit_worker(member, "disk", 4, lease_left=0) == Admitted(9, new=False)
    assert admit_worker(member, "disk", 4, lease_left=0, retired=True) == Admitted(10, new=True)


def test_a_folder_of_which_nothing_is_on_record_begins_its_books_anew():
    member = RegionOwner("", 0, 9, high=40)
    answer = admit_worker(member, "disk", 4, lease_left=0, retired=True)
    assert isinstance(answer, TurnedAway) and answer.code == "older-copy"
    assert admit_worker(member, "new disk", 1, lease_left=0, retired=True) == Admitted(10, new=True)


@pytest.mark.parametrize(
    "admit, name, code",
    [
        ("listed", "iowa", None),
        ("listed", "oslo", "unknown-region"),
        ("credentialed", "oslo", None),
        ("credentialed", "bergen", "full"),
        ("open", "oslo", None),
    ],
)
def test_who_may_join(admit: Admission, name: str, code: str | None):
    rule = AdmissionRule(admit, ("iowa", "paris"), most=1)
    there = ("iowa", "oslo") if name != "iowa" else ()
    said = admit_name(name, rule, members=there, known=None, retired=None, key="")
    assert (said.code if said else None) == code


def test_where_anybody_may_join_the_first_has_the_name():
    rule = AdmissionRule("open", (), most=9)

    def says(key: str, recorded: str) -> str | None:
        known = RegionOwner("disk", 1, 1, key=recorded)
        told = admit_name("oslo", rule, members=("oslo",), known=known, retired=None, key=key)
        return told.code if told else None

    assert says("mine", "mine") is None and says("yours", "mine") == "name-taken"
    assert says("", "mine") == "name-taken" and says("mine", "") is None


def test_nobody_waits_for_a_retired_region():
    records = [joined("iowa"), joined("paris"), *merged("iowa")[:2]]
    assert not look(*records).actions, "paris is given time"
    (close,) = look(*records, RegionRetired("paris", "left for good")).actions
    assert isinstance(close, CloseRound)
    assert close.verdict.why == "every live region has arrived"


def test_a_retired_region_sets_no_pace_and_is_no_quorum():
    reports = {"paris": [Report(0, 9.0)], "iowa": [Report(0, 1.0)]}
    there = [joined("iowa"), joined("paris")]
    assert look(*there, reports=reports).actions
    assert not look(*there, RegionRetired("paris", "left"), reports=reports).actions


def test_the_drain_waits_for_members_only():
    there = [joined("iowa"), joined("paris"), RunEnded("budget")]
    assert not look(*there, undrained=["paris"], gone=["paris"]).actions
    (finish,) = look(
        *there, RegionRetired("paris", "left"), undrained=["paris"], gone=["paris"]
    ).actions
    assert finish == FinishRun("token budget reached")


def test_silence_retires_and_says_so():
    there = [joined("iowa"), joined("paris")]
    found = look(*there, here={"iowa"}, silent={"paris": 59.0})
    assert not found.actions and found.until == 101.0, "it is looked at again in time"
    found = look(*there, here={"iowa"}, silent={"paris": 60.0})
    assert found.actions == [RetireRegion("paris", "silent for 60 seconds")]
    assert found.until == 100.0, "the rounds are looked at without it"
    gone = [*there, RegionRetired("paris", "silent")]
    assert not look(*gone, here={"iowa"}, silent={"paris": 99.0}).actions


def test_what_is_retired_is_in_the_snapshot():
    ledger = folded(joined("iowa"), *merged("paris"), joined("paris"), removed("iowa"))
    snapshot = Snapshot(ledger.snapshot(), {})
    again = Ledger.empty(1)
    copied = decode(json.loads(json.dumps(encode(snapshot))))
    assert copied
    again.apply(9, copied)
    assert replace(again, news=0) == replace(ledger, news=0)


def tombstone(monkeypatch: pytest.MonkeyPatch, most: int = 1) -> Ledger:
    monkeypatch.setattr("diloco_cli.core.ledger.MOST_RETIRED", most)
    return folded(
        joined("iowa"),
        joined("paris", epoch=3),
        *merged("paris", clock=7),
        RegionRetired("paris", "left for good"),
    )


def test_of_the_oldest_retired_names_only_epoch_and_clock_are_kept(monkeypatch):
    ledger = tombstone(monkeypatch)
    assert ledger.slots[0].merged == {"paris": "paris-7"}, "one is kept whole"
    ledger.apply(9, RegionRetired("iowa", "left for good"))
    assert ledger.regions["paris"] == RegionOwner("", 0, 3, high=7)
    slot = ledger.slots[0]
    assert not slot.merged and not slot.decided
    assert slot.applied == {members.OTHERS: 100.0} and ledger.applied([10]) == 100.0
    assert ledger.high("paris") == 7 and "paris" in ledger.retired


def test_the_oldest_is_the_oldest_after_a_snapshot_too(monkeypatch):
    """A snapshot in the journal sorts its names."""
    monkeypatch.setattr("diloco_cli.core.ledger.MOST_RETIRED", 2)
    there = [joined("zug"), joined("aarau"), joined("bern")]
    ledger = folded(*there, RegionRetired("zug", "left"), RegionRetired("aarau", "left"))
    line = json.dumps(encode(Snapshot(ledger.snapshot(), {})), sort_keys=True)
    again = Ledger.empty(1)
    copied = decode(json.loads(line))
    assert copied
    again.apply(6, copied)
    for each in (ledger, again):
        each.apply(7, RegionRetired("bern", "left"))
        assert [name for name, known in each.regions.items() if not known.owner] == ["zug"]


def test_a_name_of_which_little_is_kept_never_has_its_work_merged_again(monkeypatch):
    ledger = tombstone(monkeypatch)
    ledger.apply(9, RegionRetired("iowa", "left for good"))
    ledger.apply(10, joined("paris", epoch=4))
    assert ledger.high("paris") == 7
    told = answer(ledger, receipt("paris", clock=7), epoch=4)
    assert isinstance(told, Foreign) and "7 was decided before" in told.why
    assert isinstance(answer(ledger, receipt("paris", clock=8), epoch=4), Accept)


def test_a_name_with_a_frame_on_its_way_is_kept_whole(monkeypatch):
    monkeypatch.setattr("diloco_cli.core.ledger.MOST_RETIRED", 0)
    first, *rest = merged("paris")
    ledger = folded(joined("paris"), joined("iowa"), first, RegionRetired("paris", "left"))
    assert ledger.regions["paris"].owner
    for number, record in enumerate([*rest, RegionRetired("iowa", "left")], 9):
        ledger.apply(number, record)
    assert not ledger.regions["paris"].owner and ledger.applied([10]) == 100.0
