"""`/healthz` for probes that can show no credential: one path, one answer, and no data."""

from __future__ import annotations

import asyncio

from diloco_cli.server.http import health
from diloco_cli.server.http.health import MOST_AT_ONCE, HealthPort
from diloco_cli.server.http.listener import bind
from diloco_cli.system.files import DiskFull
from tests.server.harness import in_a_loop, joined

FULL = DiskFull("x needs 67 free bytes and has 3.", hint="Free some space.")


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


@in_a_loop
async def test_it_says_whether_contributions_can_be_acknowledged_and_nothing_else(tmp_path):
    bench = await joined(tmp_path)
    taken = bind("127.0.0.1:0", key="server.health")
    number = taken.getsockname()[1]
    port = HealthPort(bench.state, taken)
    await port.start()
    try:
        probe = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        well = await ask(number, probe)
        assert well.startswith(b"HTTP/1.1 200 ") and b'"ok": true' in well
        bench.state.disk_full("version", FULL)
        ill = await ask(number, probe)
        assert ill.startswith(b"HTTP/1.1 503 ") and b"67 free bytes" in ill
        for other in (b"GET /metrics HTTP/1.1", b"POST /healthz HTTP/1.1", b"nonsense"):
            assert (await ask(number, other + b"\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert await ask(number, b"GET /" + b"x" * 70_000) == b"", "it reads no more than a head"
    finally:
        await port.end()


@in_a_loop
async def test_callers_beyond_the_most_are_turned_away_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "SECONDS", 600.0)
    bench = await joined(tmp_path)
    taken = bind("127.0.0.1:0", key="server.health")
    number = taken.getsockname()[1]
    port = HealthPort(bench.state, taken)
    await port.start()
    silent, before = [], len(asyncio.all_tasks())
    try:
        silent = [await asyncio.open_connection("127.0.0.1", number) for _ in range(MOST_AT_ONCE)]
        # One that waited for its turn would keep a descriptor, and strangers could take them all.
        async with asyncio.timeout(30):
            assert await ask(number, b"") == b""
    finally:
        for _, writer in silent:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.01)
        await port.end()
