"""One run of the model, from nothing to the end, with all its misfortunes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

from tests.verify.model.amendments import Operator
from tests.verify.model.audit import Audit
from tests.verify.model.region import Agent, Site
from tests.verify.model.seeded_run import LONGEST_GAP, Misfortune, Setting
from tests.verify.model.server import Server
from tests.verify.model.virtual_time import Clockwork, Process, Violation


@dataclass
class Outcome:
    seed: int
    stats: Counter[str] = field(default_factory=Counter)
    points: int = 0
    violation: Violation | None = None


def play(setting: Setting, off: Collection[str] = ()) -> Outcome:
    """Runs a setting to its end, or to the first promise that breaks."""
    return Play(setting, off).outcome()


class Play:
    def __init__(self, setting: Setting, off: Collection[str]) -> None:
        self.world = Clockwork(setting, off)
        self.world.on_crash = self._crashed
        self.audit = Audit(self.world)
        self.server = Server(self.world, self.audit)
        late = dict(setting.late)
        first = [region for region in setting.regions if region not in late]
        self.sites = [self._site(region, region) for region in first]
        self.audit.sites = self.sites
        self.world.schedule(0.0, partial(self._start, self.server))
        for number, site in enumerate(self.sites):
            self.world.schedule(0.5 + 0.3 * number, partial(self._start, site.agent))
        for region, at in setting.late:
            self.world.schedule(at, partial(self._arrive, region))
        self.operator = Operator(self.world, self.server, self.audit)
        self.audit.on_reopening = self._reopened
        for misfortune in setting.misfortunes:
            self.world.schedule(misfortune.at, partial(self._strike, misfortune))

    def outcome(self) -> Outcome:
        outcome = Outcome(self.world.setting.seed, self.audit.stats)
        try:
            self.world.run(self._over, self._progress)
            self.audit.closing(self.server)
        except Violation as violation:
            outcome.violation = violation
        outcome.points = self.world.points
        return outcome

    def _over(self) -> bool:
        if self.operator.open or not self.server.up or not self.server.ledger.finished:
            return False
        return all(site.done or site.left or site.dismissed for site in self.sites)

    def _progress(self) -> tuple[int, ...]:
        done = sum(site.done for site in self.sites)
        return self.audit.stats["rounds"], done, self.operator.open

    def _reopened(self) -> None:
        """Whoever has left a finished run is started again by its supervisor."""
        for site in self.sites:
            if site.done and not site.left:
                site.done = False
                site.agent.die()
                site.trainer.die()
                self._revive(site)

    def _site(self, region: str, owner: str) -> Site:
        return Site(self.world, self.audit, self.server, region, owner)

    def _start(self, process: Server | Agent) -> None:
        if not process.up:
            process.start()

    # Members

    def _arrive(self, region: str) -> None:
        site = self._site(region, region)
        self.sites.append(site)
        self.audit.stats["arrived"] += 1
        self._start(site.agent)

    def _remove(self, blow: Misfortune) -> None:
        """An operator lets a region go, and perhaps adds it again later."""
        server, region = self.server, blow.region
        if not server.up:
            self.world.schedule(3.0, partial(self._remove, blow))
            return
        here = server.live() & set(server.ledger.members)
        if server.ledger.finished or len(here - {region}) < server.sync.quorum:
            return
        if blow.length:
            self.world.schedule(blow.length, partial(self._add, region))
        server.amend_members(remove=(region,))
        server.tick()

    def _add(self, region: str) -> None:
        server = self.server
        if not server.up:
            self.world.schedule(3.0, partial(self._add, region))
            return
        for site in self.sites:
            if site.region == region and site.dismissed and not site.left:
                site.dismissed = False
                self.world.schedule(1.0, partial(self._start, site.agent))
        server.amend_members(add=({"name": region},))

    # Crashes

    def _set_clock(self, seconds: float) -> None:
        self.audit.stats["clock"] += 1
        self.audit.jumped += LONGEST_GAP
        self.world.skew += seconds
        if self.server.up:
            self._crashed(self.server)

    def _crashed(self, process: Process) -> None:
        self.audit.stats[process.kind] += 1
        process.die()
        if process is self.server:
            self.world.schedule(self.world.rng.uniform(1, 10), partial(self._start, self.server))
            return
        site = next(s for s in self.sites if process in (s.agent, s.trainer))
        if process is site.agent:
            self._lose_mail(site)
            self._orphan(site)
            self._revive(site)
        elif site.agent.up:
            site.agent.later(self.world.rng.uniform(0.5, 4), site.agent.start_trainer)

    def _lose_mail(self, site: Site) -> None:
        """Fates and calls are written without care, so a crash may take them."""
        if self.world.chance(0.5):
            site.folder.fate.clear()
        if self.world.chance(0.5):
            site.folder.calls = None

    def _orphan(self, site: Site) -> None:
        if self.world.chance(0.5):
            site.trainer.die()
        elif site.trainer.up:
            site.trainer.orphan = True

    def _revive(self, site: Site) -> None:
        if not (site.left or site.done or site.dismissed):
            delay = self.world.rng.uniform(1, 12)
            self.world.schedule(delay, partial(self._start, site.agent))

    # Misfortunes

    def _strike(self, blow: Misfortune) -> None:
        if blow.kind == "remove":
            self._remove(blow)
            return
        if blow.kind == "clock":
            self._set_clock(blow.length)
            return
        here = [site for site in self.sites if site.region == blow.region]
        site = self.world.rng.choice(here)
        if site.left or site.done or site.dismissed:
            return
        self.audit.stats[blow.kind] += 1
        if blow.kind == "pause":
            until = self.world.now + blow.length
            site.agent.paused_until = site.trainer.paused_until = until
        elif blow.kind == "cut":
            site.cut_until = self.world.now + blow.length
        elif blow.kind == "copy":
            site.backup = site.folder.copy()
        elif blow.kind == "rival":
            self.audit.spoiled.add(blow.region)
            self.audit.rivals.add(blow.region)
            rival = self._site(blow.region, f"rival of {blow.region} since {self.world.now:.3f}")
            self.sites.append(rival)
            self.world.schedule(0.0, partial(self._start, rival.agent))
        else:
            self._stop(site, blow.kind)

    def _stop(self, site: Site, kind: str) -> None:
        site.agent.die()
        site.trainer.die()
        if kind == "leave":
            site.left = True
            return
        self.audit.spoiled.add(site.region)
        if kind == "restore" and site.backup:
            site.folder = site.backup.copy()
            self.audit.restored[site.region] = self.world.now
        elif kind == "lose":
            site.new_owner()
            site.folder = type(site.folder)(site.folder.owner)
        self._revive(site)
