"""The average of the published weights: part of the state, so restarts and replays have it."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from diloco_cli.core.fragments import scatter
from diloco_cli.core.ledger import Ledger
from diloco_cli.merge.optimizers import averaged
from diloco_cli.server.access.tokens import TokenEntry, TokenList, hash_of, keep_entries
from diloco_cli.server.build_status import build_status
from diloco_cli.server.http.asgi import make_app
from diloco_cli.server.recovery.verify import replay
from diloco_cli.server.store.state_format import StoredState, decode, encode
from tests.server.harness import TENSORS, Bench, in_a_loop, joined, make_settings, make_spec
from tests.server.http.requests import served

KEPT = {"kind": "nesterov", "ema": 0.5}


def test_it_remembers_a_share_of_the_rounds_so_far():
    average, seen = None, []
    for version in range(1, 9):
        published = np.full(5, float(version), np.float32)
        average = averaged(average, published, version, share=0.5)
        seen.append(float(average[0]))
    expected = [1.0, 2.0]
    for version in range(3, 9):
        expected.append(expected[-1] + (version - expected[-1]) / (0.5 * version))
    assert seen == pytest.approx(expected, rel=1e-6)


def test_a_state_with_an_average_is_another_and_one_without_is_as_ever():
    vectors = [np.full(4, value, np.float32) for value in (1.0, 2.0, 3.0, 4.0)]
    plain, kept = StoredState(*vectors[:3]), StoredState(*vectors)
    assert plain.digest != kept.digest
    for state in (plain, kept):
        data = b"".join(bytes(part) for part in encode(state, {"a": "b"}))
        again, metadata = decode(memoryview(data))
        assert again.digest == state.digest and metadata == {"a": "b"}
        assert (again.average is None) == (state.average is None)


def expected(bench: Bench) -> dict[str, np.ndarray]:
    weights = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in TENSORS}
    for fragment, newest in zip(
        bench.settings.layout.fragments, bench.state.weights.newest, strict=True
    ):
        average = newest.state.average
        assert average is not None
        scatter(average, fragment, weights)
    return weights


@in_a_loop
async def test_it_is_kept_through_restarts_and_replayed_to_the_bit(tmp_path):
    bench = await joined(tmp_path, make_spec(outer=KEPT))
    by_hand: list[np.ndarray | None] = [None, None]
    for number in range(1, 4):
        for fragment in range(2):
            await bench.round(fragment)
            state = bench.state.weights.newest[fragment].state
            by_hand[fragment] = averaged(by_hand[fragment], state.published, number, share=0.5)
            assert state.average is not None
            np.testing.assert_array_equal(state.average, by_hand[fragment])
            assert not np.array_equal(state.average, state.published) or number <= 2
    before = expected(bench)
    bench.restart()
    for name, values in expected(bench).items():
        np.testing.assert_array_equal(values, before[name])
    found = replay(bench.settings, tmp_path / "server")
    assert [line.version for line in found.lines] == [3, 3]


@in_a_loop
async def test_its_held_out_loss_is_kept_beside_that_of_the_weights(tmp_path):
    bench = await joined(tmp_path, make_spec(outer=KEPT, evaluate={"region": "iowa"}))
    assert bench.server.news("iowa").ema
    for fragment in (0, 1):
        await bench.round(fragment)
    plain, average = {"versions": (1, 0), "loss": 3.5}, {"versions": (1, 1), "loss": 3.25}
    await bench.beat("paris", heldout=plain, heldout_ema=average)
    assert not bench.state.ledger.ema_evaluations, "paris was not asked"
    for loss in (3.25, 9.0):
        await bench.beat("iowa", heldout=plain, heldout_ema={**average, "loss": loss})
    for _ in range(2):
        losses = build_status(bench.server, "").loss
        assert (losses.heldout, losses.heldout_at) == (3.5, 1)
        assert (losses.ema, losses.ema_at, losses.best) == (3.25, 2, 3.5)
        bench.restart()
    ledger = Ledger.of(bench.state.ledger.snapshot())
    assert [each.loss for each in ledger.ema_evaluations] == [3.25]


@in_a_loop
async def test_of_regions_only_the_one_that_evaluates_may_fetch_it(tmp_path):
    spec = make_spec(outer=KEPT, evaluate={"region": "iowa"})
    bench = await joined(tmp_path, spec)
    for fragment in (0, 1):
        await bench.round(fragment)
    entries = [
        TokenEntry("upload", name, hash_of(name), "1", 0.0, 4e9) for name in ("iowa", "paris")
    ]
    keep_entries(tmp_path / "tokens.json", spec.name, entries)
    tokens = TokenList(tmp_path / "tokens.json", spec.name)
    app = make_app(bench.server, events=tmp_path / "events", url=lambda: "", tokens=tokens)
    transport, found = httpx.ASGITransport(app), {}
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for name in ("iowa", "paris"):
            for query in ("?ema=1", ""):
                headers = {"authorization": f"Bearer {name}"}
                answer = await client.get(f"/v1/weights{query}", headers=headers)
                found[name + query] = answer.status_code
    app.audit.close()
    assert found == {"iowa?ema=1": 200, "iowa": 403, "paris?ema=1": 403, "paris": 403}


@in_a_loop
async def test_the_server_sends_it_and_says_when_there_is_none(tmp_path):
    async with served(tmp_path / "kept", make_settings(make_spec(outer=KEPT))) as (bench, client):
        await bench.join()
        assert (await client.get("/v1/weights?ema=1")).status_code == 404, "none has begun"
        for fragment in (0, 1, 0, 1):
            await bench.round(fragment)
        sent = (await client.get("/v1/weights?ema=1")).content
        loaded = load_safetensors(sent)
        assert b'"average":"true"' in sent
        assert b'"average"' not in (await client.get("/v1/weights")).content
        for name, values in expected(bench).items():
            assert loaded[name].tobytes() == values.tobytes()
        both = await client.get("/v1/weights?ema=1&version=1")
        assert both.status_code == 400
    async with served(tmp_path / "plain") as (bench, client):
        await bench.join()
        await bench.round(0)
        answer = await client.get("/v1/weights?ema=1")
        assert answer.status_code == 404 and "outer.ema" in answer.json()["error"]["hint"]
        assert bench.state.weights.newest[0].state.average is None
