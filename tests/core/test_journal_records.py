"""The JSON of journal records stays as it is, for ever: old journals are replayed by new servers.

The golden file holds what one small run writes, every kind of record among it. Digests and
sizes of frames differ with the run and the compressor, so names and zeros replace them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from diloco_cli.core.journal_records import KINDS, decode_all, encode
from diloco_cli.wire.messages import HeldOut
from tests import ROOT
from tests.server.harness import NAMES, Bench, in_a_loop, make_recipe, make_spec, read_journal
from tests.server.harness import receipt_of as receipt

GOLDEN = ROOT / "tests" / "golden" / "journal-v1.jsonl"
SIZES = ("bytes", "bytes_up", "delta_bytes")


async def small_run(folder) -> list[dict[str, Any]]:
    """A run in which everything happens that is ever recorded."""
    spec = make_spec(adopt="replace", staleness=0, budget={"tokens": 900})
    bench = Bench(folder, make_recipe(spec))
    await bench.join()
    await bench.round(0)
    late = bench.regions["tokyo"].frame(0, base=0, version=0)
    await bench.send("tokyo", 0, late)
    await _refused(bench)
    heard = HeldOut(versions=(1, 0), loss=3.25)
    await bench.beat("iowa", heldout=heard.model_dump())
    await _round_with_a_lost_payload(bench)
    bench.state.snapshot()
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
    return read_journal(folder)


async def _refused(bench: Bench) -> None:
    region = bench.regions["paris"]
    totals = {"trained": 192.0, "applied": 0.0, "refused": 0.0, "discarded": 0.0}
    data = region.frame(0)
    refused = await bench.server.submit(
        receipt(data), epoch=region.epoch, unfit="too long", norm=2.5, totals=totals
    )
    assert type(refused).__name__ == "Refused"


async def _round_with_a_lost_payload(bench: Bench) -> None:
    await bench.call(1)
    for name in NAMES:
        await bench.send(name, 1)
    lost = bench.state.ledger.slots[1].waiting["paris"].digest
    bench.state.store.drop_payloads([lost])
    await bench.settle()


def plain(records: list[dict[str, Any]]) -> list[str]:
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
