"""Over HTTP every call of the contract answers as it promises, and every "no" in words."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from diloco_cli.core.guard import Norms
from diloco_cli.core.journal_records import RoundClosed
from diloco_cli.core.rounds import Answer, Foreign, Receipt
from diloco_cli.server.http.asgi import make_app
from diloco_cli.server.http.calls import CALLS
from diloco_cli.server.intake import intake
from diloco_cli.server.intake.body import LINGER_BYTES
from diloco_cli.server.store import group_commit
from diloco_cli.system.files import DiskFull
from diloco_cli.wire.frame import most_bytes, open_frame, pack
from diloco_cli.wire.messages import EPOCH_HEADER, RUN_HEADER, WIRE_HEADER, contribution_path
from tests.server.harness import TENSORS, in_a_loop, joined
from tests.server.http.requests import error, put, served


@in_a_loop
async def test_a_region_joins_reports_and_contributes(tmp_path):
    async with served(tmp_path) as (bench, client):
        region = bench.regions["paris"]
        joined = await client.post("/v1/regions/paris/join", content=region.join.body())
        assert joined.status_code == 200
        assert joined.json() | {"epoch": 1, "high": -1, "versions": [0, 0]} == joined.json()
        region.epoch = 1
        beat = await client.post("/v1/regions/paris/heartbeat", content=region.beat(3).body())
        assert beat.status_code == 200 and beat.json()["lease_seconds"] == 10.0
        frame = region.frame(1)
        first = await put(client, frame)
        assert first.status_code == 201 and first.json()["fate"] == "pending"
        again = await put(client, frame)
        assert again.status_code == 200
        assert again.json() | {"fate": "pending", "recorded": True} == again.json()
        assert bench.state.store.payloads() == {open_frame(frame).digest}


@in_a_loop
async def test_the_run_says_what_all_regions_must_share(tmp_path):
    async with served(tmp_path) as (bench, client):
        run = (await client.get("/v1/run")).json()
        assert run["run"] == bench.run and run["wire"] == 1
        assert run["fragments"] == bench.settings.sizes
        assert run["settings"]["sync"]["every"] == 6


@in_a_loop
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/nothing", "/v1/fragments/2", "/v1/fragments/x", "/v1/fragments/0/versions/1"),
        *("/healthz/", "/v1//status", "/v1/status/"),
    ],
)
async def test_what_does_not_exist_is_404_in_words(tmp_path, path):
    async with served(tmp_path) as (_, client):
        answer = await client.get(path)
        assert answer.status_code == 404 and error(answer)["code"] == "not-found"


@in_a_loop
async def test_a_wrong_method_is_405_in_words(tmp_path):
    async with served(tmp_path) as (_, client):
        answer = await client.delete("/v1/status")
        assert answer.status_code == 405 and error(answer)["code"] == "not-allowed"
        assert "GET" in answer.headers["allow"]


@in_a_loop
async def test_a_bug_is_500_in_words(tmp_path, monkeypatch, caplog):
    async with served(tmp_path) as (bench, client):
        monkeypatch.setattr(bench.state.spec.__class__, "name", None, raising=False)
        monkeypatch.setattr(bench.server, "wait_version", lambda *_, **__: 1 / 0)
        answer = await client.get("/v1/fragments/0")
        assert answer.status_code == 500 and "ZeroDivisionError" in error(answer)["message"]
        (line,) = [line for line in caplog.records if line.levelname == "ERROR"]
        assert line.getMessage() == "fragment failed" and line.exc_info
        assert vars(line)["peer"] == "127.0.0.1"


@in_a_loop
async def test_every_region_call_names_this_run_and_this_wire_version(tmp_path):
    async with served(tmp_path) as (bench, client):
        body = bench.regions["paris"].join.body()

        async def join(**headers: str) -> httpx.Response:
            return await client.post("/v1/regions/paris/join", content=body, headers=headers)

        other = await join(**{RUN_HEADER: "another"})
        assert other.status_code == 409 and error(other)["code"] == "other-run"
        newer = await join(**{WIRE_HEADER: "3"})
        assert newer.status_code == 426 and newer.json()["wire"] == 1
        del client.headers[WIRE_HEADER]
        assert (await join()).status_code == 426
        client.headers[WIRE_HEADER] = "1"
        del client.headers[RUN_HEADER]
        assert (await join()).status_code == 400
        assert bench.state.ledger.regions == {}


@in_a_loop
async def test_nonsense_in_json_is_400_and_names_the_key(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        for body in (b"", b"{", b"[]", b'{"owner": 3}', b"\xff" * 10):
            answer = await client.post("/v1/regions/paris/join", content=body)
            assert answer.status_code == 400 and error(answer)["code"] == "bad-request"
        beat = json.loads(bench.regions["paris"].beat().body())
        beat["tokens"]["applied"] = [1.0]
        answer = await client.post("/v1/regions/paris/heartbeat", json=beat)
        assert answer.status_code == 400 and "tokens.applied" in error(answer)["message"]


@in_a_loop
async def test_long_json_is_413_before_it_is_read(tmp_path):
    async with served(tmp_path) as (_, client):
        answer = await client.post("/v1/regions/paris/join", content=b" " * 70_000)
        assert answer.status_code == 413

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(1000):
                yield b" " * 100_000
            raise AssertionError("read to the end")

        answer = await client.post("/v1/regions/paris/join", content=endless())
        assert answer.status_code == 413


@in_a_loop
async def test_a_body_longer_than_the_fragment_allows_is_413(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        limit = most_bytes(bench.settings.sizes[0], bench.settings.up)
        path = contribution_path(0, "paris", 0, 1)
        read = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal read
            while True:
                read += 1 << 16
                yield b"x" * (1 << 16)

        answer = await put(client, endless(), path=path)
        assert answer.status_code == 413 and limit < read < limit + LINGER_BYTES + (1 << 18)
        read = 0
        answer = await put(client, endless(), path=path, length=limit + 1)
        assert answer.status_code == 413 and read <= LINGER_BYTES + (1 << 16)
        assert list((tmp_path / "server" / "payloads").iterdir()) == []


@in_a_loop
async def test_damaged_bytes_are_400_and_decide_nothing(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        frame = bench.regions["paris"].frame(0)
        path = contribution_path(0, "paris", 0, 1)
        for bit in (0, 100, len(frame) * 4, len(frame) * 8 - 1):
            flipped = bytearray(frame)
            flipped[bit // 8] ^= 1 << bit % 8
            answer = await put(client, bytes(flipped), path=path)
            assert answer.status_code == 400 and error(answer)["code"] == "damaged"
        for cut in (frame[:-1], frame + b"\0", frame + frame, b""):
            assert (await put(client, cut, path=path)).status_code == 400
        assert (await put(client, frame)).status_code == 201


@in_a_loop
async def test_a_frame_that_is_not_what_its_url_says_is_422(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        paris = bench.regions["paris"]
        other: dict[str, Any] = {"layout": "0" * 64, "run": "else", "codec": {"kind": "bf16"}}
        for key, value in other.items():
            answer = await put(client, paris.frame(0, **{key: value}))
            assert answer.status_code == 422 and f"frame's {key} is" in answer.json()["why"]
            assert answer.json()["fate"] == "refused"
        frame = paris.frame(0)
        for path in (
            contribution_path(1, "paris", 0, paris.clock),
            contribution_path(0, "tokyo", 0, paris.clock),
            contribution_path(0, "paris", 1, paris.clock),
            contribution_path(0, "paris", 0, paris.clock + 1),
        ):
            assert (await put(client, frame, path=path)).status_code == 422
        assert bench.state.ledger.slots[0].decided == {}, "nothing is held against the region"


@in_a_loop
async def test_claims_that_cannot_be_true_are_422(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        lies: list[dict[str, Any]] = [{"tokens": 1e15}, {"tokens": 0.0}, {"steps": 0.5}]
        for lie in lies:
            answer = await put(client, bench.regions["paris"].frame(0, **lie))
            assert answer.status_code == 422 and "it claims" in answer.json()["why"]
        assert bench.state.ledger.slots[0].waiting == {}


@in_a_loop
async def test_content_that_is_unfit_is_422_and_names_the_tensor(tmp_path, monkeypatch):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        real = np.random.default_rng

        class Absurd:
            def normal(self, size: int) -> np.ndarray:
                values = real(1).normal(size=size)
                values[20] = 1e30
                return values

        monkeypatch.setattr(np.random, "default_rng", lambda seed: Absurd())
        frame = bench.regions["paris"].frame(0)
        monkeypatch.undo()
        answer = await put(client, frame)
        assert answer.status_code == 422 and answer.json()["fate"] == "refused"
        assert any(tensor.name in answer.json()["why"] for tensor in TENSORS)
        assert bench.state.store.payloads() == set()
        again = await put(client, frame)
        assert again.status_code == 200 and again.json()["fate"] == "refused"


@in_a_loop
async def test_a_sudden_giant_is_refused_once_the_usual_norm_is_known(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        for _ in range(3):
            await bench.call(0)
            for region in bench.regions.values():
                assert (await put(client, region.frame(0))).status_code == 201
            await bench.settle()
        giant = bench.regions["paris"]
        header = open_frame(giant.frame(0)).header
        values = np.full(header.size, 30.0, np.float32)
        answer = await put(client, pack(header, values))
        assert answer.status_code == 422 and "the usual one here" in answer.json()["why"]


@in_a_loop
async def test_the_other_fates_of_a_contribution(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        frame = bench.regions["paris"].frame(0)
        fenced = await put(client, frame, epoch=7)
        assert fenced.status_code == 412 and error(fenced)["code"] == "fenced"
        nameless = await client.put(contribution_path(0, "paris", 0, 1), content=frame)
        assert nameless.status_code == 400 and EPOCH_HEADER in error(nameless)["message"]
        ahead = await put(client, bench.regions["paris"].frame(0, base=4, version=4))
        assert ahead.status_code == 409 and error(ahead)["code"] == "server-behind"
        assert "fate" not in ahead.json()
        foreign = await put(client, bench.regions["paris"].frame(0, prev="c" * 64))
        assert foreign.status_code == 409
        assert foreign.json() | {"fate": "foreign", "merged": ""} == foreign.json()
        assert bench.state.store.payloads() == set()


@in_a_loop
async def test_without_room_nothing_is_kept_and_the_answer_is_507(tmp_path, monkeypatch):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        frame = bench.regions["paris"].frame(0)

        def full(*_: Any, **__: Any) -> None:
            raise DiskFull("There is no room left.", hint="Free some space.")

        for method in ("draft_payload", "keep_payload"):
            with monkeypatch.context() as patch:
                patch.setattr(bench.state.store, method, full)
                answer = await put(client, frame)
            assert answer.status_code == 507 and error(answer)["hint"] == "Free some space."
            assert "retry-after" in answer.headers
            assert bench.state.ledger.slots[0].waiting == {}
            assert list((tmp_path / "server" / "payloads").iterdir()) == []
        assert (await put(client, frame)).status_code == 201


@in_a_loop
async def test_a_disk_mounted_read_only_is_503_until_it_is_mounted_for_writing(
    tmp_path, monkeypatch
):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        frame = bench.regions["paris"].frame(0)

        def read_only(*_: Any) -> int:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(group_commit, "RETRY_SECONDS", 0.01)
        for call in ("pwritev", "pwrite"):  # The payload's first byte, the journal's record.
            with monkeypatch.context() as patch:
                patch.setattr(os, call, read_only)
                answer = await put(client, frame)
            assert answer.status_code == 503 and error(answer)["code"] == "read-only"
            assert "retry-after" in answer.headers
            assert "goes on by itself" in error(answer)["hint"]
            assert bench.state.failure is None
        await bench.server.publisher.settled()
        assert (await put(client, frame)).status_code in (200, 201)
        assert bench.state.ledger.slots[0].waiting.keys() == {"paris"}


@in_a_loop
async def test_too_many_uploads_at_once_are_told_to_wait(tmp_path, monkeypatch):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        monkeypatch.setattr(intake, "MOST_UPLOADS", 1)
        monkeypatch.setattr(intake, "SMALL_BYTES", 0)
        first, second = (bench.regions[name].frame(0) for name in ("paris", "tokyo"))
        begun, gate = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield first[:10]
            begun.set()
            await gate.wait()
            yield first[10:]

        path = contribution_path(0, "paris", 0, 1)
        uploading = asyncio.create_task(put(client, slow(), path=path))
        await begun.wait()
        busy = await put(client, second)
        assert busy.status_code == 503 and busy.headers["retry-after"] == "2"
        # Many that are small together are no reason to wait.
        monkeypatch.setattr(intake, "SMALL_BYTES", 256 << 20)
        assert (await put(client, second)).status_code == 201
        gate.set()
        assert (await uploading).status_code == 201


@in_a_loop
async def test_an_upload_that_falls_silent_is_given_up(tmp_path, monkeypatch):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        monkeypatch.setattr(intake, "SILENCE_SECONDS", 0.01)

        async def silent() -> AsyncIterator[bytes]:
            yield b"x"
            await asyncio.Event().wait()

        answer = await put(client, silent(), path=contribution_path(0, "paris", 0, 1))
        assert answer.status_code == 408
        assert list((tmp_path / "server" / "payloads").iterdir()) == []


@in_a_loop
async def test_the_same_frame_twice_at_once_is_kept_once_and_not_lost(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        frame = bench.regions["paris"].frame(0)
        answers = await asyncio.gather(*(put(client, frame, epoch=epoch) for epoch in (1, 7, 1, 1)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 201, 412]
        assert bench.state.store.payloads() == {open_frame(frame).digest}


@in_a_loop
async def test_a_payload_that_one_answer_gives_up_stays_for_the_other(tmp_path, monkeypatch):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        frame = bench.regions["paris"].frame(0)
        store, kept, dropping = bench.state.store, threading.Event(), asyncio.Event()
        loop, calls = asyncio.get_running_loop(), 0
        real, keep, drop = bench.server.submit, store.keep_payload, store.drop_payloads

        async def submit(receipt: Receipt, **said: Any) -> Answer:
            nonlocal calls
            calls += 1
            return Foreign("a rival was faster") if calls == 1 else await real(receipt, **said)

        def slow_drop(digests: Iterable[str]) -> None:
            loop.call_soon_threadsafe(dropping.set)
            kept.wait(0.5)  # The other upload could be that fast, if it were let.
            drop(digests)

        monkeypatch.setattr(bench.server, "submit", submit)
        monkeypatch.setattr(store, "drop_payloads", slow_drop)
        first = asyncio.create_task(put(client, frame))
        await dropping.wait()
        monkeypatch.setattr(store, "keep_payload", lambda *what: (keep(*what), kept.set()))
        second = await put(client, frame)
        assert ((await first).status_code, second.status_code) == (409, 201)
        assert store.payloads() == {open_frame(frame).digest}


@in_a_loop
async def test_nothing_is_accepted_unseen_although_its_way_became_free(tmp_path, monkeypatch):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        bench.state.ledger.slots[0].norms = Norms((0.1,) * 8)
        paris, loop = bench.regions["paris"], asyncio.get_running_loop()
        assert (await put(client, paris.frame(0))).status_code == 201
        bench.state.record(RoundClosed(0, 0, ("paris",), drain=False))
        giant = open_frame(paris.frame(0))
        giant = pack(giant.header, 1e6 * giant.values())
        keep = bench.state.store.keep_payload

        def keep_while_the_other_is_dropped(*what: Any) -> None:
            gone = {"fragment": 0, "region": "paris", "fate": "returned", "why": "unreadable"}
            done = threading.Event()
            drop = partial(bench.state.record, "dropped", **gone)
            loop.call_soon_threadsafe(lambda: (drop(), done.set()))
            assert done.wait(10)
            keep(*what)

        monkeypatch.setattr(bench.state.store, "keep_payload", keep_while_the_other_is_dropped)
        assert (await put(client, giant)).status_code in (409, 422)
        assert "paris" not in bench.state.ledger.slots[0].waiting


@in_a_loop
async def test_a_stop_needs_a_header_that_no_web_page_can_send(tmp_path):
    async with served(tmp_path) as (bench, client):
        del client.headers[WIRE_HEADER]
        assert (await client.post("/v1/stop")).status_code == 426
        assert not bench.state.stopping
        answer = await client.post("/v1/stop", headers={WIRE_HEADER: "1"})
        assert answer.status_code == 202 and bench.state.stopping


@in_a_loop
async def test_after_the_end_new_requests_are_turned_away_and_waiting_ones_released(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join()
        waiting = asyncio.create_task(client.get("/v1/fragments/0?after=0&wait=60"))
        app: Any = client._transport.app  # type: ignore[attr-defined]
        while not app.under_way:
            await asyncio.sleep(0)
        bench.state.close()
        assert (await waiting).status_code == 204
        late = await client.get("/v1/status")
        assert late.status_code == 503 and late.headers["retry-after"] == "5"
        assert error(late)["code"] == "closing"


@pytest.mark.parametrize(
    "asked, after",
    [
        ({}, None),
        ({"params": {"after": "0"}}, "0"),
        ({"headers": {"last-event-id": "0123456789ab-77"}}, "0123456789ab-77"),
        ({"params": {"after": "5"}, "headers": {"last-event-id": "7"}}, "5"),
    ],
)
@in_a_loop
async def test_events_are_streamed_after_the_id_that_was_asked_for(
    tmp_path, monkeypatch, asked, after
):
    begun = []

    async def tail(path: Path, after: str | None, state: Any) -> AsyncIterator[bytes]:
        begun.append((path.name, after))
        yield b": diloco events\n\n"

    monkeypatch.setattr("diloco_cli.server.http.handlers.tail", tail)
    async with served(tmp_path) as (_, client):
        answer = await client.get("/v1/events", **asked)
        assert answer.headers["content-type"].startswith("text/event-stream")
    assert begun == [("events.jsonl", after)]


@in_a_loop
async def test_people_find_status_metrics_health_and_a_page(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join("paris", "tokyo")
        await bench.round(0, "paris", "tokyo")
        said = (await client.get("/v1/status")).json()
        keys = {"run", "url", "state", "clock", "outer_steps", "tokens", "loss", "wire", "goodput"}
        assert keys <= set(said) and said["url"] == "http://here" and said["state"] == "training"
        assert {"budget", "applied", "pending", "refused", "discarded"} <= set(said["tokens"])
        paris = next(each for each in said["regions"] if each["name"] == "paris")
        assert paris["alive"] and paris["contributing"] and paris["share"] == 0.5
        iowa = next(each for each in said["regions"] if each["name"] == "iowa")
        assert not iowa["alive"] and "not joined yet" in iowa["why"]
        assert said["wire"]["bits_per_parameter_up"] > 4
        metrics = (await client.get("/metrics")).text
        assert 'diloco_region_alive{region="paris"} 1.0' in metrics
        assert (await client.get("/healthz")).json()["ok"] is True
        shown = await client.get("/")
        assert "trial: training</title>" in shown.text
        assert "default-src 'none'" in shown.headers["content-security-policy"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@in_a_loop
async def test_promtool_takes_the_metrics_of_a_server_that_has_made_a_round(tmp_path):
    async with served(tmp_path) as (bench, client):
        await bench.join("paris", "tokyo")
        await bench.round(0, "paris", "tokyo")
        metrics = (await client.get("/metrics")).text
    words = ["promtool", "check", "metrics"]
    done = subprocess.run(words, input=metrics, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr


@in_a_loop
async def test_a_server_that_can_acknowledge_nothing_is_not_healthy_and_says_why(tmp_path):
    async with served(tmp_path) as (bench, client):
        bench.state.disk_full("journal", DiskFull("x has 3 free bytes.", hint="Free some space."))
        answer = await client.get("/healthz")
        assert answer.status_code == 503 and answer.json()["ok"] is False
        assert answer.json()["trouble"] == "x has 3 free bytes. Free some space."
        bench.state.disk_has_room("journal")
        assert (await client.get("/healthz")).status_code == 200


@in_a_loop
async def test_every_route_is_described(tmp_path):
    async with served(tmp_path) as (_, client):
        described = (await client.get("/openapi.json")).json()
        app: Any = client._transport.app.app  # type: ignore[attr-defined]
        found = {
            (route.path.replace(":number", ""), method.lower())
            for route in app.routes
            for method in route.methods - {"HEAD"}
        }
        listed = {(path, method) for path, calls in described["paths"].items() for method in calls}
        assert found == listed and len(found) == len(CALLS)
        for calls in described["paths"].values():
            for call in calls.values():
                assert call["summary"] and call["responses"]


@in_a_loop
async def test_json_bodies_are_described_by_the_messages_that_parse_them(tmp_path):
    async with served(tmp_path) as (_, client):
        described = (await client.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    for name, path in (("Join", "join"), ("Heartbeat", "heartbeat")):
        operation = described["paths"][f"/v1/regions/{{region}}/{path}"]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert schemas[name]["additionalProperties"] is False
    assert "owner" in schemas["Join"]["required"]
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
    assert used == set(schemas)


@pytest.mark.parametrize("hosts, status", [(0, 400), (1, 404), (2, 400)])
@in_a_loop
async def test_a_request_of_http_1_1_names_its_host_once(tmp_path, hosts, status):
    bench = await joined(tmp_path)
    app = make_app(bench.server, events=tmp_path / "events.jsonl", url=lambda: "http://h:1")
    answered: list[int] = []

    async def send(message):
        answered.extend([message["status"]] if "status" in message else [])

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": "/nothing",
        "query_string": b"",
        "headers": [(b"host", b"h")] * hosts,
        "client": ("127.0.0.1", 9),
    }
    await app(scope, receive, send)
    assert answered == [status]
