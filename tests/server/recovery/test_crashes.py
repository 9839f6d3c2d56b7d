"""Whatever the server had said is still true after it died, and to the bit."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from diloco_cli.errors import StoreError
from diloco_cli.server.store.archive import PayloadLost
from diloco_cli.server.versions import next_version as merging
from diloco_cli.server.versions.next_version import next_version
from tests.server.harness import (
    Bench,
    close_server,
    in_a_loop,
    joined,
    kill_server,
    open_server,
    replayed,
    storing_all,
)


class Killed(Exception):
    """What a test throws where the power goes out."""


async def play(bench: Bench, rounds: int = 4) -> list[bytes]:
    """Some rounds with changing members, one of them open at the end; gives every frame."""
    await bench.join()
    frames = []
    casts = (("tokyo", "paris", "iowa"), ("iowa", "tokyo"), ("paris", "iowa"))
    for number, names in zip(range(rounds), itertools.cycle(casts)):
        fragment = number % 2
        await bench.call(fragment, *names)
        for name in names:
            frames.append(bench.regions[name].frame(fragment))
            await bench.send(name, data=frames[-1])
        bench.clock.now += 5
        await bench.settle()
    return frames


@in_a_loop
async def test_a_restart_stands_where_the_last_server_stood(tmp_path):
    bench = Bench(tmp_path)
    await play(bench)
    await bench.send("paris", 1)
    digests, ledger = bench.digests(), bench.state.ledger
    bench.restart()
    assert bench.digests() == digests
    assert bench.state.ledger == ledger
    assert bench.state.totals.shares.keys() == {"iowa", "paris", "tokyo"}


@in_a_loop
async def test_replaying_the_journal_from_nothing_gives_the_same_bits(tmp_path):
    bench = Bench(tmp_path)
    frames = await play(bench, 7)
    kill_server(bench.server)
    states = replayed(bench.settings, tmp_path, frames)
    assert [state.digest for state in states] == bench.digests()
    assert sum(bench.versions) == 7


@in_a_loop
async def test_the_order_of_arrival_does_not_touch_a_bit(tmp_path):
    digests = []
    for number, order in enumerate(itertools.permutations(("iowa", "paris", "tokyo"))):
        bench = Bench(tmp_path / str(number))
        bench.run = "same"
        for region in bench.regions.values():
            region.run = "same"
        await bench.join()
        await bench.call(0)
        for name in order:
            await bench.send(name)
        await bench.settle()
        digests.append(bench.digests())
        await close_server(bench.server)
    assert digests[1:] == digests[:-1]


@in_a_loop
async def test_members_are_merged_in_the_order_of_their_names(tmp_path):
    bench = await joined(tmp_path)
    for name in bench.regions:
        await bench.send(name)
    receipts = list(bench.state.ledger.slots[0].waiting.values())
    old, fragment = bench.state.weights.newest[0], bench.settings.layout.fragments[0]
    digests = set()
    for order in itertools.permutations(receipts):
        made = next_version(bench.settings, bench.state.store, old, fragment, order, drain=False)
        assert isinstance(made, tuple) and made[0].members == ("iowa", "paris", "tokyo")
        digests.add(made[0].state.digest)
    assert len(digests) == 1


def dying(calls: dict[str, int], target: Any, name: str, *, after: bool) -> Callable[..., Any]:
    """A function that dies before or after doing its work, the first time."""
    real = getattr(target, name)

    def run(*arguments: Any, **named: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        if calls[name] > 1:
            return real(*arguments, **named)
        if after:
            real(*arguments, **named)
        raise Killed

    return run


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", ["merge", "step", "store", "journal", "forget"])
@in_a_loop
async def test_dying_anywhere_while_closing_gives_the_same_version(
    tmp_path, monkeypatch, point, after
):
    undisturbed = Bench(tmp_path / "calm", storing_all())
    disturbed = Bench(tmp_path / "storm", storing_all())
    for bench in (undisturbed, disturbed):
        for region in bench.regions.values():
            region.run = "same"
        await bench.join()
        await bench.call(0)
        for name in ("tokyo", "iowa", "paris"):
            await bench.send(name)
    await undisturbed.settle()

    store: Any = disturbed.state.store
    where: dict[str, tuple[Any, str]] = {
        "merge": (merging, "combine"),
        "step": (merging, "outer_step"),
        "store": (store, "publish"),
        "journal": (store.journal, "sync"),
        "forget": (store.blobs, "move"),
    }
    with monkeypatch.context() as patch:
        target, name = where[point]
        patch.setattr(target, name, dying({}, target, name, after=after))
        disturbed.server.tick()
        await asyncio.wait(disturbed.server.publisher.merges.values())
        assert disturbed.state.failure is not None
    disturbed.restart()
    await disturbed.settle()
    await disturbed.settle()
    assert disturbed.versions == [1, 0]
    assert disturbed.digests() == undisturbed.digests()
    assert disturbed.state.ledger.slots[0].merged == undisturbed.state.ledger.slots[0].merged
    assert disturbed.state.store.payloads() == set()


@in_a_loop
async def test_an_acknowledged_frame_waits_through_any_number_of_restarts(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(0)
    await bench.send("paris")
    for _ in range(3):
        bench.restart()
        await bench.settle()
        assert bench.versions == [0, 0]
    await bench.send("tokyo")
    await bench.send("iowa")
    await bench.settle()
    assert bench.state.ledger.slots[0].members == ("iowa", "paris", "tokyo")


@in_a_loop
async def test_after_a_restart_everyone_counts_as_alive_for_one_lease(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(0)
    await bench.send("paris")
    await bench.send("tokyo")
    bench.clock.now += 1000
    bench.restart()
    assert bench.state.live() == {"iowa", "paris", "tokyo"}
    await bench.settle()
    assert bench.versions == [0, 0], "iowa gets its grace again"
    bench.clock.now += 5
    await bench.settle()
    assert bench.versions == [1, 0]


@in_a_loop
async def test_a_payload_that_cannot_be_read_again_goes_back_to_its_region(tmp_path, monkeypatch):
    bench = await joined(tmp_path)
    await bench.call(0)
    for name in bench.regions:
        await bench.send(name)
    lost = bench.state.ledger.slots[0].waiting["paris"].digest
    path = tmp_path / "server" / "payloads" / f"{lost}.frame"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    bench.server.tick()
    await bench.server.publisher.settled()
    assert bench.state.ledger.slots[0].members == ("iowa", "tokyo")
    fate = bench.server.news("paris").fates[0]
    assert (fate.digest, fate.fate) == (lost, "returned")
    assert "could not read it again" in fate.why


@in_a_loop
async def test_when_no_payload_is_left_the_round_is_idle_again(tmp_path, monkeypatch):
    bench = await joined(tmp_path)
    await bench.call(0)
    for name in bench.regions:
        await bench.send(name)

    def payload(digest: str) -> bytes:
        raise PayloadLost("gone")

    monkeypatch.setattr(bench.state.store, "payload", payload)
    bench.server.tick()
    await bench.server.publisher.settled()
    assert bench.versions == [0, 0]
    assert bench.state.ledger.slots[0].phase == "idle"
    bench.restart()
    assert bench.state.ledger.slots[0].phase == "idle", "and no restart dies of it"


@in_a_loop
async def test_weights_that_are_not_finite_are_never_published(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(0)
    for name in bench.regions:
        await bench.send(name)

    # A sound server never gets here; one whose weights are at the edge of float32 does.
    bench.state.weights.newest[0].state.momentum[3] = -3.4e38
    bench.state.weights.newest[0].state.theta[3] = 3.4e38
    before = bench.digests()
    bench.server.tick()
    await bench.server.publisher.settled()
    assert bench.versions == [0, 0] and bench.digests() == before
    fates = {name: bench.server.news(name).fates[0] for name in bench.regions}
    assert {fate.fate for fate in fates.values()} == {"refused"}
    assert "not finite" in fates["paris"].why


@in_a_loop
async def test_a_version_that_is_not_the_one_on_record_is_not_served(tmp_path):
    bench = Bench(tmp_path, storing_all())
    await bench.join()
    await bench.round(0)
    kill_server(bench.server)
    path = tmp_path / "server" / "fragments" / "0"
    (path / "v00000000.state").replace(path / "v00000001.state")
    with pytest.raises(StoreError, match=r"v00000001\.state is damaged"):
        open_server(tmp_path, bench.settings)


@in_a_loop
async def test_weights_from_another_time_are_not_served(tmp_path):
    bench = Bench(tmp_path, storing_all())
    await bench.join()
    await bench.round(0)
    old = bench.state.store.load_state(0, 0)
    bench.state.store.publish(0, 1, old, None)  # As from a folder mixed of two copies.
    kill_server(bench.server)
    with pytest.raises(StoreError, match="the journal says"):
        open_server(tmp_path, bench.settings)


@in_a_loop
async def test_nothing_is_acknowledged_before_it_is_flushed(tmp_path, monkeypatch):
    bench = await joined(tmp_path)
    order: list[str] = []
    journal: Any = bench.state.store.journal
    real = journal.sync

    def sync() -> None:
        order.append("flushed")
        real()

    monkeypatch.setattr(journal, "sync", sync)
    await bench.send("paris")
    order.append("acknowledged")
    await bench.beat("paris")
    order.append("said")
    assert order == ["flushed", "acknowledged", "said"]


@in_a_loop
async def test_a_retry_during_the_flush_waits_for_it_too(tmp_path, monkeypatch):
    bench = await joined(tmp_path)
    flush, journal = threading.Event(), bench.state.store.journal
    real: Any = journal.sync
    monkeypatch.setattr(journal, "sync", lambda: (flush.wait(), real()))
    frame = bench.regions["paris"].frame(0)
    asked = [
        asyncio.create_task(each)
        for each in (
            bench.send("paris", data=frame),
            bench.send("paris", data=frame),
            bench.beat("paris"),
        )
    ]
    try:
        done, _ = await asyncio.wait(asked, timeout=0.1)
        assert not done
    finally:
        flush.set()
    await asyncio.gather(*asked)


@in_a_loop
async def test_a_failed_flush_ends_the_server_and_every_answer(tmp_path, monkeypatch):
    bench = await joined(tmp_path)

    def sync() -> None:
        raise StoreError("the disk says no")

    monkeypatch.setattr(bench.state.store.journal, "sync", sync)
    with pytest.raises(StoreError, match="the disk says no"):
        await bench.send("paris")
    monkeypatch.undo()
    with pytest.raises(StoreError, match="the disk says no"):
        await bench.beat("paris")
        await bench.send("tokyo")
    assert isinstance(bench.state.failure, StoreError) and bench.state.closed


@in_a_loop
async def test_a_full_disk_decides_nothing_and_the_run_goes_on_when_there_is_room(
    tmp_path, monkeypatch
):
    from diloco_cli.server.store import group_commit
    from diloco_cli.system.files import DiskFull

    monkeypatch.setattr(group_commit, "RETRY_SECONDS", 0.01)
    bench = await joined(tmp_path)
    await bench.call(0)

    def sync() -> None:
        raise DiskFull("no room")

    frame = bench.regions["paris"].frame(0)
    with monkeypatch.context() as patch:
        patch.setattr(bench.state.store.journal, "sync", sync)
        with pytest.raises(DiskFull):
            await bench.send("paris", data=frame)
        with pytest.raises(DiskFull):
            await bench.send("tokyo")
        assert bench.state.failure is None
    await bench.server.publisher.settled()
    assert bench.state.commit.full is None
    assert (await bench.send("paris", data=frame)).decision.fate == "pending"  # type: ignore[union-attr]
    bench.restart()
    assert set(bench.state.ledger.slots[0].waiting) == {"paris"}


@in_a_loop
async def test_what_a_full_disk_kept_from_being_filed_is_filed_when_there_is_room(
    tmp_path, monkeypatch
):
    from diloco_cli.server.rounds import publish
    from diloco_cli.system.files import DiskFull

    monkeypatch.setattr(publish, "RETRY_SECONDS", 0.01)
    bench = Bench(tmp_path, storing_all())
    await bench.join()
    store, left = bench.state.store, 3
    move = store.blobs.move

    def full(*about: Any) -> None:
        nonlocal left
        left -= 1
        if left > 0:
            raise DiskFull("no room")
        move(*about)

    monkeypatch.setattr(store.blobs, "move", full)
    await bench.round()
    assert bench.versions[0] == 1 and left <= 0
    assert len(store.members(0, 1)) == 3 and not store.payloads()
