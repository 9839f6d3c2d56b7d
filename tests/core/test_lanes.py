"""A lane has one reader at a time: no window of an epoch is read twice, and none is left out."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco_cli.core.lanes import (
    MOST_LAPSED,
    Assignment,
    CorpusOrder,
    Cursor,
    LaneMove,
    LaneOwner,
    LanePosition,
    LaneTable,
    Readers,
    deal,
    follow,
    split,
)

ORDER = CorpusOrder("order", "settings", tokens=9000, windows=900, sequence=8, lanes=12)
NAMES = ("iowa", "lima", "oslo", "paris")


def table(count: int = 12, **owners: int) -> LaneTable:
    """Lanes dealt in blocks, region after region."""
    found = LaneTable(ORDER, count)
    lanes = iter(range(count))
    for number, (region, many) in enumerate(owners.items(), 1):
        for _ in range(many):
            found.owners[next(lanes)] = LaneOwner(region, number, 0)
    return found


def held(found: LaneTable) -> Counter[str]:
    return Counter(owner.region for owner in found.owners.values())


def carried_out(found: LaneTable, readers: Readers, grant: int = 100) -> dict[str, tuple]:
    """Deals as a server does; gives what is asked for."""
    dealing = deal(found, readers)
    for number, (why, moves) in enumerate(dealing.moves.items()):
        found.dealt(grant + number, moves, why)
    return dict(dealing.asked)


def all_here(*names: str, **more) -> Readers:
    return Readers(names, names, **more)


# Dealing


def test_whoever_is_there_gets_all_lanes_in_equal_parts():
    found = table()
    assert carried_out(found, all_here("iowa", "lima", "oslo", "paris")) == {}
    assert held(found) == {"iowa": 3, "lima": 3, "oslo": 3, "paris": 3}
    assert {owner.grant for owner in found.owners.values()} == {100}


def test_the_share_of_a_region_that_is_expected_stays_free_until_it_comes_or_is_given_up():
    found = table()
    assert carried_out(found, all_here("iowa", expected=["lima", "oslo"])) == {}
    assert held(found) == {"iowa": 4}
    assert carried_out(found, all_here("iowa", "oslo", expected=["lima"])) == {}
    assert held(found) == {"iowa": 4, "oslo": 4}
    assert carried_out(found, all_here("iowa", "oslo")) == {}
    assert held(found) == {"iowa": 6, "oslo": 6}


def test_shares_that_do_not_come_out_even_move_nothing():
    found = table(11)
    carried_out(found, all_here("iowa", "oslo", expected=["lima"]))
    carried_out(found, all_here("iowa", "lima", "oslo"))
    assert sorted(held(found).values()) == [3, 4, 4]
    dealing = deal(found, all_here("iowa", "lima", "oslo"))
    assert not dealing.moves and not dealing.asked


def test_the_richest_are_asked_for_what_is_missing_and_no_more():
    found = table(iowa=8, lima=4)
    asked = carried_out(found, all_here("iowa", "lima", "oslo"))
    assert asked == {"iowa": (4, 5, 6, 7)}
    # What is on its way is asked for again, not on top.
    assert carried_out(found, all_here("iowa", "lima", "oslo")) == asked


def test_what_is_given_up_goes_to_the_poorest_from_where_it_was_given_up():
    found = table(iowa=12)
    found.owners[11].position = 3
    given = {lane: LanePosition(1, 40) for lane in (6, 7, 8, 9, 10)}
    given[11] = LanePosition(1, 2)  # Behind what was accepted: a frame overtook the heartbeat.
    carried_out(found, all_here("iowa", "lima", released=given))
    assert held(found) == {"iowa": 6, "lima": 6}
    assert [found.owners[lane].position for lane in range(6, 12)] == [40, 40, 40, 40, 40, 3]
    assert not found.lapsed


def test_an_older_grant_gives_nothing_up():
    found = table(iowa=12)
    given = {lane: LanePosition(0, 40) for lane in range(6, 12)}
    carried_out(found, all_here("iowa", "lima", released=given))
    assert held(found) == {"iowa": 12}


def test_the_lanes_of_the_silent_go_on_after_what_was_heard_of_them():
    found = table(iowa=6, lima=6)
    found.owners[6].position, found.owners[7].position = 5, 9
    heard = {6: LanePosition(2, 8), 7: LanePosition(2, 7), 8: LanePosition(1, 70)}
    readers = Readers(("iowa", "lima"), ("iowa",), silent=("lima",), heard=heard)
    carried_out(found, readers)
    assert held(found) == {"iowa": 12}
    assert [found.owners[lane].position for lane in (6, 7, 8)] == [8, 9, 0]
    assert (found.unread, found.repeated) == (3, 0)


def test_the_lanes_of_the_removed_go_on_after_what_was_accepted():
    found = table(iowa=6, lima=6)
    found.owners[6].position = 5
    heard = {6: LanePosition(2, 8)}
    carried_out(found, Readers(("iowa",), ("iowa",), heard=heard))
    assert found.owners[6] == LaneOwner("iowa", 100, 5, began=5)
    assert (found.unread, found.repeated) == (0, 0)
    found.accepted("lima", {6: LanePosition(2, 9)})  # It was added again, with its work.
    assert (found.unread, found.repeated) == (0, 4)


def test_whoever_is_away_for_a_while_keeps_its_lanes():
    found = table(iowa=6, lima=6)
    asked = carried_out(found, Readers(("iowa", "lima", "oslo"), ("iowa", "oslo")))
    assert asked == {"iowa": (3, 4, 5)} and held(found) == {"iowa": 6, "lima": 6}


def test_nobody_there_means_that_nothing_moves():
    dealing = deal(table(iowa=6), Readers(("iowa",), (), silent=("iowa",)))
    assert not dealing.moves and not dealing.asked


def test_fewer_lanes_than_readers_leave_the_last_without_any():
    found = table(2)
    assert carried_out(found, all_here("iowa", "lima", "oslo")) == {}
    assert held(found) == {"iowa": 1, "lima": 1}


# Counting


def test_who_comes_back_with_its_work_has_read_some_windows_twice():
    found = table(iowa=1, lima=11)
    found.dealt(7, [LaneMove(0, "lima", 10)], "silent")
    assert (found.unread, found.repeated) == (10, 0)
    found.accepted("iowa", {0: LanePosition(1, 4)})
    assert (found.unread, found.repeated) == (6, 0)
    found.accepted("lima", {0: LanePosition(1, 99)})  # Not its grant.
    found.accepted("iowa", {0: LanePosition(1, 15)})
    assert (found.unread, found.repeated) == (0, 5)
    assert found.owners[0] == LaneOwner("lima", 7, 10, began=10)


def test_accepted_work_moves_its_own_grant_forward_only():
    found = table(iowa=12)
    found.accepted("iowa", {0: LanePosition(1, 9), 1: LanePosition(5, 9), 40: LanePosition(1, 9)})
    found.accepted("iowa", {0: LanePosition(1, 3)})
    found.accepted("lima", {2: LanePosition(1, 30)})
    assert found.owned("iowa")[0] == (1, 9) and found.owned("iowa")[1] == (1, 0)
    assert found.relevant("iowa", {0: LanePosition(1, 9), 2: LanePosition(1, 2)}) == {2: (1, 2)}


def test_grants_that_lapsed_long_ago_are_kept_as_a_sum():
    found = table(1, iowa=1)
    for number in range(MOST_LAPSED + 9):
        found.dealt(number + 2, [LaneMove(0, "lima", 10 * number + 5)], "silent")
    assert len(found.lapsed) == MOST_LAPSED and found.unread_windows > 0
    assert found.unread == 10 * (MOST_LAPSED + 8) + 5


def test_a_table_survives_a_snapshot():
    found = table(iowa=5, lima=7)
    found.dealt(9, [LaneMove(0, "lima", 10)], "silent")
    found.split(2)
    assert LaneTable.of(json.loads(json.dumps(asdict(found)))) == found


def test_how_much_a_region_says_it_has_read_counts_from_where_its_grants_began():
    found = table(iowa=2, lima=10)
    found.dealt(7, [LaneMove(0, "lima", 10)], "silent")
    said = {0: LanePosition(7, 15), 2: LanePosition(2, 4), 1: LanePosition(1, 99)}
    assert found.read("lima", said) == 5 + 4
    assert found.read("iowa", {0: LanePosition(1, 3), 1: LanePosition(1, 4)}) == 7
    found.split(3)
    assert found.read("lima", {12: LanePosition(7, 5)}) == 2


# Following


def told(lanes: dict[int, tuple[int, int]], *asked: int, count: int = 12) -> Assignment:
    return Assignment("order", count, {n: LanePosition(*at) for n, at in lanes.items()}, asked)


def reading(**parts: dict[int, tuple[int, int]]) -> Cursor:
    found: dict[str, Any] = {
        name: {n: LanePosition(*at) for n, at in each.items()} for name, each in parts.items()
    }
    return Cursor("order", 12, **found)


@pytest.mark.parametrize(
    "before, heard, after",
    [
        ({}, told({3: (7, 20)}), {"lanes": {3: (7, 20)}}),
        # Its own reading is ahead of what the server knows, unless its disk is an old one.
        ({"lanes": {3: (7, 25)}}, told({3: (7, 20)}), {"lanes": {3: (7, 25)}}),
        ({"lanes": {3: (7, 15)}}, told({3: (7, 20)}), {"lanes": {3: (7, 20)}}),
        ({"lanes": {3: (7, 25)}}, told({3: (8, 20)}), {"lanes": {3: (8, 20)}}),
        # Asked for, begun or not.
        ({"lanes": {3: (7, 25)}}, told({3: (7, 20)}, 3), {"released": {3: (7, 25)}}),
        ({}, told({3: (7, 20)}, 3), {"released": {3: (7, 20)}}),
        ({"lanes": {3: (6, 25)}}, told({3: (7, 20)}, 3), {"released": {3: (7, 20)}}),
        # Given up: that grant is over, a newer one is not.
        ({"released": {3: (7, 25)}}, told({3: (7, 20)}), {"released": {3: (7, 25)}}),
        ({"released": {3: (7, 25)}}, told({3: (9, 30)}), {"lanes": {3: (9, 30)}}),
        # Somebody else's by now: how far we read is still to be told.
        ({"lanes": {3: (7, 25)}}, told({}), {"released": {3: (7, 25)}}),
    ],
)
def test_a_region_follows_what_it_is_told(before, heard, after):
    assert follow(reading(**before), heard, windows=900) == reading(**after)


def test_a_region_that_reads_another_text_is_not_told_about_it():
    cursor = replace(reading(lanes={3: (7, 25)}), order="another")
    assert follow(cursor, told({4: (9, 0)}), windows=900) is cursor


def test_a_cursor_survives_a_checkpoint():
    cursor = reading(lanes={3: (7, 25)}, released={10: (2, 1)})
    assert Cursor.of(json.loads(json.dumps(cursor.as_record()))) == cursor


# More lanes


@settings(deadline=None)
@given(
    windows=st.integers(60, 400),
    count=st.integers(1, 7),
    times=st.integers(1, 5),
    data=st.data(),
)
def test_cutting_lanes_repeats_nothing_and_skips_only_the_end_of_the_epoch(
    windows, count, times, data
):
    """Places of the epoch, before and after: what was read is not read again."""
    rows, parts = windows // count, windows // (count * times)
    position = data.draw(st.integers(0, 3 * rows - 1))
    lane = data.draw(st.integers(0, count - 1))
    epoch, row = divmod(position, rows)
    read = {k * count + lane for k in range(row)}
    ahead: set[int] = set()
    how = {"count": count, "times": times, "windows": windows}
    for part, (grant, at) in split({lane: LanePosition(4, position)}, **how).items():
        assert grant == 4 and part % count == lane
        assert epoch * parts <= at <= (epoch + 1) * parts
        later = range(at - epoch * parts, parts)
        ahead |= {k * count * times + part for k in later}
    assert not read & ahead
    whole = {k * count + lane for k in range(rows)}
    tail = {place for place in whole if place >= parts * count * times}
    assert whole - read - ahead <= tail


def test_a_region_follows_into_more_lanes():
    cursor = replace(reading(lanes={1: (7, 25)}, released={2: (3, 1)}), count=3)
    parts = {1: (7, 9), 4: (7, 8), 7: (7, 8)}
    after = follow(cursor, told(parts, count=9), windows=900)
    assert after.count == 9 and after.lanes == {1: (7, 9), 4: (7, 8), 7: (7, 8)}
    assert after.released == {2: (3, 1), 5: (3, 0), 8: (3, 0)}
    assert follow(Cursor("order", 3), told(parts, count=7), windows=900).count == 7


def test_a_table_cut_into_more_lanes_keeps_owners_grants_and_positions():
    found = table(3, iowa=1, lima=2)
    found.owners[1].position = 25
    found.split(3)
    assert found.count == 9 and held(found) == {"iowa": 3, "lima": 6}
    assert found.owned("lima")[4] == (2, 8) and found.owned("lima")[1] == (2, 9)


# All of it together


class Play:
    """Regions that read, hear and report in any order; one server that deals."""

    def __init__(self, count: int) -> None:
        self.table, self.number = LaneTable(ORDER, count), 0
        self.cursors: dict[str, Cursor] = {}
        self.read: list[tuple[str, int, int]] = []
        self.given: dict[str, dict[int, LanePosition]] = {}
        self.heard: dict[int, LanePosition] = {}
        self.silent: set[str] = set()

    def deal(self) -> None:
        here = self.cursors.keys() - self.silent
        given: dict[int, LanePosition] = {}
        for each in self.given.values():
            # Whoever had the lane before says for ever that it gave it up.
            given |= {lane: max(at, given.get(lane, at)) for lane, at in each.items()}
        readers = Readers(self.cursors.keys(), here, self.silent, (), self.heard, given)
        dealing = deal(self.table, readers)
        for why, moves in dealing.moves.items():
            self.number += 1
            self.table.dealt(self.number, moves, why)
        self.asked = dealing.asked

    def join(self, name: str) -> None:
        self.cursors.setdefault(name, Cursor("order", self.table.count))
        self.deal()

    def report(self, name: str) -> None:
        """A heartbeat, after a checkpoint, and its answer."""
        if name in self.silent:
            return
        cursor = self.cursors[name]
        self.given[name] = dict(cursor.released)
        for lane, at in cursor.lanes.items():
            self.heard[lane] = max(at, self.heard.get(lane, at))
        self.deal()
        owned, asked = self.table.owned(name), self.asked.get(name, ())
        heard = Assignment("order", self.table.count, owned, asked)
        self.cursors[name] = follow(cursor, heard, windows=ORDER.windows)

    def step(self, name: str) -> None:
        cursor = self.cursors[name]
        if cursor.lanes:
            lane = min(cursor.lanes, key=lambda one: (cursor.lanes[one].position, one))
            grant, at = cursor.lanes[lane]
            self.read.append((name, lane, at))
            lanes = {**cursor.lanes, lane: LanePosition(grant, at + 1)}
            self.cursors[name] = replace(cursor, lanes=lanes)

    def send(self, name: str) -> None:
        """A frame with all that the region has read is accepted."""
        cursor = self.cursors[name]
        self.table.accepted(name, {**cursor.released, **cursor.lanes})


ACTS = st.lists(
    st.tuples(st.sampled_from(("join", "report", "step", "step", "send")), st.sampled_from(NAMES)),
    max_size=120,
)


def settled(play: Play) -> None:
    for _ in range(3):
        for name in play.cursors:
            play.report(name)


@settings(max_examples=400, deadline=None)
@given(acts=ACTS, count=st.integers(4, 9))
@example(  # Asked for a lane that is on its way to it, and asked again by the next who comes.
    acts=[
        ("join", "iowa"),
        ("join", "lima"),
        ("report", "lima"),
        ("report", "iowa"),
        ("report", "iowa"),
        ("join", "oslo"),
    ],
    count=6,
)
def test_by_agreement_nothing_is_read_twice_or_skipped_and_all_lanes_find_a_reader(acts, count):
    play = Play(count)
    for act, name in acts:
        if act == "join" or name in play.cursors:
            getattr(play, act)(name)
    windows = [(lane, at) for _, lane, at in play.read]
    assert len(set(windows)) == len(windows)
    settled(play)
    for name, cursor in play.cursors.items():
        assert cursor.lanes.keys() == play.table.owned(name).keys(), name
        for lane, (_, at) in cursor.lanes.items():
            assert sorted(n for where, n in windows if where == lane) == list(range(at))
    if play.cursors:
        shares = [len(cursor.lanes) for cursor in play.cursors.values()]
        assert sum(shares) == count and max(shares) - min(shares) <= 1
    assert (play.table.unread, play.table.repeated) == (0, 0)


@settings(max_examples=400, deadline=None)
@given(
    acts=ACTS, later=ACTS, count=st.integers(4, 9), gone=st.sampled_from(NAMES), comes=st.booleans()
)
def test_only_a_silent_owner_repeats_or_skips_and_both_are_counted(acts, later, count, gone, comes):
    play = Play(count)
    for act, name in [("join", "iowa"), ("join", gone), *acts]:
        if act == "join" or name in play.cursors:
            getattr(play, act)(name)
    play.silent.add(gone)
    play.deal()  # Too long: others read on.
    for act, name in later:
        known = name in play.cursors and act in ("report", "step")
        if known or (act == "join" and name != gone):
            getattr(play, act)(name)
    if comes:
        play.silent.clear()
        play.send(gone)
    counts = Counter((lane, at) for _, lane, at in play.read)
    twice = {window for window, count in counts.items() if count > 1}
    assert all((gone, *window) in play.read for window in twice)
    if comes:
        assert len(twice) <= play.table.repeated and play.table.unread == 0
    else:
        lost = {lapsed.lane: lapsed for lapsed in play.table.lapsed}
        assert play.table.unread == sum(lapsed.unread for lapsed in lost.values())
