"""`diloco chaos`: a real run on this machine, and everything that goes wrong with it."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.options import finite
from diloco_cli.cli.run import LogForm
from diloco_cli.cli.spec import Format, OutputFormat, Overrides, SpecFile
from diloco_cli.system import logs
from diloco_cli.system.logs import LogFormat

if TYPE_CHECKING:
    from diloco_cli.chaos.report import ChaosRecord
    from diloco_cli.chaos.run import Method
    from diloco_cli.sim.faults import Fault
    from diloco_cli.spec.schema import RunSpec


class ChaosMethod(StrEnum):
    decoupled = "decoupled"
    synchronous = "synchronous"
    streaming = "streaming"
    elastic = "elastic"
    rigid = "rigid"


EXAMPLE = "chaos: {seconds: 60, faults: [{kind: kill-trainer, per_hour: 324}]}"


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command()(chaos)


def chaos(
    spec_file: SpecFile,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="FOLDER", help="The run folder; runs/NAME-METHOD if left out."
        ),
    ] = None,
    schedule: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Inflict these faults, as FOLDER/schedule.json has them."
        ),
    ] = None,
    method: Annotated[
        ChaosMethod,
        typer.Option(
            help="How regions train together: as the spec says (decoupled), with quorum all "
            "(streaming), in lockstep too (synchronous), or as one data-parallel job."
        ),
    ] = ChaosMethod.decoupled,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, callback=finite, help="Instead of chaos.seconds."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of chaos.seed.")] = None,
    fault_free: Annotated[
        Path | None,
        typer.Option(
            "--fault-free",
            metavar="FILE",
            help="chaos.json of a run without faults, to compare with.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set an old run aside; its folder becomes FOLDER.old-N.")
    ] = False,
    format: OutputFormat = Format.text,
    log_format: LogForm = LogFormat.text,
) -> None:
    """Inflict the spec's fault schedule on a real run on this machine.

    Runs for as long as the schedule does, then stops in good order. What was inflicted, what it
    cost and how fast regions came back is in FOLDER/chaos.json; FOLDER/schedule.json inflicts the
    same again.
    """
    from diloco_cli.chaos import run
    from diloco_cli.run.folder import SpecPlace

    given = [*(overrides or ())]
    given += [f"chaos.seconds={seconds:g}"] if seconds is not None else []
    given += [f"chaos.seed={seed}"] if seed is not None else []
    place = SpecPlace(spec_file)
    spec = _load(place.file, given, method)
    options = run.ChaosOptions(
        method=method.value,
        folder=place.run_folder(f"{spec.name}-{method.value}", folder),
        faults=_faults(spec, place.path(schedule) if schedule else None),
        rate=run.rate_of(spec, place.path(fault_free) if fault_free else None),
        fresh=fresh,
        quiet=format is Format.json,
    )
    if log_format is LogFormat.json:
        logs.set_up("chaos", log_format)
    code, record = run.run_with_faults(spec, options, _baseline(method))
    if format is Format.json:
        typer.echo(json.dumps(record or {}, indent=2))
    elif record:
        _print(record, options.folder)
    raise typer.Exit(code)


def _baseline(method: ChaosMethod) -> Method | None:
    if method not in (ChaosMethod.rigid, ChaosMethod.elastic):
        return None
    from diloco_cli.bench.baselines.job import parallel_run

    return parallel_run


def _load(spec_file: Path, overrides: list[str], method: ChaosMethod) -> RunSpec:
    from diloco_cli.assemble import load_run, spelled_out

    spec = load_run(spec_file, overrides).spec
    everybody = [f"sync.quorum={len(spec.regions)}", "sync.grace={kind: none}"]
    more = {
        ChaosMethod.synchronous: [*everybody, "sync.overlap=0", "sync.fragments=1"],
        ChaosMethod.streaming: everybody,
    }.get(method, [])
    return spelled_out(load_run(spec_file, [*overrides, *more]).spec)


def _faults(spec: RunSpec, schedule: Path | None) -> list[Fault]:
    from diloco_cli.errors import SpecError
    from diloco_cli.sim import faults

    names = [region.name for region in spec.regions]
    if spec.chaos is None:
        raise SpecError(f"{spec.name} has no `chaos`.", hint=f"Add {EXAMPLE}, or give --seconds.")
    if schedule is None:
        return faults.planned(spec.chaos, names)
    return faults.load(schedule, names)


def _print(record: ChaosRecord, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from diloco_cli.observe.units import percent

    kinds = Table("fault", "inflicted", "nobody to strike", box=None)
    for kind in dict.fromkeys(fault["kind"] for fault in record["faults"]):
        own = [fault for fault in record["faults"] if fault["kind"] == kind]
        skipped = sum("skipped" in fault for fault in own)
        kinds.add_row(kind, str(len(own) - skipped), str(skipped))
    goodput, back, loss = record["goodput"], record["recovery"], record["loss"]["heldout"]
    sums = Table("", "", box=None, show_header=False)
    for name in ("time", "tokens", "participation"):
        sums.add_row(f"goodput, {name}", "–" if goodput[name] is None else percent(goodput[name]))
    if back["count"]:
        recovery = f"{back['p50']:.1f} s, p95 {back['p95']:.1f} s, of {back['count']}"
        sums.add_row("kill to next step", recovery)
    sums.add_row("held-out loss", "–" if loss is None else f"{loss:.3f}")
    console = Console()
    console.print(f"{record.get('name')}, {record.get('method')}: {record['seconds']:.0f} s")
    for table in (kinds, sums):
        if table.row_count:
            console.print(table)
    typer.echo(f"{folder / 'chaos.json'} has every figure.", err=True)
