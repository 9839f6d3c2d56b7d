"""Defects planted on purpose: the simulation is worth something if it finds them.

Each one takes out a guard of the real code, or puts a plausible mistake in its place.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from diloco_cli.core import conductor, lanes, rounds, terms
from diloco_cli.core.journal_records import TermsAmended
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.recovery import start
from diloco_cli.server.rounds import amendments, coordinator, membership
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.rounds.leases import Leases
from diloco_cli.server.rounds.publish import Publisher
from diloco_cli.server.rounds.state import State
from diloco_cli.server.store import draft, journal, journal_format, on_disk
from diloco_cli.server.store.group_commit import GroupCommit
from diloco_cli.server.store.journal import FileJournal
from diloco_cli.server.store.run_store import RunStore
from diloco_cli.server.terms import TermsHistory
from diloco_cli.server.versions.newest import PublishedVersions
from diloco_cli.system import files as files
from tests.verify.dst.seeded_run import Setting, silenced

Change = tuple[Any, str, Any]


@dataclass(frozen=True)
class Bug:
    says: str
    changes: Callable[[], list[Change]]
    swept: bool = False
    """It shows when the server dies at one certain step: looked for at every one."""
    setting: Callable[[int], Setting] | None = None
    """Runs to look in, by their number; the seeds', when left out."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Puts a defect into the server for as long as the context lasts."""
    with ExitStack() as stack:
        for where, what, instead in BUGS[name].changes() if name else ():
            stack.enter_context(patch.object(where, what, instead))
        yield


async def _nothing(*args: Any, **options: Any) -> None:
    """In the place of something worth waiting for."""


def _ack_before_journal() -> list[Change]:
    async def close(self: Any) -> None:
        # A thread under way when its journal is closed would stand still for ever: see loop.py.
        with patch.object(GroupCommit, "durable", real):
            await shut(self)

    real, shut = GroupCommit.durable, GroupCommit.close
    return [(GroupCommit, "durable", _nothing), (GroupCommit, "close", close)]


def _journal_not_flushed() -> list[Change]:
    return [(journal, "os", _OsWithout("fdatasync"))]


