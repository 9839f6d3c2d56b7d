"""An HTTP/2 server that says goodbye (GOAWAY) in the middle of what it is doing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import h2.config
import h2.connection
import h2.events
import h2.exceptions

Manner = Literal["finish", "drop"]
"""finish: what has begun is brought to its end; drop: it counts as never begun."""


class Leaving:
    """Leaves once, on its first connection, after `after` bytes of a body in either direction.

    `said` is what it says its body's length is; below zero it says nothing, and no end follows.
    """

    def __init__(self, manner: Manner, body: bytes, after: int, said: int) -> None:
        self.manner, self.body, self.after, self.said = manner, body, after, said
        self.connections = 0
        self.received: list[int] = []
        """Bytes of each request that was answered."""
        self.left, self.reset = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._talk, args=(caller,), daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _talk(self, caller: socket.socket) -> None:
        config = h2.config.H2Configuration(client_side=False)
        line = h2.connection.H2Connection(config)
        line.initiate_connection()
        got: dict[int, int] = {}
        unsent: dict[int, bytes] = {}
        with suppress(OSError, h2.exceptions.H2Error), caller:
            caller.sendall(line.data_to_send())
            while data := caller.recv(65536):
                for event in line.receive_data(data):
                    self._hear(line, event, got, unsent)
                self._send(line, unsent)
                caller.sendall(line.data_to_send())
                if self.left.is_set() and self.manner == "drop" and self.connections == 1:
                    return

    def _hear(self, line, event, got: dict[int, int], unsent: dict[int, bytes]) -> None:
        if isinstance(event, h2.events.RequestReceived):
            got[event.stream_id] = 0
        elif isinstance(event, h2.events.DataReceived):
            got[event.stream_id] += len(event.data)
            line.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if got[event.stream_id] >= self.after:
                self._leave(line, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.received.append(got[event.stream_id])
            length = [("content-length", str(self.said))] if self.said >= 0 else []
            line.send_headers(event.stream_id, [(":status", "200"), *length])
            unsent[event.stream_id] = self.body
        elif isinstance(event, h2.events.StreamReset):
            self.reset.set()

    def _leave(self, line, stream: int) -> None:
        if not self.left.is_set():
            self.left.set()
            # Not through h2: it takes no frame on a connection it has closed, we still do.
            last = stream if self.manner == "finish" else 0
            frame = last.to_bytes(4, "big") + bytes(4)
            line._data_to_send += len(frame).to_bytes(3, "big") + b"\x07\0" + bytes(4) + frame

    def _send(self, line, unsent: dict[int, bytes]) -> None:
        for stream, body in list(unsent.items()):
            while body and (room := line.local_flow_control_window(stream)) > 0:
                piece = body[: min(room, line.max_outbound_frame_size)]
                line.send_data(stream, piece)
                body = body[len(piece) :]
                if len(self.body) - len(body) >= self.after:
                    self._leave(line, stream)
                    if self.manner == "drop" and self.connections == 1:
                        return
            unsent[stream] = body
            if not body and self.said >= 0:
                line.end_stream(stream)
                del unsent[stream]


@contextmanager
def leaving(
    manner: Manner, *, body: bytes = b"", after: int, said: int | None = None
) -> Iterator[Leaving]:
    server = Leaving(manner, body, after, len(body) if said is None else said)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield server
    finally:
        server.close()
