"""What `diloco chaos` does around the run: folder, schedule, record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.assemble import shared_digest
from diloco_cli.chaos.report import aftermath, fault_free_rate
from diloco_cli.chaos.storm import EmulatedLinks
from diloco_cli.chaos.stormy import ChaosRun
from diloco_cli.errors import SpecError
from diloco_cli.launch.cores import deal_cores, my_cores
from diloco_cli.launch.roles import serve_role, work_role
from diloco_cli.launch.subprocesses import LocalLauncher
from diloco_cli.observe.events import read_events
from diloco_cli.observe.terminal import ProgressDisplay
from diloco_cli.run.ask import ShortCalls
from diloco_cli.run.find_credential import for_run
from diloco_cli.run.folder import held, read_json, refuse_foreign, set_aside
from diloco_cli.run.supervise_run import LocalRunPlan, write_json
from diloco_cli.sim import faults as schedules
from diloco_cli.sim.faults import Fault
from diloco_cli.sim.network import parse_link
from diloco_cli.spec.resolved import FILE, write_resolved
from diloco_cli.spec.schema import ChaosSpec, RunSpec
from diloco_cli.system.wakeup import Signals

if TYPE_CHECKING:
    from diloco_cli.bench.baselines.hub import GradientHub


@dataclass(frozen=True)
class ChaosOptions:
    """What stood on the command line."""

    method: str
    folder: Path
    faults: Sequence[Fault]
    rate: float | None
    """Tokens a second of all regions without faults; None when nobody knows."""
    fresh: bool
    quiet: bool


def disturb(spec: RunSpec, asked: ChaosOptions) -> tuple[int, dict[str, Any]]:
    """Runs the storm to its end; says the exit code, and the record that it also wrote."""
    assert spec.chaos is not None
    for words in (spec.chaos.link, *spec.chaos.links.values()):
        parse_link(words or "unlimited")
    _make_room(asked)
    faults = [fault for fault in asked.faults if fault.time < spec.chaos.seconds]
    with held(asked.folder):
        write_resolved(spec, asked.folder)
        schedules.save(faults, asked.folder / "schedule.json")
        way = _parallel if asked.method in ("rigid", "elastic") else _local
        code, found = way(spec, spec.chaos, faults, asked)
        head = {
            "method": asked.method,
            "name": spec.name,
            "spec": shared_digest(spec),
            "seed": spec.chaos.seed,
        }
        record = {**head, **found} if found else {}
        if record:
            write_json(asked.folder / "chaos.json", record)
        return code, record


def rate_of(spec: RunSpec, fault_free: Path | None) -> float | None:
    """Tokens a second without faults: from a record of such a run, or from the pace."""
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


def _make_room(asked: ChaosOptions) -> None:
    refuse_foreign(asked.folder)
    if asked.fresh and (aside := set_aside(asked.folder)):
        typer.echo(f"the old run is now in {aside}", err=True)
    if (asked.folder / FILE).exists():
        raise SpecError(
            f"{asked.folder} holds a run already, and figures are about one storm from its start.",
            hint="--fresh sets it aside, --dir FOLDER starts beside it.",
        )


def _local(
    spec: RunSpec, chaos: ChaosSpec, faults: Sequence[Fault], asked: ChaosOptions
) -> tuple[int, dict[str, Any]]:
    """Server and workers as `diloco run` has them, with links between where they are asked for."""
    folder, names = asked.folder, [region.name for region in spec.regions]
    resolved = folder / FILE
    links, cores = EmulatedLinks(chaos, faults, names), deal_cores(names, my_cores())
    plan = LocalRunPlan(
        folder=folder,
        regions=tuple(names),
        elsewhere=0,
        quorum=spec.sync.quorum,
        serve=serve_role(resolved, folder),
        work=lambda region, url: work_role(
            resolved, folder, region, url=links.url(region, url), cores=cores[region]
        ),
    )
    with ProgressDisplay() as progress:
        run = ChaosRun(
            plan,
            LocalLauncher(folder / "logs"),
            ShortCalls(for_run(spec)),
            progress,
            faults=faults,
            links=links,
            seconds=chaos.seconds,
        )
        code = run.conduct()
    if (span := run.span()) is None:
        return code, {}
    events = read_events(folder / "events.jsonl")
    return code, aftermath(spec, span, run.storm.struck, events, rate=asked.rate)


def _parallel(
    spec: RunSpec, chaos: ChaosSpec, faults: Sequence[Fault], asked: ChaosOptions
) -> tuple[int, dict[str, Any]]:
    from diloco_cli.bench.baselines.job import run_parallel

    with Signals() as signals:

        def until(hub: GradientHub) -> bool:
            # Before the first step of all there is nothing that a record could be about.
            if signals.impatient or (signals.count and hub.t0 is None):
                raise _Stopped
            return signals.count > 0

        try:
            record = run_parallel(
                spec,
                list(faults),
                asked.folder,
                elastic=asked.method == "elastic",
                seconds=chaos.seconds,
                say=lambda text: typer.echo(text, err=True),
                until=until,
            )
        except _Stopped:
            typer.echo(f"stopped by {signals.name}; there is no record", err=True)
            record = {}
        return signals.exit_code if signals.count else 0, record


class _Stopped(Exception):
    """Somebody wants the end now."""
