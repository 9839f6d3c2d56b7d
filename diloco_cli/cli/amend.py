"""The command that changes a run which has begun: amend."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco_cli.cli.spec import Format, OutputFormat
from diloco_cli.cli.status import TargetArgument
from diloco_cli.run.find_credential import CertsOption, for_calls

if TYPE_CHECKING:
    from diloco_cli.core.terms import Settings
    from diloco_cli.wire.messages import Amended


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command()(amend)


def amend(
    target: TargetArgument = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a key, as in sync.quorum=2 or regions.oslo.inner.batch=8; null takes it "
            "back to its default. Repeatable.",
        ),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            "--add-region",
            metavar="REGION",
            help="A name, or a region as the spec lists it: '{name: oslo, inner: {batch: 8}}'. "
            "Repeatable.",
        ),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove-region", metavar="NAME", help="Let a region go for good. Repeatable."
        ),
    ] = None,
    repace: Annotated[
        list[str] | None,
        typer.Option(
            "--repace",
            metavar="NAME",
            help="Learn a region's pace anew, after an upgrade for example. Repeatable.",
        ),
    ] = None,
    undo: Annotated[
        int | None,
        typer.Option("--undo", metavar="N", min=1, help="Take the changes of amendment N back."),
    ] = None,
    why: Annotated[
        str, typer.Option("--why", metavar="TEXT", help="The reason, for the record.")
    ] = "",
    sure: Annotated[bool, typer.Option("--yes", help="Make it although it ends the run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would change, and when.")
    ] = False,
    certs: CertsOption = None,
    format: OutputFormat = Format.text,
) -> None:
    """Change a run that has begun: running, stopped or finished.

    The change is journaled with who made it and when, and takes effect at a version boundary;
    regions follow by themselves. A larger budget opens a finished run again. Takes an admin's
    credential where the server has certificates.
    """
    import secrets

    from diloco_cli.errors import SpecError
    from diloco_cli.run.amend import amend as amend_run
    from diloco_cli.run.folder import find
    from diloco_cli.wire.messages import Amend

    named = changes or add or remove or repace
    if undo is None and not named:
        raise SpecError(
            "Nothing is to be changed.",
            hint="For example: diloco amend runs/my-run --set budget.tokens=8_000_000",
        )
    if undo is not None and named:
        raise SpecError(
            "--undo goes alone.", hint="Undo first, then make the other change with a second amend."
        )
    run = find(target)
    request = Amend(
        id=secrets.token_hex(8),
        set=_settings(changes or []),
        add=tuple(_region(text) for text in add or []),
        remove=tuple(remove or ()),
        repace=tuple(repace or ()),
        why=why,
        undo=undo,
        sure=sure,
        dry_run=dry_run,
    )
    answer = amend_run(run, request, for_calls(run, certs))
    if format is Format.json:
        typer.echo(json.dumps(answer.model_dump(mode="json"), indent=2))
    else:
        _print(answer, dry_run=dry_run)


def _settings(assignments: list[str]) -> Settings:
    from diloco_cli.errors import SpecError

    settings: Settings = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise SpecError(
                f"--set {assignment} is not KEY=VALUE.", hint="For example --set sync.quorum=2"
            )
        settings[key.strip()] = _value(f"--set {assignment}", text)
    return settings


def _region(text: str) -> Settings:
    region = _value(f"--add-region {text}", text)
    return region if isinstance(region, dict) else {"name": str(region)}


def _value(where: str, text: str) -> Any:
    from diloco_cli.errors import SpecError
    from diloco_cli.spec.yaml_source import read

    document = read(text, "")
    if document.flaws:
        flaw = document.flaws[0]
        raise SpecError(f"{where}: {flaw.message}.", hint=flaw.hint)
    return document.data


def _print(answer: Amended, *, dry_run: bool) -> None:
    if answer.recorded:
        typer.echo(f"made before, as amendment {answer.terms}", err=True)
        return
    if not answer.changes:
        typer.echo("nothing to change: the run has these settings already", err=True)
        return
    for change in answer.changes:
        typer.echo(f"{_change(change.key, change.before, change.after)}  ({change.when})")
    if answer.reopens:
        typer.echo("the run is open again; `diloco run` goes on with it", err=True)
    if answer.ends:
        typer.echo("the run ends: its budget is used up", err=True)
    if dry_run:
        typer.echo("a dry run: nothing was changed", err=True)
    else:
        typer.echo(f"on record as amendment {answer.terms}", err=True)


def _change(key: str, before: Any, after: Any) -> str:
    if key.startswith("regions.") and key.count(".") == 1:
        return f"{key}: {'added' if after else 'removed'}"
    if key.startswith("pace of "):
        return f"{key}: {before} → {after}"
    return f"{key}: {_shown(before)} → {_shown(after)}"


def _shown(value: Any) -> str:
    return "default" if value is None else json.dumps(value, ensure_ascii=False)
