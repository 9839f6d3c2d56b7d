"""Both backends move the same bytes, survive the same faults, and give up in the same words."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from diloco_cli.errors import LinkError, SpecError, WireError
from diloco_cli.net.backends import PIECES
from diloco_cli.net.connection import Connection, checked_url
from diloco_cli.net.options import DEFAULTS, ONCE, Options, Retry, Timeouts
from diloco_cli.net.refusal import Gone, read
from diloco_cli.net.transfer.upload import Source
from tests.net.goaway_server import leaving

BIG = bytes(range(256)) * 20_000  # 5 MB: many HTTP/2 frames, more than one window's default.


@pytest.fixture(params=["pyreqwest", "httpx"])
def link(request, puppet, patience) -> Iterator[Connection]:
    """A connection on each backend."""
    made = Connection(puppet.url, DEFAULTS, request.param, stop=patience)
    yield made
    made.close()


def everything(response: httpx.Response) -> bytes:
    return read("url", response, 1 << 30)


def test_it_is_http2_from_the_first_byte(link, puppet):
    puppet.will("GET /a", 200, b"hello")
    assert link.call("GET", "/a", everything) == b"hello"
    assert [request["http"] for request in puppet.heard()] == ["2"]


@pytest.mark.parametrize("size", [0, 1, 65_536, 300_000, len(BIG)])
def test_uploads_arrive_whole_from_memory_and_from_disk(link, puppet, tmp_path, size):
    body = BIG[:size]
    file = tmp_path / "body"
    file.write_bytes(body)
    for source in (body, memoryview(b"before" + body + b"after")[6 : 6 + size], file):
        puppet.will("PUT /up", 201)
        link.call("PUT", "/up", everything, body=source)
    for request in puppet.heard():
        assert request["length"] == size
        assert request["sha256"] == hashlib.sha256(body).hexdigest()
        assert request["headers"]["content-length"] == str(size)


def test_downloads_arrive_whole(link, puppet):
    puppet.will("GET /down", 200, BIG, {"content-length": str(len(BIG))})
    assert link.call("GET", "/down", everything) == BIG


def test_downloads_can_be_had_as_they_arrive(puppet, patience):
    link = Connection(puppet.url, DEFAULTS, "pyreqwest", stop=patience)
    found, pieces = bytearray(len(BIG)), []

    def fill(response):
        at = 0
        for piece in response.extensions[PIECES]():
            assert isinstance(piece, memoryview)
            pieces.append(len(piece))
            found[at : at + len(piece)] = piece
            at += len(piece)
        return at

    puppet.will("GET /down", 200, BIG, {"content-length": str(len(BIG))}, cut=1_000_000)
    puppet.will("GET /down", 200, BIG, {"content-length": str(len(BIG))})
    assert link.call("GET", "/down", fill) == len(BIG)
    assert found == BIG and len(patience.pauses) == 1
    assert max(pieces) < len(BIG)
    link.close()


def test_parts_are_sent_from_where_they_lie():
    part = Source(BIG).read(1000, 2_000_000)
    assert isinstance(part, memoryview) and part.obj is BIG
    assert part == BIG[1000:2_000_000]


def test_headers_travel_and_nothing_asks_for_another_encoding(link, puppet):
    puppet.will("GET /h", 200, b"", {"etag": '"abc"'})
    etag = link.call("GET", "/h", lambda r: r.headers["etag"], headers={"diloco-run": "r-1"})
    (request,) = puppet.heard()
    assert etag == '"abc"'
    assert request["headers"]["diloco-run"] == "r-1"
    assert request["headers"]["accept-encoding"] == "identity"


@pytest.mark.parametrize("status", [502, 503, 504, 507])
def test_later_means_again_with_the_whole_body(link, puppet, tmp_path, patience, status):
    file = tmp_path / "body"
    file.write_bytes(BIG[:300_000])
    puppet.will("PUT /busy", status).will("PUT /busy", status).will("PUT /busy", 200, b"done")
    assert link.call("PUT", "/busy", everything, body=file) == b"done"
    assert [request["length"] for request in puppet.heard()] == [300_000] * 3
    assert len(patience.pauses) == 2


def test_the_pause_a_server_asks_for_is_kept_and_a_little_more(link, puppet, patience):
    puppet.will("GET /busy", 503, b"", {"retry-after": "7"}).will("GET /busy", 200)
    link.call("GET", "/busy", everything)
    [paused] = patience.pauses
    assert 7.0 <= paused <= 10.5


def test_giving_up_repeats_the_servers_own_words(link, puppet):
    for _ in range(5):
        puppet.refuses("GET /full", 507, "disk-full", "The disk is full.")
    with pytest.raises(
        LinkError, match=r"answered 507: The disk is full \(5 tries over"
    ) as refusal:
        link.call("GET", "/full", everything)
    assert refusal.value.hint == "Do this."


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 412, 413, 422, 426, 500])
def test_no_is_never_asked_twice(link, puppet, patience, status):
    puppet.refuses("GET /no", status, "no", "No.").will("GET /no", 200)
    with pytest.raises(Exception, match=r"No|wire version"):
        link.call("GET", "/no", everything)
    assert len(puppet.heard()) == 1 and patience.pauses == []


def test_a_refusal_that_is_wanted_as_an_answer_is_handed_over(link, puppet):
    puppet.refuses("GET /no", 409, "no", "No.")
    status = link.call("GET", "/no", lambda r: r.status_code, answers=frozenset({409}))
    assert status == 409


@pytest.mark.parametrize("cut", [0, 1000, 3_000_000])
@pytest.mark.parametrize("size", [40_000, len(BIG)])
def test_a_body_that_breaks_off_is_fetched_again(link, puppet, cut, size):
    body, sized = BIG[:size], {"content-length": str(size)}
    puppet.will("GET /cut", 200, body, sized, cut=min(cut, size - 1))
    puppet.will("GET /cut", 200, body, sized)
    assert link.call("GET", "/cut", everything) == body
    assert len(puppet.heard()) == 2


def test_a_body_that_cannot_be_trusted_is_fetched_again(link, puppet):
    def choosy(response: httpx.Response) -> bytes:
        if (found := everything(response)) != b"good":
            raise WireError(f"{found!r} is bad.")
        return found

    puppet.will("GET /x", 200, b"bad").will("GET /x", 200, b"good")
    assert link.call("GET", "/x", choosy) == b"good"
    for _ in range(5):
        puppet.will("GET /x", 200, b"evil")
    with pytest.raises(WireError, match="b'evil' is bad"):
        link.call("GET", "/x", choosy)


def test_an_answer_that_does_not_come_is_given_up_in_time(puppet, patience, link):
    link.retry = Retry(tries=2)
    puppet.will("GET /slow", 200, delay=20).will("GET /slow", 200, delay=20)
    with pytest.raises(LinkError, match=r"did not answer in 0\.4 s \(2 tries over [012] s\)\."):
        link.call("GET", "/slow", everything, seconds=0.4)
    puppet.will("GET /after", 200, b"fine")
    assert link.call("GET", "/after", everything) == b"fine"


def test_a_stop_ends_the_waiting_not_the_call(link, puppet):
    link.stop = threading.Event()
    link.stop.set()
    link.retry = Retry(tries=5, first=600, most=600)
    puppet.will("GET /a", 200, b"fine")
    assert link.call("GET", "/a", everything) == b"fine"
    puppet.will("GET /b", 503).will("GET /b", 200)
    with pytest.raises(LinkError, match=r"answered 503.*\(1 try\)"):
        link.call("GET", "/b", everything)


def test_the_environment_does_not_redirect_anybody(puppet, monkeypatch, patience):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for backend in ("httpx", "pyreqwest"):
        link = Connection(puppet.url, Options(retry=ONCE), backend, stop=patience)
        puppet.will("GET /a", 200, b"direct")
        assert link.call("GET", "/a", everything) == b"direct"
        link.close()


@pytest.mark.parametrize("backend", ["httpx", "pyreqwest"])
def test_nobody_there_is_a_sentence_with_a_hint(backend, patience):
    link = Connection("http://127.0.0.1:1", Options(retry=Retry(tries=3)), backend, stop=patience)
    with pytest.raises(LinkError, match=r"127.0.0.1:1 cannot be reached.*3 tries") as refusal:
        link.call("GET", "/", everything)
    assert refusal.value.hint == "Is the server up? Try `diloco status http://127.0.0.1:1`."
    assert len(patience.pauses) == 2
    link.close()


@pytest.fixture
def breaker() -> Iterator[str]:
    """Where every connection is reset as soon as something is said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    caller, _ = listener.accept()
                    caller.recv(1000)
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    caller.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("backend", ["httpx", "pyreqwest"])
def test_a_connection_that_broke_is_not_one_that_could_not_be_made(breaker, patience, backend):
    link = Connection(breaker, Options(retry=ONCE), backend, stop=patience)
    with pytest.raises(LinkError, match=r"The connection to .* broke") as refusal:
        link.call("PUT", "/up", everything, body=BIG)
    assert isinstance(refusal.value.__cause__, httpx.RequestError)
    link.close()


