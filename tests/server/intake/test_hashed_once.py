"""A frame that was checked as it came in is not hashed again for its merge, but read it is."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.server.intake import body as receiving
from diloco_cli.server.intake import intake
from diloco_cli.server.intake.intake import Intake
from diloco_cli.server.store import on_disk
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.versions import next_version
from diloco_cli.wire.frame import open_frame
from diloco_cli.wire.messages import contribution_path
from tests.server.harness import in_a_loop, make_settings, make_spec
from tests.server.http.requests import put, served


async def sent(bench: Any, client: Any) -> dict[str, str]:
    """Everybody's answer to a call, over HTTP; digests by region."""
    await bench.join()
    await bench.call(0)
    digests = {}
    for name, region in bench.regions.items():
        frame = region.frame(0)
        assert (await put(client, frame)).status_code == 201
        digests[name] = open_frame(frame).digest
    return digests


async def merge(bench: Any) -> None:
    bench.server.tick()
    await bench.server.publisher.settled()


def payload(folder: Path, digest: str) -> Path:
    return folder / "server" / "payloads" / f"{digest}.frame"


@in_a_loop
async def test_a_merge_does_not_hash_again_what_was_hashed(tmp_path, monkeypatch):
    async with served(tmp_path) as (bench, client):
        digests = await sent(bench, client)
        assert set(bench.state.seen) == set(digests.values())
        monkeypatch.setattr(next_version, "open_frame", lambda *_, **__: pytest.fail("opened"))
        await merge(bench)
        members = bench.state.ledger.slots[0].members
        assert bench.versions[0] == 1 and members == tuple(sorted(digests))
        assert bench.state.seen == {}


@in_a_loop
async def test_contributions_are_let_go_of_before_the_step_takes_memory(tmp_path, monkeypatch):
    mapped, outer_step = [], next_version.outer_step

    def look(*arguments: Any) -> Any:
        maps = Path("/proc/self/maps").read_text()
        mapped.append(str(tmp_path / "server" / "payloads") in maps)
        return outer_step(*arguments)

    monkeypatch.setattr(next_version, "outer_step", look)
    async with served(tmp_path) as (bench, client):
        await sent(bench, client)
        await merge(bench)
        assert bench.versions[0] == 1 and mapped == [False]


@in_a_loop
async def test_the_bits_are_those_of_frames_that_are_opened_again(tmp_path):
    states = []
    for name in ("seen", "unseen"):
        async with served(tmp_path / name) as (bench, client):
            await sent(bench, client)
            if name == "unseen":
                bench.state.seen.clear()
            await merge(bench)
            states.append(bench.digests())
    assert states[0] == states[1]


def cut(path: Path) -> None:
    os.truncate(path, 100)


