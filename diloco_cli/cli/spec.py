"""Commands for writing a run spec: init, validate, explain."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from diloco_cli.spec.describe import KindDescription
    from diloco_cli.spec.load import Loaded
    from diloco_cli.spec.rules import SpecFault
    from diloco_cli.spec.schema import RunSpec

MOST_LISTED = 5
"""Held-out files that `validate` names."""


class Format(StrEnum):
    text = "text"
    json = "json"


SpecFile = Annotated[
    Path, typer.Argument(metavar="SPEC", help="Run spec, for example pipelines/quickstart.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key, as in sync.quorum=2. Repeatable."
    ),
]
OutputFormat = Annotated[
    Format, typer.Option("--format", help="json prints one document and nothing else.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(init)
    app.command()(validate)
    app.command()(explain)


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where to write; made if it is not there.")
    ] = Path("."),
    template: Annotated[
        str, typer.Option(metavar="NAME", help="The pipeline to start from.")
    ] = "quickstart",
    regions: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Names of the regions, instead of the template's."),
    ] = None,
) -> None:
    """Write a run.yaml and a start script for each host."""
    from diloco_cli.run import scaffold

    names = [] if regions is None else [name.strip() for name in regions.split(",")]
    drafts = scaffold.compose(folder, template, names)
    written = scaffold.write(drafts)
    for path in written:
        typer.echo(path)
    starts = [path.name for path in written if path.suffix == ".sh"]
    spec = folder / "run.yaml"
    typer.echo("\nNext:", err=True)
    typer.echo(f"  diloco validate {spec}   after each change", err=True)
    typer.echo(f"  diloco run {spec}        everything on this machine", err=True)
    typer.echo(
        f"  Several hosts, in {folder}: diloco certs init --host NAME, and for each", err=True
    )
    typer.echo(
        "  region diloco certs issue --region R --bundle R.tar, which goes to its host", err=True
    )
    typer.echo(f"  and nothing else. Then ./{starts[0]} here, ./{starts[1]} URL there.", err=True)
    if folder / ".gitignore" not in written:
        typer.echo("  Your .gitignore was left as it is; runs/ belongs in it.", err=True)


def validate(
    spec_file: SpecFile, overrides: Overrides = None, format: OutputFormat = Format.text
) -> None:
    """Check a run spec; every problem at once.

    Text that is not on this host is a warning, as it may be on the hosts of its regions; where it
    is missing there too, they refuse to start.
    """
    from diloco_cli.assemble import load_run, spelled_out
    from diloco_cli.errors import SpecError
    from diloco_cli.run.folder import SpecPlace
    from diloco_cli.spec.load import SpecErrors
    from diloco_cli.spec.resolved import resolved

    try:
        loaded = load_run(SpecPlace(spec_file).file, overrides or ())
    except SpecError as error:
        if format is Format.text:
            raise
        problems = error.as_data() if isinstance(error, SpecErrors) else [_whole(spec_file, error)]
        _print_json({"ok": False, "problems": problems, "warnings": [], "spec": None})
        raise typer.Exit(error.exit_code) from None
    heldout, missing = _heldout(loaded.spec)
    warnings = [*loaded.warnings, *map(loaded.problem, missing)]
    if format is Format.json:
        document = {
            "ok": True,
            "problems": [],
            "warnings": [asdict(warning) for warning in warnings],
            "spec": resolved(spelled_out(loaded.spec)),
            "heldout": heldout,
        }
        _print_json(document)
    else:
        for warning in warnings:
            typer.echo(f"warning: {warning}\nhint: {warning.hint}", err=True)
        _describe(loaded, heldout)


def _whole(file: Path, error: Any) -> dict[str, object]:
    """Puts a problem with the file itself into the form the others have."""
    place = {"file": str(file), "line": None, "column": None, "key": ""}
    return {**place, "message": error.message, "hint": error.hint}


def _describe(loaded: Loaded, heldout: list[dict[str, Any]]) -> None:
    from diloco_cli.assemble import resolve

    spec, layout = loaded.spec, resolve(loaded.spec).layout
    names = ", ".join(region.name for region in spec.regions)
    sync = spec.sync
    typer.echo(f"{spec.name}: ok")
    typer.echo(f"  regions   {len(spec.regions)} ({names}), quorum {sync.quorum}")
    typer.echo(f"  model     {layout.size:,} parameters in {len(layout.fragments)} fragments")
    typer.echo(
        f"  exchange  each fragment every {sync.every} inner steps, {spec.wire.up['kind']} up"
    )
    typer.echo(f"  budget    {spec.budget.tokens:,} tokens of all regions together")
    for text in heldout:
        whose = (
            "" if len(text["regions"]) == len(spec.regions) else f"{', '.join(text['regions'])}: "
        )
        typer.echo(f"  held out  {whose}{text['text']}")
        for file in text.get("files", ())[:MOST_LISTED]:
            typer.echo(f"            {file['share']:6.1%}  {file['path']}")
        if (more := len(text.get("files", ())) - MOST_LISTED) > 0:
            typer.echo(f"            and {more} more; --format json lists all")


def _heldout(spec: RunSpec) -> tuple[list[dict[str, Any]], list[SpecFault]]:
    """Says of every different `data` which of the files found here are held out, and which `data`
    is not here."""
    from diloco_cli.data import NamesHeldout, datasets
    from diloco_cli.data.first_bytes import NotText
    from diloco_cli.errors import SpecError
    from diloco_cli.spec.rules import SpecFault

    groups: list[tuple[dict[str, Any], list[str]]] = []
    for region in spec.regions:
        data = spec.data_of(region.name)
        same = next((names for other, names in groups if other == data), None)
        if same is None:
            groups.append((data, [region.name]))
        else:
            same.append(region.name)
    found: list[dict[str, Any]] = []
    missing: list[SpecFault] = []
    for data, names in groups:
        dataset = datasets.build(data)
        if not isinstance(dataset, NamesHeldout):
            continue
        try:
            text = dataset.held_out()
            found.append({"regions": names, "text": text.extent, **text.as_data()})
        except NotText:
            raise
        except SpecError as error:  # The files may lie on the region's host only.
            found.append({"regions": names, "text": f"not known here: {error.message}"})
            number = [region.name for region in spec.regions].index(names[0])
            own = spec.regions[number].data is not None
            message = f"is not on this host, and {', '.join(names)} will not start without it: "
            missing.append(
                SpecFault(
                    ("regions", number, "data") if own else ("data",),
                    message + error.message.removesuffix("."),
                    "Put it on the host of each region, at this path seen from the spec; then "
                    "`diloco doctor SPEC --region NAME` there says whether it does.",
                )
            )
    return found, missing


def explain(
    seam: Annotated[
        str, typer.Argument(metavar="[SEAM]", help="codec, merge, outer, model, data, …")
    ] = "",
    format: OutputFormat = Format.text,
) -> None:
    """List the kinds a spec can name, and their options."""
    from diloco_cli.assemble import SEAMS
    from diloco_cli.errors import SpecError
    from diloco_cli.spec.describe import kinds_of
    from diloco_cli.validation import nearest

    if seam and seam not in SEAMS:
        raise SpecError(
            f"There is nothing called {seam!r} to explain.",
            hint=nearest(seam, list(SEAMS), "Known"),
        )
    shown = {name: kinds_of(SEAMS[name]) for name in ([seam] if seam else SEAMS)}
    if format is Format.json:
        _print_json({name: [_kind_data(kind) for kind in kinds] for name, kinds in shown.items()})
        return
    for name, kinds in shown.items():
        typer.echo(f"{name}:" if seam else f"{name}: {', '.join(kind.name for kind in kinds)}")
        for kind in kinds if seam else ():
            _print_kind(kind)
    if not seam:
        typer.echo("\n`diloco explain codec` lists the options of each.", err=True)


def _print_kind(kind: KindDescription) -> None:
    typer.echo(f"\n  {kind.name}\n      {kind.doc}")
    for option in kind.options:
        typer.echo(f"      {option.name}: {option.type} ({option.shown_default})")
        if option.doc:
            typer.echo(f"          {option.doc}")


def _kind_data(kind: KindDescription) -> dict[str, object]:
    from diloco_cli.spec.describe import REQUIRED

    options = [
        {
            "name": option.name,
            "type": option.type,
            "required": option.default is REQUIRED,
            "default": None if option.default is REQUIRED else option.default,
            "doc": option.doc,
        }
        for option in kind.options
    ]
    return {"kind": kind.name, "doc": kind.doc, "options": options}


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
