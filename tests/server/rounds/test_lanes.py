"""Lanes change hands by a record: at a join, when they are given up, when their owner is gone."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.core.claims import FIRST_CREDIT
from diloco_cli.core.lanes import Cursor, LanePosition
from diloco_cli.errors import WireError
from diloco_cli.observe.metrics import warnings
from diloco_cli.server.build_status import build_status
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.wire.messages import LaneAssignment, News, TextOrder, parse
from tests.server.harness import LEASE, TEXT, Bench, in_a_loop, make_settings, make_spec

GRANT = 60.0


@pytest.fixture
def bench(tmp_path) -> Bench:
    return begun(tmp_path)


def begun(folder, **changes: Any) -> Bench:
    """A server whose three regions read one text in eight lanes."""
    bench = Bench(folder, make_settings(make_spec(**{"server": {"grant": GRANT}, **changes})))
    for region in bench.regions.values():
        region.order = TEXT
    return bench


def told(news: News) -> LaneAssignment:
    assert news.lanes is not None
    return news.lanes


def owned(bench: Bench, *names: str) -> list[int]:
    table = bench.state.ledger.orders[TEXT.digest]
    return [len(table.owned(name)) for name in names or bench.regions]


def at(lanes: LaneAssignment, position: int) -> dict[int, tuple[int, int]]:
    """All of one's lanes, read up to a position."""
    return {lane: (grant, position) for lane, (grant, _) in lanes.lanes.items()}


async def silent(bench: Bench, *names: str) -> None:
    """Time passes until these regions have been silent for too long; the others speak."""
    for _ in range(round((3 * LEASE + GRANT) / 5) + 1):
        bench.clock.now += 5
        for name in bench.regions.keys() - set(names):
            await bench.beat(name)
        bench.server.tick()


@in_a_loop
async def test_every_listed_region_gets_its_share_when_it_joins(bench):
    for name, share in (("iowa", 3), ("paris", 3), ("tokyo", 2)):
        joined = told(await bench.join(name))
        assert (joined.order, joined.count, len(joined.lanes)) == (TEXT.digest, 8, share)
        assert set(joined.lanes.values()) == {(bench.state.ledger.news, 0)} and not joined.asked


@in_a_loop
async def test_the_share_of_a_listed_region_that_never_comes_is_read_by_others_later(bench):
    await bench.join("iowa", "paris")
    assert owned(bench) == [3, 3, 0]
    bench.clock.now += GRANT - 1
    bench.server.tick()
    assert owned(bench) == [3, 3, 0]
    bench.clock.now += 2
    for name in ("iowa", "paris"):
        await bench.beat(name)
    bench.server.tick()
    assert owned(bench) == [4, 4, 0]


@in_a_loop
async def test_a_region_that_comes_late_gets_what_others_give_up_where_they_gave_it_up(bench):
    await bench.join("iowa", "paris")
    bench.clock.now += GRANT
    await bench.beat("iowa")
    await bench.beat("paris")
    bench.server.tick()
    assert told(await bench.join("tokyo")).lanes == {}
    asked = told(await bench.beat("iowa"))
    assert len(asked.lanes) == 4 and len(asked.asked) == 1
    lane = asked.asked[0]
    keeps = {one: (grant, 9) for one, (grant, _) in asked.lanes.items() if one != lane}
    grant = asked.lanes[lane][0]
    await bench.reads("iowa", keeps, {lane: (grant, 7)})
    bench.server.tick()
    given = told(await bench.beat("tokyo"))
    assert given.lanes == {lane: (bench.state.ledger.news, 7)}
    # The one who gave it up says so for a while: its grant is over.
    await bench.reads("iowa", keeps, {lane: (grant, 7)})
    bench.server.tick()
    assert told(await bench.beat("tokyo")).lanes == given.lanes
    assert lane not in told(await bench.beat("iowa")).lanes


@in_a_loop
async def test_a_restarted_server_knows_owners_and_accepted_positions_and_asks_again(bench):
    await bench.join("iowa", "paris")
    bench.clock.now += GRANT
    for name in ("iowa", "paris"):
        await bench.beat(name)
    bench.server.tick()
    await bench.join("tokyo")
    asked = told(await bench.beat("iowa")).asked
    before = bench.state.ledger.orders
    bench.restart()
    assert bench.state.ledger.orders == before
    await bench.beat("iowa")
    bench.server.tick()
    assert told(await bench.beat("iowa")).asked == asked


