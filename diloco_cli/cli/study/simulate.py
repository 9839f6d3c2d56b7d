"""The command `diloco simulate`: a run spec or a preset, on a virtual clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco_cli.cli.options import finite, output_file
from diloco_cli.cli.spec import Format, OutputFormat, Overrides

if TYPE_CHECKING:
    from diloco_cli.bench.published.verdict import Verdict
    from diloco_cli.sim.sweep import SimulatedCell
    from diloco_cli.spec.schema import RunSpec

Links = Annotated[
    list[str] | None,
    typer.Option(
        "--link",
        metavar="RATE/RTT",
        help="Way to the server, as in 1Gbit/50ms or paris=2Gbit/30ms.",
    ),
]
Step = Annotated[
    str, typer.Option("--step", metavar="TIME", help="One inner step of a region, as in 1.2s.")
]
Flops = Annotated[
    float | None,
    typer.Option(
        "--flops", min=1.0, callback=finite, help="Sustained by one region, instead of --step."
    ),
]
WIDTH = 110


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command()(simulate)


def simulate(
    what: Annotated[
        str, typer.Argument(metavar="SPEC|PRESET", help="A run spec, or the name of a preset.")
    ],
    overrides: Overrides = None,
    link: Links = None,
    server_link: Annotated[
        str, typer.Option(metavar="RATE", help="The server's own line, shared by all.")
    ] = "",
    step: Step = "",
    flops: Flops = None,
    jitter: Annotated[
        float,
        typer.Option(
            min=0.0, max=10.0, callback=finite, help="Spread of a step's time, 0.1: ±10 %."
        ),
    ] = 0,
    mtbf: Annotated[
        str, typer.Option(metavar="TIME", help="Between two failures of a region, as in 6h.")
    ] = "",
    shape: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=100.0,
            callback=finite,
            help="Weibull shape of the failures; 1: exponential.",
        ),
    ] = 1.0,
    kind: Annotated[
        str, typer.Option(help="What fails: kill-trainer, or kill-region for the whole host.")
    ] = "kill-trainer",
    server_mtbf: Annotated[
        str, typer.Option(metavar="TIME", help="Between two failures of the server.")
    ] = "",
    detect: Annotated[str, typer.Option(metavar="TIME", help="Until a failure is noticed.")] = "1s",
    restart: Annotated[str, typer.Option(metavar="TIME", help="Until it trains again.")] = "8s",
    checkpoint: Annotated[
        str, typer.Option(metavar="TIME", help="Between two durable points of a trainer.")
    ] = "20s",
    cores: Annotated[int, typer.Option(min=1, help="Cores that the server merges on.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recorded faults instead of drawn ones.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=output_file, help="Write the faults that were played."
        ),
    ] = None,
    duration: Annotated[
        str, typer.Option(metavar="TIME", help="How much of the run; 100 exchanges if left out.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Faults and jitter follow from it.")] = 0,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,…", help="Simulate each value, as in link=0.5,1,2Gbit."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", callback=output_file, help="Draw it; needs the extra `plot`."
        ),
    ] = None,
    format: OutputFormat = Format.text,
) -> None:
    """Simulate a run on a virtual clock, with the round logic that runs live.

    Presets repeat published tables and say cell by cell whether they agree: streaming-table4,
    decoupled-table1, dp-bandwidth, hetero, llama3, 12b-four-regions, planet.
    """
    from diloco_cli.bench.published import PRESETS

    if what in PRESETS:
        given = {
            "--set": overrides,
            "--link": link,
            "--step": step,
            "--mtbf": mtbf,
            "--vary": vary,
            "--trace": trace,
            "--duration": duration,
            "--record": record,
            "--flops": flops,
        }
        _refuse_options(what, given)
        _preset(PRESETS[what](seed=seed), plot, format)
        return
    from diloco_cli.sim.scenario import Recovery
    from diloco_cli.sim.world import World
    from diloco_cli.spec.quantities import SPAN

    # Paths in the spec are relative to it, these are not.
    trace, record, plot = (path and path.absolute() for path in (trace, record, plot))
    world = World(
        step=SPAN.read(step) if step else None,
        flops=flops,
        links=tuple(link or ()),
        server_link=server_link,
        mtbf=SPAN.read(mtbf) if mtbf else math.inf,
        shape=shape,
        kind=_kind(kind),
        server_mtbf=SPAN.read(server_mtbf) if server_mtbf else math.inf,
        recovery=Recovery(
            SPAN.read(detect), SPAN.read(restart), checkpoint=SPAN.read(checkpoint), anew=True
        ),
        jitter=jitter,
        cores=cores,
        duration=SPAN.read(duration) if duration else None,
        trace=trace,
        seed=seed,
    )
    cells = _simulate(what, overrides or [], world, vary or [])
    if record is not None:
        from diloco_cli.sim import faults
        from diloco_cli.system.outputs import writing

        with writing(record, "--record"):
            faults.save(cells[0].scenario.faults, record)
    if plot is not None:
        from diloco_cli.bench.published.plot import plot_outcomes

        plot_outcomes(cells, plot)
    _print_json(_data(cells)) if format is Format.json else _print_outcomes(cells)


def _refuse_options(preset: str, given: Mapping[str, object]) -> None:
    from diloco_cli.errors import SpecError

    if useless := [name for name, value in given.items() if value]:
        raise SpecError(
            f"The preset {preset} has no use for {', '.join(useless)}.",
            hint="Presets are fixed, so that everybody sees the same; give a run spec instead.",
        )


def _kind(kind: str) -> Any:
    from diloco_cli.errors import SpecError
    from diloco_cli.spec.fault_kinds import KILLS
    from diloco_cli.validation import nearest

    if kind not in KILLS:
        hint = nearest(kind, KILLS, "Kinds")
        raise SpecError(f"Nothing called {kind!r} can be drawn.", hint=hint)
    return kind


def _simulate(
    what: str, overrides: Sequence[str], world: Any, vary: Sequence[str]
) -> list[SimulatedCell]:
    from diloco_cli.assemble import fragment_sizes, load_run
    from diloco_cli.bench.published import PRESETS
    from diloco_cli.errors import SpecError
    from diloco_cli.run.folder import SpecPlace
    from diloco_cli.sim.sweep import parse_vary, sweep
    from diloco_cli.validation import nearest

    if not Path(what).exists() and not what.endswith((".yaml", ".yml")):
        raise SpecError(
            f"There is neither a file nor a preset called {what!r}.",
            hint=nearest(what, list(PRESETS), "Presets"),
        )

    place = SpecPlace(Path(what))

    def load(more: Sequence[str]) -> tuple[RunSpec, tuple[int, ...]]:
        spec = load_run(place.file, [*overrides, *more]).spec
        return spec, fragment_sizes(spec)

    return list(sweep(load, world, parse_vary(vary)))


# A run


def _columns() -> dict[str, Callable[[SimulatedCell], float]]:
    """Columns of the table: heading → value."""
    return {
        "goodput time %": lambda cell: 100 * cell.outcome.goodput_time,
        "goodput tokens %": lambda cell: 100 * cell.outcome.goodput_tokens,
        "participation %": lambda cell: 100 * cell.outcome.participation,
        "uptime %": lambda cell: 100 * cell.outcome.uptime,
        "utilisation %": lambda cell: 100 * cell.outcome.utilisation,
        "pace %": lambda cell: 100 * cell.outcome.pace,
        "staleness": lambda cell: cell.outcome.staleness,
        "faults": lambda cell: float(cell.outcome.faults),
        "GB up": lambda cell: cell.outcome.bytes_up / 1e9,
        "GB down": lambda cell: cell.outcome.bytes_down / 1e9,
        "Mtokens/day": lambda cell: 0.0864 * cell.outcome.tokens / cell.outcome.seconds,
        "days to budget": lambda cell: (
            cell.scenario.budget / max(1e-12, cell.outcome.tokens / cell.outcome.seconds) / 86400
        ),
    }


def _data(cells: Sequence[SimulatedCell]) -> dict[str, object]:
    columns = _columns()
    return {
        "columns": list(columns),
        "rows": {cell.label: [read(cell) for read in columns.values()] for cell in cells},
        "outcomes": {cell.label: cell.outcome.as_data() for cell in cells},
        "synchronous": {cell.label: _synchronous(cell) for cell in cells},
        "assumptions": {cell.label: cell.assumptions for cell in cells},
    }


def _synchronous(cell: SimulatedCell) -> dict[str, dict[str, float]]:
    """What one synchronous job makes of the same faults."""
    from diloco_cli.sim.synchronous import synchronous

    ways = {"rigid": False, "elastic": True}
    plays = {name: synchronous(cell.scenario, elastic=way) for name, way in ways.items()}
    return {
        name: {"goodput_tokens": play.goodput, "uptime": play.uptime, "step_seconds": play.step}
        for name, play in plays.items()
    }


def _print_outcomes(cells: Sequence[SimulatedCell]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = _columns()
    table = Table("", *(cell.label for cell in cells), box=None)
    for name, read in columns.items():
        table.add_row(name, *(_number(read(cell)) for cell in cells))
    for way in ("rigid", "elastic"):
        shares = [100 * _synchronous(cell)[way]["goodput_tokens"] for cell in cells]
        table.add_row(f"one synchronous job, {way}: goodput %", *map(_number, shares))
    Console().print(table)
    first = cells[0]
    typer.echo(
        f"\nSimulated {first.outcome.seconds:,.0f} s of {first.scenario.name}, "
        f"{first.outcome.events:,} events, seed {first.scenario.seed}. Assumed:"
    )
    for line in first.assumptions:
        typer.echo(f"  {line}")


# A preset


def _preset(verdict: Verdict, plot: Path | None, format: Format) -> None:
    if plot is not None:
        from diloco_cli.bench.published.plot import plot_verdict

        plot_verdict(verdict, plot)
    if format is Format.json:
        _print_json(_without_nan(verdict.as_data()))
    else:
        _print_verdict(verdict)
    if not verdict.met:
        raise typer.Exit(1)


def _print_verdict(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    table.add_column("", no_wrap=True)
    for column in verdict.columns:
        table.add_column(column, justify="right")
    for name, row in verdict.rows.items():
        published = verdict.paper.get(name, [math.nan] * len(row))
        table.add_row(
            name, *(_cell(ours, theirs) for ours, theirs in zip(row, published, strict=True))
        )
    typer.echo(f"{verdict.name}: {verdict.about}")
    # Cells that wrap cannot be compared by eye; a narrow terminal wraps whole lines instead.
    Console(width=max(WIDTH, Console().width)).print(table)
    if verdict.paper:
        typer.echo("In brackets: published.")
    typer.echo("\nAssumed:")
    for line in verdict.assumptions:
        typer.echo(f"  {line}")
    typer.echo("")
    for goal in verdict.goals:
        met = "met" if goal.met else "missed"
        typer.echo(f"{goal.name}: {_number(goal.value)} {goal.unit} ({goal.limit}) {met}")
    for miss in verdict.misses:
        typer.echo(f"  missed: {miss}")


def _cell(ours: float, published: float) -> str:
    return _number(ours) if math.isnan(published) else f"{_number(ours)} ({_number(published)})"


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000 or (value == round(value) and abs(value) >= 1):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(_without_nan(data), indent=2, ensure_ascii=False))
