"""Commands for the server's folder: is it what it says (replay), bring it back (restore)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.spec import Format, OutputFormat

if TYPE_CHECKING:
    from diloco_cli.server.recovery.verify import Replay, ReplayedFragment


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(replay)
    app.command()(restore)


def replay(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run folder, or a copy.")],
    to: Annotated[
        int | None,
        typer.Option(metavar="RECORD", help="Stop after this record of the journal."),
    ] = None,
    format: OutputFormat = Format.text,
) -> None:
    """Make the server's weights again from its journal and compare every bit.

    Exit code 0 when every digest is the recorded one, 5 when one differs or something is
    damaged or missing. The folder is not changed; its server must not be running.
    """
    from diloco_cli.run.folder import refuse_served

    refuse_served(folder)
    found = _replayed(folder, to)
    if format is Format.json:
        typer.echo(json.dumps(_document(found), indent=2))
        return
    for line in found.lines:
        typer.echo(_said(line, found.base))
    typer.echo(f"record {found.record}  state {found.digest}")


def restore(
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="A copy of a run folder.")],
    folder: Annotated[
        Path, typer.Option("--dir", metavar="FOLDER", help="Where the server is to live now.")
    ],
    format: OutputFormat = Format.text,
) -> None:
    """Bring a server back from a copy of its folder, on this host or another.

    The copy is replayed before and after; exit code 5 when it is damaged. Regions that have
    seen newer versions than the copy stop with exit code 5 instead of training on.
    """
    from diloco_cli.run.restore import bring_back

    before = _replayed(copy, None)
    bring_back(copy, folder)
    after = _replayed(folder, None)
    if format is Format.json:
        typer.echo(json.dumps({**_document(after), "equal": before.digest == after.digest}))
    else:
        typer.echo(f"{folder} stands at record {after.record}  state {after.digest}")
        typer.echo(
            f"Start it: diloco serve {folder / 'spec.resolved.yaml'} --dir {folder}", err=True
        )
    if before.digest != after.digest:
        from diloco_cli.errors import StoreError

        raise StoreError(
            f"{copy} was replayed to {before.digest[:12]}, {folder} to {after.digest[:12]}.",
            hint="Did somebody write to the copy? Restore once more, from a copy at rest.",
        )


def _replayed(folder: Path, to: int | None) -> Replay:
    from diloco_cli.assemble import load_run, recipe_of, resolve, spelled_out
    from diloco_cli.errors import SpecError
    from diloco_cli.run.folder import RESOLVED
    from diloco_cli.server.recovery.verify import replay as replay_run

    for name in (RESOLVED, "server"):
        if not (folder / name).exists():
            raise SpecError(
                f"{folder} is not the folder of a server: it has no {name}.",
                hint="Name the run folder, the one above `server/`.",
            )
    spec = spelled_out(load_run(folder / RESOLVED).spec)
    recipe = recipe_of(spec, resolve(spec))
    return replay_run(recipe, folder / "server", to=to)


def _said(line: ReplayedFragment, base: int) -> str:
    start = f"version {line.start}" if line.start else "the initial weights"
    if base:
        start += f", journal compacted up to record {base}"
    again = f"{line.made} versions made again from {start}" if line.made else f"only {start}"
    return f"fragment {line.fragment}  version {line.version}  {line.digest[:12]}  equal ({again})"


def _document(found: Replay) -> dict[str, object]:
    return {
        "run": found.run,
        "record": found.record,
        "compacted": found.base,
        "state": found.digest,
        "fragments": [
            {
                "fragment": line.fragment,
                "version": line.version,
                "from": line.start,
                "made": line.made,
                "digest": line.digest,
            }
            for line in found.lines
        ],
    }