@pytest.mark.parametrize("backend", ["httpx", "pyreqwest"])
def test_a_server_that_was_restarted_is_found_again(restarted, patience, backend):
    link = Connection(restarted.url, DEFAULTS, backend, stop=patience)
    restarted.will("GET /a", 200, b"before")
    assert link.call("GET", "/a", everything) == b"before"
    restarted.stop()
    restarted.start()
    restarted.will("GET /a", 200, b"after").will("GET /a", 200, b"after")
    assert link.call("GET", "/a", everything) == b"after"
    link.close()


@pytest.mark.parametrize("backend", ["httpx", "pyreqwest"])
@pytest.mark.parametrize("manner", ["finish", "drop"])
@pytest.mark.parametrize("direction", ["up", "down", "short"])
def test_a_goodbye_in_mid_transfer_is_survived(patience, backend, manner, direction):
    """A server that shuts down sends GOAWAY; what it no longer finishes is begun again."""
    body = {"up": b"fine", "down": BIG, "short": BIG[:40_000]}[direction]
    after = 10_000 if direction == "short" else 1_000_000
    with leaving(manner, body=body, after=after) as server:
        link = Connection(server.url, DEFAULTS, backend, stop=patience)
        for _ in range(2):
            sent = BIG if direction == "up" else None
            assert link.call("PUT", "/x", everything, body=sent, seconds=30) == body
        link.close()
        assert server.left.is_set() and server.connections >= 2
        assert server.received[-2:] == [len(BIG) if direction == "up" else 0] * 2
        assert len(patience.pauses) <= 2


