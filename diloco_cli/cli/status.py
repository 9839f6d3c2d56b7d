"""Commands for a run that is under way, or over: status, stop, pull."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.spec import Format, OutputFormat
from diloco_cli.run.find_credential import CertsOption, for_asking

if TYPE_CHECKING:
    from diloco_cli.observe.status import LastKnown, Status, Summary
    from diloco_cli.run.ask import ShortCalls
    from diloco_cli.run.folder import Target

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SPEC|FOLDER|URL]",
        help="Which run: its spec, its folder or its server. The newest one here when left out.",
        show_default=False,
    ),
]

WATCH_SECONDS = 2.0


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

    found = find(target)
    asking = ShortCalls(for_asking(found, certs))
    try:
        if watch:
            _watch(found, asking, format)
        else:
            _print_status(_asked(found, asking), format)
    except LinkError as error:
        _print_last_known(found, format, error)


def stop(
    target: TargetArgument = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="How long to wait for the end.")
    ] = 120.0,
    certs: CertsOption = None,
) -> None:
    """Stop a run in good order.

    Regions checkpoint and leave, then the server; `diloco run` goes on from there.
    """
    from diloco_cli.errors import LinkError
    from diloco_cli.run.ask import ShortCalls
    from diloco_cli.run.folder import find, is_a_regions, runner_of, server_elsewhere

    found = find(target)
    asking = ShortCalls(for_asking(found, certs))
    runner = runner_of(found.folder) if found.folder else None
    try:
        if found.url is None:
            raise LinkError(f"{found} has no server running.")
        asking.stop(found.url)
    except LinkError:
        if runner is None and found.folder is None:
            raise
        if runner is None and found.folder and is_a_regions(found.folder):
            raise server_elsewhere(found.folder, "stop") from None
        if runner is None:
            typer.echo(f"{found} is not running.", err=True)
            return
        # Its server is down just now; the process that would start it again can be asked.
        os.kill(runner, signal.SIGTERM)
    typer.echo(f"{found} is stopping.", err=True)
    _await_end(found, asking, wait)
    typer.echo(f"{found} has stopped.", err=True)


def pull(
    target: TargetArgument = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where to write the safetensors file.")
    ] = Path("weights.safetensors"),
    version: Annotated[
        int | None,
        typer.Option("--version", metavar="N", min=0, help="An older version of every fragment."),
    ] = None,
    certs: CertsOption = None,
) -> None:
    """Fetch the global weights as safetensors.

    They come from the server, or from the folder of a run whose server is gone.
    """
    from diloco_cli.errors import LinkError
    from diloco_cli.run.folder import find
    from diloco_cli.run.offline import refuse_unwritable

    found = find(target)
    refuse_unwritable(out)
    metadata = None
    if found.url:
        from diloco_cli.net.client import Client
        from diloco_cli.net.options import Options, Retry

        try:
            options = Options(retry=Retry(tries=2), credentials=for_asking(found, certs))
            with Client(found.url, options) as client:
                metadata = client.weights(out, version=version)
        except LinkError:
            if found.folder is None:
                raise
    if metadata is None:
        from diloco_cli.run.offline import write_weights

        assert found.folder is not None
        metadata = write_weights(found.folder, out, version=version)
    typer.echo(f"versions {metadata.get('versions', '?')} of run {metadata.get('run')}", err=True)
    typer.echo(out)


def _asked(found: Target, asking: ShortCalls) -> Status:
    from diloco_cli.errors import LinkError
    from diloco_cli.run.folder import is_a_regions, server_elsewhere
    from diloco_cli.system.locks import FileLock

    if found.folder and is_a_regions(found.folder):
        raise server_elsewhere(found.folder, "status")
    # A server that was killed leaves its address behind, but not its lock.
    if found.url is None or (found.folder and FileLock(found.folder / "server" / "lock").is_free()):
        raise LinkError(f"{found} has no server running.", hint="`diloco run` starts it again.")
    return asking.status(found.url)


def _print_status(status: Status, format: Format) -> None:
    if format is Format.json:
        typer.echo(json.dumps(status.plain(), indent=2))
        return
    from diloco_cli.observe.terminal import display, status_view

    display(status_view(status))


def _watch(found: Target, asking: ShortCalls, format: Format) -> None:
    """Shows the run until it ends; a server that is away is waited for."""
    from diloco_cli.observe.terminal import ProgressDisplay, to_stdout
    from diloco_cli.run.folder import last_summary

    status, since, summary = _asked(found, asking), "", None
    with ProgressDisplay(to_stdout()) as progress:
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
            time.sleep(WATCH_SECONDS)
            fresh = _asked_again(found, asking)
            since = "" if fresh else since or time.strftime("%H:%M:%S")
            status = fresh or status
            summary = last_summary(found.folder) if found.folder and not fresh else None
            if summary and summary.over:
                break
    if summary:
        _print_summary(summary, format)
    else:
        _print_status(status, format)


def _asked_again(found: Target, asking: ShortCalls) -> Status | None:
    """Asks wherever the server listens now; None while it does not answer."""
    from diloco_cli.errors import LinkError, WireError
    from diloco_cli.run.folder import address_of

    url = address_of(found.folder).url if found.folder else None
    try:
        return asking.status(str(url or found.url))
    except (LinkError, WireError):
        return None


def _print_last_known(found: Target, format: Format, error: Exception) -> None:
    """Says what the folder still knows; a run that has ended needs no server to be known."""
    from diloco_cli.run.folder import last_summary
    from diloco_cli.run.offline import known_without_server

    if found.folder is None:
        raise error
    summary = last_summary(found.folder)
    _print_summary(summary or known_without_server(found.folder), format)
    if summary is None or not summary.ended:
        raise error


def _print_summary(document: Summary | LastKnown, format: Format) -> None:
    if format is Format.json:
        typer.echo(json.dumps({**document.plain(), "reachable": False}, indent=2))
        return
    from diloco_cli.observe.status import Summary
    from diloco_cli.observe.terminal import display, last_known_view, summary_view

    is_summary = isinstance(document, Summary)
    display(summary_view(document) if is_summary else last_known_view(document))


def _await_end(found: Target, asking: ShortCalls, seconds: float) -> None:
    """Waits until nobody holds the run any more."""
    from diloco_cli.errors import LinkError, RunFailed
    from diloco_cli.run.folder import runner_of
    from diloco_cli.system.locks import FileLock

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found.folder:
            if (
                runner_of(found.folder) is None
                and FileLock(found.folder / "server" / "lock").is_free()
            ):
                return
        else:
            assert found.url is not None
            try:
                asking.status(found.url)
            except LinkError:
                return
        time.sleep(0.2)
    raise RunFailed(
        f"{found} is still stopping after {seconds:g} s.",
        hint=f"`diloco status {found}` shows what it waits for; wait longer with --wait.",
    )
