"""What a client puts on the line, seen frame by frame."""

from __future__ import annotations

import socket
import threading

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RemoteSettingsChanged, RequestReceived, WindowUpdated
from h2.settings import SettingCodes

from diloco_cli.net.connection import Connection
from diloco_cli.net.options import DEFAULTS, Backend

MEBI = 1 << 20


def observed(backend: Backend) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Answers one request by hand; returns its headers and the windows the client opened."""
    listener = socket.create_server(("127.0.0.1", 0))
    headers: list[tuple[str, str]] = []
    windows: dict[str, int] = {}

    def serve() -> None:
        accepted, _ = listener.accept()
        with accepted:
            config = H2Configuration(client_side=False, header_encoding="utf-8")
            connection = H2Connection(config)
            connection.initiate_connection()
            accepted.sendall(connection.data_to_send())
            while data := accepted.recv(65536):
                for event in connection.receive_data(data):
                    if isinstance(event, RemoteSettingsChanged):
                        changed = event.changed_settings.get(SettingCodes.INITIAL_WINDOW_SIZE)
                        windows["stream"] = changed.new_value if changed else 0
                    if isinstance(event, WindowUpdated) and event.stream_id == 0:
                        windows["connection"] = event.delta or 0
                    if isinstance(event, RequestReceived):
                        headers.extend((str(k), str(v)) for k, v in event.headers or [])
                        assert event.stream_id is not None
                        connection.send_headers(
                            event.stream_id, [(":status", "204")], end_stream=True
                        )
                accepted.sendall(connection.data_to_send())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    link = Connection(f"http://127.0.0.1:{listener.getsockname()[1]}", DEFAULTS, backend)
    link.call("GET", "/", lambda response: response.status_code)
    link.close()
    thread.join(10)
    listener.close()
    assert not thread.is_alive(), "closing the link left its connection open"
    return headers, windows


@pytest.mark.parametrize("backend", ["httpx", "pyreqwest"])
def test_the_host_is_said_once(backend):
    """In `:authority`; proxies exist that answer 400 to a `host` beside it."""
    headers, _ = observed(backend)
    names = [name for name, _ in headers]
    assert ":authority" in names and "host" not in names
    assert len(names) == len(set(names))


def test_bulk_downloads_open_windows_that_fill_a_long_line():
    _, windows = observed("pyreqwest")
    assert windows["stream"] == 64 * MEBI
    assert windows["connection"] > 120 * MEBI
