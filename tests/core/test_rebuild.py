"""What a run goes on from when its server's journal is lost."""

from __future__ import annotations

from diloco_cli.core.claims import PaceRecord
from diloco_cli.core.journal_records import RegionJoined, RunRebuilt, TermsAmended, decode, encode
from diloco_cli.core.lanes import CorpusOrder, Cursor, LanePosition, LaneTable
from diloco_cli.core.ledger import FragmentState, Ledger
from diloco_cli.core.members import Admitted, RegionOwner, TurnedAway, admit_worker
from diloco_cli.core.rebuild import (
    NUMBERS,
    FoundRegion,
    FoundVersion,
    NewestVersion,
    OtherWeights,
    first_number,
    newest_runs,
    newest_version,
    rebuilt_ledger,
)

TEXT = CorpusOrder("text", "settings", 10_000, 400, 16, 4)


def held(holder: str, version: int, digest: str = "d", tokens: float = 1.0) -> FoundVersion:
    return FoundVersion(holder, version, digest, {"paris": "x"}, {"paris": tokens})


def test_the_newest_version_goes_on_and_all_who_hold_it_are_named():
    found = [held("a", 3), held("b", 5, tokens=1), held("c", 5, tokens=2)]
    newest = newest_version(found)
    assert newest == NewestVersion(found[2], ("b", "c"))
    assert newest_version([]) is None


def test_two_histories_under_one_number_are_both_shown():
    found = newest_version([held("a", 5, "one"), held("b", 5, "two"), held("c", 4)])
    assert found == OtherWeights(5, {"one": ("a",), "two": ("b",)})


def test_of_several_runs_the_one_goes_on_that_no_other_continues():
    assert newest_runs({"second": {"first"}, "first": set(), "third": {"first", "second"}}) == [
        "third"
    ]
    assert newest_runs({"one": set(), "other": set()}) == ["one", "other"]


def test_the_new_journal_is_numbered_above_all_that_is_known():
    assert first_number([17, 4]) == NUMBERS and first_number([NUMBERS + 3]) == 2 * NUMBERS


def reading(lanes: dict[int, tuple[int, int]], count: int = 4) -> tuple[Cursor, ...]:
    return (Cursor("text", count, {lane: LanePosition(*at) for lane, at in lanes.items()}),)


def rebuilt(ledger: Ledger | None = None, **regions: FoundRegion) -> Ledger:
    found = [
        FoundVersion("paris", 7, "weights", {"paris": "x", "tokyo": "y"}, {"paris": 90.0}),
        FoundVersion("paris", 6, "others", {"paris": "z"}, {"paris": 80.0}),
    ]
    return rebuilt_ledger(ledger or Ledger.empty(2), found, regions, (), served=50.0)


def test_versions_members_and_counted_tokens_go_on():
    ledger = rebuilt(paris=FoundRegion(high=40, key="key"))
    assert [slot.version for slot in ledger.slots] == [7, 6] and ledger.outer_steps == 13
    assert ledger.slots[0].merged == {"paris": "x", "tokyo": "y"}
    assert ledger.applied([1, 1]) == 85.0
    assert ledger.members == ("paris", "tokyo") and ledger.high("paris") == 40
    assert ledger.regions["paris"].key == "key"
    assert ledger.allowance.time == 50.0 and ledger.paces["paris"] == PaceRecord(0.0)


def test_no_folder_is_waited_for_and_an_older_start_takes_a_new_name():
    paris = rebuilt().regions["paris"]
    assert admit_worker(paris, "new", 1, lease_left=9.0) == Admitted(1, new=True)
    assert isinstance(admit_worker(paris, "old", 2, lease_left=9.0), TurnedAway)
    held_by = RegionOwner("other", 1, 4)
    assert isinstance(admit_worker(held_by, "new", 1, lease_left=9.0), TurnedAway)


def test_a_record_says_all_of_it_and_what_it_says_is_folded():
    ledger = rebuilt(paris=FoundRegion(order=TEXT, reading=reading({0: (12, 30)})))
    record = RunRebuilt(("lost",), ("s0", "s1"), ("paris", "paris"), ledger.snapshot(), {})
    assert decode(encode(record)) == record
    again = Ledger.folded(2, [(NUMBERS + 1, record)])
    assert again.continues == ["lost"] and again.news == NUMBERS + 1
    assert [(slot.first, slot.first_state) for slot in again.slots] == [(7, "s0"), (6, "s1")]
    assert again.orders["text"].owned("paris") == {0: LanePosition(12, 30)}
    assert Ledger.of(again.snapshot()).snapshot() == again.snapshot()
    assert all(isinstance(slot, FragmentState) for slot in again.slots)


def test_a_copy_keeps_its_terms_paces_and_bars_and_learns_newer_ones():
    copy = Ledger.empty(2)
    for number, name in enumerate(("paris", "tokyo"), 1):
        copy.apply(number, RegionJoined(name, f"{name}-folder", 3, 2))
    copy.apply(3, TermsAmended(1, "one", {"outer.lr": 0.5}))
    amended = [*copy.amendments, TermsAmended(2, "two", remove=("tokyo",), by="admin")]
    found = [held("paris", 1), held("paris", 1)]
    ledger = rebuilt_ledger(copy, found, {}, amended, served=None)
    assert ledger.terms == 2 and ledger.retired["tokyo"].barred
    assert ledger.regions["paris"].epoch == 2 and not ledger.regions["paris"].owner


def test_lanes_belong_to_the_newest_grant_and_are_read_on_from_the_furthest_position():
    table = LaneTable(TEXT, 4)
    copy = Ledger.empty(2)
    copy.orders["text"] = table
    paris = FoundRegion(order=TEXT, reading=reading({0: (5, 10), 1: (9, 20)}))
    tokyo = FoundRegion(order=TEXT, reading=(*reading({1: (7, 90)}), *reading({2: (8, 30)})))
    ledger = rebuilt(copy, paris=paris, tokyo=tokyo)
    assert ledger.orders["text"].owned("paris") == {0: (5, 10), 1: (9, 20)}
    assert ledger.orders["text"].owned("tokyo") == {2: (8, 30)}
    assert 3 not in ledger.orders["text"].owners, "nobody is missing who could have it"


def test_lanes_of_a_region_whose_folder_is_not_given_stay_its_own():
    ledger = rebuilt(paris=FoundRegion(order=TEXT, reading=reading({0: (5, 10), 1: (9, 20)})))
    assert ledger.orders["text"].owned("tokyo") == {2: (0, 10), 3: (0, 10)}


def test_lanes_that_were_cut_since_the_copy_are_cut():
    copy = Ledger.empty(2)
    copy.orders["text"] = LaneTable(TEXT, 4)
    ledger = rebuilt(copy, paris=FoundRegion(order=TEXT, reading=reading({6: (9, 4)}, count=8)))
    assert ledger.orders["text"].count == 8
    assert ledger.orders["text"].owned("paris") == {6: (9, 4)}