def flipped(at: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return flip


@in_a_loop
@pytest.mark.parametrize(
    "harm", [Path.unlink, cut, flipped(0.0), flipped(0.02), flipped(0.9), flipped(1.0)]
)
async def test_a_frame_whose_file_changed_goes_back_to_its_region(tmp_path, harm):
    async with served(tmp_path) as (bench, client):
        digests = await sent(bench, client)
        harm(payload(tmp_path, digests["paris"]))
        await merge(bench)
        assert bench.state.ledger.slots[0].members == ("iowa", "tokyo")
        fate = bench.server.news("paris").fates[0]
        assert (fate.digest, fate.fate) == (digests["paris"], "returned")


@in_a_loop
@pytest.mark.parametrize("place", [4, -50])
async def test_whoever_compares_directions_first_finds_the_changed_file(tmp_path, place):
    """It is the first to look into a chunk of frames that were seen."""
    names = ("iowa", "lima", "oslo", "paris", "tokyo")
    settings = make_settings(make_spec(names, server={"guard": {"agreement": 0.2}}))
    async with served(tmp_path, settings) as (bench, client):
        digests = await sent(bench, client)
        path = payload(tmp_path, digests["paris"])
        data = bytearray(path.read_bytes())
        # The highest bit of a zstd frame's fifth byte makes it claim more than any memory has.
        head = len(open_frame(data).outline.head)
        data[head + place if place > 0 else place] ^= 0x80
        path.write_bytes(data)
        await merge(bench)
        assert bench.state.failure is None
        assert bench.state.ledger.slots[0].members == ("iowa", "lima", "oslo", "tokyo")
        fate = bench.server.news("paris").fates[0]
        assert (fate.digest, fate.fate) == (digests["paris"], "returned")


@in_a_loop
async def test_what_is_refused_is_not_remembered(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        await bench.call(0)
        region = bench.regions["paris"]
        assert (await put(client, region.frame(0, tokens=1e9))).status_code == 422
        assert bench.state.seen == {} and bench.state.store.payloads() == set()


@in_a_loop
async def test_drafts_leave_nothing_open_or_behind(tmp_path):
    async with served(tmp_path) as (bench, client):
        await sent(bench, client)
        await merge(bench)
        frame = bench.regions["paris"].frame(1)
        damaged = frame[:-1] + bytes([frame[-1] ^ 1])
        gc.collect()
        gc.disable()  # What only the collector would close might stay open for long.
        try:
            await put(client, damaged, path="/v1/fragments/1/contributions/paris/0-2")
            assert_nothing_open(tmp_path, collect=False)
        finally:
            gc.enable()


@in_a_loop
@pytest.mark.parametrize("times", [1, 2])
async def test_an_upload_that_is_called_off_leaves_nothing(tmp_path, times, monkeypatch):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        await bench.call(0)
        loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        keep = bench.state.store.keep_payload

        def slow(*about: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            keep(*about)

        monkeypatch.setattr(bench.state.store, "keep_payload", slow)
        uploading = asyncio.create_task(put(client, bench.regions["paris"].frame(0)))
        await begun.wait()
        for _ in range(times):
            uploading.cancel()
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([uploading])
        assert uploading.cancelled()
        del uploading
        assert bench.state.seen == {} and bench.state.store.payloads() == set()
        assert_nothing_open(tmp_path)


@in_a_loop
@pytest.mark.parametrize(
    ("times", "stuck"), [(0, False), (1, False), (2, False), (1, True), (2, True)]
)
async def test_a_batch_comes_in_while_one_is_written_and_is_waited_for_when_called_off(
    tmp_path, times, stuck, monkeypatch
):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        monkeypatch.setattr(receiving, "BATCH_BYTES", 128)
        third, go_on = asyncio.Event(), hold_writes(monkeypatch)
        frame = bench.regions["paris"].frame(0)

        async def body() -> AsyncIterator[bytes]:
            for at in range(0, len(frame), 64):
                if at == 128:
                    third.set()
                    if stuck:
                        await asyncio.Event().wait()
                yield frame[at : at + 64]

        uploading = asyncio.create_task(
            put(client, body(), path=contribution_path(0, "paris", 0, 1))
        )
        await asyncio.wait_for(third.wait(), 20)
        for _ in range(times):
            uploading.cancel()
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([uploading])
        assert uploading.cancelled() == bool(times)
        kept = set() if times else {open_frame(frame).digest}
        assert bench.state.store.payloads() == kept
        del uploading
        assert_nothing_open(tmp_path)


@in_a_loop
async def test_who_is_called_off_while_a_refused_body_is_still_written_hears_of_it(
    tmp_path, monkeypatch
):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        monkeypatch.setattr(receiving, "BATCH_BYTES", 128)
        monkeypatch.setattr(Intake, "_limit", lambda *_: 150)
        last, go_on = asyncio.Event(), hold_writes(monkeypatch)

        async def body() -> AsyncIterator[bytes]:
            for number in range(3):
                if number == 2:
                    last.set()
                yield bytes(64)

        path = contribution_path(0, "paris", 0, 1)
        uploading = asyncio.create_task(put(client, body(), path=path))
        await last.wait()
        for _ in range(20):  # Until it has found that there are too many, and waits for the thread.
            await asyncio.sleep(0)
        uploading.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([uploading])
        assert uploading.cancelled()
        del uploading
        assert_nothing_open(tmp_path)


@in_a_loop
@pytest.mark.parametrize("allocates", [True, False])
async def test_a_body_needs_no_room_that_others_have_taken_already(
    tmp_path, monkeypatch, allocates
):
    if allocates and sys.platform != "linux":
        pytest.skip("room is taken with a call of Linux")
    async with served(tmp_path) as (bench, client):
        await bench.join()
        monkeypatch.setattr(receiving, "BATCH_BYTES", 128)
        monkeypatch.setattr(intake, "SHORT_BYTES", 0 if allocates else 1 << 20)
        asked, draft_payload = [], bench.state.store.draft_payload

        def remember(size: int = 0, *, length: int = 0) -> Draft:
            asked.append(size)
            return draft_payload(size, length=length)

        monkeypatch.setattr(bench.state.store, "draft_payload", remember)
        first, second = (bench.regions[name].frame(0) for name in ("paris", "iowa"))
        written, gate = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            for at in range(0, len(first), 64):
                if at == 384:  # Which is not asked for before 128 bytes are on the disk.
                    written.set()
                    await gate.wait()
                yield first[at : at + 64]

        async def cut() -> AsyncIterator[bytes]:
            yield first[:200]

        path = contribution_path(0, "paris", 0, 1)
        assert (await put(client, cut(), path=path, length=len(first))).status_code == 400
        uploading = asyncio.create_task(put(client, body(), path=path, length=len(first)))
        await written.wait()
        assert (await put(client, second)).status_code == 201
        gate.set()
        assert (await uploading).status_code == 201
        assert asked[:2] == [len(first), len(first)], "a body that is gone needs no room"
        missing = asked[2] - len(second)
        assert missing == 0 if allocates else len(first) - 320 <= missing <= len(first) - 256


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """From now on every write to a draft waits for the event."""
    loop, go_on, write = asyncio.get_running_loop(), asyncio.Event(), Draft.write_pieces

    def slow(draft: Draft, *about: Any) -> None:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        write(draft, *about)

    monkeypatch.setattr(Draft, "write_pieces", slow)
    return go_on


def assert_nothing_open(folder: Path, *, collect: bool = True) -> None:
    payloads = folder / "server" / "payloads"
    # A thread of the pool lets go of what it did only after it has said that it is done.
    deadline = time.monotonic() + 20
    while (found := still_open(payloads, collect=collect)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not found
    assert not list(payloads.glob(".upload*"))


def still_open(folder: Path, *, collect: bool) -> list[str]:
    if collect:  # An error of the test's own may know the body that it came from.
        gc.collect()
    handles = {str(path.resolve()) for path in Path("/proc/self/fd").iterdir()}
    return [name for name in handles if name.startswith(str(folder))]


@pytest.mark.parametrize("advice", [on_disk.POPULATE_READ, 9999])
def test_a_file_is_mapped_whole_on_systems_that_know_how_and_on_others(
    tmp_path, monkeypatch, advice
):
    monkeypatch.setattr(on_disk, "POPULATE_READ", advice)
    for size in (0, 1, 3 << 18):
        path = tmp_path / str(size)
        path.write_bytes(os.urandom(size))
        assert on_disk.mapped(path) == path.read_bytes()