@in_a_loop
async def test_an_accepted_frame_moves_its_region_on_and_survives_restart_and_snapshot(bench):
    lanes = at(told(await bench.join("iowa")), 5)
    cursor = Cursor(TEXT.digest, 8, {n: LanePosition(*where) for n, where in lanes.items()})
    await bench.send("iowa", 0, bench.regions["iowa"].frame(0, cursor=cursor.as_record()))
    assert told(await bench.beat("iowa")).lanes == lanes
    bench.state.snapshot()
    await bench.beat("iowa")
    bench.restart()
    bench.regions["iowa"].boot += 1
    assert told(await bench.join("iowa")).lanes == lanes, "an empty disk begins here"


@pytest.mark.parametrize(
    "cursor",
    [
        {"order": TEXT.digest, "count": 8, "lanes": {"x": 3}, "released": {}},
        {"order": TEXT.digest, "count": 8, "lanes": [1], "released": {}},
        {"order": TEXT.digest, "count": 8, "lanes": {"0": [2, -5]}, "released": {}},
        {"order": TEXT.digest, "count": 8, "lanes": {"0": 7}, "released": {}},
        {"order": TEXT.digest, "count": "8", "lanes": {}, "released": {}},
        {"order": TEXT.digest, "count": 3, "lanes": {"0": [2, 50]}, "released": {}},
        {"order": TEXT.digest, "count": -8, "lanes": {"0": [2, 50]}, "released": {}},
        {"order": "f" * 32, "count": 8, "lanes": {"0": [2, 50]}, "released": {}},
        {"order": [], "lanes": None},
    ],
)
@in_a_loop
async def test_what_is_no_cursor_of_the_text_moves_nothing(bench, cursor):
    lanes = told(await bench.join("iowa")).lanes
    await bench.send("iowa", 0, bench.regions["iowa"].frame(0, cursor=cursor))
    assert told(await bench.beat("iowa")).lanes == lanes


@in_a_loop
async def test_nobody_moves_or_gives_up_the_lanes_of_another(bench):
    await bench.join("iowa")
    lanes = told(await bench.join("paris")).lanes
    ahead = {lane: LanePosition(grant, 300) for lane, (grant, _) in lanes.items()}
    cursor = Cursor(TEXT.digest, 8, ahead).as_record()
    await bench.send("iowa", 0, bench.regions["iowa"].frame(0, cursor=cursor))
    await bench.reads("iowa", {}, {lane: (grant, 300) for lane, (grant, _) in ahead.items()})
    bench.server.tick()
    assert told(await bench.beat("paris")).lanes == lanes


@in_a_loop
async def test_nobody_is_heard_that_has_read_more_than_it_can_have_trained(tmp_path):
    """Whoever gets its lanes next would go on from there, and leave out all that comes before."""
    bench = begun(tmp_path, pace=1.0)
    lanes = told(await bench.join("iowa"))
    await bench.join("paris", "tokyo")
    # The first credit counts from the start, then 1.25 steps a second; eight times the batch
    # of four windows is believed, and iowa has three lanes.
    most = int((FIRST_CREDIT + 1.25 * 4) * 8 * 4) // 3
    bench.clock.now += 4
    far = 2**53 - 1
    await bench.reads("iowa", at(lanes, far), at(lanes, far))
    cursor = {"order": TEXT.digest, "count": 8, "released": {}}
    for position in (far, most + 1, most):
        said = {str(lane): [grant, position] for lane, (grant, _) in lanes.lanes.items()}
        await bench.call(0)
        data = bench.regions["iowa"].frame(0, cursor={**cursor, "lanes": said})
        await bench.send("iowa", 0, data)
        await bench.send("paris", 0)
        await bench.send("tokyo", 0)
        await bench.settle()
        positions = {position for _, position in told(await bench.beat("iowa")).lanes.values()}
        assert positions == ({most} if position == most else {0})
    assert owned(bench) == [3, 3, 2], "nor was anything given up"


