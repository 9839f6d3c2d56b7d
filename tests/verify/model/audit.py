"""The promises of the protocol, checked while the run goes on and at its end.

a  no work is merged twice, and none is merged and still held
b  the books balance, equal what is really held, and lose nothing durable
c  every image equals the server's version, to the last bit
d  a replay of the journal gives the same weights
e  the run finishes and leaves nothing acknowledged pending
f  a live region is never left out for long (calm runs)
g  a round waits for its grace and no longer, and closes only when called
h  one worker speaks for a region, and nobody is fenced without a rival
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from diloco_cli.core import unmerged_work
from diloco_cli.core.journal_records import VersionPublished
from diloco_cli.core.ledger import Ledger
from tests.verify.model.seeded_run import LEASE
from tests.verify.model.symbols import TINY, Frame, Image, Saved, State, worth
from tests.verify.model.virtual_time import Clockwork, Violation

if TYPE_CHECKING:
    from tests.verify.model.region import Site, Trainer
    from tests.verify.model.server import Server

LEFT_OUT = 16
"""Rounds a live region may miss in a row when nothing fails (speeds up to 1:4)."""


@dataclass(frozen=True, slots=True)
class Version:
    published: float
    merged: Mapping[str, str]
    applied: Mapping[str, float]


class Audit:
    def __init__(self, world: Clockwork) -> None:
        fragments = range(world.setting.sync.fragments)
        self.world = world
        self.sites: list[Site] = []
        self.stats: Counter[str] = Counter()
        self.spoiled: set[str] = set()
        """Regions with a rival, a lost disk or an old one: some work of theirs may go."""
        self.history = [[Version(0.0, {}, {})] for _ in fragments]
        self.merged: list[dict[int, float]] = [{} for _ in fragments]
        self.frames: list[list[Frame]] = [[] for _ in fragments]
        self.dropped: list[set[int]] = [set() for _ in fragments]
        self.speakers: dict[tuple[str, int], str] = {}
        self.missed: Counter[tuple[int, str]] = Counter()
        self.met: dict[int, tuple[object, float]] = {}

    def fail(self, kind: str, what: str) -> NoReturn:
        raise Violation(kind, f"at {self.world.now:.2f}: {what}")

    def demand(self, fact: bool, kind: str, what: str) -> None:
        if not fact:
            self.fail(kind, what)

    # The server

    def published(self, server: Server, f: int, version: int, frames: list[Frame]) -> None:
        """Follows every token of the merged frames."""
        last, merged = self.history[f][-1], self.merged[f]
        self.stats["rounds"] += 1
        applied = dict(last.applied)
        for frame in frames:
            self.frames[f].append(frame)
            applied[frame.region] = applied.get(frame.region, 0.0) + frame.work.tokens
            for token, share in frame.tokens.items():
                merged[token] = merged.get(token, 0.0) + share
                if merged[token] > 1 + TINY:
                    self.fail("a", f"{frame.region}: a step is merged twice into {f}")
        digests = {**last.merged, **{frame.region: frame.digest for frame in frames}}
        self.demand(version == len(self.history[f]), "d", f"version {version} published again")
        state = server.states[f, version]
        self.history[f].append(Version(state.published, digests, applied))
        self._turns(server, f, {frame.region for frame in frames})
        for site in self.sites:
            if site.trainer.up and f < len(site.trainer.books):
                self.not_merged(site.trainer, f)

    def _turns(self, server: Server, f: int, members: set[str]) -> None:
        for region in server.live():
            self.missed[f, region] = 0 if region in members else self.missed[f, region] + 1
            longest = self.missed[f, region]
            self.stats["left out"] = max(self.stats["left out"], longest)
            if longest > LEFT_OUT and self._owes_turns(region) and not server.ledger.end:
                self.fail("f", f"{longest} rounds without {region}")

    def _owes_turns(self, region: str) -> bool:
        """Says whether nothing but the rules keeps a region out.

        With `replace` and `blend`, frames that take long are too old when they arrive:
        that is what `staleness` asks for.
        """
        setting = self.world.setting
        near = region not in setting.far and setting.sync.staleness >= 2
        return setting.calm and (setting.sync.alpha == 1 or near)

    def same_again(self, before: State | None, now: State) -> None:
        if self.world.setting.unreadable == 0:
            self.demand(before in (None, now), "d", "a recomputed version differs")

    def waits(self, server: Server, f: int, closes: bool) -> None:
        """Keeps its own watch on a round: quorum, floor and grace, then it must close."""
        gathering, now = server.table.rounds[f], self.world.now
        if closes:
            self.demand(server.ledger.slots[f].phase == "called", "g", "an uncalled round closes")
        if gathering.called_at is None or len(gathering.members) < server.need:
            self.met.pop(f, None)
            return
        key = (server.life, gathering.called_at)
        known, met = self.met.get(f, (None, now))
        if known != key:
            met = now
        self.met[f] = (key, met)
        deadline = max(met, gathering.floor) + gathering.grace
        if not closes or now > deadline:
            self.demand(now <= deadline + 1e-6, "g", f"{f} waits beyond its grace")

    def spoke(self, region: str, epoch: int, owner: str) -> None:
        first = self.speakers.setdefault((region, epoch), owner)
        self.demand(first == owner, "h", f"two workers speak for {region} in epoch {epoch}")

    def finished(self, server: Server) -> None:
        """Whoever is away when the end comes has one lease to come back with its work."""
        for site in self.sites:
            region = site.region
            speaks = site.agent.up and site.agent.epoch == server.ledger.regions[region].epoch
            if speaks and site.trainer.up:
                left = any(book.held.steps >= 1 or book.flight for book in site.trainer.books)
                patient = max(server.ended_at, server.signs[region]) + LEASE
                gone = self.world.now >= patient
                self.demand(gone or not left, "e", f"{region} is not drained at the end")

    # The regions

    def received(self, f: int, image: Image) -> None:
        truth = self.history[f][image.version].published
        self.demand(image.value == truth, "c", f"image {image.version} of {f} differs")

    def fenced(self, site: Site) -> None:
        self.stats["fenced"] += 1
        self.demand(site.region in self.spoiled, "h", f"{site.region} is fenced without a rival")

    def turned_away(self, site: Site, code: str) -> None:
        self.demand(site.region in self.spoiled, "h", f"{site.region}: {code} without a rival")

    def decided(self, frame: Frame, fate: str) -> None:
        """A region is told the truth about the frame it asks about."""
        region = frame.region
        if self.history[frame.fragment][-1].merged.get(region) == frame.digest:
            true = fate == "merged" or region in self.spoiled
            self.demand(true, "b", f"{region}: a merged frame is {fate}")
        if fate == "foreign":
            self.gives_up(frame.region)

    def gives_up(self, region: str) -> None:
        self.demand(region in self.spoiled, "b", f"{region} gives up work without a rival")

    def given_up(self, f: int, before: Mapping[int, float], after: Mapping[int, float]) -> None:
        """Remembers work that left the books, in whole or in part."""
        self.dropped[f].update(t for t, share in before.items() if after.get(t, 0.0) < share)

    def restarted(self, trainer: Trainer, f: int, saved: Saved | None) -> None:
        if trainer.site.region in self.spoiled:
            return
        book, frame = trainer.books[f], trainer.folder.outbox.get(f)
        durable = set(saved.held[f].tokens) if saved else set()
        here = set(trainer.held[f].tokens)
        if frame:
            durable.update(frame.tokens)
            if book.flight:
                here.update(frame.tokens)
        lost = durable - here - self.dropped[f] - self.merged[f].keys()
        self.demand(not lost, "b", f"{trainer.site.region} lost {len(lost)} durable steps of {f}")

    def books(self, trainer: Trainer, f: int) -> None:
        """Compares the books of a fragment with what is really there."""
        book, held, region = trainer.books[f], trainer.held[f], trainer.site.region
        steps = sum(held.tokens.values())
        tokens = steps * self.world.setting.batch[region]
        if abs(unexplained := unmerged_work.account(book)) > 1e-6:
            self.fail("b", f"{region}: the books of {f} miss {unexplained} tokens")
        if abs(book.held.steps - steps) > 1e-6 or abs(book.held.tokens - tokens) > 1e-6:
            self.fail("b", f"{region} books {book.held}, holds {steps} steps of {f}")
        if book.fresh.steps < -1e-6 or any(share < 0 for share in held.tokens.values()):
            self.fail("b", f"{region} holds negative work on {f}")
        if book.version >= 0:
            version = self.history[f][book.version]
            if book.prev != (known := version.merged.get(region, "")):
                self.fail("b", f"{region}: {book.prev} is not {known}, which was merged last")
            applied = version.applied.get(region, 0.0)
            if abs(book.totals.applied - applied) > 1e-6 and region not in self.spoiled:
                self.fail("b", f"{region} books {book.totals.applied} applied, not {applied}")
        self.not_merged(trainer, f)

    def not_merged(self, trainer: Trainer, f: int) -> None:
        """No step is in the weights and still held outside the frame in flight."""
        region = trainer.site.region
        if region in self.spoiled:
            return
        book, merged = trainer.books[f], self.merged[f]
        frame, share = trainer.flying(f), book.flight.share if book.flight else 0.0
        for token, part in trainer.held[f].tokens.items():
            if token in merged:
                inside = frame.tokens.get(token, 0.0) if frame else 0.0
                if merged[token] + part - share * inside > 1 + 1e-6:
                    self.fail("a", f"{region}: a step is merged and still held on {f}")

    # The end

    def closing(self, server: Server) -> None:
        """Checks what only the whole run can show."""
        for f, slot in enumerate(server.ledger.slots):
            self.demand(not slot.waiting and not slot.closing, "e", "an accepted frame is pending")
            for region, batch in self.world.setting.batch.items():
                steps = sum(sum(x.tokens.values()) for x in self.frames[f] if x.region == region)
                applied = slot.applied.get(region, 0.0)
                self.demand(abs(applied - steps * batch) < 1e-5, "b", "applied is not what merged")
            for site in self.sites:
                if site.region not in self.spoiled and site.done:
                    self._conserved(site.trainer, f)
        self._replay(server)

    def _conserved(self, trainer: Trainer, f: int) -> None:
        book, region = trainer.books[f], trainer.site.region
        self.demand(book.pending == 0, "b", f"{region} still has pending work after the end")
        untouched = self.world.setting.calm and self.world.setting.sync.alpha == 1
        if not untouched:
            return
        made = sum(map(worth, trainer.trained))
        sent = sum(frame.value for frame in self.frames[f] if frame.region == region)
        error = made - sent - trainer.remainder[f]
        self.demand(abs(error) < 1e-6, "b", f"{region}: {error} of {f} is in no book")

    def _replay(self, server: Server) -> None:
        from tests.verify.model.server import merged_state

        again = Ledger.empty(len(server.ledger.slots))
        states = [State() for _ in again.slots]
        for number, record in enumerate(server.journal, 1):
            if isinstance(record, VersionPublished):
                f, slot = record.fragment, again.slots[record.fragment]
                states[f] = merged_state(states[f], slot, server.payloads)
                same = states[f] == server.states[f, record.version]
                self.demand(same, "d", f"replay gives other weights for {f}")
            again.apply(number, record)
        if not self.world.off:
            self.demand(again == server.ledger, "d", "replay gives another ledger")
