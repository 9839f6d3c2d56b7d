"""Hostile clients on real sockets: the server stays up, stays small, serves the honest."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import h2.config
import h2.connection
import h2.events
import httpx
import psutil
import pytest
from hyperframe.frame import ContinuationFrame, HeadersFrame, PingFrame, SettingsFrame

from diloco_cli.net.credentials import Credentials
from diloco_cli.wire.messages import RUN_HEADER, WIRE_HEADER, WIRE_VERSION
from tests.security.tls_server import Guarded, client

pytestmark = pytest.mark.live

MORE_BYTES = 96 << 20
"""How much the server's memory may grow under any of these."""


@pytest.fixture(scope="module")
def target(guarded: Guarded) -> Guarded:
    guarded.vault.identity("upload", "paris")
    return guarded


@contextmanager
def unharmed(running: Guarded) -> Iterator[None]:
    """What is done inside must leave the server up, small, and answering others meanwhile."""
    admin = running.vault.identity("admin", "operator")
    process = psutil.Process(running.child.pid)
    with client(running.url, admin, http2=False) as asked:
        assert asked.get("/v1/status").status_code == 200
        before, most, over, answers = process.memory_info().rss, [0], threading.Event(), [0]

        def honest() -> None:
            while not over.is_set():
                assert asked.get("/v1/status").status_code == 200
                answers[0] += 1
                most[0] = max(most[0], process.memory_info().rss)
                over.wait(0.02)

        watch = threading.Thread(target=honest)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join(60)
        assert asked.get("/v1/status").status_code == 200
    assert running.child.poll() is None
    assert answers[0] > 0
    assert most[0] - before < MORE_BYTES, f"grew by {(most[0] - before) >> 20} MiB"


@contextmanager
def raw(running: Guarded, *protocols: str) -> Iterator[ssl.SSLSocket]:
    """A connection with a good certificate, and nothing said on it yet."""
    host, port = running.url.removeprefix("https://").split(":")
    context = running.vault.identity("upload", "paris").context()
    context.set_alpn_protocols(list(protocols or ("h2",)))
    with (
        socket.create_connection((host, int(port)), 20) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        secure.settimeout(20)
        yield secure


def conversation(secure: ssl.SSLSocket) -> h2.connection.H2Connection:
    speaking = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    speaking.initiate_connection()
    secure.sendall(speaking.data_to_send())
    return speaking


def was_cut(secure: ssl.SSLSocket) -> bool:
    """Reads until the other side ends the connection."""
    with suppress(TimeoutError):
        try:
            while secure.recv(65536):
                pass
            return True
        except (OSError, ssl.SSLError) as error:
            return not isinstance(error, TimeoutError)
    return False


def asked_for(path: str, identity: Credentials | None = None) -> list[tuple[str, str]]:
    own = [("authorization", f"Bearer {identity.token}")] if identity else []
    where = [(":method", "GET"), (":scheme", "https"), (":authority", "x"), (":path", path)]
    return where + own


def test_rapid_resets_end_the_connection_or_nothing(target: Guarded):
    """Fault 42: streams opened and reset at once, thousands of times."""
    paris = target.vault.identity("upload", "paris")
    with unharmed(target), raw(target) as secure:
        speaking = conversation(secure)
        with suppress(OSError, ssl.SSLError):
            for _ in range(100):
                for _ in range(50):
                    stream = speaking.get_next_available_stream_id()
                    path = f"/v1/fragments/0?after=99&wait=60&n={stream}"
                    speaking.send_headers(stream, asked_for(path, paris), end_stream=True)
                    speaking.reset_stream(stream, 8)
                secure.sendall(speaking.data_to_send())
        # Not one of these 5,000 waits for its answer: no more than a connection's streams may.
        assert was_cut(secure)


def test_one_caller_cannot_keep_the_server_waiting_for_ever_more_answers(target: Guarded):
    """Requests that wait are forgotten by their client, but not by the server."""
    paris = target.vault.identity("upload", "paris")
    found: Counter[str] = Counter()
    with unharmed(target), ExitStack() as connections:
        talks = []
        for _ in range(2):
            secure = connections.enter_context(raw(target))
            speaking = conversation(secure)
            for _ in range(80):
                stream = speaking.get_next_available_stream_id()
                waiting = asked_for("/v1/fragments/0?after=99&wait=3", paris)
                speaking.send_headers(stream, waiting, end_stream=True)
            secure.sendall(speaking.data_to_send())
            talks.append((secure, speaking))
        for secure, speaking in talks:
            found += statuses(secure, speaking, 80)
    assert found == {"204": 128, "503": 32}


def statuses(
    secure: ssl.SSLSocket, speaking: h2.connection.H2Connection, count: int
) -> Counter[str]:
    """Waits for so many answers and counts them by their status."""
    found: Counter[str] = Counter()
    while found.total() < count:
        for event in speaking.receive_data(secure.recv(65536)):
            if isinstance(event, h2.events.ResponseReceived):
                found[{str(key): str(value) for key, value in event.headers}[":status"]] += 1
    return found


def test_headers_without_end_are_cut_off(target: Guarded):
    """Fault 42: CONTINUATION frames that never say END_HEADERS."""
    with unharmed(target), raw(target) as secure:
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize())
        first = HeadersFrame(1, b"\x82\x87\x84\x41\x01x")  # Known headers, then a flood.
        secure.sendall(first.serialize())
        field = b"\x00\x04junk" + b"\x7f\x81\x07" + b"a" * 1024  # A literal of 1 KiB.
        sent = 0
        try:
            for _ in range(4096):  # 64 MiB, were it to take them.
                flood = ContinuationFrame(1, field * 15).serialize()
                secure.sendall(flood)
                sent += len(flood)
        except (OSError, ssl.SSLError):
            pass
        assert was_cut(secure)
    assert sent < 32 << 20


