"""The average of the published weights: part of the state, so restarts and replays have it."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from diloco_cli.core.fragments import scatter
from diloco_cli.merge.optimizers import averaged
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
async def test_the_server_sends_it_and_says_when_there_is_none(tmp_path):
    async with served(tmp_path / "kept", make_settings(make_spec(outer=KEPT))) as (bench, client):
        await bench.join()
        assert (await client.get("/v1/weights?ema=1")).status_code == 404, "none has begun"
        for fragment in (0, 1, 0, 1):
            await bench.round(fragment)
        loaded = load_safetensors((await client.get("/v1/weights?ema=1")).content)
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
