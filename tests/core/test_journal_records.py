"""The JSON of journal records stays as it is, for ever: old journals are replayed by new servers.

The golden file holds what one small run writes, every kind of record among it. Digests and
sizes of frames differ with the run and the compressor, so names and zeros replace them. When a
record is meant to change, `.venv/bin/python -m tests.core.test_journal_records` writes it anew.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from diloco_cli.core.journal_records import (
    KINDS,
    Entry,
    RegionPaced,
    RunRebuilt,
    decode_all,
    encode,
)
from diloco_cli.core.lanes import Cursor, LanePosition
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.rebuild import FoundVersion, rebuilt_ledger
from diloco_cli.spec.schema import StartSpec
from diloco_cli.wire.messages import HeldOut
from tests import ROOT
from tests.server.harness import (
    NAMES,
    TEXT,
    Bench,
    in_a_loop,
    make_settings,
    make_spec,
    read_journal,
)
from tests.server.harness import receipt_of as receipt

GOLDEN = ROOT / "tests" / "golden" / "journal-v1.jsonl"
SIZES = ("bytes", "bytes_up", "delta_bytes")


async def small_run(folder) -> list[Entry]:
    """A run in which everything happens that is ever recorded."""
    spec = make_spec(
        adopt="replace", staleness=0, budget={"tokens": 1500}, evaluate={"region": "iowa"}
    )
    spec = spec.model_copy(update={"start": StartSpec(weights="old.safetensors")})
    bench = Bench(folder, make_settings(spec))
    for region in bench.regions.values():
        region.order = TEXT
    await bench.join()
    await bench.send("iowa", 0, bench.regions["iowa"].frame(0, cursor=reading(bench, "iowa")))
    await bench.round(0, "paris", "tokyo")
    late = bench.regions["tokyo"].frame(0, base=0, version=0)
    await bench.send("tokyo", 0, late)
    await _refused(bench)
    heard = HeldOut(versions=(1, 0), loss=3.25)
    await bench.beat("iowa", heldout=heard.model_dump(), heldout_ema=heard.model_dump())
    await _round_with_a_lost_payload(bench)
    await bench.amend({"outer.lr": 0.5, "sync.grace": None}, why="too slow")
    bench.state.record(RegionPaced("tokyo", 1.5, bench.state.allowance_clock, 18.0))
    await bench.amend({"regions.tokyo.pace": None}, repace=("tokyo",), why="faster")
    bench.server.membership.retire("tokyo", "left for good")
    bench.state.snapshot()
    bench.clock.now += 5
    await bench.join("tokyo")
    await _end_too_early(bench)
    while not bench.state.ledger.end:
        await bench.round(0)
        await bench.round(1)
    for name in NAMES:
        await bench.beat(name, drained=True)
    await bench.settle()
    await bench.server.publisher.store_newest()
    await bench.server.publisher.settled()
    bench.state.close()
    bench.state.store.close()
    return [*read_journal(folder), encode(rebuilt(bench))]


def rebuilt(bench: Bench) -> RunRebuilt:
    """The first record of a run that goes on from what paris holds of this one."""
    ledger, totals = bench.state.ledger, bench.state.totals
    found = [
        FoundVersion("paris", slot.version, slot.published, slot.merged, slot.applied)
        for slot in ledger.slots
    ]
    states = tuple(slot.state for slot in ledger.slots)
    ledger = rebuilt_ledger(Ledger.of(ledger.snapshot()), found, {}, (), served=None)
    tally = totals.rebuilt([slot.applied for slot in ledger.slots])
    return RunRebuilt(("lost",), states, ("paris",) * 2, ledger.snapshot(), tally)


def reading(bench: Bench, region: str) -> dict[str, Any]:
    """A cursor, as the header of a frame has it."""
    table = bench.state.ledger.orders[TEXT.digest]
    lanes = {lane: LanePosition(at.grant, 3) for lane, at in table.owned(region).items()}
    return Cursor(TEXT.digest, TEXT.lanes, lanes).as_record()


async def _refused(bench: Bench) -> None:
    region = bench.regions["paris"]
    totals = {"trained": 192.0, "applied": 0.0, "refused": 0.0, "discarded": 0.0}
    data = region.frame(0)
    refused = await bench.server.submit(
        receipt(data), epoch=region.epoch, unfit="too long", norm=2.5, totals=totals
    )
    assert type(refused).__name__ == "Refused"


async def _end_too_early(bench: Bench) -> None:
    """Iowa holds all that is left of the budget, and loses it before it is sent."""
    iowa = bench.regions["iowa"]
    trained, pending = list(iowa.trained), list(iowa.pending)
    iowa.trained = [each + 1500.0 for each in trained]
    iowa.pending = [each + 1500.0 for each in pending]
    await bench.beat("iowa")
    bench.server.tick()
    assert bench.state.ledger.end
    iowa.trained, iowa.pending = trained, pending
    for name in NAMES:
        await bench.beat(name, drained=True)
    await bench.settle()
    assert not bench.state.ledger.end


async def _round_with_a_lost_payload(bench: Bench) -> None:
    await bench.call(1)
    for name in NAMES:
        await bench.send(name, 1)
    lost = bench.state.ledger.slots[1].waiting["paris"].digest
    bench.state.store.drop_payloads([lost])
    await bench.settle()


def plain(records: list[Entry]) -> list[str]:
    """Canonical lines, as the journal has them, without what depends on the compressor."""
    names: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        return names.setdefault(found.group(), f"digest-{len(names)}")

    def stable(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {key: stable(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return list(map(stable, value))
        if key == "why":
            return value.split(":")[0]  # The rest may name a file.
        return 0 if key in SIZES else value

    lines = []
    for record in records:
        text = json.dumps(stable(record), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        lines.append(re.sub(r"\b[0-9a-f]{32,64}\b", named, text))
    return lines


@in_a_loop
async def test_a_run_writes_the_records_it_always_wrote(tmp_path):
    assert plain(await small_run(tmp_path)) == GOLDEN.read_text().splitlines()


def test_every_kind_of_record_comes_back_as_it_was_written():
    entries = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    records = [record for _, record in decode_all(entries)]
    assert {record.kind for record in records} == set(KINDS)
    assert json.loads(json.dumps([encode(record) for record in records])) == entries


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lines = plain(asyncio.run(small_run(Path(folder))))
    GOLDEN.write_text("\n".join(lines) + "\n")
