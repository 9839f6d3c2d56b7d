"""The promises of the protocol, checked while the run goes on and at its end.

a  no work is merged twice, and none is merged and still held
b  the books balance, equal what is really held, and lose nothing durable
c  every image equals the server's version, to the last bit
d  a replay of the journal gives the same weights
e  the run finishes and leaves nothing acknowledged pending
f  a live region is never left out for long (calm runs)
g  a round waits for its grace and no longer, and closes only when called
o  a run ends with its budget: a step or two more of each region where nothing fails, and less
   than a round short of it
k  no more counts of what a region claims than its time allows
t  every amendment is made once, and none that was answered is lost
h  one worker speaks for a region, and nobody is fenced without a rival
m  nothing of a region that is no member is accepted, and nobody waits for it
l  no window is merged twice into a fragment or left out, but for what a silent owner read
   unheard; and whoever is there gets something to read
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from diloco_cli.core import unmerged_work
from diloco_cli.core.claims import ALONE, CEILING, SLACK
from diloco_cli.core.journal_records import VersionPublished
from diloco_cli.core.lanes import LaneOwner, LanePosition
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.members import MOST_RETIRED
from diloco_cli.core.unmerged_work import Work
from tests.verify.model.amendments import terms_after
from tests.verify.model.seeded_run import LEASE
from tests.verify.model.symbols import TINY, Frame, Image, Saved, State, worth
from tests.verify.model.virtual_time import Clockwork, Violation

if TYPE_CHECKING:
    from tests.verify.model.region import Site, Trainer
    from tests.verify.model.server import Server

Window = tuple[int, int]
"""Lane and position."""
MOST_STEPS = 32
"""Cap of the steps in one frame's weight, under any terms of any run here."""
MOST_RESUMED = 40
"""Times that a run may go on after a drain."""
BARE = 150.0
"""Seconds in which a region that is there gets a lane."""
LEFT_OUT = 24
"""Rounds a live region may miss in a row when nothing fails (speeds up to 1:4, no grace)."""


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
        self.retired: set[str] = set()
        """Regions that were no members for a while: fenced once, and as good as ever."""
        self.history = [[Version(0.0, {}, {})] for _ in fragments]
        self.merged: list[dict[int, float]] = [{} for _ in fragments]
        self.frames: list[list[Frame]] = [[] for _ in fragments]
        self.dropped: list[set[int]] = [set() for _ in fragments]
        self.speakers: dict[tuple[str, int], str] = {}
        self.answered: set[str] = set()
        """Ids of the amendments that were answered."""
        self.on_reopening: Callable[[], None] = lambda: None
        self.claimed: dict[tuple[str, int], float] = defaultdict(float)
        """By region and fragment: steps that counted."""
        self.allowed: dict[tuple[str, int], float] = defaultdict(float)
        self.allowed_at: dict[tuple[str, int], tuple[float, float, float]] = {}
        """Steps that might have counted; up to when, what had jumped by then, at which rate."""
        self.jumped = 0.0
        """Seconds that a wrong wall clock has given everybody."""
        self.went_on = 0
        self.missed: Counter[tuple[int, str]] = Counter()
        self.met: dict[int, tuple[object, float]] = {}
        self.unsure: dict[int, float] = {}
        """By fragment: when its round last had no window yet."""
        self.rivals: set[str] = set()
        """Regions that two folders have spoken for."""
        self.restored: dict[str, float] = {}
        """By region: when its folder was last put back to an older copy."""
        self.windows: dict[int, Window] = {}
        self.readers: dict[int, str] = {}
        self.read_at: dict[int, float] = {}
        """All by token."""
        self.unreadable: set[str] = set()
        """Digests of frames that were accepted and could not be merged."""
        self.accepted_at: dict[str, float] = {}
        """By digest of a frame."""
        self.own: dict[tuple[str, Window], tuple[int, Frame]] = {}
        """Windows that are merged and whose work they were: the token, and the frame it came in."""
        self.words: dict[tuple[int, int, int], int] = {}
        """By life of the server, lane and grant: the furthest position that it has heard."""
        self.unheard: list[tuple[int, str, int]] = []
        """Lanes that were read on for a silent owner: lane, owner, the first window unheard of."""

    def fail(self, kind: str, what: str) -> NoReturn:
        raise Violation(kind, f"at {self.world.now:.2f}: {what}")

    def demand(self, fact: bool, kind: str, what: str) -> None:
        if not fact:
            self.fail(kind, what)

    # The server

    def opened_again(self) -> None:
        self.stats["reopened"] += 1
        self.on_reopening()

    def published(self, server: Server, f: int, version: int, frames: list[Frame]) -> None:
        """Follows every token of the merged frames."""
        last, merged = self.history[f][-1], self.merged[f]
        self.stats["rounds"] += 1
        applied = dict(last.applied)
        for frame in frames:
            self.frames[f].append(frame)
            applied[frame.region] = applied.get(frame.region, 0.0) + frame.work.tokens
            for token, share in frame.tokens.items():
                self.own[frame.region, self.windows[token]] = token, frame
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
        # An amendment may ask for rounds that leave a slow region out for long.
        calm = setting.calm and not setting.wishes
        # Frames that contradict their own books are refused, and their region is in quarantine.
        honest = region not in setting.unbalanced
        return calm and honest and (setting.sync.alpha == 1 or near)

    def same_again(self, before: State | None, now: State) -> None:
        if self.world.setting.unreadable == 0:
            self.demand(before in (None, now), "d", "a recomputed version differs")

    def waits(self, server: Server, f: int, closes: bool, *, looked: bool) -> None:
        """Keeps its own watch on a round: quorum, floor and grace, then it must close.

        `looked` says that it was looked at: some actions come first and alone.
        """
        gathering, now = server.table.rounds[f], self.world.now
        here = server.live() & set(server.ledger.members) - server.ledger.quarantined()
        full = gathering.called_at is not None and len(gathering.members) >= server.need
        if full and looked and not closes:
            self.demand(not here <= set(gathering.members), "m", f"{f} waits for no member")
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
        if gathering.grace is None:
            self.unsure[f] = now  # Nobody has said yet how long a step takes.
            again = [
                region
                for region in gathering.members
                if region in server.reports and (f, region) not in server.table.unheard
                if server.reports[region][f].steps >= server.sync.every
            ]
            waits = looked and again and not closes
            self.demand(not waits, "g", f"{f} waits although {again} could be called again")
            return
        # It may become known when the window is long over.
        deadline = max(max(met, gathering.floor) + gathering.grace, self.unsure.get(f, 0.0) + 1.0)
        if not closes or now > deadline:
            in_time = now <= deadline + 1e-6
            self.demand(in_time, "g", f"{f} waits beyond its grace")

    def spoke(self, region: str, epoch: int, owner: str) -> None:
        first = self.speakers.setdefault((region, epoch), owner)
        self.demand(first == owner, "h", f"two workers speak for {region} in epoch {epoch}")

    def let_go(self, region: str, *, removed: bool = False) -> None:
        """A region is no member any more; one that was only silent loses nothing by that."""
        self.stats["removed" if removed else "forgotten"] += 1
        self.retired.add(region)
        if removed or self._forgets:
            self.spoiled.add(region)

    @property
    def _forgets(self) -> bool:
        return self.world.setting.keeps != MOST_RETIRED

    def welcomed(self, server: Server, region: str) -> None:
        gone = server.ledger.retired.get(region)
        self.demand(not (gone and gone.barred), "m", f"{region} was removed, and joins")

    def accepted(self, server: Server, frame: Frame) -> None:
        region = frame.region
        self.accepted_at[frame.digest] = self.world.now
        self.demand(region in server.ledger.members, "m", f"{region} is no member")

    def counted(self, server: Server, frame: Frame, counted: Work) -> None:
        """Keeps its own account of what a region's time allows."""
        region, f, now = frame.region, frame.fragment, self.world.now
        books_agree = frame.balanced or frame.lie == 1
        self.demand(books_agree, "k", f"{region} claims {frame.lie} × what its books say")
        self.claimed[region, f] += counted.steps
        self.stats["uncounted"] += counted.steps < frame.work.steps - TINY
        since, jumped, rate = self.allowed_at.get((region, f), (0.0, 0.0, ALONE))
        fastest = self._fastest(server, region)
        passed = now - since + self.jumped - jumped
        self.allowed[region, f] += passed * max(rate, fastest)
        self.allowed_at[region, f] = now, self.jumped, fastest
        allowed = MOST_STEPS + self.allowed[region, f]
        fits = self.claimed[region, f] <= allowed + TINY
        found = f"{self.claimed[region, f]:.0f} steps of {region} count, not {allowed:.0f}"
        self.demand(fits, "k", found)

    def _fastest(self, server: Server, region: str) -> float:
        """The most steps per second that may be believed of a region, knowing how fast all are."""
        speeds, known = self.world.setting.speeds, server.accounts.allowance()._known
        others = [1 / speeds[name] for name in known if name != region]
        return CEILING * SLACK * max(others) if others else ALONE

    def resumed(self) -> None:
        self.stats["resumed"] += 1
        self.went_on += 1
        self.demand(self.went_on < MOST_RESUMED, "e", "the run ends and goes on for ever")

    def ends_short(self, server: Server) -> None:
        """A run is not finished while there is a round or more of its budget left."""
        terms, here = server.terms, server.live() & set(server.ledger.members)
        step = sum(terms.step_tokens(region) for region in here or server.ledger.members)
        left = terms.budget - server.ledger.applied(terms.sizes)
        short = left >= max(terms.sync.every * step, 1.0)
        self.demand(not short, "o", f"finished with {left:.0f} of {terms.budget:.0f} tokens left")

    def _kept_to_the_budget(self, server: Server) -> None:
        setting, terms = self.world.setting, server.terms
        if not setting.calm or setting.wishes or setting.reopenings or setting.lies:
            return
        step = sum(terms.step_tokens(region) for region in server.ledger.regions)
        over = server.ledger.applied(terms.sizes) - terms.budget
        self.demand(over <= 2 * step + TINY, "o", f"{over:.0f} tokens above the budget")

    def finished(self, server: Server) -> None:
        """Whoever is away when the end comes has one lease to come back with its work."""
        for site in self.sites:
            region = site.region
            if region not in server.ledger.members:
                continue
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
        known = site.region in self.spoiled | self.retired
        self.demand(known, "h", f"{site.region} is fenced without a rival")

    def turned_away(self, site: Site, code: str) -> None:
        self.demand(site.region in self.spoiled, "h", f"{site.region}: {code} without a rival")

    def decided(self, frame: Frame, fate: str) -> None:
        """A region is told the truth about the frame it asks about."""
        region = frame.region
        if self.history[frame.fragment][-1].merged.get(region) == frame.digest:
            true = fate == "merged" or region in self.spoiled
            self.demand(true, "b", f"{region}: a merged frame is {fate}")
        if fate in ("foreign", "forgotten"):
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
        # Of a name that is kept short, the server no longer says what was merged last.
        if book.version >= 0 and not (region in self.retired and self._forgets):
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

    # The text

    def said(self, server: Server, lane: int, at: LanePosition) -> None:
        key = (server.life, lane, at.grant)
        self.words[key] = max(at.position, self.words.get(key, 0))

    def read_on(self, server: Server, lane: int, owner: LaneOwner, *, removed: bool) -> None:
        """Another region reads a lane whose owner is silent, or removed and perhaps added again."""
        self.stats["silent lanes"] += 1
        heard = self.words.get((server.life, lane, owner.grant), 0)
        since = owner.position if removed else max(heard, owner.position)
        self.unheard.append((lane, owner.region, since))

    def reads(self, region: str, token: int, window: Window) -> None:
        """A region never reads again what is merged of its own, not even with another disk."""
        self.windows[token], self.readers[token] = window, region
        self.read_at[token] = self.world.now
        if merged := self.own.get((region, window)):
            excused = region in self.rivals or self._unheard({region}, window)
            excused = excused or self._came_late(*merged)
            self.demand(excused, "l", f"{region} reads {window} again, which is merged")

    def _came_late(self, token: int, frame: Frame) -> bool:
        """Says whether a frame was on its way when its folder was put back to an older copy.

        That may be started under the number of the start before, and so has its epoch. What it
        reads again of such a frame, it gives up with the first version that contains that.
        """
        since = self.restored.get(frame.region, 0.0)
        return self.read_at[token] <= since <= self.accepted_at[frame.digest]

    def _unheard(self, readers: set[str], window: Window) -> bool:
        lane, at = window
        return any(
            lane == lost and owner in readers and at >= since for lost, owner, since in self.unheard
        )

    def bare(self, region: str, seconds: float) -> None:
        self.demand(seconds < BARE, "l", f"{region} has had nothing to read for {seconds:.0f} s")

    def _text(self, server: Server) -> None:
        anywhere = {self.windows[token] for merged in self.merged for token in merged}
        given_up = {self.windows[token] for dropped in self.dropped for token in dropped}
        wanted = any("sync.adopt" in changes for _, changes in self.world.setting.wishes)
        whole = self.world.setting.sync.alpha == 1 and not wanted
        whole = whole and not any(site.left for site in self.sites)
        whole = whole and not (self.spoiled or self.retired or self.unheard)
        for f, merged in enumerate(self.merged):
            seen: dict[Window, int] = {}
            for token in merged:
                window = self.windows[token]
                if window in seen:
                    readers = {self.readers[token], self.readers[seen[window]]}
                    self.stats["repeated"] += 1
                    excused = readers & self.spoiled or self._unheard(readers, window)
                    self.demand(bool(excused), "l", f"{readers} have {window} merged into {f}")
                seen[window] = token
            ends: dict[int, int] = {}
            for lane, at in seen:
                ends[lane] = max(at, ends.get(lane, 0))
            left_out = {(lane, at) for lane, end in ends.items() for at in range(end)} - seen.keys()
            # A crash between the posts of two fragments costs one of them the work.
            left_out -= given_up | anywhere
            self.stats["windows"] += len(seen)
            self.stats["left out windows"] += len(left_out)
            found = f"{sorted(left_out)[:4]} are never merged into {f}"
            self.demand(not (whole and left_out), "l", found)

    # The end

    def closing(self, server: Server) -> None:
        """Checks what only the whole run can show."""
        for f, slot in enumerate(server.ledger.slots):
            self.demand(not slot.waiting and not slot.closing, "e", "an accepted frame is pending")
            for region, batch in () if self._forgets else self.world.setting.batch.items():
                steps = sum(sum(x.tokens.values()) for x in self.frames[f] if x.region == region)
                applied = slot.applied.get(region, 0.0)
                same = abs(applied - steps * batch) < 1e-5
                less = applied <= self.world.setting.lies.get(region, 1.0) * steps * batch + 1e-5
                fits = less if self.stats["uncounted"] or self.world.setting.lies else same
                self.demand(fits, "b", "applied is not what merged")
            for site in self.sites:
                if site.region not in self.spoiled and site.done:
                    self._conserved(site.trainer, f)
        self._kept_to_the_budget(server)
        merged = {frame.digest for frames in self.frames for frame in frames}
        lost = self.accepted_at.keys() - merged - self.unreadable
        self.demand(not lost, "e", f"accepted, and never merged: {lost}")
        ids = [record.id for record in server.ledger.amendments]
        self.demand(len(ids) == len(set(ids)), "t", f"an amendment counts twice: {ids}")
        self.demand(self.answered <= set(ids), "t", f"lost: {self.answered - set(ids)}")
        self._replay(server)
        self._text(server)

    def _conserved(self, trainer: Trainer, f: int) -> None:
        book, region = trainer.books[f], trainer.site.region
        self.demand(book.pending == 0, "b", f"{region} still has pending work after the end")
        setting = self.world.setting
        untouched = setting.calm and setting.sync.alpha == 1
        untouched = untouched and not (setting.wishes or setting.lies)  # Refused work is dropped.
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
                by = terms_after(self.world.setting, again.amendments[: slot.terms])
                states[f] = merged_state(states[f], slot, server.payloads, by)
                same = states[f] == server.states[f, record.version]
                self.demand(same, "d", f"replay gives other weights for {f}")
            again.apply(number, record)
        if not self.world.off:
            self.demand(again == server.ledger, "d", "replay gives another ledger")
