"""Bombs over real sockets: refused with the reason, before memory is spent, and nothing stays."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diloco_cli.bench.support.one_fragment_server import REGIONS, OneFragmentServer, stage
from diloco_cli.errors import WireError
from diloco_cli.net.client import Client
from diloco_cli.net.options import Options
from diloco_cli.server.http.listener import HTTP2
from diloco_cli.wire.frame import most_bytes
from diloco_cli.wire.messages import (
    EPOCH_HEADER,
    RUN_HEADER,
    WIRE_HEADER,
    WIRE_VERSION,
    check_value,
    contribution_path,
    join_path,
    part_path,
)
from tests.wire.forged_frames import put_together, squeezed, taken_apart, with_chunk, with_header

pytestmark = pytest.mark.live

VALUES = 100_000
MOST_GROWTH = 64 << 20
ZSTD = 0xFD2FB528


class Target:
    """A running server, and a region whose frames can be anything."""

    def __init__(self, running: OneFragmentServer) -> None:
        self.running = running
        with Client(running.url) as client:
            running.join(client)
            self.run = client.run().run
        self.headers = {
            RUN_HEADER: self.run,
            WIRE_HEADER: str(WIRE_VERSION),
            EPOCH_HEADER: str(running.epoch),
        }
        self.limit = most_bytes(VALUES, running.settings.up)

    def frame(self) -> bytes:
        return self.running.frame(self.run)

    @property
    def path(self) -> str:
        return contribution_path(0, REGIONS[0], 0, self.running.clock)

    @property
    def kept(self) -> list[str]:
        return [each.name for each in (self.running.folder / "server" / "payloads").iterdir()]

    @property
    def memory(self) -> int:
        """The most the server ever used, in bytes."""
        status = Path(f"/proc/{self.running.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with stage(VALUES) as running:
        made = Target(running)
        # Whatever a frame makes the server import and compile, it has imported then.
        with httpx.Client(base_url=running.url, trust_env=False) as client:
            middle = with_chunk(made.frame(), squeezed(bytes(4 * VALUES)) + b"\0")
            client.put(made.path, content=middle, headers=made.headers)
        yield made


@pytest.fixture(params=["HTTP/1.1", "HTTP/2"])
def client(request, target: Target) -> Iterator[httpx.Client]:
    two = request.param == "HTTP/2"
    url = target.running.url
    with httpx.Client(base_url=url, http1=not two, http2=two, trust_env=False) as made:
        yield made


def zstd_claiming(content: int, *, window: int | None = None) -> bytes:
    """A zstd frame of nothing that declares any size and any window."""
    descriptor = (3 << 6) | (0 if window else 1 << 5) | (1 << 2)
    start = struct.pack("<IB", ZSTD, descriptor)
    if window:
        start += bytes([(window.bit_length() - 1 - 10) << 3])
    return start + struct.pack("<Q", content) + b"\x01\0\0"


def many_chunks(data: bytes) -> bytes:
    fields, chunks = taken_apart(data)
    return put_together({**fields, "size": 2**40, "chunks": [50] * 100_000}, chunks)


BOMBS: dict[str, tuple[Callable[[bytes], bytes], int, str]] = {
    "a terabyte in nine bytes": (
        lambda data: with_chunk(data, zstd_claiming(1 << 40)), 400, "declares 1099511627776 bytes",
    ),
    "256 megabytes in eight kilobytes": (
        lambda data: with_chunk(data, squeezed(bytes(256 << 20))), 400, "declares 268435456 bytes",
    ),
    "a window of 2 GiB": (
        lambda data: with_chunk(data, zstd_claiming(4 * VALUES, window=1 << 31)), 400, "window",
    ),
    "a trillion values": (lambda data: with_header(data, size=2**40), 400, "values need"),
    "a hundred thousand chunks": (many_chunks, 400, "has 100000 chunks"),
    "a second zstd frame": (
        lambda data: with_chunk(data, 2 * squeezed(bytes(4 * VALUES))), 422, "does not decompress",
    ),
    "a byte after the zstd frame": (
        lambda data: with_chunk(data, squeezed(bytes(4 * VALUES)) + b"\0"), 422, "not decompress",
    ),
    "a second frame": (lambda data: data + data, 400, "are here"),
    "a byte after the frame": (lambda data: data + b"\0", 400, "are here"),
    "half of the frame": (lambda data: data[: len(data) // 2], 400, "are here"),
    "a flipped bit": (
        lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], 400, "hashes to",
    ),
    "a frame of nothing": (lambda data: b"", 400, "too few"),
}  # fmt: skip


def refused(answer: httpx.Response, status: int, why: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert why in error["message"] and error["hint"], error


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_with_its_reason_and_leaves_nothing(target, client, bomb):
    make, status, why = BOMBS[bomb]
    data = make(target.frame())
    before = target.memory
    refused(client.put(target.path, content=data, headers=target.headers), status, why)
    assert target.kept == []
    assert target.memory - before < MOST_GROWTH


def test_a_json_body_without_an_end_is_refused(target, client):
    answer = client.post(join_path(REGIONS[0]), content=b" " * 70_000, headers=target.headers)
    refused(answer, 413, "at most 66048")


@pytest.mark.parametrize(
    "said, status, why",
    [
        ({"digest": "crc32:00000000"}, 400, "has the digest"),
        ({"size": 1 << 40}, 413, "at most"),
        ({"size": 10}, 400, "are no part"),
        ({"frame": "../../../etc/passwd"}, 400, "needs a SHA-256"),
    ],
)
def test_a_part_that_lies_is_refused(target, client, said, status, why):
    data = target.frame()
    part = data[:5000]
    query: dict[str, Any] = {
        "size": len(data),
        "frame": data[-32:].hex(),
        "digest": check_value(zlib.crc32(part)),
        **said,
    }
    answer = client.put(part_path(target.path, 0, **query), content=part, headers=target.headers)
    refused(answer, status, why)


curl = shutil.which("curl")


@pytest.mark.skipif(curl is None, reason="there is no curl here")
@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
@pytest.mark.parametrize("length", ["said", "endless"])
def test_curl_reads_why_its_body_is_too_long(target, tmp_path, version, length):
    target.frame()
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(200_000_000)
    source = "-" if length == "endless" else str(large)
    headers = [f"-H{key}: {value}" for key, value in target.headers.items()]
    before = target.memory
    with open("/dev/zero", "rb") as zeros:
        done = subprocess.run(
            [str(curl), "-sS", version, "-w", "\n%{http_code}", *headers, "-T", source,
             target.running.url + target.path],
            stdin=zeros, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    body, code = done.stdout.rsplit("\n", 1)
    assert code == "413" and f"at most {target.limit} are expected" in body
    assert target.kept == []
    # What is on the way before it is refused: as much as the window of a stream allows.
    assert target.memory - before < MOST_GROWTH + HTTP2.initial_stream_window_size


@pytest.mark.parametrize("backend", ["pyreqwest", "httpx"])
def test_our_own_client_says_why(target, backend):
    target.frame()
    with Client(target.running.url, Options(backend=backend), run=target.run) as client:
        client.run()
        path, headers = target.path, {**client.headers(), **target.headers}
        with pytest.raises(WireError, match=f"30000000 bytes or more, at most {target.limit}"):
            client.lane(0).call(
                "PUT", path, lambda answer: None, body=bytes(30_000_000), headers=headers
            )
