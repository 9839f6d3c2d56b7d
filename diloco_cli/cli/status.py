"""Commands for a run that is under way, or over: status, stop, pull."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.options import finite, output_file
from diloco_cli.cli.spec import Format, OutputFormat
from diloco_cli.run.find_credential import CertsOption, for_calls

if TYPE_CHECKING:
    from diloco_cli.observe.status import LastKnown, Status, Summary
    from diloco_cli.run.ask import ShortCalls
    from diloco_cli.run.folder import Target
    from diloco_cli.wire.messages import Amendment

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SPEC|FOLDER|URL]",
        help="Which run: its spec, its folder or its server. The newest one here when left out.",
        show_default=False,
    ),
]

WATCH_SECONDS = 2.0
START_SECONDS = 0.2
KEYS = "q quit   r rounds   o open the page"


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(status)
    app.command()(stop)
    app.command()(pull)


def status(
    target: TargetArgument = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again every two seconds.")
    ] = False,
    certs: CertsOption = None,
    format: OutputFormat = Format.text,
) -> None:
    """Show who trains, who contributes and how far.

    Without a server the last known state is shown; exit code 4 unless the run had ended.
    """
    from diloco_cli.errors import LinkError
    from diloco_cli.run.ask import ShortCalls
    from diloco_cli.run.folder import find

    run = find(target)
    calls = ShortCalls(for_calls(run, certs))
    try:
        if watch:
            _watch(run, calls, format)
        else:
            _print_status(run, _current_status(run, calls), format)
    except LinkError as error:
        _print_last_known(run, format, error)


def stop(
    target: TargetArgument = None,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", callback=finite, help="How long to wait for the end."
        ),
    ] = 120.0,
    certs: CertsOption = None,
) -> None:
    """Stop a run in good order.

    Regions checkpoint and leave, then the server; `diloco run` goes on from there.
    """
    from diloco_cli.errors import LinkError
    from diloco_cli.run.ask import ShortCalls
    from diloco_cli.run.folder import find, is_a_regions, runner_of, server_elsewhere

    run = find(target)
    calls = ShortCalls(for_calls(run, certs))
    runner = runner_of(run.folder) if run.folder else None
    try:
        if run.url is None:
            raise LinkError(f"{run} has no server running.")
        calls.stop(run.url)
    except LinkError:
        if runner is None and run.folder is None:
            raise
        if runner is None and run.folder and is_a_regions(run.folder):
            raise server_elsewhere(run.folder, "stop") from None
        if runner is None:
            typer.echo(f"{run} is not running.", err=True)
            return
        # Its server is down just now; the process that would start it again can be asked.
        os.kill(runner, signal.SIGTERM)
    typer.echo(f"{run} is stopping.", err=True)
    _await_end(run, calls, wait)
    typer.echo(f"{run} has stopped.", err=True)


def pull(
    target: TargetArgument = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FILE",
            callback=output_file,
            help="Where to write the safetensors file.",
        ),
    ] = Path("weights.safetensors"),
    version: Annotated[
        int | None,
        typer.Option("--version", metavar="N", min=0, help="An older version of every fragment."),
    ] = None,
    ema: Annotated[
        bool,
        typer.Option("--ema", help="The average of the last versions that `outer.ema` keeps."),
    ] = False,
    certs: CertsOption = None,
) -> None:
    """Fetch the global weights as safetensors.

    They come from the server, or from the folder of a run whose server is gone.
    """
    from diloco_cli.run.folder import find
    from diloco_cli.run.model.find import fetch_weights

    metadata = fetch_weights(find(target), out, version=version, ema=ema, certs=certs)
    os.umask(umask := os.umask(0o077))
    out.chmod(0o666 & ~umask)  # As any other file: whoever pulls weights may pass them on.
    typer.echo(f"versions {metadata.get('versions', '?')} of run {metadata.get('run')}", err=True)
    typer.echo(out)


def _current_status(run: Target, calls: ShortCalls) -> Status:
    from diloco_cli.errors import LinkError
    from diloco_cli.run.folder import is_a_regions, server_elsewhere
    from diloco_cli.system.locks import FileLock

    if run.folder and is_a_regions(run.folder):
        raise server_elsewhere(run.folder, "status")
    # A server that was killed leaves its address behind, but not its lock.
    if run.url is None or (run.folder and FileLock(run.folder / "server" / "lock").is_free()):
        raise LinkError(f"{run} has no server running.", hint=_start_again(run))
    return calls.status(run.url)


def _start_again(run: Target) -> str:
    """On a host with regions `diloco run` brings all back; one that only serves never had any."""
    from diloco_cli.run.folder import runner_of

    if runner := run.folder and runner_of(run.folder):
        return f"Process {runner} is starting it; `diloco status --watch {run}` waits for that."
    with_regions = run.folder is None or (run.folder / "regions").is_dir()
    command = "run" if with_regions else "serve"
    return f"`diloco {command} SPEC` starts it again."


def _print_status(run: Target, status: Status, format: Format) -> None:
    if format is Format.json:
        typer.echo(json.dumps(status.plain(), indent=2))
        return
    from diloco_cli.observe.status_view import status_view
    from diloco_cli.observe.terminal import display

    display(status_view(status))
    for label, text in _heldout(run):
        typer.echo(f"{label}: {text}")


def _heldout(run: Target) -> list[tuple[str, str]]:
    from diloco_cli.run.folder import heldout_rows

    return heldout_rows(run.folder) if run.folder else []


def _watch(run: Target, calls: ShortCalls, format: Format) -> None:
    """Shows the run until it ends; a server that is away is waited for."""
    from diloco_cli.observe.terminal import ProgressDisplay, to_stdout
    from diloco_cli.run.folder import last_summary
    from diloco_cli.system.keys import Keys

    status, since, summary = _first_status(run, calls), "", None
    with ProgressDisplay(to_stdout()) as progress, Keys() as keys:
        progress.follow(run.folder)
        progress.keys = KEYS if keys.heard else ""
        while not status.over:
            shown = status
            if since:
                why = f"since {since}, retrying; Ctrl-C ends this"
                away = {"state": "server away", "why": why, "reachable": False}
                shown = status.model_copy(update=away)
            if format is Format.json:
                typer.echo(json.dumps(shown.plain()))
            else:
                progress.show(shown)
            key = keys.wait(WATCH_SECONDS)
            if key == "q":
                return
            if key == "r":
                progress.rounds = not progress.rounds
            if key == "o":
                progress.say(_opened(status.url))
            fresh = _status_or_none(run, calls)
            since = "" if fresh else since or time.strftime("%H:%M:%S")
            status = fresh or status
            summary = last_summary(run.folder) if run.folder and not fresh else None
            if summary and summary.over:
                break
    if summary:
        _print_summary(summary, run, format)
    else:
        _print_status(run, status, format)


def _first_status(run: Target, calls: ShortCalls) -> Status:
    """Waits for the server of a run that is just being started."""
    from diloco_cli.errors import LinkError
    from diloco_cli.run.folder import runner_of

    try:
        return _current_status(run, calls)
    except LinkError as error:
        folder = run.folder
        if not folder or not (runner := runner_of(folder)):
            raise
        typer.echo(f"{run} is being started by process {runner}; waiting for it.", err=True)
        while not (status := _status_or_none(run, calls)):
            if runner_of(folder) is None:
                raise error from None
            time.sleep(START_SECONDS)
        return status


def _opened(url: str) -> str:
    """Opens the page where there are windows; says its address in any case."""
    if sys.platform == "darwin" or os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
        import webbrowser

        webbrowser.open(url)
    return f"The page of the run: {url}"


def _status_or_none(run: Target, calls: ShortCalls) -> Status | None:
    """Asks wherever the server listens now; None while it does not answer."""
    from diloco_cli.errors import LinkError, WireError
    from diloco_cli.run.folder import address_of

    url = (address_of(run.folder).url if run.folder else None) or run.url
    try:
        return calls.status(url) if url else None
    except (LinkError, WireError):
        return None


def _print_last_known(run: Target, format: Format, error: Exception) -> None:
    """Says what the folder still knows; a run that has ended needs no server to be known."""
    from diloco_cli.run.folder import last_summary
    from diloco_cli.run.offline import known_without_server

    if run.folder is None:
        raise error
    summary = last_summary(run.folder)
    _print_summary(summary or known_without_server(run.folder), run, format)
    if summary is None or not summary.ended:
        raise error


def _print_summary(document: Summary | LastKnown, run: Target, format: Format) -> None:
    amendments = _amendments(run)
    if format is Format.json:
        listed = [amendment.model_dump(mode="json") for amendment in amendments]
        beside = {"amendments": listed, "reachable": False}
        typer.echo(json.dumps({**document.plain(), **beside}, indent=2))
        return
    from diloco_cli.observe.status import Summary
    from diloco_cli.observe.status_view import amendment_lines
    from diloco_cli.observe.terminal import display, last_known_view, summary_view

    if isinstance(document, Summary):
        display(summary_view(document, beside=_heldout(run)))
    else:
        display(last_known_view(document))
    for line in amendment_lines(amendments):
        typer.echo(line)


def _amendments(run: Target) -> list[Amendment]:
    """What is on record in the folder of a run whose server is gone; nothing if it is damaged."""
    from diloco_cli.errors import DilocoError
    from diloco_cli.run.edited_spec import amendments_of
    from diloco_cli.server.build_status import amendment_of

    if run.folder is None:
        return []
    with contextlib.suppress(DilocoError, OSError):
        return [amendment_of(record) for record in amendments_of(run.folder)]
    return []


def _await_end(run: Target, calls: ShortCalls, seconds: float) -> None:
    """Waits until nobody holds the run any more."""
    from diloco_cli.errors import LinkError, RunFailed
    from diloco_cli.run.folder import runner_of
    from diloco_cli.system.locks import FileLock

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if run.folder:
            if runner_of(run.folder) is None and FileLock(run.folder / "server" / "lock").is_free():
                return
        else:
            assert run.url is not None
            try:
                calls.status(run.url)
            except LinkError:
                return
        time.sleep(0.2)
    raise RunFailed(
        f"{run} is still stopping after {seconds:g} s.",
        hint=f"`diloco status {run}` shows what it waits for; wait longer with --wait.",
    )