@pytest.mark.parametrize("backend", ["httpx", "pyreqwest"])
@pytest.mark.parametrize("said", [30_000, 100_000])
def test_more_than_an_answer_said_it_has_is_not_taken(patience, backend, said):
    with leaving("finish", body=BIG[: said + 1], after=len(BIG), said=said) as server:
        link = Connection(server.url, Options(retry=Retry(tries=2)), backend, stop=patience)
        with pytest.raises(LinkError, match=r"The connection to .* broke"):
            link.call("GET", "/x", everything)
        link.close()


@pytest.mark.parametrize("backend", ["httpx", "pyreqwest"])
def test_an_answer_that_never_ends_is_refused_at_its_limit(patience, backend):
    with leaving("finish", body=BIG[:500_000], after=len(BIG), said=-1) as server:
        link = Connection(server.url, Options(retry=ONCE), backend, stop=patience)
        with pytest.raises(WireError, match="more than the 1000 bytes"):
            link.call("GET", "/x", lambda response: read(link.url, response, 1000))
        link.close()


@pytest.mark.parametrize("backend", ["httpx", "pyreqwest"])
def test_what_nobody_reads_is_closed_all_the_same(patience, backend):
    with leaving("finish", body=BIG[:500_000], after=len(BIG), said=-1) as server:
        link = Connection(server.url, DEFAULTS, backend, stop=patience)
        response = link.call("GET", "/x", lambda response: response)
        assert response.is_closed
        # Before its time is up. httpx forgets the stream and tells nobody.
        assert backend == "httpx" or server.reset.wait(5)
        link.close()


