"""Commands for the server's folder: is it what it says (replay), copy it (backup), bring it back
(restore)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.options import output_folder
from diloco_cli.cli.spec import Format, OutputFormat

if TYPE_CHECKING:
    from diloco_cli.server.recovery.verify import Replay, ReplayedFragment


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(replay)
    app.command()(backup)
    app.command()(restore)


def replay(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run folder, or a copy.")],
    to: Annotated[
        int | None,
        typer.Option(metavar="RECORD", help="Stop after this record of the journal."),
    ] = None,
    format: OutputFormat = Format.text,
) -> None:
    """Recompute the server's weights from its journal and compare every bit.

    Exit code 0 when every digest is the recorded one, 5 when one differs or something is
    damaged or missing. The folder is not changed; its server must not be running.
    """
    from diloco_cli.run.folder import refuse_served

    refuse_served(folder)
    result = _replay(folder, to)
    if format is Format.json:
        typer.echo(json.dumps(_replay_document(result), indent=2))
        return
    for line in result.lines:
        typer.echo(_fragment_line(line, result.base))
    typer.echo(f"record {result.record}  state {result.digest}")


def backup(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run folder on the server's host.")
    ],
    to: Annotated[
        Path,
        typer.Option(metavar="FOLDER", callback=output_folder, help="Where copies are kept."),
    ],
    every: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Again and again, such as 5m.")
    ] = None,
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="Copies to keep.")] = 3,
) -> None:
    """Copy a server's folder while it runs: journal, weights, spec and certificates.

    Each copy is whole, and takes the room of what is new since the one before. It holds the
    keys of `server.certs`: keep it as safe as those.
    """
    from diloco_cli.errors import DilocoError
    from diloco_cli.run.copies import Interrupted, back_up
    from diloco_cli.spec.quantities import DURATION
    from diloco_cli.system.wakeup import Signals

    pause = DURATION.read(every) if every else None
    with Signals() as signals:
        while True:
            try:
                typer.echo(back_up(run, to, keep=keep, stopped=lambda: signals.count > 0))
            except Interrupted:
                if pause is None:
                    raise typer.Exit(signals.exit_code) from None
            except DilocoError as error:
                if pause is None:
                    raise
                typer.echo(f"error: {error.message} The next try is in {every}.", err=True)
            if pause is not None and not signals.count:
                signals.pause(pause)
            if pause is None or signals.count:
                return


def restore(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="COPY",
            help="What `diloco backup` made, or a copy; with --from-regions, region folders.",
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--dir", metavar="FOLDER", help="Where the server is to live now.")
    ],
    from_regions: Annotated[
        bool,
        typer.Option(
            "--from-regions", help="Rebuild a lost server from what its regions hold; see below."
        ),
    ] = False,
    and_copy: Annotated[
        Path | None,
        typer.Option("--and", metavar="COPY", help="With --from-regions: an older copy as well."),
    ] = None,
    set_back: Annotated[
        bool,
        typer.Option(
            "--set-back", help="Declare what was merged after COPY lost; its regions then go on."
        ),
    ] = False,
    spec: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --from-regions: the spec, if none lies beside the folders."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Go on from what one region alone holds.")
    ] = False,
    format: OutputFormat = Format.text,
) -> None:
    """Bring a server back from a copy of its folder, on this host or another.

    The copy is replayed before and after; exit code 5 when it is damaged. Regions that have
    seen newer versions than the copy stop with exit code 5 instead of training on; with
    --set-back the run goes on under a new id, and they go on with what they hold.

    With --from-regions nothing of the server is needed: COPY are run folders of region hosts, or
    copies of their regions/NAME, on this host. Of every fragment the newest version that one of
    them, or --and COPY, holds is where the run goes on, under a new id; its regions realign by
    themselves. What was merged after that is lost, and so is the outer momentum.
    """
    from diloco_cli.errors import SpecError
    from diloco_cli.run.copies import newest_copy

    if not from_regions and len(sources) > 1:
        raise SpecError(
            f"{len(sources)} copies are given, and a server is brought back from one.",
            hint="Are these region folders? Then say --from-regions.",
        )
    if from_regions and set_back:
        raise SpecError(
            "--set-back is for a copy alone.",
            hint="Give the copy with --and: what it and the regions hold is then weighed up.",
        )
    if not from_regions and (and_copy or spec):
        option = "--and" if and_copy else "--spec"
        raise SpecError(f"{option} is for --from-regions.", hint="Say --from-regions, too.")
    if from_regions or set_back:
        copy = sources[0] if set_back else and_copy
        regions = [] if set_back else sources
        return _rebuild(regions, copy and newest_copy(copy), folder, spec, yes, format)
    _bring_back(newest_copy(sources[0]), folder, format)


def _bring_back(copy: Path, folder: Path, format: Format) -> None:
    from diloco_cli.run.copies import bring_back, bring_back_certs

    before = _replay(copy, None)
    bring_back(copy, folder)
    if certs := bring_back_certs(copy):
        typer.echo(f"The certificates are in {certs} again.", err=True)
    after = _replay(folder, None)
    if format is Format.json:
        typer.echo(json.dumps({**_replay_document(after), "equal": before.digest == after.digest}))
    else:
        typer.echo(f"{folder} stands at record {after.record}  state {after.digest}")
        typer.echo(_start_line(folder), err=True)
    if before.digest != after.digest:
        from diloco_cli.errors import StoreError

        raise StoreError(
            f"{copy} was replayed to {before.digest[:12]}, {folder} to {after.digest[:12]}.",
            hint="Did somebody write to the copy? Restore once more, from a copy at rest.",
        )


def _rebuild(
    regions: list[Path],
    copy: Path | None,
    folder: Path,
    spec: Path | None,
    yes: bool,
    format: Format,
) -> None:
    from diloco_cli.errors import SpecError
    from diloco_cli.run.copies import bring_back_certs
    from diloco_cli.run.rebuild.lost_server import plan_rebuild

    plan = plan_rebuild(regions, copy, folder, spec=spec)
    for remark in plan.remarks:
        typer.echo(f"note: {remark}", err=True)
    if plan.unconfirmed and not yes:
        raise SpecError(
            "Some of what would go on is held by one region alone.",
            hint="Give more region folders or a copy with --and; or say --yes.",
        )
    run = plan.write(folder)
    if copy and (certs := bring_back_certs(copy)):
        typer.echo(f"The certificates are in {certs} again.", err=True)
    wanted = plan.settings.spec.server.certs
    if wanted and not Path(wanted).exists():
        typer.echo(
            f"note: {wanted} is lost, and with it the run's authority: `diloco certs init` makes "
            "another, and every region must be issued its credential anew",
            err=True,
        )
    if not wanted and not copy:
        port = plan.settings.spec.server.listen.rpartition(":")[2]
        typer.echo(
            "note: the spec is a region's, and does not know what the server was told at its "
            "start. If regions come over TLS, put the run's certs/ here and add: --set "
            f"server.certs=certs --set server.listen=0.0.0.0:{port}",
            err=True,
        )
    after = _replay(folder, None)
    if format is Format.json:
        found = {"was": plan.run, "holders": [each.holders for each in plan.fragments]}
        momentum = [each.momentum for each in plan.fragments]
        typer.echo(json.dumps({**_replay_document(after), **found, "momentum": momentum}))
        return
    for number, each in enumerate(plan.fragments):
        typer.echo(
            f"fragment {number}  version {each.version}  {each.digest[:12]}  from "
            f"{', '.join(each.holders)}, momentum {each.momentum}"
        )
    typer.echo(f"{folder} holds run {run}, which continues {plan.run}  state {after.digest}")
    typer.echo(_start_line(folder), err=True)
    typer.echo(
        "Regions go over to it by themselves when they reach it; those that have stopped are "
        "started again as ever.",
        err=True,
    )


def _start_line(folder: Path) -> str:
    return f"Start it: diloco serve {folder / 'spec.resolved.yaml'} --dir {folder}"


def _replay(folder: Path, to: int | None) -> Replay:
    from diloco_cli.assemble import build_terms, load_run, resolve, settings_of, spelled_out
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
    settings = settings_of(spec, resolve(spec))
    return replay_run(settings, folder / "server", to=to, build=build_terms)


def _fragment_line(line: ReplayedFragment, base: int) -> str:
    start = f"version {line.start}" if line.start else "the initial weights"
    if base:
        start += f", journal compacted up to record {base}"
    again = f"{line.made} versions recomputed from {start}" if line.made else f"only {start}"
    return f"fragment {line.fragment}  version {line.version}  {line.digest[:12]}  equal ({again})"


def _replay_document(result: Replay) -> dict[str, object]:
    return {
        "run": result.run,
        "record": result.record,
        "compacted": result.base,
        "state": result.digest,
        "fragments": [
            {
                "fragment": line.fragment,
                "version": line.version,
                "from": line.start,
                "made": line.made,
                "digest": line.digest,
            }
            for line in result.lines
        ],
    }
