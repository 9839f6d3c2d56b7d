"""Commands that run things: run, serve, work, and the trainer that work starts."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli import status, store
from diloco_cli.cli.spec import Overrides, SpecFile
from diloco_cli.run.find_credential import CertsOption, for_region, forget_tokens
from diloco_cli.system import logs
from diloco_cli.system.logs import LogFormat

if TYPE_CHECKING:
    from diloco_cli.run.start import BackgroundRun
    from diloco_cli.spec.schema import RunSpec

Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="FOLDER", help="The run folder; runs/NAME when left out."),
]
Region = Annotated[
    str | None,
    typer.Option("--region", metavar="NAME", envvar="DILOCO_REGION", help="Which region to train."),
]
LogForm = Annotated[
    LogFormat,
    typer.Option("--log-format", help="Log lines for people, or one JSON object per line."),
]
Cores = Annotated[str, typer.Option("--cores", hidden=True)]
WithParent = Annotated[bool, typer.Option("--with-parent", hidden=True)]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(run)
    app.command()(serve)
    app.command()(work)
    app.command(hidden=True)(trainer)
    status.register(app)
    store.register(app)


def run(
    spec_file: SpecFile,
    overrides: Overrides = None,
    folder: Folder = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the old folder becomes FOLDER.old-N.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; prints the process id.")
    ] = False,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="tokens=N|steps=N|minutes=N",
            help="Stop early: merged tokens, inner steps of the furthest region, or minutes.",
        ),
    ] = None,
    regions: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Start only these here; others may join."),
    ] = None,
    log_format: LogForm = LogFormat.text,
) -> None:
    """Run server and workers on this machine.

    A folder that already holds the run is resumed. Ctrl-C stops in good order, a second one
    kills.
    """
    from diloco_cli.observe.terminal import ProgressDisplay
    from diloco_cli.run import start

    spec = _load(spec_file, overrides)
    options = start.RunOptions(
        spec_file=spec_file,
        overrides=tuple(overrides or ()),
        folder=folder or _home(spec),
        regions=_regions(spec, regions),
        until=until,
        fresh=fresh,
    )
    if log_format is LogFormat.json:
        logs.set_up("run", log_format)
    progress = start.LoggedProgress() if log_format is LogFormat.json else ProgressDisplay()
    if detach:
        _tell_background(start.run_in_background(spec, options, progress), options.folder)
        return
    code = start.run_here(spec, options, progress)
    if log_format is LogFormat.text:
        _print_summary(options.folder)
    raise typer.Exit(code)


def _print_summary(folder: Path) -> None:
    """Shows what the run came to, and where to look next."""
    from diloco_cli.observe.terminal import display, summary_view
    from diloco_cli.run.folder import last_summary
    from diloco_cli.run.start import is_finished

    if not (summary := last_summary(folder)):
        typer.echo(f"nothing is known yet; {folder / 'logs'} has the logs", err=True)
        return
    display(summary_view(summary))
    typer.echo("\nwhere to look next:", err=True)
    typer.echo(f"  {folder / 'summary.json'}   these figures, for programs", err=True)
    typer.echo(f"  {folder / 'logs'}   what each process logged", err=True)
    pull = f"{program()} pull {folder} --out weights.safetensors"
    typer.echo(f"  {pull}   the weights", err=True)
    if not is_finished(folder):
        typer.echo("  rerun the same command to resume", err=True)


def _tell_background(background: BackgroundRun, folder: Path) -> None:
    if background.is_over:
        typer.echo(f"{folder} is over; `{program()} status {folder}` says how it ended.", err=True)
        return
    typer.echo(background.pid)
    for deed, command in (("watch", "status --watch"), ("stop", "stop")):
        typer.echo(f"{deed} it with: {program()} {command} {folder}", err=True)
    typer.echo(f"its log: {background.log}", err=True)


def program() -> str:
    """How this command was started, so that the commands it prints can be pasted."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return f"{sys.executable} -m diloco_cli"
    found = shutil.which(started.name)
    is_on_path = found and started.exists() and started.samefile(found)
    return started.name if is_on_path else str(started)


def serve(
    spec_file: SpecFile,
    overrides: Overrides = None,
    folder: Folder = None,
    log_format: LogForm = LogFormat.text,
    with_parent: WithParent = False,
    failpoint: Annotated[str, typer.Option("--failpoint", hidden=True)] = "",
) -> None:
    """Run the aggregation server on this host."""
    from diloco_cli.assemble import recipe_of, resolve
    from diloco_cli.run.folder import refuse_foreign, refuse_served
    from diloco_cli.server.lifecycle import serve as serve_run
    from diloco_cli.spec.resolved import write_resolved
    from diloco_cli.system import failpoints

    spec = _load(spec_file, overrides)
    home = folder or _home(spec)
    refuse_foreign(home)
    refuse_served(home)
    logs.set_up("server", log_format)
    write_resolved(spec, home)
    parts = resolve(spec)
    failpoints.arm(failpoint)
    code = serve_run(
        recipe_of(spec, parts), home, lambda: parts.model.init(spec.seed), with_parent=with_parent
    )
    raise typer.Exit(code)


