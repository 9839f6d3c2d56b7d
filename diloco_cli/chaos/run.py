"""What `diloco chaos` does around the run: folder, schedule, record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


Method = Callable[[RunSpec, ChaosSpec, Sequence[Fault], ChaosOptions], tuple[int, dict[str, Any]]]
"""Trains under these faults; returns the exit code and the record, which is empty if the job
never got under way."""


def run_with_faults(
    spec: RunSpec, options: ChaosOptions, method: Method | None = None
) -> tuple[int, dict[str, Any]]:
    """Trains by a method, the local run if none is given, while faults are inflicted.

    Returns the exit code and the record, which is also written to chaos.json.
    """
    assert spec.chaos is not None
    method = method or local_run
    for words in (spec.chaos.link, *spec.chaos.links.values()):
        parse_link(words or "unlimited")
    _make_room(options)
    faults = [fault for fault in options.faults if fault.time < spec.chaos.seconds]
    with held(options.folder):
        write_resolved(spec, options.folder)
        schedules.save(faults, options.folder / "schedule.json")
        code, measured = method(spec, spec.chaos, faults, options)
        head = {
            "method": options.method,
            "name": spec.name,
            "spec": shared_digest(spec),
            "seed": spec.chaos.seed,
        }
        record = {**head, **measured} if measured else {}
        if record:
            write_json(options.folder / "chaos.json", record)
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
) -> tuple[int, dict[str, Any]]:
    """Server and workers as `diloco run` has them, with links between where they are asked for."""
    folder, names = options.folder, [region.name for region in spec.regions]
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
    return code, aftermath(spec, span, run.storm.struck, events, rate=options.rate)
