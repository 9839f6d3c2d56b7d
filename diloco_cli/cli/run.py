"""Commands that run things: run, serve, work, and the trainer that work starts."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli import status, store
from diloco_cli.cli.options import finite
from diloco_cli.cli.spec import Overrides, SpecFile
from diloco_cli.run.find_credential import CertsOption, for_region, forget_tokens
from diloco_cli.system import logs
from diloco_cli.system.logs import LogFormat

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import numpy as np

    from diloco_cli.run.start import BackgroundRun
    from diloco_cli.server.recovery.start import FirstWeights
    from diloco_cli.spec.schema import RunSpec

Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="FOLDER",
        help="The run folder. When left out, runs/NAME: beside a spec that is called run.yaml, in "
        "the working folder for any other. NAME is the spec's `name`.",
    ),
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
Failpoint = Annotated[str, typer.Option("--failpoint", hidden=True)]
Hosts = Annotated[
    int | None,
    typer.Option(
        "--hosts",
        metavar="N",
        min=1,
        envvar="DILOCO_HOSTS",
        help="How many hosts the region has; must be what the spec says.",
    ),
]
Host = Annotated[
    int | None,
    typer.Option(
        "--host",
        metavar="K",
        min=0,
        envvar="DILOCO_HOST",
        help="Which of its region's hosts this is, from 0; srun, torchrun and Kubernetes say.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        envvar="DILOCO_COORDINATOR",
        help="Where host 0 of the region listens for its other hosts.",
    ),
]
Own = Annotated[str, typer.Option("--own", hidden=True)]
WithParent = Annotated[bool, typer.Option("--with-parent", hidden=True)]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(run)
    app.command()(serve)
    app.command()(work)
    app.command(hidden=True)(trainer)
    app.command(hidden=True)(follower)
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
    from diloco_cli.run.folder import SpecPlace

    place = SpecPlace(spec_file)
    spec = _load(place.file, overrides)
    options = start.RunOptions(
        spec_file=place.file,
        overrides=tuple(overrides or ()),
        folder=place.run_folder(spec.name, folder),
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
    from diloco_cli.run.folder import heldout_rows, last_summary
    from diloco_cli.run.start import is_finished

    if not (summary := last_summary(folder)):
        typer.echo(f"nothing is known yet; {folder / 'logs'} has the logs", err=True)
        return
    display(summary_view(summary, beside=heldout_rows(folder)))
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
    installed = shutil.which(started.name)
    is_on_path = installed and started.exists() and started.samefile(installed)
    return started.name if is_on_path else str(started)


def serve(
    spec_file: SpecFile,
    overrides: Overrides = None,
    folder: Folder = None,
    log_format: LogForm = LogFormat.text,
    with_parent: WithParent = False,
    failpoint: Failpoint = "",
) -> None:
    """Run the aggregation server on this host."""
    from diloco_cli.assemble import build_terms, resolve, settings_of
    from diloco_cli.models import first_tensors
    from diloco_cli.run.doctor.before_start import before_start, refuse_unready
    from diloco_cli.run.edited_spec import settle_spec
    from diloco_cli.run.first_weights import check_first_weights, first_weights
    from diloco_cli.run.folder import SpecPlace, refuse_foreign, refuse_served
    from diloco_cli.server.lifecycle import serve as serve_run
    from diloco_cli.system import failpoints

    place = SpecPlace(spec_file)
    spec = _load(place.file, overrides)
    home = place.run_folder(spec.name, folder)
    refuse_foreign(home)
    refuse_served(home)
    check_first_weights(spec, home)
    logs.set_up("server", log_format)
    for warning in refuse_unready(before_start(spec, home, (), os.environ, serves=True)):
        log.warning(warning)
    settled = settle_spec(spec, home, fresh=False)
    if settled.remark:
        log.info(settled.remark)
    spec = settled.first
    parts = resolve(spec)
    failpoints.arm(failpoint)

    def initial() -> Mapping[str, np.ndarray] | FirstWeights:
        if spec.start:
            return first_weights(spec, parts, home)
        return first_tensors(parts.model, spec.seed)

    code = serve_run(
        settings_of(spec, parts), home, initial, with_parent=with_parent, build=build_terms
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
        typer.Option(
            metavar="SECONDS",
            callback=finite,
            help="How long to try before the server first answers.",
        ),
    ] = 60.0,
    certs: CertsOption = None,
    leave: Annotated[
        bool,
        typer.Option("--leave", help="Train no more: have what is held merged, then go for good."),
    ] = False,
    hosts: Hosts = None,
    host: Host = None,
    coordinator: Coordinator = None,
    log_format: LogForm = LogFormat.text,
    cores: Cores = "",
    with_parent: WithParent = False,
    failpoint: Failpoint = "",
) -> None:
    """Train one region on this host, or a part of one."""
    from diloco_cli.assemble import build_amended, resolve, shared_digest, shared_settings
    from diloco_cli.run.doctor.before_start import before_start, refuse_unready
    from diloco_cli.run.folder import SpecPlace, refuse_foreign
    from diloco_cli.system import failpoints
    from diloco_cli.worker.agent import agent
    from diloco_cli.worker.hosts.first_host import FirstHost
    from diloco_cli.worker.hosts.follower_supervisor import supervise
    from diloco_cli.worker.hosts.secret import take_secret
    from diloco_cli.worker.hosts.which_host import find_place

    paths = SpecPlace(spec_file)
    spec = _load(paths.file, overrides)
    name = _any_region(spec, region)
    home = paths.run_folder(spec.name, folder)
    refuse_foreign(home)
    place = find_place(
        name,
        spec.region(name).host_count,
        hosts=hosts,
        host=host,
        coordinator=coordinator,
        environment=os.environ,
    )
    number = place.host if place else 0
    url = _server_of(server, home) if number == 0 else ""
    certs = paths.path(certs) if certs else None
    credentials = for_region(spec, name, certs)
    forget_tokens(spec, name)
    logs.set_up(f"host {number}" if number else "worker", log_format, region=name)
    secret = b""
    if place:
        folder_of = home / "regions" / name
        secret = take_secret(spec.name, name, token=credentials.token, folder=folder_of)
    if place and number:
        code = supervise(
            spec,
            name,
            home,
            place,
            secret,
            wait=wait,
            cores=_cores(cores),
            with_parent=with_parent,
            failpoint=failpoint,
        )
        raise typer.Exit(code)
    shared = agent.SharedSettings(
        shared_settings(spec), shared_digest(spec), resolve(spec).layout.digest
    )
    failpoints.arm(failpoint)  # Those of its trainer are set there.
    # A token from the environment is gone by now, and cannot be read again.
    from_files = credentials.files and (credentials.token_file or not credentials.token)

    def look(newest: RunSpec) -> None:
        for warning in refuse_unready(before_start(newest, home, [name], os.environ, serves=False)):
            log.warning(warning)

    code = agent.work(
        spec,
        name,
        home,
        url,
        shared=shared,
        build=build_amended,
        cores=_cores(cores),
        with_parent=with_parent,
        wait=wait,
        credentials=credentials,
        leave=leave,
        hosts=FirstHost(place, secret) if place else None,
        failpoint=failpoint,
        look=look,
        renewed=partial(for_region, spec, name, certs) if from_files else None,
    )
    raise typer.Exit(code)


def trainer(
    spec_file: SpecFile,
    region: Region = None,
    folder: Folder = None,
    log_format: LogForm = LogFormat.text,
    cores: Cores = "",
    alone: Annotated[float, typer.Option("--alone", hidden=True, callback=finite)] = 60.0,
    hosts: Hosts = None,
    coordinator: Coordinator = None,
    own: Own = "",
    failpoint: Failpoint = "",
    terms: Annotated[int, typer.Option("--terms", hidden=True)] = 0,
) -> None:
    """Train one region's inner steps; started by `diloco work`."""
    # Loading JAX and tracing leave next to no garbage, and looking for it takes a tenth of
    # the start. The trainer turns it on again when it has made its first step.
    gc.disable()
    from diloco_cli.run.folder import default_folder
    from diloco_cli.system import failpoints
    from diloco_cli.worker.hosts.which_host import HostPlace
    from diloco_cli.worker.trainer.built_in_trainer import train

    failpoints.arm(failpoint)
    place = HostPlace(0, hosts, coordinator) if hosts and coordinator else None
    spec = _load(spec_file, None)
    name = _any_region(spec, region)
    home = folder or default_folder(spec_file, spec.name)
    logs.set_up("trainer", log_format, region=name)
    code = train(
        spec, name, home, terms=terms, cores=_cores(cores), alone=alone, place=place, own=own
    )
    raise typer.Exit(code)


