"""Which way to the newest version is shorter, and which bytes of the weights one still needs."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import numpy as np
import pytest

from diloco_cli.server.http.handlers import MOST_MODELS
from diloco_cli.server.versions import newest as weights_module
from diloco_cli.server.versions.export import InMemory, ModelDownload
from diloco_cli.server.versions.newest import WORTH_BYTES
from diloco_cli.server.versions.send import ImmutableResource
from diloco_cli.wire.frame import open_frame, read_chain
from diloco_cli.wire.messages import version_path
from tests.server.harness import in_a_loop, make_settings
from tests.server.http.requests import served


@in_a_loop
async def test_a_region_gets_the_chain_or_the_whole_whichever_is_shorter(tmp_path, monkeypatch):
    """Every way back, on a model so small that both happen; the bits are the same on either."""
    monkeypatch.setattr(weights_module, "WORTH_BYTES", 0)
    async with served(tmp_path, joined=True) as (bench, client):
        start = bench.state.weights.newest[0].state.published
        for _ in range(4):
            await bench.round(0)
        whole = (await client.get(version_path(0, 4))).content
        expected = open_frame(whole).values()
        seen = set()
        for since in range(4):
            chain = bench.state.weights.chain(0, since, 4)
            assert chain is not None
            answer = await client.get(version_path(0, 4, since=since))
            seen.add(answer.status_code)
            if chain.size <= len(whole):
                assert answer.status_code == 200 and len(answer.content) == chain.size
            else:
                assert answer.status_code == 410
                said = answer.json()["error"]["message"]
                assert f"{chain.size} bytes" in said and f"whole fragment has {len(whole)}" in said
            if since == 0:
                deltas = read_chain(b"".join(chain.read(0, chain.size)))
                for delta in deltas:
                    start = start + delta.values()
                np.testing.assert_array_equal(start, expected)
        assert seen == {200, 410}


@in_a_loop
async def test_the_whole_must_be_shorter_by_what_asking_again_costs(tmp_path):
    async with served(tmp_path, joined=True) as (bench, _):
        await bench.round(0)
        weights, blobs = bench.state.weights, bench.state.store.blobs
        whole = await weights.whole(0, 1)
        assert whole is not None
        for more, expected in ((0, None), (WORTH_BYTES, None), (WORTH_BYTES + 1, whole)):
            chain = ImmutableResource(blobs, (("chain", whole.size + more),), "")
            assert await weights.shorter(0, 1, chain) is expected
        older = ImmutableResource(blobs, (("chain", 10 * WORTH_BYTES),), "")
        assert await weights.shorter(0, 0, older) is None, "no longer there as a whole"


@in_a_loop
async def test_weights_come_in_ranges_that_fit_together(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        await bench.round(0)
        full = await client.get("/v1/weights")
        size, etag = len(full.content), full.headers["etag"]
        assert full.headers["accept-ranges"] == "bytes"
        for start, stop in ((0, 7), (5, 9), (8, size), (size - 40, size), (100, 2000)):
            asked = {"range": f"bytes={start}-{stop - 1}", "if-range": etag}
            part = await client.get("/v1/weights", headers=asked)
            assert part.status_code == 206 and part.content == full.content[start:stop]
        again = await client.get("/v1/weights", headers={"if-none-match": etag})
        assert again.status_code == 304


@in_a_loop
async def test_other_weights_are_sent_from_their_beginning(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        before = await client.get("/v1/weights")
        await bench.round(0)
        asked = {"range": "bytes=100-", "if-range": before.headers["etag"]}
        after = await client.get("/v1/weights", headers=asked)
        assert after.status_code == 200 and after.headers["etag"] != before.headers["etag"]
        pinned = await client.get("/v1/weights?version=0", headers=asked)
        assert pinned.status_code == 206 and pinned.content == before.content[100:]


def test_other_bits_under_the_same_versions_have_another_etag():
    """As on a server that was restored from a copy and went on from there."""
    settings = make_settings()
    taken = [(3, InMemory(np.zeros(size, np.float32))) for size in settings.sizes]
    made = [ModelDownload(settings.layout, "r", taken, [digest] * 2) for digest in ("a", "b", "a")]
    assert made[0].etag == made[2].etag != made[1].etag


@in_a_loop
@pytest.mark.parametrize(
    "path, headers, status",
    [
        ("/v1/weights", {"range": f"bytes={'9' * 5000}-"}, 200),
        ("/v1/weights", {"range": "bytes=999999999-"}, 416),
        ("/v1/fragments/0/versions/0", {"range": f"bytes=0-{'9' * 5000}"}, 200),
        (f"/v1/fragments/{'9' * 5000}", {}, 404),
        (f"/v1/fragments/0/versions/{'9' * 5000}", {}, 404),
        (f"/v1/weights?version={'9' * 5000}", {}, 400),
        (f"/v1/fragments/0?after={'9' * 5000}", {}, 400),
        ("/v1/fragments/0?after=-1&wait=nan", {}, 200),
    ],
)
async def test_numbers_of_thousands_of_digits_fail_nothing(tmp_path, path, headers, status):
    async with served(tmp_path, joined=True) as (_, client):
        answer = await client.get(path, headers=headers)
        assert answer.status_code == status, answer.text[:300]


@in_a_loop
async def test_only_so_many_whole_models_are_sent_at_a_time(tmp_path):
    async with served(tmp_path, joined=True) as (_, client):
        app: Any = client._transport.app  # type: ignore[attr-defined]
        go, sending = asyncio.Event(), []

        async def slowly(message: Any) -> None:
            sending.append(message["type"])
            await go.wait()

        slow = [asyncio.create_task(_asked(app, slowly)) for _ in range(MOST_MODELS)]
        while len(sending) < MOST_MODELS:
            await asyncio.sleep(0)
        busy = await client.get("/v1/weights")
        assert busy.status_code == 503 and busy.headers["retry-after"]
        go.set()
        await asyncio.gather(*slow)
        assert (await client.get("/v1/weights")).status_code == 200


async def _asked(app: Any, send: Any) -> None:
    """A request for the weights whose answer is taken in as `send` does."""
    scope = {"type": "http", "method": "GET", "path": "/v1/weights", "query_string": b""}
    silence = asyncio.Event()

    async def receive() -> Any:
        await silence.wait()

    await app({**scope, "headers": [], "http_version": "2", "client": None}, receive, send)


@in_a_loop
async def test_a_frame_that_the_cache_has_no_room_for_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with served(tmp_path, joined=True) as (_, client):
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", full)
            assert (await client.get(version_path(0, 0))).status_code == 507
        assert not list(tmp_path.rglob("*.whole*"))
        assert (await client.get(version_path(0, 0))).status_code == 200


@in_a_loop
async def test_a_frame_that_was_overtaken_while_it_was_encoded_leaves_nothing(tmp_path):
    async with served(tmp_path, joined=True) as (bench, client):
        weights = bench.state.weights
        async with weights._turn:  # As while the frame of another fragment is encoded.
            asked = asyncio.create_task(client.get(version_path(0, 0)))
            while (0, 0) not in weights._encoding:
                await asyncio.sleep(0)
            for _ in range(3):
                await bench.round(0)
        answer = await asked
        assert answer.status_code == 410 and "3 is the newest" in answer.text
        assert not list(tmp_path.rglob("*.whole*"))
        assert (await client.get(version_path(0, 3))).status_code == 200
        assert len(list(tmp_path.rglob("*.whole"))) == 1
