"""A run on this machine while a fault schedule is inflicted on it: folder, schedule, record.

The run is a `LocalRun`, supervised as ever. A `FaultWatcher` inflicts what is due whenever the
run is looked at, and stops it when the schedule is over, not when the budget is spent. However
the run ends, every fault that still lasts is ended first, so that no process stays paused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from diloco_cli.assemble import shared_digest
from diloco_cli.chaos.inflict import EmulatedLinks, FaultInflictor, InflictedFault, LinkBytes
from diloco_cli.chaos.report import ChaosRecord, Span, aftermath, fault_free_rate
from diloco_cli.errors import RunFailed, SpecError
from diloco_cli.launch.subprocesses import LocalLauncher
from diloco_cli.launch.supervise import Patience, Supervisor
from diloco_cli.observe.events import read_events
from diloco_cli.observe.status import Status
from diloco_cli.observe.terminal import ProgressDisplay
from diloco_cli.run.ask import ShortCalls
from diloco_cli.run.find_credential import for_run
from diloco_cli.run.folder import held, read_json, refuse_foreign, set_aside
from diloco_cli.run.start import LoggedProgress, plan_run
from diloco_cli.run.supervise_run import LocalRun, write_json
from diloco_cli.sim import faults as schedules
from diloco_cli.sim.faults import Fault
from diloco_cli.sim.network import parse_link
from diloco_cli.spec.resolved import FILE, write_resolved
from diloco_cli.spec.schema import ChaosSpec, RunSpec
from diloco_cli.system import logs

START_SECONDS = 600.0
"""For every region to make its first step."""
RETURN_SECONDS = 60.0
"""For a server that was down at the end to answer once more."""
PATIENCE = Patience(healthy=5.0, tries=1_000_000)
"""A process that is killed on purpose, again and again, must not be given up."""
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class ChaosOptions:
    """What the command line asked for."""

    method: str
    folder: Path
    faults: Sequence[Fault]
    rate: float | None
    """Tokens per second of all regions without faults; None if unknown."""
    fresh: bool
    quiet: bool


Method = Callable[
    [RunSpec, ChaosSpec, Sequence[Fault], ChaosOptions], tuple[int, ChaosRecord | None]
]
"""Trains under these faults; returns the exit code and the record, which is None if the job
never got under way."""


def run_with_faults(
    spec: RunSpec, options: ChaosOptions, method: Method | None = None
) -> tuple[int, ChaosRecord | None]:
    """Trains by a method, the local run if none is given, while faults are inflicted.

    Returns the exit code and the record, which is also written to chaos.json.
    """
    assert spec.chaos is not None
    method = method or local_run
    for link in (spec.chaos.link, *spec.chaos.links.values()):
        parse_link(link or "unlimited")
    _make_room(options)
    faults = [fault for fault in options.faults if fault.time < spec.chaos.seconds]
    with held(options.folder):
        write_resolved(spec, options.folder)
        schedules.save(faults, options.folder / "schedule.json")
        code, measured = method(spec, spec.chaos, faults, options)
        if measured is None:
            return code, None
        record: ChaosRecord = {
            "method": options.method,
            "name": spec.name,
            "spec": shared_digest(spec),
            "seed": spec.chaos.seed,
            **measured,
        }
        write_json(options.folder / "chaos.json", record)
        return code, record


def rate_of(spec: RunSpec, fault_free: Path | None) -> float | None:
    """Tokens per second without faults: from a record of such a run, or from the pace."""
    if fault_free is None:
        return fault_free_rate(spec)
    record = read_json(fault_free)
    try:
        rate = record["tokens"]["trained"] / record["seconds"]
    except (KeyError, TypeError, ZeroDivisionError):
        rate = 0.0
    if not 0 < rate < math.inf:
        raise SpecError(
            f"{fault_free} is no record of a run without faults.",
            hint="`diloco chaos SPEC --set chaos.faults=[]` makes one: its FOLDER/chaos.json.",
        )
    return rate


def _make_room(options: ChaosOptions) -> None:
    refuse_foreign(options.folder)
    if options.fresh and (aside := set_aside(options.folder)):
        typer.echo(f"the old run is now in {aside}", err=True)
    if (options.folder / FILE).exists():
        raise SpecError(
            f"{options.folder} holds a run already; the figures are of one run, from its start.",
            hint="--fresh sets it aside, --dir FOLDER starts beside it.",
        )


def local_run(
    spec: RunSpec, chaos: ChaosSpec, faults: Sequence[Fault], options: ChaosOptions
) -> tuple[int, ChaosRecord | None]:
    """Server and workers as `diloco run` has them, with links between where they are asked for."""
    folder, names = options.folder, [region.name for region in spec.regions]
    links = EmulatedLinks(chaos, faults, names)
    plan = plan_run(spec, folder / FILE, names, url_for=links.url)
    with LoggedProgress() if logs.options() else ProgressDisplay() as progress:
        run = LocalRun(
            plan,
            LocalLauncher(folder / "logs"),
            ShortCalls(for_run(spec)),
            progress,
            patience=PATIENCE,
            poll=POLL_SECONDS,
        )
        watcher = FaultWatcher(run, faults, links, chaos.seconds)
        run.watcher = watcher
        try:
            code = run.run()
        finally:
            links.close()
    if (span := watcher.span()) is None:
        return code, None
    events = read_events(folder / "events.jsonl")
    return code, aftermath(spec, span, watcher.inflictor.inflicted, events, rate=options.rate)


class FaultWatcher:
    """Inflicts the faults of a schedule on a local run; stops it when the schedule is over."""

    def __init__(
        self, run: LocalRun, faults: Sequence[Fault], links: EmulatedLinks, seconds: float
    ) -> None:
        self._run, self._links = run, links
        self.inflictor = FaultInflictor(faults, self, links, seconds, report=self._report)
        self._carried: tuple[Mapping[str, LinkBytes], Mapping[str, LinkBytes]] = {}, {}
        """By links: when the schedule began, and when it was over."""
        self._before: Status | None = None
        self._after: Status | None = None
        self._ended = 0.0

    @property
    def folder(self) -> Path:
        return self._run.plan.folder

    def supervisor(self, region: str) -> Supervisor | None:
        return self._run.supervisor(region)

    def span(self) -> Span | None:
        """The time the record is about; None if no fault schedule began."""
        inflictor, before, after = self.inflictor, self._before, self._after or self._run.status
        if inflictor.began is None or before is None or after is None:
            return None
        seconds = (self._ended or time.monotonic()) - inflictor.began
        first, last = self._carried
        carried = {
            name: LinkBytes(up - earlier.up, down - earlier.down)
            for name, (up, down) in last.items()
            for earlier in [first.get(name, LinkBytes(0, 0))]
        }
        return Span(inflictor.began_wall, seconds, before, after, carried)

    def reason_to_stop(self, fresh: Status | None) -> str:
        now = time.monotonic()
        if self.inflictor.began is None:
            self._begin_when_all_step(fresh, now)
            return ""
        if not self.inflictor.over(now):
            self.inflictor.tend(now)
            return ""
        if not self._ended:
            self._end(now)
        # A server that was down at the end may first come back.
        if not fresh and now < self._ended + RETURN_SECONDS:
            return ""
        self._after = fresh or self._run.status
        return f"the schedule's {self.inflictor.seconds:g} s are over"

    def next_look(self) -> float:
        now = time.monotonic()
        return math.inf if self.inflictor.over(now) else self.inflictor.until_next(now)

    def stopping(self) -> None:
        if not self._ended:
            self._end(time.monotonic())
        self._after = self._after or self._run.status
        self._end_faults()

    def _end(self, now: float) -> None:
        self._ended = now
        self._carried = self._carried[0], self._links.carried()
        self._end_faults()

    def _begin_when_all_step(self, fresh: Status | None, now: float) -> None:
        idle = [region.name for region in fresh.regions if not region.step] if fresh else []
        if fresh and not idle:
            self.inflictor.begin(now)
            self._before, self._carried = fresh, (self._links.carried(), {})
            self._run.progress.say(
                f"every region trains; {len(self.inflictor.faults)} faults are to come"
            )
        elif now > self._run.began + START_SECONDS:
            raise RunFailed(
                f"After {START_SECONDS:g} s no step was made by {', '.join(idle) or 'any region'}.",
                hint=f"Look into {self.folder / 'logs'}.",
            )

    def _end_faults(self) -> None:
        self.inflictor.end_all()
        for name in ("", *self._run.plan.regions):
            if supervisor := self.supervisor(name):
                supervisor.call_back()

    def _report(self, inflicted: InflictedFault) -> None:
        fault = inflicted.fault
        fields: dict[str, object] = {"fault": fault.kind, "at": round(inflicted.at, 3)}
        if fault.region:
            fields["region"] = fault.region
        if fault.duration is not None:
            fields["duration"] = fault.duration
        if inflicted.skipped:
            fields["why"] = f"nobody was struck: {inflicted.skipped}"
        self._run.log.note("fault", **fields)
        name = f"{fault.kind} {fault.region}".strip()
        reason = f" ({inflicted.skipped})" if inflicted.skipped else ""
        self._run.progress.say(f"{inflicted.at:.0f} s: {name}{reason}")
