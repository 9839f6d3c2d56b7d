"""Bytes on their way out: all of them, from memory or disk, and none to a client that left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.server.store.on_disk import FileBlobs
from diloco_cli.server.versions.send import PIECE_BYTES, SHORT_BYTES, BlobPieces, ByteRange
from tests.server.harness import in_a_loop

SIZES = (3 * PIECE_BYTES + 17, 1, SHORT_BYTES)


class Client:
    """Takes an answer without ever waiting, as the server below does while it has room."""

    def __init__(self, *, leaves_after: int = 1 << 40) -> None:
        self.said: list[Any] = []
        self._leaves_after, self._left = leaves_after, asyncio.Event()

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.said.append(message)
        if len(self.said) > self._leaves_after:
            self._left.set()

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.said[1:])


def made(folder: Path) -> tuple[list[tuple[Path, int]], bytes]:
    files = []
    for number, size in enumerate(SIZES):
        path = folder / str(number)
        path.write_bytes(os.urandom(size))
        files.append((path, size))
    return files, b"".join(path.read_bytes() for path, _ in files)


def pieces_of(files: list[tuple[Path, int]], start: int, stop: int) -> BlobPieces:
    blobs = FileBlobs(files[0][0].parent)
    return BlobPieces(blobs, [(path.name, size) for path, size in files], start, stop)


def forget(path: Path) -> None:
    """Makes the system read the file from its disk again, where that can be asked for."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def answered(files: list[tuple[Path, int]], start: int, stop: int, client: Client) -> int:
    counted: list[int] = []
    reading = pieces_of(files, start, stop)
    response = ByteRange(reading, stop - start, counted.append, 206, {"content-length": "0"})
    await response({"type": "http"}, client.receive, client.send)
    return sum(counted)


@in_a_loop
@pytest.mark.parametrize("cold", [False, True])
async def test_any_stretch_of_several_files_arrives_whole(tmp_path, cold):
    files, everything = made(tmp_path)
    size, first = len(everything), files[0][1]
    for start, stop in ((0, size), (5, 6), (first - 1, first + 2), (first, size), (size - 1, size)):
        if cold:
            for path, _ in files:
                forget(path)
        client = Client()
        assert await answered(files, start, stop, client) == stop - start
        assert client.body == everything[start:stop]
        assert [message["more_body"] for message in client.said[1:-1]].count(False) == 0
        assert client.said[-1]["more_body"] is False


@in_a_loop
async def test_what_is_in_memory_needs_no_thread(tmp_path):
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("the system cannot tell")
    files, everything = made(tmp_path)
    reading, found = pieces_of(files, 0, len(everything)), b""
    while piece := reading.next_now():
        found += piece
    if not found:
        pytest.skip("the file system cannot tell")
    assert found == everything


@in_a_loop
async def test_nothing_is_read_for_a_client_that_left(tmp_path):
    files, everything = made(tmp_path)
    client = Client(leaves_after=3)
    counted = await answered(files, 0, len(everything), client)
    assert counted == len(client.body) <= 4 * PIECE_BYTES < len(everything)
    assert client.said[-1]["more_body"] is True, "nobody is told that this was all"


@in_a_loop
async def test_others_have_their_turn_while_a_long_answer_is_sent(tmp_path):
    files, everything = made(tmp_path)
    turns = [0]

    async def other() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    client = Client()
    await answered(files, 0, len(everything), client)
    task.cancel()
    assert turns[0] >= len(client.said) - 2


@in_a_loop
async def test_a_file_that_lost_its_end_is_not_waited_for(tmp_path):
    files, everything = made(tmp_path)
    os.truncate(files[-1][0], 100)
    client = Client()
    await answered(files, 0, len(everything), client)
    assert client.body == everything[: sum(SIZES[:2]) + 100]
    assert client.said[-1]["more_body"] is False


@in_a_loop
async def test_a_file_that_is_open_may_be_removed(tmp_path):
    files, everything = made(tmp_path)
    reading = pieces_of(files, 0, SIZES[0])
    found = reading.next()
    files[0][0].unlink()
    assert found + b"".join(reading) == everything[: SIZES[0]]
    held = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    name = str(files[0][0])
    assert not [fd for fd in held if name in _target(fd)], "it is closed after its last byte"


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # The one that listed them.
        return ""
