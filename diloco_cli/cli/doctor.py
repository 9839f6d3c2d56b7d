"""The command `diloco doctor`: is this host ready?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from diloco_cli.cli.spec import Format, OutputFormat, Overrides
from diloco_cli.cli.study.simulate import Flops, Step
from diloco_cli.run.find_credential import CertsOption, for_url

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command()(doctor)


def doctor(
    spec_file: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="The run this host is to take part in.")
    ] = None,
    overrides: Overrides = None,
    server: Annotated[
        str, typer.Option(metavar="URL", help="The server to reach; it then does not run here.")
    ] = "",
    certs: CertsOption = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="FOLDER", help="Where the run will be kept.")
    ] = None,
    region: Annotated[
        str, typer.Option(metavar="NAME", help="The region that trains here; any when left out.")
    ] = "",
    step: Step = "",
    flops: Flops = None,
    format: OutputFormat = Format.text,
) -> None:
    """Say whether this host is ready, one line per check; ends with 1 if something is not."""
    from diloco_cli.run.doctor import host

    certs = certs.absolute() if certs else None  # Unlike the spec's paths, relative to the shell.
    checks: list[host.Check] = []
    expected, home = None, folder or Path("runs")
    if spec_file is not None:
        from diloco_cli.assemble import load_run
        from diloco_cli.errors import SpecError
        from diloco_cli.plan.plan import plan
        from diloco_cli.run.doctor.before_start import disk_reserve
        from diloco_cli.run.doctor.text import text
        from diloco_cli.run.folder import SpecPlace
        from diloco_cli.sim.world import World
        from diloco_cli.spec.quantities import SPAN
        from diloco_cli.validation import nearest

        place = SpecPlace(spec_file)
        spec = load_run(place.file, overrides or ()).spec
        home = place.path(folder) if folder else place.run_folder(spec.name)
        expected = plan(spec, World(step=SPAN.read(step) if step else None, flops=flops))
        known = [each.name for each in spec.regions]
        if region and region not in known:
            raise SpecError(
                f"There is no region {region!r} in {spec_file}.",
                hint=nearest(region, known, "Its regions are"),
            )
        checks += text(spec, [region] if region else known)
        checks += [] if server else disk_reserve(spec, home)
        checks += host.against(expected, home, serves=not server, region=region or None)
    checks = [*host.host(home), *checks]
    if server:
        from diloco_cli.run.doctor import server as reach

        checks += reach.server(server, expected, for_url(certs))
    answer = host.summary(checks)
    if format is Format.json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        for check in checks:
            typer.echo(f"{MARKS[check.state]}  {check.name:<11} {check.said}")
            if check.state != "ok" and check.fix:
                typer.echo(f"      {'':<11} fix: {check.fix}")
    if not answer["ok"]:
        raise typer.Exit(1)
