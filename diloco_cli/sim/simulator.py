"""What would happen? Discrete events on a virtual clock, decided by the live core.

    heartbeat ─▶ tick ─▶ call ─▶ step ends ─▶ post ─▶ lanes ─▶ admit ─▶ close ─▶ merge ─▶ version
                                   ▲                                                       │
                                   └───────────────── adopted at a step's end ◀── lanes ◀──┘

Between two events nothing changes but the number of steps, which follows from the time.
The same scenario and seed give the same outcome, to the last event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from diloco_cli.core.rounds import Receipt
from diloco_cli.sim.clock import EventQueue
from diloco_cli.sim.faults import Fault
from diloco_cli.sim.network import Link, parse_link
from diloco_cli.sim.outcome import OnTheWay, OutcomeCounter, SimulationOutcome
from diloco_cli.sim.region import SimulatedRegion
from diloco_cli.sim.scenario import RegionSite, Scenario
from diloco_cli.sim.server import SimulatedServer
from diloco_cli.spec.fault_kinds import KILLS, Kind

Seconds = float


def simulate(scenario: Scenario) -> SimulationOutcome:
    """Simulates a scenario to its end."""
    return Simulation(scenario).run()


class Simulation:
    """One simulated run: the regions, the server and what passes between them."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.agenda = EventQueue()
        self.server = SimulatedServer(scenario, self.agenda)
        self.server.on_call, self.server.on_publish = self._called, self._published
        cut = _cuts(scenario)
        self.regions = {site.name: self.region_of(cut(site)) for site in scenario.sites}
        self.links = {name: region.site.link for name, region in self.regions.items()}
        self.tally = OutcomeCounter(scenario, training=len(self.regions))
        # Over the lines of regions, and over the server's own.
        self.on_way_up, self.on_way_down = (OnTheWay(), OnTheWay()), (OnTheWay(), OnTheWay())
        self.overlap = scenario.sync.overlap > 0
        for region in self.regions.values():
            self._beat_now(region)
        for fault in scenario.faults:
            self.agenda.at(fault.time, self._struck, fault)

    def region_of(self, site: RegionSite) -> SimulatedRegion:
        """The simulated region of a site; bench/quality overrides this with one that trains."""
        return SimulatedRegion(site, self.scenario)

    def frame_bytes(self, region: SimulatedRegion, fragment: int) -> int:
        """Of the frame that a region has just made; bench/quality counts those of a real one."""
        return math.ceil(self.scenario.sizes[fragment] * self.scenario.up_bits / 8)

    def version_bytes(self, fragment: int) -> int:
        """Of the newest version as it travels down."""
        return math.ceil(self.scenario.sizes[fragment] * self.scenario.down_bits / 8)

    def run(self) -> SimulationOutcome:
        budget, tally = self.scenario.budget, self.tally
        happened = self.agenda.run(self.scenario.duration, lambda: tally.applied >= budget)
        for region in self.regions.values():
            region.advance(self.agenda.now)
        now = self.agenda.now
        tally.bytes_up -= max(bodies.left(now) for bodies in self.on_way_up)
        tally.bytes_down -= max(bodies.left(now) for bodies in self.on_way_down)
        return tally.outcome(self.regions.values(), now=self.agenda.now, events=happened)

    # Heartbeats

    def _beat_now(self, region: SimulatedRegion) -> None:
        """Reports at once; from here on the next ones are counted."""
        region.beats += 1
        self._beat(region, region.beats)

    def _beat(self, region: SimulatedRegion, number: int) -> None:
        """Reports after some steps, and after a quarter of a lease at the latest."""
        if number != region.beats or not region.alive:
            return
        now, link = self.agenda.now, region.site.link
        region.advance(now)
        step = region.site.step * region.factor
        arrives, reports = link.after(now, link.delay), region.reports()
        self.agenda.at(arrives, self.server.heard, region.name, reports, step)
        due = now + self.scenario.server.lease / 4
        if region.training and not region.waiting:
            due = min(due, region.began + region.until_report(reports) * region.current)
        self.agenda.at(due, self._beat, region, number)

    # Calls and contributions

    def _called(self, fragment: int, version: int) -> None:
        now = self.agenda.now
        for region in self.regions.values():
            if region.alive:
                link = region.site.link
                self.agenda.at(link.after(now, link.delay), self._hears, region, fragment, version)

    def _hears(self, region: SimulatedRegion, fragment: int, version: int) -> None:
        region.calls[fragment] = version
        self.agenda.at(region.boundary(self.agenda.now), self._answer, region, fragment)

    def _answer(self, region: SimulatedRegion, fragment: int) -> None:
        """Posts what is held, at the end of a step."""
        now = self.agenda.now
        if not region.training or fragment not in region.calls:
            return
        region.advance(now)
        book = region.post(fragment, region.calls[fragment])
        if book is None or book.flight is None:
            return
        flight, size = book.flight, self.scenario.sizes[fragment]
        length = self.frame_bytes(region, fragment)
        identity = {"base": flight.base, "clock": flight.clock, "digest": flight.digest}
        receipt = Receipt(
            region.name,
            fragment,
            **identity,
            prev=flight.prev,
            tokens=flight.work.tokens,
            steps=flight.work.steps,
            bytes=length,
        )
        ready = now + size / self.scenario.encode_values
        arrives = self._sent(region, length, ready)
        checked = arrives + size / self.scenario.server.check_values + self.scenario.server.commit
        self.agenda.at(checked, self.server.arrived, receipt, self._answers(region, receipt))
        self._stand_still(region)

    def _answers(self, region: SimulatedRegion, receipt: Receipt):
        def hear(fate: str) -> None:
            region.advance(self.agenda.now)
            region.answered(receipt.fragment, receipt.digest, fate)
            self.tally.turned_away += 1

        return hear

    # Bytes pass the region's lane and the server's at once; they are there when both are done.
    # A region that is cut off must not hold up the server's lane, so that one is used now.

    def _sent(self, region: SimulatedRegion, length: int, ready: Seconds) -> Seconds:
        now, (region_line, server_line) = self.agenda.now, self.on_way_up
        region.up = region_line.send(region.up, length, at=ready, now=now)
        self.server.up = server_line.send(self.server.up, length, at=ready, now=now)
        self.tally.bytes_up += length
        return max(region.up.last, self.server.up.last)

    def _fetched(self, region: SimulatedRegion, length: int) -> Seconds:
        now, link = self.agenda.now, region.site.link
        region_line, server_line = self.on_way_down
        there = link.after(now, link.delay)
        region.down = region_line.send(region.down, length, at=there, now=now)
        self.server.down = server_line.send(self.server.down, length, at=now, now=now)
        self.tally.bytes_down += length
        return max(region.down.last, self.server.down.last)

    # Versions

    def _published(self, fragment: int, members: dict[str, Receipt]) -> None:
        slot, now = self.server.ledger.slots[fragment], self.agenda.now
        self.tally.published(fragment, slot.version, members, now=now)
        length = self.version_bytes(fragment)
        for name, region in self.regions.items():
            if region.alive:
                arrives = self._fetched(region, length)
                merged = slot.merged.get(name, "")
                self.agenda.at(arrives, self._receives, region, fragment, slot.version, merged)

    def _receives(self, region: SimulatedRegion, fragment: int, version: int, merged: str) -> None:
        region.images[fragment] = version, merged
        self.agenda.at(region.boundary(self.agenda.now), self._adopt, region, fragment)

    def _adopt(self, region: SimulatedRegion, fragment: int) -> None:
        if not region.training or fragment not in region.images:
            return
        region.advance(self.agenda.now)
        version, merged = region.images.pop(fragment)
        region.adopt(fragment, version, merged)
        if region.calls.get(fragment, version) < version:
            del region.calls[fragment]
        elif fragment in region.calls:
            self._answer(region, fragment)
        self._go_on(region)

    # Without overlap a region stands still between its frame and the version

    def _stand_still(self, region: SimulatedRegion) -> None:
        if not self.overlap and not region.waiting and region.waits():
            region.waiting = True
            self.tally.counted(region, training=False, now=self.agenda.now)

    def _go_on(self, region: SimulatedRegion) -> None:
        if region.waiting and not region.waits():
            region.waiting, region.began = False, self.agenda.now
            self.tally.counted(region, training=True, now=self.agenda.now)
            self._beat_now(region)

    # Faults

    def _struck(self, fault: Fault) -> None:
        HANDLERS[fault.kind](self, fault)

    def _server_dies(self, fault: Fault) -> None:
        self.tally.faults += 1
        self.server.crash(fault.duration or self.scenario.server.restart)

    def _unnoticed(self, fault: Fault) -> None:
        """Counted only: the trainer does not notice, and the connection is soon back."""
        self.tally.faults += 1

    def _slows(self, fault: Fault) -> None:
        self.tally.faults += 1
        region = self.regions[fault.region]
        region.paced(fault.factor, now=self.agenda.now)
        self.agenda.at(self.agenda.now + (fault.duration or 0.0), self._recovers, region)

    def _narrows(self, fault: Fault) -> None:
        self.tally.faults += 1
        region = self.regions[fault.region]
        ends = self.agenda.now + (fault.duration or 0.0)
        self.agenda.at(ends, self._linked, region, self.links[region.name])
        self._linked(region, parse_link(fault.link))

    def _region_stops(self, fault: Fault) -> None:
        region = self.regions[fault.region]
        if region.training and not region.failing:
            # Chips that fail while their group is being rebuilt cost it nothing more.
            self.tally.faults += 1
            region.failing = True
            ends = region.boundary(self.agenda.now)
            at = ends if self.scenario.recovery.at_boundary else self.agenda.now
            self.agenda.at(at, self._dies, region, fault)
        elif self.scenario.recovery.anew and fault.kind in KILLS:
            self.tally.faults += 1
            region.alive = region.alive and fault.kind != "kill-region"
            self._comes_back(region, fault.duration)

    def _recovers(self, region: SimulatedRegion) -> None:
        region.paced(1.0, now=self.agenda.now)

    def _linked(self, region: SimulatedRegion, link: Link) -> None:
        region.site = replace(region.site, link=replace(link, outages=region.site.link.outages))
        region.up, region.down = (
            region.up.over(region.site.upward),
            region.down.over(region.site.link),
        )

    def _dies(self, region: SimulatedRegion, fault: Fault) -> None:
        recovery, now = self.scenario.recovery, self.agenda.now
        was = region.training and not region.waiting
        keeps = recovery.at_boundary or fault.kind in ("pause", "leave")
        region.stop(recovery, now=now, keeps=keeps)
        lapses = fault.kind == "pause" and (fault.duration or 0.0) > self.scenario.server.lease
        region.alive = fault.kind not in ("kill-region", "leave") and not lapses
        self.tally.counted(region, training=False, now=now, was=was)
        self._comes_back(region, fault.duration)

    def _comes_back(self, region: SimulatedRegion, away: Seconds | None) -> None:
        """Begins the way back; whatever had begun before comes to nothing."""
        if away is None:
            away = self.scenario.recovery.detect + self._restart_time(region)
        region.deaths += 1
        back = self.agenda.now + away
        self.agenda.at(back, self._returns, region, region.deaths)

    def _restart_time(self, region: SimulatedRegion) -> Seconds:
        recovery = self.scenario.recovery
        if math.isinf(recovery.shape):
            return recovery.restart
        scale = recovery.restart / math.gamma(1.0 + 1.0 / recovery.shape)
        return region.chance.weibullvariate(scale, recovery.shape)

    def _returns(self, region: SimulatedRegion, death: int) -> None:
        """A host that was lost fetches the weights anew; a trainer finds them on its disk."""
        if death != region.deaths:
            return
        if region.alive:
            self._trains_again(region, death)
            return
        length = math.ceil(self.scenario.parameters * self.scenario.whole_bits / 8)
        self.agenda.at(self._fetched(region, length), self._trains_again, region, death)

    def _trains_again(self, region: SimulatedRegion, death: int) -> None:
        if death != region.deaths:
            return
        now, reborn = self.agenda.now, not region.alive
        region.start(now=now)
        self.tally.counted(region, training=True, now=now)
        slots = self.server.ledger.slots
        for number, slot in enumerate(slots):
            newest = slot.version, slot.merged.get(region.name, "")
            known = newest if reborn else region.images.pop(number, None)
            if known:
                region.adopt(number, *known)
        region.images.clear()
        region.calls = self.server.ledger.calls()
        for number in list(region.calls):
            self._answer(region, number)
        self._beat_now(region)


