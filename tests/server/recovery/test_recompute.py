"""Versions that are not stored as a whole: made again after a death, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_cli.core.journal_records import VersionPublished, VersionStored
from diloco_cli.core.ledger import Ledger
from diloco_cli.errors import StoreError
from diloco_cli.server.recovery.verify import replay
from diloco_cli.server.store import blob_names
from diloco_cli.server.store.retention import RECOMPUTED_AT_ONCE, is_due
from diloco_cli.wire.frame import open_frame
from tests.server.harness import (
    Bench,
    in_a_loop,
    kill_server,
    make_settings,
    make_spec,
    open_server,
)


def settings_of(**store: Any) -> Any:
    return make_settings(make_spec(server={"store": {"kind": "folder", **store}}))


async def run_for(folder: Path, rounds: int, **store: Any) -> Bench:
    bench = Bench(folder, settings_of(**store))
    await bench.join()
    for _ in range(rounds):
        await bench.round(0)
    return bench


def states(bench: Bench) -> list[int]:
    return bench.state.store.versions(0)


@in_a_loop
async def test_a_start_makes_the_versions_after_the_stored_one_again(tmp_path):
    bench = await run_for(tmp_path, 7)
    assert states(bench) == [0, 4]
    assert [made.version for made in bench.state.ledger.slots[0].unstored] == [5, 6, 7]
    digests, published = bench.digests(), bench.state.weights.newest[0].digest
    bench.restart()
    assert bench.digests() == digests and bench.state.weights.newest[0].digest == published
    assert bench.state.weights.chain(0, 2, 7) is not None, "regions still follow by deltas"
    await bench.round(0)
    assert states(bench)[-1] == 8 and bench.state.store.payloads() == set()
    assert replay(bench.settings, tmp_path / "server").lines[0].made == 4


@in_a_loop
async def test_fragments_take_turns_in_being_stored(tmp_path):
    rule, most = Bench(tmp_path).state.store.retention, RECOMPUTED_AT_ONCE
    due = [[v for v in range(1, 9) if is_due(rule, f, v, behind=0, size=1)] for f in range(2)]
    assert due == [[4, 8], [3, 7]]
    assert is_due(rule, 0, 1, behind=2 * most, size=most)
    assert not is_due(rule, 0, 1, behind=2 * most, size=4 * most)
    assert not is_due(rule, 0, 1, behind=most, size=1), "that little is soon read"


@in_a_loop
async def test_what_many_regions_sent_is_not_kept_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco_cli.server.store.retention.RECOMPUTED_AT_ONCE", 0)
    bench = await run_for(tmp_path, 3)
    assert states(bench) == [0, 2], "the frames of two rounds are longer than a state"


@in_a_loop
async def test_a_server_that_is_stopped_stores_what_it_has(tmp_path):
    bench = await run_for(tmp_path, 6)
    digests = bench.digests()
    assert len(bench.state.store.payloads()) == 6
    await bench.server.publisher.store_newest()
    assert states(bench) == [0, 4, 6] and bench.state.store.payloads() == set()
    assert len(bench.state.store.members(0, 5)) == len(bench.state.store.members(0, 6)) == 3
    for path in (tmp_path / "server" / "fragments" / "0").glob("*.frame"):
        path.unlink()
    bench.restart()
    assert bench.digests() == digests
    await bench.round(0)
    assert [made.version for made in bench.state.ledger.slots[0].made] == [7]


@in_a_loop
async def test_a_merged_frame_that_comes_again_takes_nothing_away(tmp_path):
    bench = await run_for(tmp_path, 2)
    assert all(
        bench.server.wanted(receipt.digest)
        for made in bench.state.ledger.slots[0].made
        for receipt in made.receipts.values()
    )


@in_a_loop
async def test_a_state_that_no_record_speaks_of_is_not_taken_for_the_next(tmp_path):
    bench = await run_for(tmp_path, 1)
    store, other = bench.state.store, bench.state.weights.newest[0].state.load()
    store.publish(0, 2, other, None)  # As by a server that died, of other members.
    await bench.round(0)
    assert states(bench) == [0]
    digests = bench.digests()
    bench.restart()
    assert bench.digests() == digests
    newest = bench.state.weights.newest[0].state.published
    np.testing.assert_array_equal(bench.state.store.published(0, 2), newest)


@pytest.mark.parametrize("what", ["damaged", "gone", "base"])
@in_a_loop
async def test_versions_that_cannot_be_made_again_are_not_served(tmp_path, what):
    bench = await run_for(tmp_path, 3)
    kill_server(bench.server)
    made = bench.state.ledger.slots[0].made[1]
    path = tmp_path / "server" / "payloads" / f"{made.receipts['paris'].digest}.frame"
    if what == "damaged":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif what == "gone":
        path.unlink()
    else:  # A sound state, of another history.
        state = bench.state.weights.newest[0].state.load()
        bench.state.store.publish(0, 0, state, None)
    with pytest.raises(StoreError) as refusal:
        open_server(tmp_path, bench.settings)
    expected = "recomputed, has the digest" if what == "base" else "cannot be recomputed: paris"
    assert expected in str(refusal.value) and refusal.value.exit_code == 5


@in_a_loop
async def test_weights_of_any_kept_version_are_added_up_from_the_stored_one(tmp_path):
    bench = await run_for(tmp_path, 7, history=5)
    store: Any = bench.state.store
    assert store.published(0, 3) is None, "its deltas are pruned"
    for version in range(4, 8):
        frame = open_frame(store.blobs.view(blob_names.delta(0, version)))
        found = store.published(0, version)
        before = store.published(0, version - 1)
        if before is not None:
            np.testing.assert_array_equal(found, before + frame.values())
    newest = bench.state.weights.newest[0]
    np.testing.assert_array_equal(store.published(0, 7), newest.state.published)
    path = tmp_path / "server" / blob_names.delta(0, 6)
    path.write_bytes(store.blobs.view(blob_names.delta(0, 5)))
    with pytest.raises(StoreError, match="leads to weights with the digest"):
        store.published(0, 7)
    path.write_bytes(b"?")
    with pytest.raises(StoreError, match=r"v00000006\.delta cannot be read"):
        store.published(0, 7)


@in_a_loop
async def test_what_is_needed_to_make_a_version_is_never_pruned(tmp_path):
    bench = await run_for(tmp_path, 7, history=2, replay=0)
    store = bench.state.store
    assert states(bench) == [4] and all(
        store.blobs.size(blob_names.delta(0, version)) for version in (5, 6, 7)
    )
    assert len(store.payloads()) == 9
    bench.restart()
    assert bench.versions[0] == 7


def test_the_ledger_knows_which_versions_are_to_be_made_again():
    ledger = Ledger.empty(1)
    slot = ledger.slots[0]
    for version, stored in enumerate((True, False, False), 1):
        record = VersionPublished(0, version, "p", f"s{version}", stored=stored)
        ledger.apply(version, record)
        assert slot.base == 1
    assert [made.version for made in slot.made] == [2, 3]
    again = Ledger.empty(1)
    again.restore(ledger.snapshot())
    assert again == ledger
    ledger.apply(4, VersionStored(0, 3))
    assert slot.base == 3 and slot.unstored == [] and len(slot.made) == 2
