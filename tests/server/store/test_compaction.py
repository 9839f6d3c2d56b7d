"""A long run on a bounded disk: a snapshot takes the place of records, and nothing changes."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.core.journal_records import WeightsEvaluated
from diloco_cli.core.ledger import MOST_EVALUATIONS, Ledger
from diloco_cli.errors import SpecError, StoreError
from diloco_cli.server.recovery.verify import replay
from diloco_cli.server.store import journal_format
from diloco_cli.server.store.journal import FileJournal, read_journal
from diloco_cli.system.files import DiskFull
from tests.server.harness import (
    Bench,
    in_a_loop,
    kill_server,
    make_settings,
    make_spec,
    open_server,
    storing_all,
)

SMALL = 1 << 12


def small(**store: Any) -> Any:
    changes = {"kind": "folder", "journal": SMALL, "reserve": 0, **store}
    return make_settings(make_spec(server={"store": changes}))


async def long_run(bench: Bench, rounds: int = 12) -> None:
    await bench.join()
    for number in range(rounds):
        await bench.round(number % 2)


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@in_a_loop
async def test_the_disk_stays_bounded_and_a_restart_stands_at_the_same_place(tmp_path):
    bench = Bench(tmp_path, small(history=3, replay=2))
    await long_run(bench, 14)
    first, used = bench.state.store.journal.base, files(tmp_path / "server")
    for number in range(14):
        await bench.round(number % 2)
    assert bench.state.store.journal.base > first > 0
    assert len(files(tmp_path / "server")) == len(used)
    # A snapshot of this run is about as long as the limit, so it may be twice that.
    assert (tmp_path / "server" / "journal").stat().st_size < 6 * SMALL
    await bench.send("paris", 1)
    digests, ledger = bench.digests(), bench.state.ledger
    tally = bench.state.totals.snapshot()
    bench.restart()
    assert bench.digests() == digests and bench.state.ledger == ledger
    assert bench.state.totals.snapshot() == tally
    await bench.round(0)
    assert bench.versions[0] == 15


@in_a_loop
async def test_numbers_and_chain_go_on_through_a_compaction(tmp_path):
    bench = Bench(tmp_path, small())
    await long_run(bench)
    found = read_journal(tmp_path / "server" / "journal")
    assert found.base > 0 and found.records[0]["kind"] == "snapshot"
    assert found.last.number == bench.state.store.journal.last == found.base + len(found.records)
    news = bench.state.ledger.news
    bench.restart()
    assert bench.state.ledger.news == news <= found.last.number


@in_a_loop
async def test_a_snapshot_says_what_its_records_amount_to(tmp_path):
    bench = Bench(tmp_path)
    await long_run(bench, 5)
    await bench.send("tokyo", 1)
    bench.state.snapshot()
    await bench.round(0)
    found = replay(bench.settings, tmp_path / "server")
    assert found.base == 0
    kill_server(bench.server)
    path = tmp_path / "server" / "journal"
    journal, records = FileJournal.open(path)
    journal.close()
    path.unlink()
    forged = FileJournal.create(path, run=journal.run)
    for record in records:
        if record["kind"] == "snapshot":
            record["ledger"]["slots"][0]["applied"]["paris"] += 32.0
        forged.append(record)
    forged.close()
    with pytest.raises(StoreError, match="is a snapshot that disagrees"):
        replay(bench.settings, tmp_path / "server")


@in_a_loop
async def test_a_replay_makes_every_version_again_from_the_initial_weights(tmp_path):
    bench = Bench(tmp_path)
    await long_run(bench, 7)
    found = replay(bench.settings, tmp_path / "server")
    assert [line.digest for line in found.lines] == bench.digests()
    assert [(line.start, line.made) for line in found.lines] == [(0, 4), (0, 3)]
    journal = read_journal(tmp_path / "server" / "journal")
    published = [
        n
        for n, r in enumerate(journal.records, 1)
        if (r["kind"], r.get("version")) == ("published", 2)
    ]
    early = replay(bench.settings, tmp_path / "server", to=published[0])
    assert [line.version for line in early.lines] == [2, 1] and early.digest != found.digest
    for wrong in (-1, found.record + 1):
        with pytest.raises(SpecError, match=f"has the records 0 to {found.record}, not {wrong}"):
            replay(bench.settings, tmp_path / "server", to=wrong)


@in_a_loop
async def test_after_a_compaction_a_replay_begins_with_a_digest_on_record(tmp_path):
    bench = Bench(tmp_path, small(history=8, replay=6))
    await long_run(bench, 16)
    found = replay(bench.settings, tmp_path / "server")
    assert found.base > 0 and [line.digest for line in found.lines] == bench.digests()
    assert all(4 <= line.made <= 6 for line in found.lines)
    with pytest.raises(SpecError, match="records were compacted"):
        replay(bench.settings, tmp_path / "server", to=found.base)


@pytest.mark.parametrize("what", ["state", "member", "newest"])
@in_a_loop
async def test_a_replay_finds_what_is_not_what_the_journal_says(tmp_path, what):
    bench = Bench(tmp_path, storing_all())
    await long_run(bench, 6)
    store, folder = bench.state.store, tmp_path / "server" / "fragments" / "0"
    kill_server(bench.server)
    if what == "state":  # Another start: everything after it comes out differently.
        old = store.load_state(0, 1)
        store.publish(0, 0, type(old)(old.theta, old.momentum, old.published), None)
    elif what == "member":
        path = sorted(folder.glob("v00000002.*.frame"))[0]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        store.publish(0, 3, store.load_state(0, 2), None)
    with pytest.raises(StoreError) as refusal:
        replay(bench.settings, tmp_path / "server")
    assert {
        "state": "Version 1 of fragment 0, recomputed, has the digest",
        "member": "Version 2 of fragment 0 cannot be recomputed: ",
        "newest": "Version 3 of fragment 0, stored, has the digest",
    }[what] in str(refusal.value)
    assert refusal.value.exit_code == 5


@in_a_loop
async def test_what_a_version_was_made_of_is_filed_also_after_a_crash(tmp_path, monkeypatch):
    bench = Bench(tmp_path, storing_all())
    await bench.join()

    def killed(*_: Any) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(bench.state.store.blobs, "move", killed)
    await bench.call(0)
    for name in bench.regions:
        await bench.send(name)
    bench.server.tick()
    await asyncio.wait(bench.server.publisher.merges.values())
    assert len(bench.state.store.payloads()) == 3
    assert replay(bench.settings, tmp_path / "server").lines[0].made == 1
    bench.restart()
    assert bench.state.store.payloads() == set()
    assert len(bench.state.store.members(0, 1)) == 3
    assert replay(bench.settings, tmp_path / "server").lines[0].made == 1


def a_journal(path: Path, words: int = 6) -> FileJournal:
    journal = FileJournal.create(path, run="r")
    for number in range(words):
        journal.append({"kind": "snapshot" if number == 3 else f"w{number + 1}"})
        journal.sync()
    return journal


def test_a_compacted_journal_goes_on_and_is_read_back(tmp_path):
    journal = a_journal(tmp_path / "journal")
    before = journal.size
    journal.compact(4)
    assert journal.size < before and (journal.base, journal.last) == (3, 6)
    assert journal.append({"kind": "w7"}) == 7
    journal.close()
    again, records = FileJournal.open(tmp_path / "journal")
    assert [r["kind"] for r in records] == ["snapshot", "w5", "w6", "w7"]
    assert (again.base, again.last) == (3, 7)
    again.append({"kind": "snapshot"})
    again.compact(8)
    again.close()
    assert read_journal(tmp_path / "journal").base == 7


def test_whoever_waits_during_a_compaction_is_served_after_it(tmp_path, monkeypatch):
    journal = a_journal(tmp_path / "journal")
    going, go = threading.Event(), threading.Event()
    real = os.replace

    def replace(*names: Any) -> None:
        going.set()
        assert go.wait(20)
        real(*names)

    monkeypatch.setattr(os, "replace", replace)
    compacting = threading.Thread(target=journal.compact, args=(4,))
    compacting.start()
    assert going.wait(20)
    journal.append({"kind": "meanwhile"})
    writer = threading.Thread(target=journal.sync)
    writer.start()
    go.set()
    compacting.join()
    writer.join()
    journal.close()
    kinds = [r["kind"] for r in read_journal(tmp_path / "journal").records]
    assert kinds == ["snapshot", "w5", "w6", "meanwhile"]


def test_a_full_disk_leaves_the_long_journal_as_it_was(tmp_path, monkeypatch):
    journal = a_journal(tmp_path / "journal")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(DiskFull):
            journal.compact(4)
    journal.append({"kind": "w7"})
    journal.close()
    assert len(read_journal(tmp_path / "journal").records) == 7


def test_a_disk_that_fails_in_a_compaction_ends_the_journal(tmp_path, monkeypatch):
    journal = a_journal(tmp_path / "journal")

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(StoreError, match="could not be compacted"):
            journal.compact(4)
    with pytest.raises(StoreError, match="could not be compacted"):
        journal.append({"kind": "w7"})


def test_a_compacted_journal_is_never_cut_below_what_it_was_made_of(tmp_path):
    path = tmp_path / "journal"
    journal = a_journal(path)
    journal.compact(4)
    journal.close()
    whole = path.read_bytes()
    header = journal_format.frame_at(whole, 0)
    assert header
    for length in range(header.stop, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError) as refusal:
            FileJournal.open(path)
        assert "truncate" not in str(refusal.value), "nothing here may be given up"
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(StoreError):
            FileJournal.open(path)


@in_a_loop
async def test_a_compacted_journal_without_its_snapshot_is_refused(tmp_path):
    bench = Bench(tmp_path, small())
    await long_run(bench)
    kill_server(bench.server)
    path = tmp_path / "server" / "journal"
    found = read_journal(path)
    about = {
        "journal": 1,
        "run": found.run,
        "base": found.base,
        "chain": "00" * 32,
        "settled": found.base,
    }
    path.write_bytes(journal_format.frame(journal_format.entry(0, b"", about), settled=0))
    with pytest.raises(StoreError, match="which is no snapshot of those before"):
        open_server(tmp_path, bench.settings)


def test_evaluations_do_not_pile_up_and_the_best_is_not_forgotten():
    ledger = Ledger.empty(1)
    for number in range(3 * MOST_EVALUATIONS):
        loss = 1.0 if number == 100 else 5.0 + number % 7
        ledger.apply(number + 1, WeightsEvaluated((number,), loss, "paris"))
    assert len(ledger.evaluations) == MOST_EVALUATIONS
    assert ledger.evaluations[0].versions == (0,)
    assert min(each.loss for each in ledger.evaluations) == 1.0
    assert ledger.evaluations[-1].versions == (3 * MOST_EVALUATIONS - 1,)