@in_a_loop
async def test_nobody_says_for_all_into_how_many_lanes_the_text_is_cut(bench):
    bench.regions["iowa"].order = TEXT.model_copy(update={"lanes": 1})
    with pytest.raises(HttpRefusal, match="cuts its text into 1 lanes, the run into 8") as refused:
        await bench.join("iowa")
    assert refused.value.code == "other-spec" and not bench.state.ledger.orders
    bench.regions["iowa"].order = None
    await bench.join("iowa")
    said = {"order": TEXT.model_copy(update={"lanes": 1}).model_dump(), "count": 1, "lanes": {}}
    assert (await bench.beat("iowa", reading=said)).lanes is None
    assert len(told(await bench.join("paris")).lanes) == 4
    # Any terms that the run has had will do.
    await bench.amend({"data.lanes": 16})
    bench.regions["tokyo"].order = TEXT.model_copy(update={"lanes": 16})
    assert told(await bench.join("tokyo")).count == 16


@in_a_loop
async def test_the_lanes_of_a_silent_region_go_on_after_what_it_said_and_are_counted(bench):
    await bench.join()
    await bench.reads("iowa", at(told(await bench.beat("iowa")), 6))
    lost = told(await bench.beat("iowa")).lanes
    await silent(bench, "iowa")
    assert owned(bench) == [0, 4, 4]
    table = bench.state.ledger.orders[TEXT.digest]
    assert {table.owners[lane].position for lane in lost} == {6}
    assert (table.unread, table.repeated) == (18, 0)
    # It comes back: its work counts, its lanes are others' by now, and it gets new ones.
    assert told(await bench.beat("iowa")).lanes == {}
    read = {lane: LanePosition(grant, 8) for lane, (grant, _) in lost.items()}
    cursor = Cursor(TEXT.digest, 8, {}, read).as_record()
    await bench.send("iowa", 0, bench.regions["iowa"].frame(0, cursor=cursor))
    assert (table.unread, table.repeated) == (0, 6)
    bench.server.tick()
    asked = [told(await bench.beat(name)).asked for name in ("paris", "tokyo")]
    assert sum(map(len, asked)) == 2


@in_a_loop
async def test_a_region_that_is_away_for_less_keeps_its_lanes(bench):
    await bench.join()
    before = owned(bench)
    bench.clock.now += 3 * LEASE + GRANT - 1
    for name in ("paris", "tokyo"):
        await bench.beat(name)
    bench.server.tick()
    assert owned(bench) == before


@in_a_loop
async def test_regions_with_other_texts_have_all_lanes_of_their_own(bench):
    bench.regions["paris"].order = TEXT.model_copy(update={"digest": "c" * 32})
    joined = [told(await bench.join(name)) for name in ("iowa", "paris")]
    assert len(joined[1].lanes) == 4, "tokyo, which is still to come, may read the same"
    bench.clock.now += GRANT
    for name in ("iowa", "paris"):
        await bench.beat(name)
    bench.server.tick()
    joined = [told(await bench.beat(name)) for name in ("iowa", "paris")]
    assert [each.lanes.keys() for each in joined] == [set(range(8))] * 2


@in_a_loop
async def test_a_region_whose_text_changes_reads_the_new_one(bench):
    await bench.join("iowa", "paris")
    grown = TEXT.model_copy(update={"digest": "c" * 32, "tokens": 4800, "windows": 500})
    bench.clock.now += 2 * GRANT
    cursor = {"order": grown.model_dump(), "count": 8, "lanes": {}}
    for name in ("iowa", "paris"):
        await bench.beat(name, **({"reading": cursor} if name == "iowa" else {}))
    bench.server.tick()
    changed = told(await bench.beat("iowa"))
    assert changed.order == grown.digest and len(changed.lanes) == 8
    assert len(told(await bench.beat("paris")).lanes) == 8
    noted = [fields for kind, fields in bench.noted if kind == "text-changed"]
    assert noted == [{"region": "iowa", "order": grown.digest, "tokens": 4800}]
    # Each change is a record, so there are not many in a short time.
    before = bench.state.ledger.orders.keys()
    await bench.reads("iowa", {})
    assert bench.state.ledger.regions["iowa"].order == grown.digest
    assert bench.state.ledger.orders.keys() == before