HANDLERS: Mapping[Kind, Callable[[Simulation, Fault], None]] = {
    "kill-trainer": Simulation._region_stops,
    "kill-agent": Simulation._unnoticed,
    "kill-region": Simulation._region_stops,
    "kill-server": Simulation._server_dies,
    "pause": Simulation._region_stops,
    "slow": Simulation._slows,
    "leave": Simulation._region_stops,
    "cut": Simulation._unnoticed,  # Its outage is in the link from the beginning.
    "narrow": Simulation._narrows,
    "reset": Simulation._unnoticed,
}


def _cuts(scenario: Scenario):
    """Gives sites whose links are out whenever the schedule cuts them off."""
    cuts: dict[str, list[tuple[Seconds, Seconds]]] = {}
    for fault in scenario.faults:
        if fault.kind == "cut" and fault.duration:
            cuts.setdefault(fault.region, []).append((fault.time, fault.time + fault.duration))

    def cut(site: RegionSite) -> RegionSite:
        if site.name not in cuts:
            return site
        return replace(site, link=_without(site.link, cuts[site.name]))

    return cut


def _without(link: Link, cuts: list[tuple[Seconds, Seconds]]) -> Link:
    """The same link, out at these times as well; times that touch become one."""
    joined: list[tuple[Seconds, Seconds]] = []
    for begin, end in sorted([*link.outages, *cuts]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return replace(link, outages=tuple(joined))
