"""The stream of events: each of them once, also when the run log goes on in a new file."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.observe.event_file import older
from diloco_cli.observe.events import EventLog
from diloco_cli.server.http.event_stream import tail
from tests.server.harness import Bench, close_server, in_a_loop

WRITER = """\
import sys
from pathlib import Path
from diloco_cli.observe.events import EventLog
log = EventLog(Path(sys.argv[1]), sys.argv[2], most=int(sys.argv[3]))
number = 0
for line in sys.stdin:
    for _ in range(int(line)):
        log.note("note", why="x" * 200, region=number)
        number += 1
"""
MOST = 15_000
"""About fifty lines: in a turn of three times ten at most one file ends."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("diloco_cli.server.http.event_stream.LOOK_SECONDS", 0.01)


async def told(stream: AsyncIterator[bytes], count: int) -> list[str]:
    """The next events of a stream."""
    found: list[str] = []
    while len(found) < count:
        text = await asyncio.wait_for(anext(stream), 60)
        found += [each for each in text.decode().split("\n\n") if "data: " in each]
    return found


async def is_told_out(stream: AsyncIterator[bytes]) -> bool:
    """Ends a stream, and says whether nothing more came for some looks."""
    try:
        return not await asyncio.wait_for(told(stream, 1), 0.2)
    except TimeoutError:
        return True


def id_of(event: str) -> str:
    return event.splitlines()[0].removeprefix("id: ")


def of_the_file_before(events: list[str]) -> list[int]:
    """Which events were in any file before the last; late ones have no id to tell by."""
    files = {n: id_of(event)[:12] for n, event in enumerate(events) if event.startswith("id: ")}
    last = files[max(files)]
    return [number for number, file in files.items() if file != last]


def said_by(event: str) -> tuple[str, int]:
    data: dict[str, Any] = json.loads(event.partition("data: ")[2])
    return data["process"], data["region"]


@in_a_loop
async def test_events_are_streamed_and_resumed_by_id(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "server")
    for number in range(3):
        log.note("note", why=f"number {number}")
    bench = Bench(tmp_path)
    everything = await told(tail(path, "0", bench.state), 3)
    assert ["number 0" in everything[0], "number 2" in everything[2]] == [True, True]
    generation, _, place = id_of(everything[0]).partition("-")
    assert await told(tail(path, f"{generation}-{place}", bench.state), 2) == everything[1:]
    assert await told(tail(path, place, bench.state), 2) == everything[1:], "as ids once were"
    inside = tail(path, f"{generation}-{int(place) - 3}", bench.state)
    assert await told(inside, 2) == everything[1:], "half a line is left out"

    fresh = tail(path, None, bench.state)
    assert await anext(fresh) == b": diloco events\n\n"
    log.note("note", why="news")
    assert "news" in (await told(fresh, 1))[0]
    log.close()
    await close_server(bench.server)


@in_a_loop
async def test_what_is_no_event_is_never_sent(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"[]\n7\n")
    bench = Bench(tmp_path)
    stream = tail(path, "0", bench.state)
    assert await anext(stream) == b": diloco events\n\n"
    EventLog(path, "server").note("note", why="news")
    assert (await anext(stream)).count(b"data: ") == 1
    await close_server(bench.server)


@in_a_loop
async def test_a_stream_over_many_files_of_several_processes_has_every_event_once(tmp_path):
    path = tmp_path / "events.jsonl"
    bench = Bench(tmp_path)
    writers = [await start(path, name) for name in "abc"]
    stream = tail(path, "0", bench.state)
    events: list[str] = []
    for _ in range(20):
        for writer in writers:
            assert writer.stdin
            writer.stdin.write(b"10\n")
        events += await told(stream, 30)
    assert sorted(map(said_by, events)) == [(name, n) for name in "abc" for n in range(200)]
    assert await is_told_out(stream)

    # Who was away since an event of the older file gets all that came after it, once.
    number = of_the_file_before(events)[-5]
    back = tail(path, id_of(events[number]), bench.state)
    missed = await told(back, len(events) - number - 1)
    assert sorted(map(said_by, missed)) == sorted(map(said_by, events[number + 1 :]))
    assert await is_told_out(back)

    # Who was away for longer gets all that is kept.
    kept = older(path).read_bytes().count(b"\n") + path.read_bytes().count(b"\n")
    assert kept < 200 and len(await told(tail(path, id_of(events[0]), bench.state), kept)) == kept
    await asyncio.gather(*map(end, writers))
    await close_server(bench.server)


async def start(path: Path, name: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-c", WRITER, str(path), name, str(MOST))
    return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)


async def end(writer: asyncio.subprocess.Process) -> None:
    assert writer.stdin
    writer.stdin.close()
    assert await asyncio.wait_for(writer.wait(), 20) == 0


@in_a_loop
async def test_a_stream_goes_on_after_the_file_was_deleted(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "server", most=500)
    bench = Bench(tmp_path)
    for number in range(4):
        log.note("note", why="x" * 100, region=number)
    stream = tail(path, "0", bench.state)
    assert [said_by(event)[1] for event in await told(stream, 4)] == [0, 1, 2, 3]
    assert older(path).exists()
    path.unlink()
    log.note("note", why="x" * 100, region=4)
    assert [said_by(event)[1] for event in await told(stream, 1)] == [4]
    assert await is_told_out(stream)
    log.close()
    await close_server(bench.server)