def test_headers_have_a_limit_in_both_versions(target: Guarded):
    paris = target.vault.identity("upload", "paris")
    for http2 in (True, False):
        with client(target.url, paris, http2=http2) as asked:
            try:
                status = asked.get("/v1/status", headers={"x-junk": "a" * 70_000}).status_code
                assert status in (400, 431)
            except httpx.TransportError:
                pass
            else:
                continue
        with client(target.url, paris, http2=http2) as asked:
            assert asked.get("/v1/status", headers={"x-junk": "a" * 4000}).status_code == 200


def test_a_flood_of_pings_and_settings_is_survived(target: Guarded):
    with unharmed(target), raw(target) as secure:
        conversation(secure)
        junk = PingFrame(0, b"12345678").serialize() + SettingsFrame(0).serialize()
        with suppress(OSError, ssl.SSLError):
            for _ in range(200):
                secure.sendall(junk * 50)


def test_garbage_instead_of_a_handshake_or_a_request_is_survived(target: Guarded):
    host, port = target.url.removeprefix("https://").split(":")
    with unharmed(target):
        for junk in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\xff\xff" + b"\0" * 70_000,
            b"\0" * 9,
        ):
            with socket.create_connection((host, int(port)), 20) as plain, suppress(OSError):
                plain.sendall(junk)
        for junk in (struct.pack(">I", 0xFFFFFFFF) * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff"):
            with raw(target) as secure, suppress(OSError, ssl.SSLError):
                secure.sendall(junk)


@pytest.mark.parametrize(
    "hosts, status", [(b"", b"400"), (b"Host: h\r\n", b"200"), (b"Host: h\r\nHost: h\r\n", b"400")]
)
def test_a_request_that_does_not_name_its_host_is_refused(target: Guarded, hosts, status):
    """Our HTTP library adds an empty `Host` where none came, so only real bytes show it."""
    token = target.vault.identity("admin", "operator").headers["authorization"].encode()
    with raw(target, "http/1.1") as secure:
        secure.sendall(
            b"GET /v1/status HTTP/1.1\r\n" + hosts + b"Authorization: " + token + b"\r\n\r\n"
        )
        assert secure.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_json_has_a_size_limit_before_it_is_parsed(target: Guarded):
    paris = target.vault.identity("upload", "paris")
    with unharmed(target), client(target.url, paris) as asked:
        run = asked.get("/v1/run").json()["run"]
        headers = {WIRE_HEADER: str(WIRE_VERSION), RUN_HEADER: run}
        for body, status in (
            (b"[" * 60_000, 400),
            (b'{"owner": ' + b"9" * 50_000 + b"}", 400),
            (b" " * 1_000_000, 413),
        ):
            answer = asked.post("/v1/regions/paris/join", content=body, headers=headers)
            assert answer.status_code == status, answer.text
        many = (b" " * 60_000 for _ in range(20))  # Its length is not said beforehand.
        try:
            answer = asked.post("/v1/regions/paris/join", content=many, headers=headers)
            assert answer.status_code == 413
        except httpx.TransportError:
            pass  # It answered before everything was sent; httpx may not hear it.


def test_silent_and_dripping_strangers_are_cut_and_regions_are_not(
    own: Callable[..., Guarded],
):
    """Slow loris: connections that never get to a request that may be made."""
    running = own(stranger_seconds=2.0)
    host, port = running.url.removeprefix("https://").split(":")
    paris = running.vault.identity("upload", "paris")
    silent = [socket.create_connection((host, int(port)), 30) for _ in range(40)]
    with raw(running, "http/1.1") as dripping, client(running.url, paris, http2=False) as region:
        dripping.sendall(b"GET /v1/status HTTP/1.1\r\nhost: x\r\n")
        assert region.get("/v1/status").status_code == 200
        ended = threading.Event()

        def drip() -> None:
            with suppress(OSError, ssl.SSLError):
                while not ended.is_set():
                    dripping.sendall(b"x-a: b\r\n")
                    ended.wait(0.2)
            ended.set()

        threading.Thread(target=drip, daemon=True).start()
        try:
            for one in silent:
                one.settimeout(40)
                assert one.recv(1) == b""
                one.close()
            assert ended.wait(40)
            # These two nobody but the sweep would end: past the handshake, then nothing.
            with raw(running) as greeted, raw(running) as mute:
                conversation(greeted)
                assert was_cut(greeted) and was_cut(mute)
        finally:
            ended.set()
        # The same connection as before: it had made a request that it may make.
        stays = region.get("/v1/status")
        assert stays.status_code == 200
    assert " idle connections" in running.said
