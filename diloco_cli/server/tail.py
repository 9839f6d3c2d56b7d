"""The run log as server-sent events.

An event's id is the place in the file after it, so a reader that was away goes on where
it stopped, also after a restart of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from diloco_cli.observe.events import parse
from diloco_cli.server.state import State

LOOK_SECONDS = 1.0
"""How often the file is looked at: other processes of the run write to it, too."""

SILENCE_SECONDS = 15.0
"""After so long without events a comment is sent, so that the line stays open."""

BATCH_BYTES = 1 << 18


async def tail(path: Path, after: int | None, state: State) -> AsyncIterator[bytes]:
    """Yields events written after byte `after`, or from now on, until the server closes."""
    place = _size(path) if after is None else after
    silent = 0.0
    yield b": diloco events\n\n"
    while not state.closed:
        text, place = await asyncio.to_thread(_read, path, place)
        if text:
            silent = 0.0
            yield text
            continue
        await state.until(lambda: False, LOOK_SECONDS)
        silent += LOOK_SECONDS
        if silent >= SILENCE_SECONDS:
            silent = 0.0
            yield b": still here\n\n"


def _read(path: Path, place: int) -> tuple[bytes, int]:
    """Renders the whole lines from `place` on, and says where the next one begins."""
    if place >= _size(path):
        return b"", place
    with open(path, "rb") as file:
        # An id made up by hand may point into a line; the rest of that line is left out.
        if place > 0:
            file.seek(place - 1)
            if file.read(1) != b"\n":
                place += len(file.readline())
        file.seek(place)
        data = file.read(BATCH_BYTES)
    rendered = []
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        place += len(line)
        if event := parse(line):
            kind = event.kind.encode()
            rendered.append(b"id: %d\nevent: %s\ndata: %s\n\n" % (place, kind, line.strip()))
    return b"".join(rendered), place


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