class _OsWithout:
    """The module `os`, one of whose calls does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return (lambda *args: None) if name == self._name else getattr(os, name)


def _payload_not_flushed() -> list[Change]:
    return [(draft, "os", _OsWithout("fsync"))]


def _names_not_flushed() -> list[Change]:
    return [(each, "sync_folder", lambda path: None) for each in (files, draft)]


def _version_not_flushed() -> list[Change]:
    return [(files, "sync_file", lambda path: None)]


def _failed_flush_believed() -> list[Change]:
    def commit(self: Any, batch: Any) -> None:
        real(self, batch)
        if self._dead:
            self._dead = ""
            self._stop += sum(len(journal_format.frame(each, settled=0)) for each in batch)
            self._durable = batch[-1].number
            del self._waiting[: len(batch)]

    real = FileJournal._commit
    return [(FileJournal, "_commit", commit)]


def _journal_only_flushed_at_start() -> list[Change]:
    def opened(cls: Any, path: Any, **options: Any) -> Any:
        with patch.object(journal, "keep_bytes", flush):
            return real(path, **options)

    def flush(path: Any, data: bytes) -> None:
        with files.disk_errors(path):
            os.truncate(path, len(data))
            files.sync_file(path)
            files.sync_folder(path.parent)

    real = FileJournal.open
    return [(FileJournal, "open", classmethod(opened))]


def _names_not_kept_at_start() -> list[Change]:
    return [(on_disk, "sync_names", lambda folder: None)]


def _round_published_twice() -> list[Change]:
    def merge_soon(self: Any, fragment: int) -> None:
        task = asyncio.get_running_loop().create_task(self._merge(fragment))
        self.merges[fragment] = task
        task.add_done_callback(lambda task: self._merged(fragment, task))

    return [(Publisher, "merge_soon", merge_soon)]


def _payloads_dropped_too_early() -> list[Change]:
    def publish(self: Any, fragment: int, version: int, *what: Any, **how: Any) -> str:
        digest = real(self, fragment, version, *what, **how)
        if version:
            self.drop_payloads(self.payloads())
        return digest

    real = RunStore.publish
    return [(RunStore, "publish", publish)]


def _retries_forgotten() -> list[Change]:
    def admit(receipt: Any, record: Any, **options: Any) -> Any:
        record = replace(record, known=None, merged=receipt.prev)
        return real(receipt, record, **options)

    real = rounds.admit
    return [(coordinator.rounds, "admit", admit)]


def _epochs_ignored() -> list[Change]:
    def admit(receipt: Any, record: Any, *, epoch: int, **options: Any) -> Any:
        record = replace(record, epoch=epoch, merged=receipt.prev, known=None)
        return real(receipt, record, epoch=epoch, **options)

    real = rounds.admit
    return [
        (coordinator.rounds, "admit", admit),
        (Coordinator, "check_epoch", lambda self, region, epoch: None),
    ]


def _crashed_merges_forgotten() -> list[Change]:
    return [(Publisher, "resume", lambda self: None)]


def _said_before_durable() -> list[Change]:
    async def said(self: Any, build: Callable[[], Any]) -> Any:
        return build()

    return [(State, "answer_when_durable", said)]


def _version_without_files() -> list[Change]:
    def publish(self: Any, fragment: int, version: int, *what: Any, **how: Any) -> str:
        return what[0].digest if version else real(self, fragment, version, *what, **how)

    real = RunStore.publish
    return [(RunStore, "publish", publish)]


def _members_tidied_too_early() -> list[Change]:
    def put_away(self: Any, fragment: int, version: int, base: int, made: Any) -> None:
        for each in made:
            self.drop_payloads(receipt.digest for receipt in each.receipts.values())
        self.prune(fragment, version, base)

    return [(RunStore, "put_away", put_away)]


def _unstored_swept() -> list[Change]:
    def sweep(store: Any, ledger: Any) -> None:
        real(store, ledger)
        open_rounds = [found for s in ledger.slots for found in (s.waiting, s.closing)]
        wanted = {receipt.digest for found in open_rounds for receipt in found.values()}
        store.drop_payloads(store.payloads() - wanted)

    real = start._sweep
    return [(start, "_sweep", sweep)]


def _said_to_be_stored() -> list[Change]:
    def publish(self: Any, fragment: int, version: int, *what: Any, **how: Any) -> str:
        return real(self, fragment, version, *what, **{**how, "whole": not version})

    real = RunStore.publish
    return [(RunStore, "publish", publish)]


def _base_pruned() -> list[Change]:
    def prune(self: Any, fragment: int, version: int, base: int) -> None:
        real(self, fragment, version, version)

    real = RunStore.prune
    return [(RunStore, "prune", prune)]


def _half_record_left() -> list[Change]:
    def write(self: Any, data: bytes) -> int:
        try:
            return real(self, data)
        except files.DiskFull:
            del self._waiting[:]  # Taken for written.
            self._durable = self._last
            return 0

    real = FileJournal._write
    return [(FileJournal, "_write", write)]


def _payload_forgotten_when_sent_twice() -> list[Change]:
    return [(Coordinator, "wanted", lambda self, digest: False)]


def _old_version_served() -> list[Change]:
    def install(self: Any, fragment: int, version: Any) -> None:
        before = self.newest[fragment]
        real(self, fragment, version)
        if version.number % 3 == 0:  # The right number on the weights of the version before.
            self.newest[fragment] = replace(version, state=before.state, digest=before.digest)

    real = PublishedVersions.install
    return [(PublishedVersions, "install", install)]


def _nobody_waited_for() -> list[Change]:
    return [(Leases, "undrained", lambda self, *, since, now: [])]


def _one_lease_waited_for() -> list[Change]:
    def undrained(self: Any, *, since: float, now: float) -> list[str]:
        return [
            region
            for region in self.not_drained()
            if now < max(since, self.all[region].seen) + self.all[region].seconds
        ]

    return [(Leases, "undrained", undrained)]


def _newest_terms_for_all() -> list[Change]:
    return [(TermsHistory, "__getitem__", lambda self, number: self.newest)]


def _terms_before() -> list[Change]:
    real = TermsHistory.__getitem__
    return [(TermsHistory, "__getitem__", lambda self, number: real(self, max(0, number - 1)))]


def _retired_accepted() -> list[Change]:
    """Only their frames: a region that was removed still hears of it with its next heartbeat."""

    def admit(receipt: Any, record: Any, **options: Any) -> Any:
        return real(receipt, replace(record, retired=""), **options)

    def check_epoch(self: Any, region: str, epoch: int) -> None:
        if region not in self.state.ledger.retired:
            self.membership.check_epoch(region, epoch)

    async def heartbeat(self: Any, region: str, said: Any) -> Any:
        self.membership.check_epoch(region, said.epoch)
        return await beat(self, region, said)

    async def wait_news(self: Any, region: str, **options: Any) -> Any:
        self.membership.check_epoch(region, options["epoch"])
        return await wait(self, region, **options)

    real, beat, wait = rounds.admit, Coordinator.heartbeat, Coordinator.wait_news
    return [
        (coordinator.rounds, "admit", admit),
        (Coordinator, "check_epoch", check_epoch),
        (Coordinator, "heartbeat", heartbeat),
        (Coordinator, "wait_news", wait_news),
    ]


def _dropped_with_the_region() -> list[Change]:
    def retire(self: Any, region: str, retirement: Any) -> None:
        for slot in self.slots:
            slot.waiting.pop(region, None)
        real(self, region, retirement)

    def rounds_without(state: Any, region: str, *why: Any) -> None:
        table = state.table
        table.rounds = [
            replace(each, members=tuple(m for m in each.members if m != region))
            for each in table.rounds
        ]
        let_go(state, region, *why)

    real, let_go = Ledger._retire, membership.let_go
    return [
        (Ledger, "_retire", retire),
        (membership, "let_go", rounds_without),
        (amendments, "let_go", rounds_without),
    ]


def _lane_handed_out_twice() -> list[Change]:
    """To the next before its owner has given it up."""

    def deal(table: Any, readers: Any) -> Any:
        asked = real(table, readers).asked
        given = {
            lane: lanes.LanePosition(table.owners[lane].grant, table.owners[lane].position)
            for each in asked.values()
            for lane in each
        }
        return real(table, replace(readers, released={**given, **readers.released}))

    real = lanes.deal
    return [(conductor.lanes, "deal", deal)]


def _lane_begun_again() -> list[Change]:
    """Where its grant began, not where its owner has given it up."""

    def deal(table: Any, readers: Any) -> Any:
        dealing = real(table, readers)
        moves = {
            why: tuple(
                move._replace(at=table.owners[move.lane].position) if why == "released" else move
                for move in group
            )
            for why, group in dealing.moves.items()
        }
        return replace(dealing, moves=moves)

    real = lanes.deal
    return [(conductor.lanes, "deal", deal)]


def _retired_for_ever() -> list[Change]:
    def retire(self: Any, region: str, retirement: Any) -> None:
        real(self, region, retirement)
        for slot in self.slots:
            slot.merged.pop(region, None)
            slot.decided.pop(region, None)
        self.regions.pop(region, None)
        self.retired.pop(region, None)

    real = Ledger._retire
    return [(Ledger, "_retire", retire)]


def _amended_again() -> list[Change]:
    return [(terms, "known", lambda amendments, request: None)]


def _amended_in_memory() -> list[Change]:
    def record(self: Any, record: Any) -> None:
        if isinstance(record, TermsAmended) and not record.reopens:
            self.ledger.apply(self.ledger.news, record)
            self.history.apply(self.ledger, record)
        else:
            real(self, record)

    real = State.record
    return [(State, "record", record)]


BUGS: dict[str, Bug] = {
    "ack-before-journal": Bug("answers do not wait for the journal", _ack_before_journal),
    "journal-not-flushed": Bug("no fdatasync of the journal", _journal_not_flushed),
    "payload-not-flushed": Bug("no fsync of a payload", _payload_not_flushed),
    "names-not-flushed": Bug("no fsync of folders", _names_not_flushed),
    "version-not-flushed": Bug("no fsync of versions", _version_not_flushed),
    "failed-flush-believed": Bug("a failed fdatasync counts as done", _failed_flush_believed),
    "journal-flushed-again": Bug(
        "a start flushes the journal instead of writing it anew", _journal_only_flushed_at_start
    ),
    "names-not-kept": Bug(
        "a start relies on names that were not flushed", _names_not_kept_at_start
    ),
    "published-twice": Bug("a round closed while the last is tidied up", _round_published_twice),
    "payloads-dropped-early": Bug(
        "payloads go before their version is on record", _payloads_dropped_too_early
    ),
    "retries-forgotten": Bug("a frame that comes again is accepted again", _retries_forgotten),
    "epochs-ignored": Bug("a fenced worker may still contribute", _epochs_ignored),
    "merges-not-resumed": Bug(
        "a restart forgets the rounds that were closing", _crashed_merges_forgotten
    ),
    "said-before-durable": Bug("news tell what is not durable yet", _said_before_durable),
    "version-without-files": Bug("a version is recorded, not stored", _version_without_files),
    "members-tidied-early": Bug(
        "contributions go before a state with them is stored", _members_tidied_too_early
    ),
    "unstored-swept": Bug("a start removes what unstored versions are made of", _unstored_swept),
    "not-stored": Bug("a state is recorded as stored and was not written", _said_to_be_stored),
    "base-pruned": Bug("the state that versions are made from is pruned", _base_pruned),
    "full-disk-believed": Bug("records a full disk refused count as done", _half_record_left),
    "payload-not-counted": Bug(
        "the payload of a frame goes with its second copy", _payload_forgotten_when_sent_twice
    ),
    "nobody-waited-for": Bug("a run is finished while regions hold work", _nobody_waited_for),
    "one-lease-waited": Bug(
        "silence of one lease, not two, is enough", _one_lease_waited_for, setting=silenced
    ),
    "newest-terms": Bug("a version is made by the newest terms", _newest_terms_for_all),
    "amended-again": Bug("an amendment that comes again is made again", _amended_again),
    "amended-in-memory": Bug("an amendment is not on record", _amended_in_memory),
    "terms-before": Bug("a version is made by the terms before its own", _terms_before),
    "retired-accepted": Bug("frames of a region that was removed are accepted", _retired_accepted),
    "dropped-with-the-region": Bug(
        "what a retired region had accepted is dropped", _dropped_with_the_region
    ),
    "lane-handed-out-twice": Bug(
        "a lane goes to the next before its owner gave it up", _lane_handed_out_twice
    ),
    "lane-begun-again": Bug("the next owner begins where the last one began", _lane_begun_again),
    "name-forgotten": Bug("a retired name is free, epochs and all", _retired_for_ever),
    "old-weights-served": Bug("a version is served with the weights before", _old_version_served),
}
