"""What the members of a data-parallel job and their reducer say to each other.

A frame is a head of 21 bytes and a payload of at most one chunk:

    kind u8 · step u32 · attempt u32 · at u64 · length u32, big-endian

    TALK       JSON, one object
    GRADIENT   a chunk of a member's gradient, or of the mean on the way back
    STATE      a chunk of weights and optimiser, for a member that joins

Chunks of a gradient carry the step and the attempt they belong to, so that what was still
on the way when a member died is told from what the others send again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from diloco_cli.errors import WireError

TALK, GRADIENT, STATE = 1, 2, 3
CHUNK = 1 << 18
PIECES = 32
"""A gradient has about so many chunks, so that the first is back before the last has left."""
HEAD = struct.Struct("!BIIQI")

Words = dict[str, Any]
"""The JSON object of a TALK message."""


@dataclass(frozen=True, slots=True)
class MessageHead:
    kind: int
    step: int = 0
    attempt: int = 0
    at: int = 0
    """Where in the whole its first byte belongs."""
    length: int = 0


class MessageSocket:
    """One end of a connection: any thread may send, one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._sending = threading.Lock()

    def send(self, head: MessageHead, payload: bytes | memoryview = b"") -> None:
        packed = HEAD.pack(head.kind, head.step, head.attempt, head.at, len(payload))
        with self._sending:
            self._end.sendall(packed)
            self._end.sendall(payload)

    def say(self, **words: Any) -> None:
        self.send(MessageHead(TALK), json.dumps(words).encode())

    def head(self) -> MessageHead:
        """Waits for the next frame; ConnectionError when the other side is gone."""
        packed = bytearray(HEAD.size)
        self.read(memoryview(packed))
        head = MessageHead(*HEAD.unpack(packed))
        if head.kind not in (TALK, GRADIENT, STATE) or head.length > CHUNK:
            raise WireError(
                f"A frame of kind {head.kind} with {head.length} bytes is none of ours."
            )
        return head

    def read(self, room: memoryview) -> None:
        """Fills the room with the next bytes."""
        while room:
            if not (got := self._end.recv_into(room)):
                raise ConnectionError("the other side closed the connection")
            room = room[got:]

    def chunk(self, head: MessageHead, room: memoryview) -> None:
        """Reads a chunk to its place."""
        place = room[head.at :][: head.length]
        if len(place) != head.length:
            raise WireError(f"{head.length} bytes at {head.at} lie beyond {len(room)}.")
        self.read(place)

    def words(self, head: MessageHead) -> Words:
        text = bytearray(head.length)
        self.read(memoryview(text))
        return json.loads(text)

    def close(self) -> None:
        """Ends the connection for whoever sends or receives on it; harmless when repeated."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def chunks(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Cuts bytes into chunks, each with its place."""
    step = stride(len(data))
    for at in range(0, len(data), step):
        yield at, data[at : at + step]


def stride(size: int) -> int:
    """How long the chunks of so many bytes are; a power of two, so that no value is cut."""
    return min(CHUNK, max(4096, 1 << (size // PIECES).bit_length()))


def mean(parts: list[tuple[float, memoryview]], kind: str) -> np.ndarray:
    """Adds chunks up in the order given, each times its weight, and gives the bytes."""
    total: np.ndarray | None = None
    for weight, part in parts:
        values = np.frombuffer(part, np.float32) if kind == "fp32" else _widened(part)
        share = values * np.float32(weight)
        total = share if total is None else np.add(total, share, out=total)
    assert total is not None
    return (total if kind == "fp32" else _narrowed(total)).view(np.uint8)


def _widened(part: memoryview) -> np.ndarray:
    return (np.frombuffer(part, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrowed(values: np.ndarray) -> np.ndarray:
    """bf16 bits, to the nearest even; sums of bf16 that are not finite stay so."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