def follower(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    region: Annotated[str, typer.Option("--region")],
    hosts: Annotated[int, typer.Option("--hosts")],
    host: Annotated[int, typer.Option("--host")],
    coordinator: Annotated[str, typer.Option("--coordinator")],
    generation: Annotated[str, typer.Option("--generation")],
    own: Own = "",
    log_format: LogForm = LogFormat.text,
    cores: Cores = "",
    failpoint: Failpoint = "",
) -> None:
    """Do what the first host of a region does; started by `diloco work` on its other hosts."""
    gc.disable()
    from diloco_cli.assemble import build_amended
    from diloco_cli.system import failpoints
    from diloco_cli.worker.hosts.follower import follow
    from diloco_cli.worker.hosts.which_host import HostPlace

    failpoints.arm(failpoint)
    logs.set_up(f"host {host} follower", log_format, region=region)
    place = HostPlace(host, hosts, coordinator)
    code = follow(place, run, region, generation, build=build_amended, own=own, cores=_cores(cores))
    raise typer.Exit(code)


def _load(spec_file: Path, overrides: Sequence[str] | None) -> RunSpec:
    """Loads a spec with every option written down."""
    from diloco_cli.assemble import load_run, spelled_out

    return spelled_out(load_run(spec_file, overrides or ()).spec)


