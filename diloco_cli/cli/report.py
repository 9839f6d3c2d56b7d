"""Commands that show a run to others: report, compare."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.status import TargetArgument
from diloco_cli.run.find_credential import CertsOption, for_calls

if TYPE_CHECKING:
    from diloco_cli.observe.page.report import Environment
    from diloco_cli.observe.run_record import RunRecord

OutOption = Annotated[Path, typer.Option("--out", metavar="FILE", help="The HTML file to write.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(report)
    app.command()(compare)


def report(
    target: TargetArgument = None,
    out: OutOption = Path("report.html"),
    png: Annotated[
        bool, typer.Option("--png", help="Also write the curves as PNG files beside it.")
    ] = False,
    certs: CertsOption = None,
) -> None:
    """Write one HTML file about a run: losses, speed, token fates, faults, traffic, settings.

    Of a run that goes on, stopped or finished; its folder is only read. The file asks nobody
    for anything and can be sent as it is.
    """
    from diloco_cli.observe.page.report import report as render

    record = _record(target, certs)
    _write(out, render(record, _environment()))
    if png:
        from diloco_cli.observe.page.pictures import pictures

        for path in pictures(record, out):
            typer.echo(f"wrote {path}", err=True)


def compare(
    targets: Annotated[
        list[str], typer.Argument(metavar="RUN RUN…", help="Folders or specs of runs.")
    ],
    out: OutOption = Path("compare.html"),
    certs: CertsOption = None,
) -> None:
    """Lay the held-out losses of several runs over one axis, in one HTML file."""
    from diloco_cli.errors import SpecError
    from diloco_cli.observe.page.report import comparison

    if len(targets) < 2:
        raise SpecError("There is one run to compare.", hint="Name two or more.")
    records = [_record(target, certs) for target in targets]
    _write(out, comparison(records, _environment()))


def _record(target: str | None, certs: Path | None) -> RunRecord:
    from diloco_cli.errors import DilocoError, SpecError
    from diloco_cli.observe.run_record import read_run, summary_of
    from diloco_cli.run.ask import ShortCalls
    from diloco_cli.run.folder import find

    run = find(target)
    if run.folder is None:
        raise SpecError(
            f"{run.url} is a server; a report is made from the run's folder.",
            hint="Name the folder, on the server's host, or a copy of it.",
        )
    record = read_run(run.folder)
    if run.url:
        # Its summary is of the last stop, or there is none yet; without an answer that is it.
        calls = ShortCalls(for_calls(run, certs))
        try:
            record = replace(record, summary=summary_of(calls.status(run.url)))
        except DilocoError as error:
            typer.echo(f"{run.url} does not answer ({error.message})", err=True)
        finally:
            calls.close()
    return record


def _environment() -> Environment:
    from importlib.metadata import version

    from diloco_cli.observe.page.report import Environment

    return Environment(version("diloco-cli"), "diloco " + shlex.join(sys.argv[1:]))


def _write(out: Path, text: str) -> None:
    from diloco_cli.system.files import disk_errors

    with disk_errors(out):
        out.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {out} ({len(text) / 1000:.0f} kB)", err=True)
