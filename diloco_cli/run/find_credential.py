"""Which certificate and token does this command show?

--certs FOLDER                  what `diloco certs issue` printed
the spec's server.certs         regions/NAME for a worker, admins/operator for the rest
DILOCO_TOKEN(_FILE), token_*    a token instead of the one in the folder
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from diloco_cli.net.credentials import Credentials
    from diloco_cli.run.folder import Target
    from diloco_cli.spec.schema import RunSpec

CertsOption = Annotated[
    Path | None,
    typer.Option(
        "--certs",
        metavar="FOLDER",
        help="Certificate and token to show, as `diloco certs issue` made them.",
        show_default=False,
    ),
]


def for_region(spec: RunSpec, name: str, certs: Path | None) -> Credentials:
    """What a worker shows."""
    from diloco_cli.net.credentials import load_credentials, token_from_environment

    region = spec.region(name)
    home = certs or (Path(spec.server.certs) / "regions" / name if spec.server.certs else None)
    token, file = _from_environment()
    if not token and not file:
        token = token_from_environment(region.token_env) if region.token_env else ""
        file = Path(region.token_file).expanduser() if region.token_file else None
    return load_credentials(home, token=token, token_file=file)


def forget_tokens(spec: RunSpec, name: str) -> None:
    """Takes a worker's token out of the environment: its trainer would inherit it."""
    for variable in ("DILOCO_TOKEN", spec.region(name).token_env):
        os.environ.pop(variable or "", None)


def for_calls(run: Target, certs: Path | None) -> Credentials:
    """What somebody who asks for status, stops or pulls shows."""
    from diloco_cli.net.credentials import load_credentials

    token, file = _from_environment()
    home = certs or (_beside(run.folder) if run.folder else None)
    return load_credentials(home, token=token, token_file=file)


def for_url(certs: Path | None) -> Credentials:
    """What somebody shows who knows a server's URL and nothing else."""
    from diloco_cli.net.credentials import load_credentials

    token, file = _from_environment()
    return load_credentials(certs, token=token, token_file=file)


def for_start(spec: RunSpec) -> Credentials:
    """What a new run's server shows to the one whose weights it begins with."""
    from diloco_cli.net.credentials import load_credentials

    token, file = _from_environment()
    return load_credentials(_operator(spec.server.certs), token=token, token_file=file)


def for_run(spec: RunSpec) -> Credentials:
    """What `diloco run` shows to the server that it started."""
    from diloco_cli.net.credentials import load_credentials

    return load_credentials(_operator(spec.server.certs))


def _from_environment() -> tuple[str, Path | None]:
    from diloco_cli.net.credentials import checked_token

    file = os.environ.get("DILOCO_TOKEN_FILE")
    if token := os.environ.get("DILOCO_TOKEN", "").strip():
        return checked_token(token, "$DILOCO_TOKEN"), None
    return "", Path(file).expanduser() if file else None


def _beside(folder: Path) -> Path | None:
    """The operator's credential, where the spec of the run in this folder says it is."""
    from diloco_cli.errors import StoreError
    from diloco_cli.run.folder import RESOLVED, spec_base
    from diloco_cli.spec.yaml_source import read

    file = folder / RESOLVED
    # Of another release it may be; what it says besides is not looked at.
    said: Any = read(file.read_text("utf-8", "replace"), str(file)).data
    server = said.get("server") if isinstance(said, dict) else ""
    certs = (server or {}).get("certs") if isinstance(server, dict | None) else 0
    if not isinstance(certs, str | None):
        raise StoreError(
            f"{file} is damaged: it is not the resolved spec of a run.",
            hint="Restore it from a copy, or name the server by its URL.",
        )
    return _operator(str(spec_base(folder) / certs) if certs else None)


def _operator(certs: str | None) -> Path | None:
    home = Path(certs) / "admins" / "operator" if certs else None
    # On a region's host there is no admin; --certs names what there is.
    return home if home and home.is_dir() else None