def _regions(spec: RunSpec, listed: str | None) -> tuple[str, ...] | None:
    """The regions that were named; None when none were, which means all."""
    from diloco_cli.errors import SpecError

    known = [region.name for region in spec.regions]
    if listed is None:
        return None
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names:
        raise SpecError(
            f"--regions {listed!r} names no region.",
            hint=f"The regions of {spec.name} are: {', '.join(known)}. Leave it out for all.",
        )
    return tuple(dict.fromkeys(_one_region(spec, name) for name in names))


def _any_region(spec: RunSpec, name: str | None) -> str:
    """The region that was named; whether one that is not listed may join, the server says."""
    from diloco_cli.errors import SpecError
    from diloco_cli.spec.schema import is_a_name

    if not name:
        names = ", ".join(region.name for region in spec.regions)
        raise SpecError(
            "Which region is this? Neither --region nor DILOCO_REGION says so.",
            hint=f"The regions of {spec.name} are: {names}.",
        )
    if not is_a_name(name):
        raise SpecError(
            f"{name!r} cannot be the name of a region.",
            hint="Names are small letters, digits, - and _, as in --region oslo",
        )
    return name


def _one_region(spec: RunSpec, name: str) -> str:
    from diloco_cli.errors import SpecError
    from diloco_cli.validation import nearest

    names = [region.name for region in spec.regions]
    if name in names:
        return name
    raise SpecError(
        f"There is no region {name!r} in {spec.name}; it has {', '.join(names)}.",
        hint=nearest(name, names, "Known regions"),
    )


def _server_of(url: str | None, folder: Path) -> str:
    from diloco_cli.errors import SpecError
    from diloco_cli.run.folder import address_of

    url = url or address_of(folder).url
    if not url:
        raise SpecError(
            "Where is the server? Neither --server nor DILOCO_SERVER says so, and "
            f"{folder} has no server running.",
            hint="Start it with `diloco serve SPEC`; it prints its URL.",
        )
    return url


def _cores(text: str) -> tuple[int, ...] | None:
    from diloco_cli.errors import SpecError

    try:
        return tuple(int(core) for core in text.split(",")) if text else None
    except ValueError:
        raise SpecError(f"--cores {text} is not a list of numbers.", hint="As in 0,1,2.") from None
