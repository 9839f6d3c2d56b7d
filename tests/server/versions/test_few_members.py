"""A round with few of the live regions: a step in proportion, by what is on record, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_cli.core.journal_records import RoundClosed, decode_all
from diloco_cli.server.recovery.verify import replay
from tests.server.harness import Bench, in_a_loop, joined, kill_server, make_spec, read_journal

KINDS: list[dict[str, Any]] = [
    {"kind": "nesterov"},
    {"kind": "aged-nesterov"},
    {"kind": "adam"},
    {"kind": "sgd"},
]


async def all_then_one(folder: Path, outer: dict[str, Any]) -> tuple[Bench, np.ndarray]:
    """Three live regions in one round, one of them in the next; and how far that moved."""
    spec = make_spec(quorum=1, outer=outer, grace={"kind": "fixed", "seconds": 1.0})
    bench = await joined(folder, spec)
    await bench.round(0)
    before = bench.state.weights.newest[0].state.theta.copy()
    await bench.round(0, "iowa")
    return bench, bench.state.weights.newest[0].state.theta - before


@in_a_loop
async def test_one_of_three_moves_the_weights_by_a_third_of_a_step(tmp_path):
    moved = []
    for number in range(2):
        folder = tmp_path / str(number)
        bench, step = await all_then_one(folder, {"kind": "sgd", "proportional": not number})
        moved.append(step)
        kill_server(bench.server)
        records = (record for _, record in decode_all(read_journal(folder)))
        closed = [record for record in records if isinstance(record, RoundClosed)]
        assert [(len(record.members), record.live) for record in closed] == [(3, 3), (1, 3)]
    assert np.abs(moved[1]).max() > 1e-3
    np.testing.assert_allclose(3 * moved[0], moved[1], atol=1e-6)


@pytest.mark.parametrize("outer", KINDS, ids=lambda outer: outer["kind"])
@in_a_loop
async def test_restarts_and_replays_take_the_same_steps(tmp_path, outer):
    bench, _ = await all_then_one(tmp_path, outer)
    await bench.amend({"outer.proportional": False})
    await bench.round(0, "paris", "tokyo")
    digests = bench.digests()
    bench.restart()
    assert bench.digests() == digests and bench.versions[0] == 3
    await bench.round(0, "tokyo")
    found = replay(bench.settings, tmp_path / "server")
    assert [line.version for line in found.lines] == [4, 0]
