"""The command `diloco plan`: what a run needs and what to expect, before it begins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.simulate import Flops, Links, Step
from diloco_cli.cli.spec import Format, OutputFormat, Overrides, SpecFile
from diloco_cli.run.find_credential import CertsOption, for_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco_cli.plan.plan import Plan
    from diloco_cli.run.doctor.probe import Way
    from diloco_cli.spec.schema import RunSpec


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command()(plan)


def plan(
    spec_file: SpecFile,
    overrides: Overrides = None,
    link: Links = None,
    probe: Annotated[
        str, typer.Option(metavar="URL", help="Measure the way to this running server first.")
    ] = "",
    certs: CertsOption = None,
    server_link: Annotated[
        str, typer.Option(metavar="RATE", help="The server's own line, shared by all.")
    ] = "",
    step: Step = "",
    flops: Flops = None,
    mtbf: Annotated[
        str, typer.Option(metavar="TIME", help="Between two failures of a region, as in 6h.")
    ] = "",
    restart: Annotated[str, typer.Option(metavar="TIME", help="Until it trains again.")] = "8s",
    cores: Annotated[int, typer.Option(min=1, help="Cores that the server merges on.")] = 1,
    target: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Share of the pace that lines must allow.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Faults follow from it.")] = 0,
    format: OutputFormat = Format.text,
) -> None:
    """Say what a run needs, what to expect of it and what to change; nothing is started."""
    from diloco_cli.assemble import load_run
    from diloco_cli.plan import plan as planning
    from diloco_cli.sim.scenario import Recovery
    from diloco_cli.sim.world import World, parse_span

    spec = load_run(spec_file, overrides or ()).spec
    links, steps, said = list(link or []), {}, []
    if probe:
        way = _measured(probe, certs)
        links, steps = [_gross(way), *links], _steps(way, spec)
        said = _said(probe, way, steps)
    world = World(
        step=parse_span(step) if step else None,
        steps={} if step or flops else steps,
        flops=flops,
        links=tuple(links),
        server_link=server_link,
        mtbf=parse_span(mtbf) if mtbf else math.inf,
        recovery=Recovery(restart=parse_span(restart)),
        cores=cores,
        seed=seed,
    )
    found = planning.plan(spec, world, target=target)
    found.assumptions.extend(said)
    if format is Format.json:
        text = json.dumps(planning.as_data(found), indent=2, ensure_ascii=False, default=str)
        typer.echo(text.replace("Infinity", "null"))
    else:
        _print(found)


def _measured(url: str, certs: Path | None) -> Way:
    from diloco_cli.run.doctor.probe import measure

    return measure(url, lambda text: typer.echo(text, err=True), credentials=for_url(certs))


def _gross(way: Way) -> str:
    """The link as `--link` says it: what was measured is net already."""
    from diloco_cli.sim.measured import LINE_SHARE

    rate = way.rate / LINE_SHARE.value / 1e6
    return f"{rate:.3f}Mbit/{1000 * way.round_trip:.3f}ms"


def _steps(way: Way, spec: RunSpec) -> dict[str, float]:
    """Seconds of a step in the regions of this spec that train at the server now."""
    steps = {}
    for region in spec.regions:
        if speed := way.speeds.get(region.name):
            inner = spec.inner_of(region.name)
            steps[region.name] = inner.batch * inner.sequence / speed
    return steps


def _said(url: str, way: Way, steps: Mapping[str, float]) -> list[str]:
    said = [f"the way to {url} was measured: {way.words} downwards; upwards the same is assumed"]
    if steps:
        slowest = max(steps, key=lambda name: steps[name])
        said.append(
            f"steps take what the regions that train there report, {steps[slowest]:.3g} s in "
            f"{slowest} (unless --step or --flops is given)"
        )
    return said


def _print(found: Plan) -> None:
    from diloco_cli.observe.units import bytes_
    from diloco_cli.plan.needs import gbit

    scenario, needs, expected, memory = (
        found.scenario,
        found.needs,
        found.expected,
        found.memory,
    )
    sync, share = found.spec.sync, f"{found.target:.0%}"
    lines: list[tuple[str, str]] = [
        ("model", f"{scenario.parameters:,} parameters in {len(scenario.sizes)} fragments"),
        (
            "trainer",
            f"{bytes_(memory.device)} on the device and about {bytes_(memory.activations)} of "
            f"activations; {bytes_(memory.host)} on the host",
        ),
        ("server", f"{bytes_(memory.server)} of memory, {bytes_(memory.server_disk)} of disk"),
        (
            "a fragment",
            f"{bytes_(needs.fragment_up)} up, {bytes_(needs.fragment_down)} down, one about every "
            f"{sync.every / sync.fragments:.3g} steps",
        ),
        (
            "a day",
            f"{bytes_(found.day[0])} up and {bytes_(found.day[1])} down for each region",
        ),
        (
            f"for {share}",
            f"each region {gbit(needs.need_up)} up and {gbit(needs.need_down)} down; the server "
            f"{gbit(needs.server_in)} in, {gbit(needs.server_out)} out, {needs.merge_cores:.2g} "
            "cores to merge",
        ),
        (
            "goodput",
            f"{found.goodput:.1%} of the time, participation "
            f"{expected.participation:.1%}, utilisation {expected.utilisation:.1%}, pace "
            f"{expected.pace:.0%}",
        ),
        ("tokens", f"{found.tokens_per_day:,.3g} a day, {_days(found.days)} to the budget"),
        ("held up by", found.binding),
    ]
    typer.echo(found.spec.name)
    for name, words in lines:
        typer.echo(f"  {name:<11} {words}")
    _print_advice(found)
    typer.echo("\nTime-outs:")
    for one in found.time_outs:
        typer.echo(f"  {one.name:<23} {one.seconds:8.1f} s  {one.why}")
    typer.echo("\nAssumed:")
    for words in found.assumptions:
        typer.echo(f"  {words}")


def _print_advice(found: Plan) -> None:
    from diloco_cli.plan.advice import pasted
    from diloco_cli.plan.plan import tokens_per_day

    if not found.advice or found.better is None:
        typer.echo("\nNothing needs to change.")
        return
    typer.echo("\nBetter:")
    for advice in found.advice:
        value = advice.value["kind"] if isinstance(advice.value, dict) else advice.value
        typer.echo(f"  {advice.key}: {value}")
        typer.echo(f"      why    {advice.why}")
        typer.echo(f"      price  {advice.price}")
    better = found.better
    rate = tokens_per_day(better) * found.unbroken
    days = found.spec.budget.tokens / rate if rate else math.inf
    typer.echo(
        f"  Then: pace {better.pace:.0%} of the new period, utilisation {better.utilisation:.1%}, "
        f"{_days(days)} to the budget. To paste:"
    )
    for line in pasted(found.spec, found.advice):
        typer.echo(f"\n{line}")


def _days(days: float) -> str:
    if not math.isfinite(days):
        return "never"
    if days >= 1:
        return f"{days:,.3g} days"
    return f"{24 * days:.2g} hours" if days >= 1 / 24 else f"{1440 * days:.2g} minutes"