def work(
    spec_file: SpecFile,
    overrides: Overrides = None,
    region: Region = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="DILOCO_SERVER", help="Where the server listens."),
    ] = None,
    folder: Folder = None,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How long to try before the server first answers."),
    ] = 60.0,
    certs: CertsOption = None,
    log_format: LogForm = LogFormat.text,
    cores: Cores = "",
    with_parent: WithParent = False,
) -> None:
    """Train one region on this host."""
    from diloco_cli.assemble import resolve, shared_digest, shared_settings
    from diloco_cli.run.folder import refuse_foreign
    from diloco_cli.worker.agent import agent

    spec = _load(spec_file, overrides)
    name = _one_region(spec, region)
    home = folder or _home(spec)
    refuse_foreign(home)
    url = _server_of(server, home)
    credentials = for_region(spec, name, certs)
    forget_tokens(spec, name)
    logs.set_up("worker", log_format, region=name)
    terms = agent.SharedSettings(
        shared_settings(spec), shared_digest(spec), resolve(spec).layout.digest
    )
    code = agent.work(
        spec,
        name,
        home,
        url,
        terms=terms,
        cores=_cores(cores),
        with_parent=with_parent,
        wait=wait,
        credentials=credentials,
    )
    raise typer.Exit(code)


def trainer(
    spec_file: SpecFile,
    region: Region = None,
    folder: Folder = None,
    log_format: LogForm = LogFormat.text,
    cores: Cores = "",
    alone: Annotated[float, typer.Option("--alone", hidden=True)] = 60.0,
) -> None:
    """Train one region's inner steps; started by `diloco work`."""
    # Loading JAX and tracing leave next to no garbage, and looking for it takes a tenth of
    # the start. The trainer turns it on again when it has made its first step.
    gc.disable()
    from diloco_cli.worker.trainer.loop import train

    spec = _load(spec_file, None)
    name = _one_region(spec, region)
    home = folder or _home(spec)
    logs.set_up("trainer", log_format, region=name)
    raise typer.Exit(train(spec, name, home, cores=_cores(cores), alone=alone))


def _load(spec_file: Path, overrides: Sequence[str] | None) -> RunSpec:
    """Loads a spec with every option written down."""
    from diloco_cli.assemble import load_run, spelled_out

    return spelled_out(load_run(spec_file, overrides or ()).spec)


def _home(spec: RunSpec) -> Path:
    from diloco_cli.run.folder import RUNS

    return RUNS / spec.name


def _regions(spec: RunSpec, asked: str | None) -> tuple[str, ...]:
    from diloco_cli.errors import SpecError

    known = [region.name for region in spec.regions]
    if asked is None:
        return tuple(known)
    names = [name.strip() for name in asked.split(",") if name.strip()]
    if not names:
        raise SpecError(
            f"--regions {asked!r} names no region.",
            hint=f"The regions of {spec.name} are: {', '.join(known)}. Leave it out for all.",
        )
    return tuple(dict.fromkeys(_one_region(spec, name) for name in names))


def _one_region(spec: RunSpec, asked: str | None) -> str:
    from diloco_cli.errors import SpecError
    from diloco_cli.validation import nearest

    names = [region.name for region in spec.regions]
    if asked in names:
        return asked
    if not asked:
        raise SpecError(
            "Which region is this? Neither --region nor DILOCO_REGION says so.",
            hint=f"The regions of {spec.name} are: {', '.join(names)}.",
        )
    raise SpecError(
        f"There is no region {asked!r} in {spec.name}; it has {', '.join(names)}.",
        hint=nearest(asked, names, "Known regions"),
    )


def _server_of(asked: str | None, folder: Path) -> str:
    from diloco_cli.errors import SpecError
    from diloco_cli.run.folder import address_of

    found = asked or address_of(folder).url
    if not found:
        raise SpecError(
            "Where is the server? Neither --server nor DILOCO_SERVER says so, and "
            f"{folder} has no server running.",
            hint="Start it with `diloco serve SPEC`; it prints its URL.",
        )
    return str(found)


def _cores(text: str) -> tuple[int, ...] | None:
    from diloco_cli.errors import SpecError

    try:
        return tuple(int(core) for core in text.split(",")) if text else None
    except ValueError:
        raise SpecError(f"--cores {text} is not a list of numbers.", hint="As in 0,1,2.") from None
