"""The processes of a run: what each is called and how it is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_cli.launch import Role
from diloco_cli.system import logs


def serve_role(spec_file: Path, folder: Path) -> Role:
    argv = (*_command("serve", spec_file, folder), "--with-parent")
    return Role("server", argv, address=folder / "server" / "address.json")


def work_role(
    spec_file: Path,
    folder: Path,
    region: str,
    *,
    url: str,
    cores: Sequence[int],
    coordinator: str = "",
) -> Role:
    argv = [*_command("work", spec_file, folder), "--region", region, "--server", url]
    if coordinator:
        argv += ["--host", "0", "--coordinator", coordinator]
    if cores:
        argv += ["--cores", ",".join(map(str, cores))]
    # A region may be called what a log is called already.
    name = f"{region}.region" if region in ("server", "run") else region
    return Role(name, (*argv, "--with-parent"))


def follower_role(
    spec_file: Path,
    folder: Path,
    region: str,
    *,
    host: int,
    coordinator: str,
    cores: Sequence[int],
) -> Role:
    """The worker of another host of a region, on this machine."""
    argv = [*_command("work", spec_file, folder), "--region", region]
    argv += ["--host", str(host), "--coordinator", coordinator]
    if cores:
        argv += ["--cores", ",".join(map(str, cores))]
    return Role(f"{region}.host-{host}", (*argv, "--with-parent"))


def _command(name: str, spec_file: Path, folder: Path) -> list[str]:
    ours = [sys.executable, "-m", "diloco_cli", name, str(spec_file), "--dir", str(folder)]
    return ours + logs.options()
