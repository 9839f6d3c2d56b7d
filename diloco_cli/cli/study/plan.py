"""The command `diloco plan`: what a run needs and what to expect, before it begins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.options import finite
from diloco_cli.cli.spec import Format, OutputFormat, Overrides, SpecFile
from diloco_cli.cli.study.simulate import Flops, Links, Step
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
        float,
        typer.Option(
            min=0.5, max=0.999, callback=finite, help="Share of the pace that lines must allow."
        ),
    ] = 0.95,
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME|SIZE", help="What regions train on, as in h100, v5p or 80GB: does it fit?"
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Faults follow from it.")] = 0,
    format: OutputFormat = Format.text,
) -> None:
    """Say what a run needs, what to expect of it and what to change; nothing is started."""
    from diloco_cli.assemble import load_run
    from diloco_cli.plan import plan as planning
    from diloco_cli.plan.devices import named_device
    from diloco_cli.run.folder import SpecPlace
    from diloco_cli.sim.scenario import Recovery
    from diloco_cli.sim.world import World
    from diloco_cli.spec.quantities import SPAN

    place = SpecPlace(spec_file)
    spec = load_run(place.file, overrides or ()).spec
    links, steps, notes = list(link or []), {}, []
    if probe:
        way = _measured(probe, place.path(certs) if certs else None)
        links, steps = [_gross(way), *links], _steps(way, spec)
        notes = _probe_notes(probe, way, steps)
    world = World(
        step=SPAN.read(step) if step else None,
        steps={} if step or flops else steps,
        flops=flops,
        links=tuple(links),
        server_link=server_link,
        mtbf=SPAN.read(mtbf) if mtbf else math.inf,
        recovery=Recovery(restart=SPAN.read(restart)),
        cores=cores,
        seed=seed,
    )
    chosen = named_device(device) if device else None
    made = planning.plan(spec, world, target=target, device=chosen)
    made.assumptions.extend(notes)
    if format is Format.json:
        text = json.dumps(planning.as_data(made), indent=2, ensure_ascii=False, default=str)
        typer.echo(text.replace("Infinity", "null"))
    else:
        _print(made)


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


def _probe_notes(url: str, way: Way, steps: Mapping[str, float]) -> list[str]:
    notes = [f"the way to {url} was measured: {way.words} downwards; upwards the same is assumed"]
    if steps:
        slowest = max(steps, key=lambda name: steps[name])
        notes.append(
            f"steps take what the regions that train there report, {steps[slowest]:.3g} s in "
            f"{slowest} (unless --step or --flops is given)"
        )
    return notes


def _print(plan: Plan) -> None:
    from diloco_cli.observe.units import bytes_
    from diloco_cli.plan.needs import gbit

    scenario, needs, expected, memory = (
        plan.scenario,
        plan.needs,
        plan.expected,
        plan.memory,
    )
    sync, share = plan.spec.sync, f"{plan.target:.0%}"
    lines: list[tuple[str, str]] = [
        ("model", f"{scenario.parameters:,} parameters in {len(scenario.sizes)} fragments"),
        *(("trainer", words) for words in _trainers(plan)),
        ("its host", f"{bytes_(memory.host)} of memory"),
        ("server", f"{bytes_(memory.server)} of memory, {bytes_(memory.server_disk)} of disk"),
        (
            "a fragment",
            f"{bytes_(needs.fragment_up)} up, {bytes_(needs.fragment_down)} down, one about every "
            f"{sync.every / sync.fragments:.3g} steps",
        ),
        (
            "a day",
            f"{bytes_(plan.day[0])} up and {bytes_(plan.day[1])} down for each region",
        ),
        (
            f"for {share}",
            f"each region {gbit(needs.need_up)} up and {gbit(needs.need_down)} down; the server "
            f"{gbit(needs.server_in)} in, {gbit(needs.server_out)} out, {needs.merge_cores:.2g} "
            "cores to merge",
        ),
        (
            "goodput",
            f"{plan.goodput:.1%} of the time, participation "
            f"{expected.participation:.1%}, utilisation {expected.utilisation:.1%}, pace "
            f"{expected.pace:.0%}",
        ),
        ("tokens", f"{plan.tokens_per_day:,.3g} a day, {_days(plan.days)} to the budget"),
        ("limited by", plan.binding),
    ]
    typer.echo(plan.spec.name)
    for name, words in lines:
        typer.echo(f"  {name:<11} {words}")
    _print_advice(plan)
    typer.echo("\nTime-outs:")
    for timeout in plan.time_outs:
        typer.echo(f"  {timeout.name:<23} {timeout.seconds:8.1f} s  {timeout.why}")
    typer.echo("\nAssumed:")
    for words in plan.assumptions:
        typer.echo(f"  {words}")


def _trainers(plan: Plan) -> list[str]:
    """What each device needs, said once for all regions that need the same."""
    from diloco_cli.observe.units import bytes_
    from diloco_cli.plan.devices import alike

    lines, verdicts = [], {verdict.needs.region: verdict for verdict in plan.verdicts}
    for names, one in alike(plan.devices):
        whose = "the device" if one.devices == 1 else f"each of {one.devices} devices"
        words = (
            f"{bytes_(one.total)} on {whose} of {names}: {bytes_(one.state)} of weights and "
            f"optimiser, {bytes_(one.gradients)} of gradients, about {bytes_(one.working)} beside "
            "them"
        )
        if verdict := verdicts.get(names.partition(", ")[0]):
            room = f"{verdict.device.name}, {bytes_(verdict.device.memory)}"
            words += f"; {'fits' if verdict.fits else 'DOES NOT FIT'} ({room})"
        lines.append(words)
    return lines


def _print_problems(plan: Plan) -> None:
    if not plan.problems:
        return
    typer.echo("\nProblems:")
    for problem in plan.problems:
        typer.echo(f"  {problem}")
    remedies: dict[str, list[str]] = {}
    for verdict in plan.verdicts:
        if not verdict.fits:
            changes = (verdict.remedy or {}).items()
            words = ", ".join(f"{key}: {_yaml(value)}" for key, value in changes)
            words = words or "nothing we know of but a smaller model or larger devices"
            remedies.setdefault(words, []).append(verdict.needs.region)
    for words, names in remedies.items():
        typer.echo(f"  makes {', '.join(names)} fit: {words}")


def _yaml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in value.items()) + "}"
    return str(value)


def _print_advice(plan: Plan) -> None:
    from diloco_cli.plan.advice import pasted
    from diloco_cli.plan.plan import tokens_per_day

    _print_problems(plan)
    if not plan.advice or plan.better is None:
        if not plan.problems:
            typer.echo("\nNothing needs to change.")
        return
    typer.echo("\nBetter:")
    for advice in plan.advice:
        value = advice.value["kind"] if isinstance(advice.value, dict) else advice.value
        typer.echo(f"  {advice.key}: {value}")
        typer.echo(f"      why    {advice.why}")
        typer.echo(f"      price  {advice.price}")
    better = plan.better
    rate = tokens_per_day(better) * plan.unbroken
    days = plan.spec.budget.tokens / rate if rate else math.inf
    typer.echo(
        f"  Then: pace {better.pace:.0%} of the new period, utilisation {better.utilisation:.1%}, "
        f"{_days(days)} to the budget. To paste:"
    )
    for line in pasted(plan.spec, plan.advice):
        typer.echo(f"\n{line}")


def _days(days: float) -> str:
    if not math.isfinite(days):
        return "never"
    if days >= 1:
        return f"{days:,.3g} days"
    return f"{24 * days:.2g} hours" if days >= 1 / 24 else f"{1440 * days:.2g} minutes"
