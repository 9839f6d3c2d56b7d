"""What must be true, whatever happened: looked at at every start, every answer, and at the end.

Everything the server ever said is a promise. The audit hears each answer as it leaves,
sees each record as it is appended, and after every death holds the server that comes
back to both.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from diloco_cli.core import unmerged_work
from diloco_cli.core.fragments import gather
from diloco_cli.core.journal_records import (
    Entry,
    FrameDecided,
    MemberDropped,
    Record,
    RoundClosed,
    RunResumed,
    TermsAmended,
    VersionPublished,
    decode,
)
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.terms import overlay
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.versions.next_version import Version, next_version
from diloco_cli.spec.resolved import resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.frame import Frame
from tests.verify.dst.silent_regions import Silence
from tests.verify.dst.text import ORDER, TextAudit

Shares = dict[int, float]
"""How much of each inner step is in something; 1 is all of it."""


class Violation(Exception):
    """A promise was broken."""


@dataclass(frozen=True)
class Posted:
    region: str
    fragment: int
    owner: str
    tokens: float
    data: bytes
    shares: Shares


class Audit:
    def __init__(
        self,
        settings: ServerSettings,
        initial: Callable,
        trace: Callable[..., None],
        clock: Callable[[], float],
    ) -> None:
        self.settings, self.initial, self.trace, self.clock = settings, initial, trace, clock
        self.silence = Silence(settings.spec.server.lease)
        self.text = TextAudit()
        self.ledger = Ledger.empty(len(settings.sizes))
        """Of the records so far."""
        self.frames: dict[str, Posted] = {}
        self.steps = 0
        self.records: list[Record] = []
        """What was appended to the journal, as far as it is still there."""
        self.acknowledged: dict[str, str] = {}
        """Digest of every frame the server ever answered for: the fate it told last."""
        self.versions: dict[tuple[int, int], str] = {}
        """Digest of every version anybody was told of."""
        self.newest = [0] * len(settings.sizes)
        self.epochs: dict[str, int] = {}
        self.news = 0
        self.said: set[str] = set()
        self.went_on = 0
        """Number of the last record that took an end back."""
        self.amended: dict[str, int] = {}
        """Number of every amendment that was answered, by its id."""
        self.problem: BaseException | None = None
        self.on_problem: Callable[[], None] = lambda: None
        self.spoiled: set[str] = set()
        """Regions with a rival, or a disk that was lost or set back."""
        self.retired: set[str] = set()
        """Regions that left for good, or were removed: what they held may be given up."""
        self.restless: set[str] = set()
        """Regions of which some process died or was fenced."""

    def broken(self, error: BaseException) -> None:
        self.problem = self.problem or error
        self.on_problem()

    def must(self, true: object, why: str) -> None:
        if not true:
            self.broken(violation := Violation(why))
            raise violation

    # What regions do

    def new_step(self) -> int:
        self.steps += 1
        return self.steps

    def posted(self, frame: Frame, data: bytes, owner: str, shares: Shares) -> None:
        said = frame.header
        self.frames[frame.digest] = Posted(
            said.region, said.fragment, owner, said.tokens, data, shares
        )
        self.trace("posted", frame=frame.digest[:8], region=said.region, clock=said.clock)

    def booked(self, region: str, fragment: int, book: unmerged_work.Book) -> None:
        gap = unmerged_work.account(book)
        self.must(abs(gap) < 1e-6 * max(1.0, book.totals.trained), f"{region}: a gap of {gap}")
        self.must(book.held.steps > -1e-6, f"{region} holds {book.held} of {fragment}")

    def received(self, fragment: int, image: Any) -> None:
        self._told_version(fragment, image.version, image.published)

    def finished(self, worker: Any) -> None:
        """A worker has heard that the run is finished and has nothing left."""
        given_up = self.spoiled | self.retired
        whole = self.settings.spec.sync.alpha == 1 and worker.region not in given_up
        if not whole or worker.region in self.restless or worker.news.stop:
            return
        books = worker.trainer.books
        if any(book.totals.refused for book in books):
            return  # What is held beside a refused frame is dropped with it.
        if worker.region in self.silence.excused:
            return  # It came back when the run had rightly been finished without it.
        for f, book in enumerate(books):
            lost = book.totals.trained - book.totals.applied
            self.must(lost == 0, f"{worker.name}: {lost} tokens of fragment {f} were not merged")

    # What the server says

    def replied(self, exchange: Any, reply: Any) -> None:
        """Hears an answer the moment it leaves the server."""
        path, status = exchange.target.partition("?")[0], reply.status
        self.trace("replied", who=exchange.who, status=status)
        if status == 500:
            self.must(False, f"{exchange.method} {path} answered 500: {reply.body[:300]!r}")
        if "json" not in reply.headers.get("content-type", "") or not reply.body:
            return
        said = json.loads(reply.body)
        if status == 200 and path.endswith(("/join", "/heartbeat")):
            self.silence.heard(path.split("/")[3], at=exchange.arrived)
        elif status == 201 and "/contributions/" in path and "/parts" not in path:
            self.silence.heard(path.split("/")[5], at=exchange.arrived)
        if "/contributions/" in path and "fate" in said and "/parts" not in path:
            self._told_fate(self._digest_of(exchange), said["fate"])
        elif status == 200 and "versions" in said and "fates" in said:
            self._told_news(path.split("/")[3], said)
        elif status in (200, 201) and path == "/v1/amendments" and exchange.method == "POST":
            self._told_amendment(json.loads(exchange.body)["id"], said)
        elif status == 200 and "published" in said and "links" in said:
            self._told_version(said["fragment"], said["version"], said["published"])

    def _digest_of(self, exchange: Any) -> str:
        found = exchange.headers.get("diloco-parts")
        return found or exchange.body[-32:].hex()

    def _told_fate(self, digest: str, fate: str) -> None:
        # An answer may leave later than one that was built after it, so `pending` says little.
        before = self.acknowledged.get(digest)
        if before is None:
            if fate not in ("foreign", "returned"):
                self.acknowledged[digest] = fate
        elif before == "pending" and fate in ("merged", "refused", "returned"):
            self.acknowledged[digest] = fate
        elif fate != "pending":
            # A copy that comes after a newer frame was decided is foreign, or after the end
            # returned: the server remembers the newest frame, and a rival has sent it.
            late = fate in ("foreign", "returned") and self._newest_decided(digest) != digest
            self.must(late or before == fate, f"frame {digest[:8]} was {before}, now it is {fate}")

    def _newest_decided(self, digest: str) -> str:
        about = self.frames[digest]
        mine = (about.region, about.fragment)
        return next(
            record.receipt.digest
            for record in reversed(self.records)
            if isinstance(record, FrameDecided)
            and (record.receipt.region, record.receipt.fragment) == mine
        )

    def _told_news(self, region: str, said: dict[str, Any]) -> None:
        for f, version in enumerate(said["versions"]):
            self.newest[f] = max(self.newest[f], version)
        for decided in said["fates"].values():
            self._told_fate(decided["digest"], decided["fate"])
        self.news = max(self.news, said["n"])
        # An answer may leave later than the record after which it would be another one.
        if said["n"] >= self.went_on:
            self.said |= {key for key in ("end", "finished") if said[key]}
        if "epoch" in said:
            self.epochs[region] = max(self.epochs.get(region, 0), said["epoch"])

    def _told_amendment(self, id: str, said: dict[str, Any]) -> None:
        if said["changes"] or said["recorded"]:
            number = self.amended.setdefault(id, said["terms"])
            self.must(number == said["terms"], f"{id} was amendment {number}, is {said['terms']}")

    def _told_version(self, fragment: int, version: int, published: str) -> None:
        known = self.versions.setdefault((fragment, version), published)
        self.newest[fragment] = max(self.newest[fragment], version)
        self.must(
            known == published,
            f"version {version} of fragment {fragment} was {known[:8]}, now {published[:8]}",
        )

    # What the server records

    def opened(self, coordinator: Coordinator) -> None:
        """Holds a server that comes back to all that was ever said."""
        state = coordinator.state
        number = state.store.journal.last
        self.must(number <= len(self.records), f"{number} records, {len(self.records)} written")
        del self.records[number:]
        self.went_on = min(self.went_on, number)
        folded = self._fold()
        self.must(folded == state.ledger, f"the ledger is not the fold of its {number} records")
        self.ledger = self._fold()
        self._check_promises(folded)
        self.silence.opened(now=self.clock())
        append = state.commit.append

        def appended(record: Entry) -> int:
            number, decoded = append(record), decode(json.loads(json.dumps(record)))
            assert decoded is not None
            self._appended(number, decoded)
            return number

        state.commit.append = appended

    def _fold(self) -> Ledger:
        return Ledger.folded(len(self.settings.sizes), enumerate(self.records, 1))

    def _appended(self, number: int, record: Record) -> None:
        self.must(number == len(self.records) + 1, f"record {number} after {len(self.records)}")
        if isinstance(record, VersionPublished):
            f, version = record.fragment, record.version
            before = [published.version for published in self._published(f)]
            self.must(
                version == len(before) + 1, f"version {version} of {f} after versions {before}"
            )
        if isinstance(record, MemberDropped):
            self.must("could not read" not in record.why, f"payload lost: {record.why}")
        if isinstance(record, FrameDecided) and record.fate == "pending":
            region, digest = record.receipt.region, record.receipt.digest
            known = region in self.ledger.members
            self.must(known, f"frame {digest[:8]} is accepted, and {region} is no member")
        self.records.append(record)
        self.ledger.apply(number, record)
        if isinstance(record, TermsAmended) and record.reopens:
            self.said.clear()  # The run is open again.
            self.went_on = number
        if isinstance(record, RunResumed):
            self.said.discard("end")
            self.went_on = number
        self.silence.recorded(record, now=self.clock())
        self.trace("record", number=number, what=record.kind)

    def _published(self, fragment: int) -> list[VersionPublished]:
        published = (record for record in self.records if isinstance(record, VersionPublished))
        return [record for record in published if record.fragment == fragment]

    def _check_promises(self, ledger: Ledger) -> None:
        self.must(ledger.news >= self.news, f"news {self.news} is gone, {ledger.news} is left")
        for f, version in enumerate(self.newest):
            found = ledger.slots[f].version
            self.must(found >= version, f"version {version} of {f} is gone, {found} is left")
        for (f, version), digest in self.versions.items():
            if version > 0:
                found = self._published(f)[version - 1].published
                self.must(found == digest, f"version {version} of {f} is another one now")
        for region, epoch in self.epochs.items():
            found = ledger.regions[region].epoch if region in ledger.regions else 0
            self.must(found >= epoch, f"epoch {epoch} of {region} is gone, {found} is left")
        decided, fates = self._fates()
        for digest, told in self.acknowledged.items():
            self.must(digest in decided, f"frame {digest[:8]} was {told}, now it is unknown")
            if told != "pending":
                self.must(fates[digest] == told, f"{digest[:8]} was {told}, is {fates[digest]}")
        ids = [record.id for record in ledger.amendments]
        self.must(len(set(ids)) == len(ids), f"an amendment was made twice: {ids}")
        for id, number in self.amended.items():
            there = ids.index(id) + 1 if id in ids else 0
            self.must(there == number, f"{id} was amendment {number}, now it is {there}")
        for key in self.said:
            self.must(getattr(ledger, key), f"{key} was said, and is not on record")

    def _fates(self) -> tuple[set[str], dict[str, str]]:
        """Every decided frame, and what became of it, by the records alone."""
        fates: dict[str, str] = {}
        ledger = Ledger.empty(len(self.settings.sizes))
        for number, record in enumerate(self.records, 1):
            match record:
                case FrameDecided():
                    fates[record.receipt.digest] = record.fate
                case MemberDropped():
                    member = ledger.slots[record.fragment].closing[record.region]
                    fates[member.digest] = record.fate
                case VersionPublished():
                    members = ledger.slots[record.fragment].closing.values()
                    fates.update({receipt.digest: "merged" for receipt in members})
                case _:
                    pass
            ledger.apply(number, record)
        return set(fates), fates

    # The end

    def closing(self, root: Path, *, books: bool, calm: bool) -> None:
        """Looks at everything once more when the run is finished."""
        ledger = self._fold()
        self.must(ledger.finished, "the run ended without being finished")
        self._check_promises(ledger)
        for digest, fate in self._fates()[1].items():
            self.must(fate != "pending", f"frame {digest[:8]} was accepted and became of nothing")
        for f, slot in enumerate(ledger.slots):
            left = sorted([*slot.waiting, *slot.closing])
            self.must(not left, f"{', '.join(left)} wait for ever to be merged into {f}")
        self._check_merged()
        summary = json.loads((root / "summary.json").read_bytes())
        if books:
            self.must(summary["balanced"], f"tokens do not balance: {summary['fragments']}")

        if calm:
            self._check_budget(ledger)

    def _check_budget(self, ledger: Ledger) -> None:
        """Where nothing went wrong, no more is merged than the budget and two steps of each."""
        settings = self.settings
        budget, applied = settings.spec.budget.tokens, ledger.applied(settings.sizes)
        step = sum(settings.step_tokens(region) for region in ledger.members)
        self.must(applied <= budget + 2 * step, f"{applied} of {budget} tokens are merged")
        least = budget - settings.spec.sync.every * step
        self.must(applied > least, f"only {applied} of {budget} tokens are merged")

    def _check_merged(self) -> None:
        """Makes every version again from nothing, and counts the work in it."""
        ledger, store = Ledger.empty(len(self.settings.sizes)), cast(Any, self)
        versions, merged = self._begin(), Counter[str]()
        every_terms, closed = [self.settings], dict[int, int]()
        shares: list[Shares] = [{} for _ in versions]
        for number, record in enumerate(self.records, 1):
            if isinstance(record, VersionPublished):
                f = record.fragment
                slot, about = ledger.slots[f], self.settings.layout.fragments[f]
                receipts = tuple(slot.closing.values())
                settings = every_terms[closed[f]]
                how = {"drain": slot.drain, "live": slot.live}
                made = next_version(settings, store, versions[f], about, receipts, **how)
                if not isinstance(made, tuple):
                    self.must(False, f"version {record.version} of {f}: {made}")
                    return
                versions[f] = made[0]
                same = versions[f].digest, versions[f].state.digest
                self.must(
                    same == (record.published, record.state),
                    f"version {record.version} of {f} replays to {same[0][:8]}",
                )
                for receipt in receipts:
                    merged[receipt.digest] += 1
                    for step, share in self.frames[receipt.digest].shares.items():
                        shares[f][step] = shares[f].get(step, 0.0) + share
            ledger.apply(number, record)
            if isinstance(record, RoundClosed):
                closed[record.fragment] = len(every_terms) - 1
            if isinstance(record, TermsAmended):
                data = overlay(resolved(self.settings.spec), ledger.amendments)
                every_terms.append(every_terms[-1].amended(RunSpec.model_validate(data)))
        twice = [digest[:8] for digest, count in merged.items() if count > 1]
        self.must(not twice, f"merged twice: {twice}")
        for f, found in enumerate(shares):
            over = [step for step, share in found.items() if share > 1 + 1e-6]
            self.must(not over, f"steps {over[:5]} were merged twice into fragment {f}")
            lapsed = ledger.orders[ORDER.digest].lapsed if ledger.orders else ()
            again = self.text.repeated(found, lapsed, self.spoiled)
            self.must(not again, f"windows {again} were merged twice into fragment {f}")

    def _begin(self) -> list[Version]:
        versions = []
        for fragment in self.settings.layout.fragments:
            theta = gather(self.initial(), fragment)
            state = StoredState(theta, self.settings.outer.start(fragment.size), theta)
            versions.append(Version(0, state, "", {}, ()))
        return versions

    # As much of a store as merging needs.

    run = "replay"

    def payload(self, digest: str) -> bytes:
        return self.frames[digest].data
