"""`diloco certs`: certificates and tokens for a run whose server others can reach."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_cli.cli.options import output_file
from diloco_cli.cli.spec import Format, OutputFormat

if TYPE_CHECKING:
    from diloco_cli.server.access.tokens import Role, TokenEntry
    from diloco_cli.spec.schema import RunSpec

certs = typer.Typer(
    name="certs",
    help="Make, hand out and take back certificates and tokens.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Folder = Annotated[
    Path, typer.Option("--dir", metavar="FOLDER", help="Where they are kept, on the server's host.")
]
Days = Annotated[
    int, typer.Option("--days", metavar="N", min=1, max=3650, help="How long it is good for.")
]
Region = Annotated[str | None, typer.Option("--region", metavar="R", help="A region, to train.")]
Reader = Annotated[
    str | None, typer.Option("--reader", metavar="NAME", help="Somebody who may look and pull.")
]
Admin = Annotated[
    str | None, typer.Option("--admin", metavar="NAME", help="Somebody who may also stop the run.")
]
HERE = Path("certs")
YEAR = 365


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.add_typer(certs)


@certs.command()
def init(
    spec_file: Annotated[
        Path, typer.Argument(metavar="[SPEC]", help="The run spec; its name is the run's.")
    ] = Path("run.yaml"),
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="NAME", help="Name or address regions reach it by. Repeatable."
        ),
    ] = None,
    folder: Folder = HERE,
    days: Days = YEAR,
) -> None:
    """Make an authority, the server's certificate and an admin.

    Again, it makes only what is missing, ends soon, or lacks a --host.
    """
    from diloco_cli.server.access.issue import CredentialFolder
    from diloco_cli.spec.load import load_spec

    spec = load_spec(spec_file).spec
    done = CredentialFolder(folder).create_missing(
        spec.name, [*(host or ()), *_listening(spec.server.listen)], days
    )
    for line in done:
        typer.echo(f"made {line}", err=True)
    if not done:
        typer.echo("everything is there already", err=True)
    typer.echo(folder)
    if not host and done:
        typer.echo(
            "hint: only this host can reach the server by these names; add others with --host NAME",
            err=True,
        )
    if not spec.server.certs or spec.server.admit == "listed":
        typer.echo(
            f"in {spec_file}: server: {{certs: {folder}, admit: credentialed}}, so that whoever has"
            " a credential may join (start-server.sh does that by itself)",
            err=True,
        )
    first = spec.regions[0].name
    typer.echo(
        f"next: diloco certs issue --region {first} --bundle {first}.tar (and so on): all that the "
        f"host of {first} needs. Nothing else of {folder} leaves this host.",
        err=True,
    )


@certs.command()
def issue(
    region: Region = None,
    reader: Reader = None,
    admin: Admin = None,
    folder: Folder = HERE,
    days: Days = YEAR,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Make a new one; the old one ends within a day."),
    ] = False,
    handout: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE.tar",
            callback=output_file,
            help="Also pack what the region's host needs: spec, start script, this credential.",
        ),
    ] = None,
    spec_file: Annotated[
        Path, typer.Option("--spec", metavar="SPEC", help="The run spec that goes with it.")
    ] = Path("run.yaml"),
) -> None:
    """Make a certificate and a token for a region, a reader or an admin.

    Prints the folder to copy to its host, or the bundle. It holds secrets: copy it over a safe way.
    """
    from diloco_cli.server.access.issue import CredentialFolder, bundle

    role, name = _whose(region, reader, admin)
    spec = _beside(spec_file, role, name, needed=handout is not None)
    entry = CredentialFolder(folder).issue(role, name, days, renew=renew)
    if entry is None:
        typer.echo(f"{name} has a valid one already; --renew makes a new one", err=True)
    else:
        typer.echo(f"{role} {name}: good until {_day(entry.expires)}", err=True)
    home = bundle(folder, role, name)
    if handout and spec:
        from diloco_cli.run.scaffold import write_handout

        write_handout(handout, run=spec.name, region=name, spec=spec_file, credential=home)
        typer.echo(handout)
        typer.echo(
            f"next: copy {handout}, and nothing else, to the host of {name}; there:", err=True
        )
        typer.echo(f"      tar -xf {handout.name} && {spec.name}/start-{name}.sh URL", err=True)
        return
    typer.echo(home)
    typer.echo(f"next: copy {home} to the same place on the host of {name}", err=True)
    if role == "upload":
        typer.echo(f"      there: diloco work SPEC --region {name} --certs {home} …", err=True)


@certs.command()
def revoke(
    region: Region = None, reader: Reader = None, admin: Admin = None, folder: Folder = HERE
) -> None:
    """Take a credential back; a running server knows within seconds."""
    from diloco_cli.server.access.issue import CredentialFolder

    role, name = _whose(region, reader, admin)
    if revoked := CredentialFolder(folder).revoke(role, name):
        typer.echo(f"revoked {len(revoked)} of {role} {name}", err=True)
    else:
        typer.echo(f"{role} {name} had none left to revoke", err=True)


@certs.command()
def show(folder: Folder = HERE, format: OutputFormat = Format.text) -> None:
    """Show the certificates and who has a token, and until when; no secrets."""
    from diloco_cli.server.access import authority
    from diloco_cli.server.access.issue import CredentialFolder

    run, entries = CredentialFolder(folder).entries()
    made = {name: authority.read_certificate(folder / f"{name}.pem") for name in ("ca", "server")}
    document = {
        "run": run,
        "certificates": [
            {
                "name": name,
                "names": authority.names_of(certificate),
                "expires": certificate.not_valid_after_utc.timestamp(),
                "sha256": authority.fingerprint(certificate),
            }
            for name, certificate in made.items()
        ],
        "credentials": [_entry_document(entry) for entry in entries],
    }
    if format is Format.json:
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"run {run}")
    for shown in document["certificates"]:
        names = f" for {', '.join(shown['names'])}" if shown["names"] else ""
        typer.echo(f"  {shown['name']:<8}until {_day(shown['expires'])}{names}")
        typer.echo(f"          sha256 {shown['sha256']}")
    for shown in document["credentials"]:
        until = f"until {_day(shown['expires'])}, serial {shown['serial'][:12]}…"
        typer.echo(f"  {shown['role']:<8}{shown['name']}: {shown['state']}, {until}")


def _entry_document(entry: TokenEntry) -> dict[str, object]:
    return {
        "role": entry.role,
        "name": entry.name,
        "state": entry.state(time.time()),
        "issued": entry.issued,
        "expires": entry.expires,
        "serial": entry.serial,
    }


def _whose(region: str | None, reader: str | None, admin: str | None) -> tuple[Role, str]:
    from diloco_cli.errors import SpecError

    options: list[tuple[Role, str | None]] = [
        ("upload", region),
        ("read", reader),
        ("admin", admin),
    ]
    given: list[tuple[Role, str]] = [(role, name) for role, name in options if name]
    if len(given) != 1:
        raise SpecError(
            "Whose is it? Name one of --region, --reader and --admin.", hint="As in --region paris"
        )
    return given[0]


def _beside(spec_file: Path, role: str, name: str, *, needed: bool) -> RunSpec | None:
    """The spec that a region's credential is for; says when the region is not in it."""
    from diloco_cli.errors import SpecError
    from diloco_cli.spec.load import load_spec

    if needed and role != "upload":
        raise SpecError("--bundle is for regions.", hint="Copy the folder that is printed.")
    if role != "upload" or not (needed or spec_file.is_file()):
        return None
    spec = load_spec(spec_file).spec
    known = [region.name for region in spec.regions]
    if name not in known:
        typer.echo(
            f"warning: {spec_file} lists {', '.join(known)}, not {name}; it may join where "
            "server.admit is credentialed, as start-server.sh sets it",
            err=True,
        )
    return spec


def _listening(listen: str) -> list[str]:
    """The host that the spec listens on, where that is a name others can use."""
    host = listen.rpartition(":")[0].strip("[]")
    return [host] if host not in ("", "0.0.0.0", "::") else []


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at))