def test_nobody_is_sent_elsewhere_or_given_something_to_keep(link, puppet):
    kept = {"location": "/b", "set-cookie": "a=b"}
    puppet.will("GET /a", 302, b"", kept).will("GET /a", 200, b"", kept).will("GET /a", 200)
    with pytest.raises(LinkError, match="answered 302"):
        link.call("GET", "/a", everything)
    for _ in range(2):
        link.call("GET", "/a", everything)
    heard = puppet.heard()
    assert [request["key"] for request in heard] == ["GET /a"] * 3
    assert not any("cookie" in request["headers"] for request in heard)


def test_pauses_double_up_to_a_limit_and_are_never_quite_the_same():
    retry = Retry(first=1.0, most=10.0, most_retry_after=60.0)
    assert [retry.pause(n, chance=1.0) for n in (1, 2, 3, 4, 5, 2000)] == [1, 2, 4, 8, 10, 10]
    assert [retry.pause(n, chance=0.0) for n in (1, 2, 5)] == [0.5, 1, 5]
    assert [retry.pause(1, retry_after=30, chance=chance) for chance in (0.0, 0.5, 1.0)] == [
        30,
        37.5,
        45,
    ]
    assert retry.pause(1, retry_after=9999, chance=0.0) == 60
    assert retry.pause(4, retry_after=0.1, chance=1.0) == 8


def test_large_bodies_get_the_time_they_need():
    timeouts = Timeouts(answer=10, slowest_bytes_per_second=1_000_000)
    assert timeouts.transfer(0) == 10
    assert timeouts.transfer(500_000_000) == 510


@pytest.mark.parametrize(
    "url",
    [
        "",
        "agg.example:8443",
        "ftp://x",
        "http://",
        "http://a:b",
        "x y",
        "http://a:99999",
        "http://a:0",
    ],
)
def test_what_is_no_url_of_a_server_is_a_usage_error(url):
    with pytest.raises(SpecError, match="is not the URL of a server"):
        checked_url(url)
    assert checked_url("http://a:1/") == "http://a:1"


def test_a_url_with_a_password_is_refused_and_does_not_say_it():
    with pytest.raises(SpecError, match="a name or a password in it") as refused:
        checked_url("http://me:secret@agg.example:8443")
    assert "secret" not in refused.value.message
    with pytest.raises(SpecError, match="is not the URL") as refused:
        checked_url("ftp://me:secret@agg.example:8443")
    assert "secret" not in str(refused.value)


def test_a_link_that_was_closed_says_so(link, puppet):
    link.close()
    with pytest.raises(RuntimeError, match="is closed"):
        link.call("GET", "/there", lambda response: None)


def test_an_answer_longer_than_allowed_is_not_read_to_its_end(link, puppet):
    link.retry = Retry(tries=1)
    puppet.will("GET /long", 200, BIG)
    with pytest.raises(WireError, match="more than the 1000 bytes"):
        link.call("GET", "/long", lambda r: read(link.url, r, 1000))


def test_gone_is_told_apart(link, puppet):
    puppet.refuses("GET /old", 410, "pruned", "Version 3 is gone.")
    with pytest.raises(Gone, match="Version 3 is gone"):
        link.call("GET", "/old", everything)
