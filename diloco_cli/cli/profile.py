"""The command `diloco profile`: what do a region's devices do during some steps?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco_cli.cli.options import finite, output_folder

MOST_STEPS = 1000


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command()(profile)


def profile(
    target: Annotated[
        str, typer.Argument(metavar="SPEC|FOLDER", help="Which run: its spec or its folder.")
    ],
    region: Annotated[
        str, typer.Option("--region", metavar="NAME", help="A region that trains on this host.")
    ],
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=MOST_STEPS, help="How many inner steps.")
    ] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            callback=output_folder,
            help="Where to; RUN/profiles/REGION if left out.",
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, callback=finite, help="How long to wait for it."
        ),
    ] = 300.0,
) -> None:
    """Trace some inner steps of a region while it trains.

    Read it with XProf (`xprof --logdir FOLDER`), or open the .trace.json.gz in ui.perfetto.dev.
    """
    from diloco_cli.run.folder import find
    from diloco_cli.run.profile import profile as trace

    folder, answer = trace(find(target), region, steps, out=out, wait=wait)
    typer.echo(f"traced {answer.steps} steps of {region}", err=True)
    typer.echo(folder)