@in_a_loop
async def test_more_lanes_by_an_amendment_leave_everybody_what_it_reads(bench):
    before = told(await bench.join("iowa"))
    await bench.join("paris", "tokyo")
    await bench.amend({"data.lanes": 24})
    bench.server.tick()
    after = told(await bench.beat("iowa"))
    assert after.count == 24
    assert after.lanes == {
        lane + part: (grant, 0) for lane, (grant, _) in before.lanes.items() for part in (0, 8, 16)
    }
    # It has not followed yet: it speaks of eight lanes, read up to 7.
    await bench.reads("iowa", at(before, 7))
    await silent(bench, "iowa")
    table = bench.state.ledger.orders[TEXT.digest]
    for lane in before.lanes:
        assert [table.owners[lane + part].position for part in (0, 8, 16)] == [3, 2, 2]


@pytest.mark.parametrize("count", [4, 12])
@in_a_loop
async def test_lanes_can_only_be_cut_into_equal_parts(bench, count):
    with pytest.raises(HttpRefusal, match=f"is 8 and cannot become {count}"):
        await bench.amend({"data.lanes": count})


@in_a_loop
async def test_a_region_without_a_text_is_not_told_of_lanes(bench):
    bench.regions["iowa"].order = None
    assert (await bench.join("iowa")).lanes is None


@in_a_loop
async def test_a_join_without_a_text_keeps_the_lanes_of_the_one_before(bench):
    lanes = told(await bench.join("iowa")).lanes
    bench.regions["iowa"].order = None
    bench.regions["iowa"].boot += 1
    bench.clock.now += 5
    assert told(await bench.join("iowa")).lanes == lanes


def test_an_order_with_fewer_windows_than_lanes_is_none():
    said = TEXT.model_dump_json().replace('"windows":400', '"windows":7')
    with pytest.raises(WireError, match="7 windows for 8 lanes"):
        parse(TextOrder, said.encode())


# When somebody is retired


@in_a_loop
async def test_the_lanes_of_a_removed_region_go_on_at_once_after_what_was_accepted(bench):
    await bench.join()
    lanes = at(told(await bench.reads("iowa", {})), 6)
    await bench.reads("iowa", lanes)
    await bench.amend(remove=["iowa"])
    bench.server.tick()
    assert owned(bench) == [0, 4, 4]
    table = bench.state.ledger.orders[TEXT.digest]
    assert {table.owners[lane].position for lane in lanes} == {0}
    assert (table.unread, table.repeated) == (0, 0), "its work can no longer come"


@in_a_loop
async def test_the_lanes_of_a_forgotten_region_go_on_after_what_it_said(tmp_path):
    bench = begun(tmp_path, server={"grant": GRANT, "forget": "20s"})
    await bench.join()
    lanes = at(told(await bench.reads("iowa", {})), 6)
    await bench.reads("iowa", lanes)
    for _ in range(5):
        bench.clock.now += 5
        for name in ("paris", "tokyo"):
            await bench.beat(name)
        bench.server.tick()
    assert "iowa" in bench.state.ledger.retired and owned(bench) == [0, 4, 4]
    table = bench.state.ledger.orders[TEXT.digest]
    assert {table.owners[lane].position for lane in lanes} == {6}, "it may come back with its work"
    assert table.unread == 18


# What people see


@in_a_loop
async def test_the_status_says_who_reads_how_much_and_what_was_read_twice_or_not_at_all(bench):
    await bench.join()
    lanes = at(told(await bench.reads("iowa", {})), 6)
    await bench.reads("iowa", lanes)
    await silent(bench, "iowa")
    status = build_status(bench.server, "http://127.0.0.1:1")
    assert [region.lanes for region in status.regions] == [0, 4, 4]
    assert (status.tokens.unread, status.tokens.repeated) == (18 * 8, 0)
    (text,) = status.texts
    assert (text.tokens, text.lanes, text.regions) == (4000, 8, ("iowa", "paris", "tokyo"))
    assert warnings(status) == []


@in_a_loop
async def test_texts_that_differ_although_the_settings_are_equal_are_shown_with_their_sizes(bench):
    bench.regions["paris"].order = TEXT.model_copy(update={"digest": "c" * 32, "tokens": 4800})
    bench.regions["tokyo"].order = TEXT.model_copy(
        update={"digest": "d" * 32, "settings": "e" * 32}
    )
    await bench.join()
    (said,) = warnings(build_status(bench.server, "http://127.0.0.1:1"))
    assert said.endswith("iowa has 4,000 tokens; paris has 4,800 tokens")
