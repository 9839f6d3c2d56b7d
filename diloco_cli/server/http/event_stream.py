"""The run log as server-sent events.

An event's id is its place in the log, so a reader that was away goes on where it stopped,
also after a restart of the server or when the log has gone on in a new file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from diloco_cli.observe.event_file import EventLine, EventReader
from diloco_cli.observe.events import parse
from diloco_cli.server.rounds.state import State

LOOK_SECONDS = 1.0
"""How often the file is looked at: other processes of the run write to it, too."""

SILENCE_SECONDS = 15.0
"""After so long without events a comment is sent, so that the line stays open."""


async def tail(path: Path, after: str | None, state: State) -> AsyncIterator[bytes]:
    """Yields events after the one with this id, or from now on, until the server closes."""
    reader = await asyncio.to_thread(EventReader, path, after)
    silent = 0.0
    yield b": diloco events\n\n"
    while not state.closed:
        if lines := await asyncio.to_thread(reader.more):
            if text := _rendered(lines):
                silent = 0.0
                yield text
            continue
        await state.until(lambda: False, LOOK_SECONDS)
        silent += LOOK_SECONDS
        if silent >= SILENCE_SECONDS:
            silent = 0.0
            yield b": still here\n\n"


def _rendered(lines: Iterable[EventLine]) -> bytes:
    rendered = []
    for line in lines:
        if event := parse(line.text):
            # Without an id of its own an event leaves the reader with the last one it had.
            rendered += [f"id: {line.id}\n".encode()] if line.id else []
            fields = event.kind.encode(), line.text.strip()
            rendered.append(b"event: %s\ndata: %s\n\n" % fields)
    return b"".join(rendered)
