"""A frame in parts is the same frame: in any order, sent twice, cut, damaged or overtaken."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from diloco_cli.server.intake import intake
from diloco_cli.server.intake.partial_files import PartialFiles
from diloco_cli.server.store import draft
from diloco_cli.system.files import DiskFull
from diloco_cli.wire.frame import open_frame
from diloco_cli.wire.messages import (
    EPOCH_HEADER,
    PARTS_HEADER,
    check_value,
    contribution_path,
    part_path,
    parts_path,
)
from tests.server.harness import Bench, in_a_loop, kill_server, open_server
from tests.server.http.requests import client_of, served


class Sender:
    """One region's frame, sent by hand."""

    def __init__(self, client: httpx.AsyncClient, data: bytes) -> None:
        self.client, self.data = client, data
        about = open_frame(data)
        self.frame = about.digest
        head = about.header
        self.path = contribution_path(head.fragment, head.region, head.base, head.clock)

    async def part(self, start: int, stop: int, epoch: int = 1, **said: Any) -> httpx.Response:
        data = said.pop("data", self.data[start:stop])
        query: dict[str, Any] = {
            "size": len(self.data),
            "frame": self.frame,
            "digest": check_value(zlib.crc32(data)),
            **said,
        }
        headers = {EPOCH_HEADER: str(epoch)}
        path = part_path(self.path, start, **query)
        return await self.client.put(path, content=data, headers=headers)

    async def have(self, epoch: int = 1) -> dict[str, Any]:
        headers = {EPOCH_HEADER: str(epoch)}
        answer = await self.client.get(parts_path(self.path, frame=self.frame), headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def complete(self, epoch: int = 1) -> httpx.Response:
        headers = {EPOCH_HEADER: str(epoch), PARTS_HEADER: self.frame}
        return await self.client.put(self.path, headers=headers)


@contextmanager
def held_up() -> Iterator[None]:
    """Keeps the server from deciding on any frame, as a long queue of them does."""
    go = threading.Event()
    opened = intake.open_frame

    def wait(data: Any) -> Any:
        go.wait(30)
        return opened(data)

    with patch.object(intake, "open_frame", wait):
        try:
            yield
        finally:
            go.set()


def drafts(folder: Path) -> list[str]:
    """What is on the disk of frames that are not complete."""
    left = [*folder.rglob("*.draft"), *folder.rglob("parts/*.bytes"), *folder.rglob("parts/*.have")]
    return sorted(path.suffix for path in left)


@in_a_loop
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
async def test_parts_in_any_order_make_the_frame(tmp_path, order):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        size = len(sender.data)
        cuts = [(0, 50), (50, 120), (120, size)]
        for number in order:
            assert (await sender.part(*cuts[number])).status_code == 200
        assert (await sender.have())["have"] == [[0, size]]
        answer = await sender.complete()
        assert answer.status_code == 201 and answer.json()["fate"] == "pending"
        assert bench.state.store.payloads() == {sender.frame}
        assert bench.state.store.payload(sender.frame) == sender.data
        assert drafts(tmp_path) == []


@in_a_loop
async def test_what_is_there_is_told_and_a_gap_is_no_frame(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        assert await sender.have() == {"have": [], "decided": False}
        await sender.part(100, 200)
        await sender.part(0, 50)
        assert (await sender.have())["have"] == [[0, 50], [100, 200]]
        answer = await sender.complete()
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "incomplete"
        assert answer.json()["have"] == [[0, 50], [100, 200]]


@in_a_loop
async def test_a_part_again_changes_nothing_and_other_bytes_are_refused(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        assert (await sender.part(0, 100)).status_code == 200
        assert (await sender.part(0, 100)).json()["have"] == [[0, 100]]
        assert (await sender.part(20, 60)).status_code == 200
        other = await sender.part(0, 100, data=b"?" * 100)
        assert other.status_code == 409 and other.json()["error"]["code"] == "conflict"
        across = await sender.part(50, 150)
        assert across.status_code == 409 and "overlap" in across.json()["error"]["message"]
        assert (await sender.part(100, len(sender.data))).status_code == 200
        assert (await sender.complete()).status_code == 201


@in_a_loop
async def test_a_part_that_was_changed_on_its_way_does_not_count(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        answer = await sender.part(0, 100, digest="crc32:00000000")
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "damaged"
        assert (await sender.have())["have"] == [] and drafts(tmp_path) == []


@in_a_loop
async def test_parts_that_do_not_make_the_frame_are_dropped(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        await sender.part(0, 100, data=b"?" * 100)
        await sender.part(100, len(sender.data))
        answer = await sender.complete()
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "damaged"
        assert (await sender.have())["have"] == [] and drafts(tmp_path) == []
        assert bench.state.store.payloads() == set()


@in_a_loop
async def test_the_answer_is_the_same_when_it_is_asked_for_again(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        await sender.part(0, len(sender.data))
        assert (await sender.complete()).status_code == 201
        again = await sender.complete()
        assert again.status_code == 200 and again.json()["recorded"] is True
        assert (await sender.have())["decided"] is True


@in_a_loop
async def test_a_newer_frame_takes_the_place_of_an_older_one_and_not_the_reverse(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        region = bench.regions["paris"]
        older, newer = (Sender(client, region.frame(0)) for _ in range(2))
        await older.part(0, 100)
        assert (await newer.part(0, 50)).status_code == 200
        assert (await older.have())["have"] == []
        async with asyncio.timeout(30):
            while drafts(tmp_path) != [".bytes", ".have"]:
                await asyncio.sleep(0)  # Nobody waits for what is removed; it goes all the same.
        late = await older.part(100, 200)
        assert late.status_code == 409 and "on its way" in late.json()["error"]["message"]
        assert (await newer.have())["have"] == [[0, 50]]


@in_a_loop
async def test_parts_of_one_fragment_or_region_do_not_disturb_another(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        senders = [
            Sender(client, bench.regions[name].frame(fragment))
            for name in ("paris", "tokyo")
            for fragment in (0, 1)
        ]
        for sender in senders:
            await sender.part(0, 100)
        for sender in senders:
            await sender.part(100, len(sender.data))
            assert (await sender.complete()).status_code == 201
        assert drafts(tmp_path) == []


@in_a_loop
async def test_a_frame_sent_in_one_piece_after_all_ends_its_parts(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        await sender.part(0, 100)
        answer = await client.put(sender.path, content=sender.data, headers={EPOCH_HEADER: "1"})
        assert answer.status_code == 201 and drafts(tmp_path) == []


@in_a_loop
async def test_another_epoch_may_neither_ask_nor_send_nor_complete(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        await sender.part(0, len(sender.data))
        assert (await sender.part(0, 10, epoch=2)).status_code == 412
        assert (await sender.complete(epoch=2)).status_code == 412
        headers = {EPOCH_HEADER: "2"}
        asked = await client.get(parts_path(sender.path, frame=sender.frame), headers=headers)
        assert asked.status_code == 412
        assert (await sender.complete()).status_code == 201


@in_a_loop
@pytest.mark.parametrize(
    "said, status",
    [
        ({"size": 10**9}, 413),
        ({"size": 50}, 400),
        ({"frame": "abc"}, 400),
        ({"size": 10**20}, 413),
    ],
)
async def test_impossible_parts_are_refused_before_anything_is_written(tmp_path, said, status):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        assert (await sender.part(0, 100, **said)).status_code == status
        assert drafts(tmp_path) == []


@in_a_loop
async def test_the_size_of_a_frame_does_not_change_on_the_way(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        await sender.part(0, 100)
        other = await sender.part(100, 200, size=len(sender.data) - 1)
        assert other.status_code == 409 and "not" in other.json()["error"]["message"]


@in_a_loop
async def test_a_full_disk_is_507_and_costs_nothing_that_was_there(tmp_path, monkeypatch):
    async with served(tmp_path, joined=True) as (bench, client):
        region = bench.regions["paris"]
        older, newer = (Sender(client, region.frame(0)) for _ in range(2))
        await older.part(0, 100)

        def full(size: int = 0) -> None:
            raise DiskFull("There is no room.")

        monkeypatch.setattr(bench.state.store, "check_room", full)
        assert (await newer.part(0, 100)).status_code == 507
        assert (await older.have())["have"] == [[0, 100]]


@in_a_loop
async def test_a_newer_frame_does_not_wait_for_the_older_one_to_be_removed(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        region = bench.regions["paris"]
        older, newer = (Sender(client, region.frame(0)) for _ in range(2))
        await older.part(0, 100)
        (file,) = tmp_path.rglob("parts/*.bytes")
        file.unlink()
        file.mkdir()  # It never can be.
        assert (await newer.part(0, 50)).status_code == 200
        assert (await newer.have())["have"] == [[0, 50]]
        file.rmdir()


@asynccontextmanager
async def served_again(bench: Bench, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The same run after its server was killed and started once more."""
    kill_server(bench.server)
    bench.server = open_server(folder)
    async with client_of(bench) as client:
        yield client


@in_a_loop
async def test_what_a_dead_server_had_is_there_at_the_next_start(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        await sender.part(0, 100)
        await sender.part(150, 200)
        async with served_again(bench, tmp_path) as sender.client:
            assert (await sender.have())["have"] == [[0, 100], [150, 200]]
            await sender.part(100, 150)
            await sender.part(200, len(sender.data))
            assert (await sender.complete()).status_code == 201
            assert bench.state.store.payload(sender.frame) == sender.data
            assert drafts(tmp_path) == []


@in_a_loop
async def test_only_the_newest_frame_of_each_fragment_is_taken_up_again(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        region = bench.regions["paris"]
        older, newer = (Sender(client, region.frame(0)) for _ in range(2))
        await older.part(0, 100)
        left = {path: path.read_bytes() for path in (tmp_path / "server" / "parts").iterdir()}
        await newer.part(0, 50)
        for path, data in left.items():  # As if the server had died while it dropped them.
            path.write_bytes(data)
        async with served_again(bench, tmp_path) as newer.client:
            assert (await newer.have())["have"] == [[0, 50]]
            assert drafts(tmp_path) == [".bytes", ".have"]


@in_a_loop
@pytest.mark.parametrize(
    "damage",
    [
        lambda bytes_, have: have.write_bytes(b""),
        lambda bytes_, have: have.write_bytes(have.read_bytes()[:-5]),
        lambda bytes_, have: have.write_bytes(have.read_bytes().replace(b"100", b"999999999")),
        lambda bytes_, have: have.write_bytes(
            have.read_bytes().replace(b"[[0,100]]", b"[[50,100],[0,60]]")
        ),
        lambda bytes_, have: have.unlink(),
        lambda bytes_, have: bytes_.unlink(),
        lambda bytes_, have: bytes_.write_bytes(b"short"),
        lambda bytes_, have: os.utime(bytes_, (1, 1)),
    ],
    ids=[
        "empty list",
        "cut list",
        "long list",
        "odd list",
        "no list",
        "no bytes",
        "cut bytes",
        "forgotten",
    ],
)
async def test_parts_that_are_damaged_or_forgotten_are_swept_at_the_start(tmp_path, damage):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        await sender.part(0, 100)
        have, bytes_ = sorted((tmp_path / "server" / "parts").iterdir())[::-1]
        damage(bytes_, have)
        async with served_again(bench, tmp_path) as sender.client:
            assert (await sender.have())["have"] == [] and drafts(tmp_path) == []
            await sender.part(0, len(sender.data))
            assert (await sender.complete()).status_code == 201


@in_a_loop
async def test_what_nobody_goes_on_with_makes_room_for_others(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        gone = Sender(client, bench.regions["tokyo"].frame(0))
        await gone.part(0, 100)
        (data,) = (tmp_path / "server" / "parts").glob("*.bytes")
        os.utime(data, (1, 1))
        await Sender(client, bench.regions["paris"].frame(0)).part(0, 100)
        assert not data.exists() and (await gone.have())["have"] == []


@in_a_loop
async def test_two_who_drop_the_same_forgotten_frames_do_not_stumble_over_each_other(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        for fragment in (0, 1):
            await Sender(client, bench.regions["tokyo"].frame(fragment)).part(0, 100)
        left = list((tmp_path / "server" / "parts").glob("*.bytes"))
        assert len(left) == 2
        for data in left:
            os.utime(data, (1, 1))
        others = [Sender(client, bench.regions[name].frame(0)) for name in ("paris", "iowa")]
        answers = await asyncio.gather(*(other.part(0, 100) for other in others))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert not any(data.exists() for data in left)


@in_a_loop
async def test_a_late_copy_of_a_part_begins_nothing_while_its_frame_is_decided(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        size = len(sender.data)
        await sender.part(0, size)
        with held_up():
            deciding = asyncio.create_task(sender.complete())
            while not (await sender.have())["decided"]:
                await asyncio.sleep(0)
            late = await sender.part(0, 100)
            assert late.status_code == 200 and late.json()["have"] == [[0, size]]
            assert drafts(tmp_path) == [".bytes", ".have"], "the one that is being decided"
        assert (await deciding).status_code == 201
        assert (await sender.part(0, 100)).json()["have"] == [[0, size]]
        assert drafts(tmp_path) == []


@in_a_loop
async def test_what_is_being_decided_cannot_be_changed_by_parts_of_a_similar_name(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        sender = Sender(client, bench.regions["paris"].frame(0))
        await sender.part(0, len(sender.data))
        with held_up():
            deciding = asyncio.create_task(sender.complete())
            while not (await sender.have())["decided"]:
                await asyncio.sleep(0)
            similar = sender.frame[:32] + "0" * 32
            other = await sender.part(0, 100, data=b"x" * 100, frame=similar)
            assert other.status_code == 200
        assert (await deciding).status_code == 201
        assert bench.state.store.payload(sender.frame) == sender.data


@in_a_loop
async def test_a_frame_needs_room_beside_those_that_are_on_their_way(tmp_path, monkeypatch):
    async with served(tmp_path, joined=True) as (bench, client):
        # A disk on which no room can be taken before it is written to.
        monkeypatch.setattr(draft, "allocate", lambda handle, size: False)
        asked: list[int] = []
        monkeypatch.setattr(bench.state.store, "check_room", asked.append)
        first, second = (Sender(client, bench.regions[name].frame(0)) for name in ("paris", "iowa"))
        await first.part(0, 100)
        await second.part(0, 100)
        assert asked == [len(first.data), len(second.data) + len(first.data) - 100]


@pytest.mark.skipif(sys.platform != "linux", reason="room is taken with a call of Linux")
@in_a_loop
async def test_a_frame_takes_its_room_with_its_first_part(tmp_path, monkeypatch):
    async with served(tmp_path, joined=True) as (bench, client):
        asked: list[int] = []
        monkeypatch.setattr(bench.state.store, "check_room", asked.append)
        threads, allocate = [], draft.allocate

        def note(handle: int, size: int) -> bool:
            threads.append(threading.current_thread())
            return allocate(handle, size)

        monkeypatch.setattr(draft, "allocate", note)
        first, second = (Sender(client, bench.regions[name].frame(0)) for name in ("paris", "iowa"))
        await first.part(0, 100)
        (taken,) = (tmp_path / "server" / "parts").glob("*.bytes")
        assert 512 * taken.stat().st_blocks >= len(first.data) == taken.stat().st_size
        await second.part(0, 100)
        assert asked == [len(first.data), len(second.data)], "nothing is promised twice"
        assert len(threads) == 2 and threading.main_thread() not in threads, "others go on"
        again = [each.allocated for _, each in PartialFiles(bench.state.store).load()]
        assert again == [True, True], "nor by the next server"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at this process's memory in /proc")
@in_a_loop
@pytest.mark.parametrize("wrong", ["damaged", "misaddressed"])
async def test_a_refused_frame_is_let_go_of_at_once(tmp_path, wrong):
    async with served(tmp_path, joined=True) as (bench, client):
        frame = bytearray(bench.regions["paris"].frame(0))
        sender = Sender(client, bytes(frame))
        if wrong == "damaged":
            frame[0] ^= 1
        else:
            sender.path = sender.path.replace("paris", "tokyo")
        sender.data = bytes(frame)
        gc.disable()  # It may come late, and what is mapped takes room on the disk until then.
        try:
            await sender.part(0, len(frame))
            assert (await sender.complete()).status_code in (400, 422)
            async with asyncio.timeout(10):  # The thread that opened it may not have ended yet.
                while str(tmp_path) in Path("/proc/self/maps").read_text():
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
        assert drafts(tmp_path) == []


@in_a_loop
async def test_two_first_parts_at_once_are_of_one_frame_even_while_others_are_swept(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        await Sender(client, bench.regions["tokyo"].frame(0)).part(0, 100)
        (old,) = (tmp_path / "server" / "parts").glob("*.bytes")
        os.utime(old, (1, 1))
        sender = Sender(client, bench.regions["paris"].frame(0))
        parts = [sender.part(0, 100), sender.part(100, len(sender.data))]
        assert [answer.status_code for answer in await asyncio.gather(*parts)] == [200, 200]
        assert (await sender.have())["have"] == [[0, len(sender.data)]]
        assert (await sender.complete()).status_code == 201 and drafts(tmp_path) == []
