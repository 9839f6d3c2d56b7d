"""Versions, deltas and whole models are fetched over HTTP, whole or in ranges."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
from safetensors.numpy import load as load_safetensors

from diloco_cli.core.fragments import scatter
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import open_frame, read_chain
from tests.server.harness import TENSORS, in_a_loop
from tests.server.http.requests import error, served


@in_a_loop
async def test_a_version_is_announced_and_fetched_whole_or_as_deltas(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        for _ in range(3):
            await bench.round(0)
        newest = bench.state.weights.newest[0]
        said = (await client.get("/v1/fragments/0?after=1")).json()
        assert said["version"] == 3 and said["members"] == ["iowa", "paris", "tokyo"]
        assert said["merged"]["paris"] == bench.regions["paris"].prev[0]
        assert said["published"] == newest.digest

        whole = open_frame((await client.get(said["links"]["whole"])).content)
        assert (whole.values() == newest.state.published).all()
        assert whole.header.merged == said["merged"]

        first = open_frame((await client.get("/v1/fragments/1/versions/0")).content)
        assert (first.values() == bench.state.weights.newest[1].state.published).all()


@in_a_loop
async def test_a_chain_of_deltas_leads_to_the_same_bits_as_the_whole_frame(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        start = bench.state.weights.newest[0].state.published
        for _ in range(3):
            await bench.round(0)
        chain = read_chain((await client.get("/v1/fragments/0/versions/3?from=0")).content)
        assert [frame.header.version for frame in chain] == [1, 2, 3]
        held = start
        for frame in chain:
            held = held + frame.values()
        newest = bench.state.weights.newest[0]
        assert held.tobytes() == newest.state.published.tobytes()
        assert chain[-1].header.published == newest.digest
        assert chain[-1].codec == codecs.build(bench.settings.spec.wire.down)


@in_a_loop
async def test_versions_that_are_gone_say_so(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        for _ in range(10):
            await bench.round(0)
        gone = await client.get("/v1/fragments/0/versions/10?from=0")
        assert gone.status_code == 410 and "10 is the newest" in error(gone)["message"]
        assert (await client.get("/v1/fragments/0/versions/7")).status_code == 410
        assert (await client.get("/v1/fragments/0/versions/11")).status_code == 404
        assert (await client.get("/v1/fragments/0/versions/10?from=10")).status_code == 410
        latest = (await client.get("/v1/fragments/0?after=0")).json()
        assert latest["links"]["delta"] is None, "longer than the whole, and gone"
        old = await client.get("/v1/weights?version=0")
        assert old.status_code == 410
        assert (await client.get("/v1/weights?version=99")).status_code == 404


@in_a_loop
async def test_versions_are_immutable_and_come_in_ranges(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        await bench.round(0)
        await bench.round(0)
        for url in ("/v1/fragments/0/versions/2", "/v1/fragments/0/versions/2?from=0"):
            full = await client.get(url)
            assert full.status_code == 200 and "immutable" in full.headers["cache-control"]
            size, etag = len(full.content), full.headers["etag"]
            assert full.headers["content-length"] == str(size)

            async def part(asked: str, url: str = url, **headers: str) -> httpx.Response:
                return await client.get(url, headers={"range": asked, **headers})

            middle = await part("bytes=100-299")
            assert middle.status_code == 206 and middle.content == full.content[100:300]
            assert middle.headers["content-range"] == f"bytes 100-299/{size}"
            assert (await part("bytes=-7")).content == full.content[-7:]
            assert (await part(f"bytes={size - 5}-")).content == full.content[-5:]
            assert (await part(f"bytes=50-{size * 2}")).content == full.content[50:]
            beyond = await part(f"bytes={size}-")
            assert beyond.status_code == 416 and error(beyond)["code"] == "range"
            assert beyond.headers["content-range"] == f"bytes */{size}"
            assert (await part("bytes=1-2,4-5")).status_code == 200
            assert (await part("bytes=1-2", **{"if-range": '"other"'})).status_code == 200
            assert (await part("bytes=1-2", **{"if-range": etag})).status_code == 206
            known = await client.get(url, headers={"if-none-match": etag})
            assert known.status_code == 304 and known.content == b""
            head = await client.head(url)
            assert head.headers["content-length"] == str(size)


@in_a_loop
async def test_waiting_for_a_version_ends_with_it_or_with_204(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        late = await client.get("/v1/fragments/0?after=0&wait=0.01")
        assert late.status_code == 204 and late.content == b""
        waiting = asyncio.create_task(client.get("/v1/fragments/0?after=0&wait=30"))
        calls = asyncio.create_task(client.get("/v1/regions/iowa/calls?after=0&epoch=1&wait=30"))
        await bench.round(0)
        assert (await waiting).json()["version"] == 1
        assert (await calls).json()["calls"] == {"0": 0}
        bad = await client.get("/v1/regions/iowa/calls?after=x&epoch=1")
        assert bad.status_code == 400
        assert (await client.get("/v1/regions/iowa/calls?after=0&epoch=2")).status_code == 412


@in_a_loop
async def test_the_weights_are_one_safetensors_file_at_one_clock(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        await bench.round(0)
        answer = await client.get("/v1/weights")
        loaded = load_safetensors(answer.content)
        expected = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in TENSORS}
        for fragment, newest in zip(
            bench.settings.layout.fragments, bench.state.weights.newest, strict=True
        ):
            scatter(newest.state.published, fragment, expected)
        assert set(loaded) == set(expected)
        for name, values in expected.items():
            assert loaded[name].shape == values.shape
            assert loaded[name].tobytes() == values.tobytes()
        length = int.from_bytes(answer.content[:8], "little")
        metadata = json.loads(answer.content[8 : 8 + length])["__metadata__"]
        assert metadata == {
            "run": bench.run,
            "versions": "[1, 0]",
            "layout": bench.settings.layout.digest,
        }
        before = load_safetensors((await client.get("/v1/weights?version=0")).content)
        assert any((before[name] != loaded[name]).any() for name in loaded)
        await bench.round(1)
        again = load_safetensors((await client.get("/v1/weights?version=0")).content)
        assert all((before[name] == again[name]).all() for name in before)
