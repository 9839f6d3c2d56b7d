"""Credentials of every sort, and a server behind TLS in a process of its own."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from diloco_cli.net.credentials import Credentials, load_credentials
from diloco_cli.server.access.issue import CredentialFolder, bundle
from diloco_cli.server.access.tokens import Role
from tests import ROOT, SMALL_SERVER

RUN = "trial"
"""The name of the small run's spec."""


class Vault:
    """A folder of certificates with one of everything that can go wrong."""

    def __init__(self, folder: Path) -> None:
        self.credentials = CredentialFolder(folder / "certs")
        self.credentials.create_missing(RUN, [], 30)
        self.other = CredentialFolder(folder / "other")
        self.other.create_missing("another", [], 30)

    def made(
        self, role: Role, name: str, *, days: int = 30, credentials: CredentialFolder | None = None
    ) -> Path:
        credentials = credentials or self.credentials
        credentials.issue(role, name, days, renew=False)
        return bundle(credentials.folder, role, name)

    def identity(self, role: Role, name: str) -> Credentials:
        return load_credentials(self.made(role, name))


def mixed(certificate: Credentials, token: str) -> Credentials:
    """The certificate of one with the token of another, or none."""
    return Credentials(token, certificate.ca, certificate.certificate, certificate.key)


def token_of(home: Path) -> str:
    return (home / "token").read_text().strip()


def client(url: str, identity: Credentials, *, http2: bool = True) -> httpx.Client:
    return httpx.Client(
        base_url=url,
        http2=http2,
        verify=identity.context(),
        headers=identity.headers,
        trust_env=False,
        timeout=20,
    )


@dataclass
class Guarded:
    """A small server behind TLS."""

    folder: Path
    vault: Vault
    child: subprocess.Popen[bytes]
    url: str = ""

    @property
    def said(self) -> str:
        return (self.folder / "log").read_text()

    def until(self, words: str, count: int = 1) -> None:
        """Waits until the server has said this so often."""
        deadline = time.monotonic() + 30
        while self.said.count(words) < count:
            assert self.child.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def audit(self) -> list[dict[str, Any]]:
        lines = (self.folder / "audit.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()


def start(folder: Path, vault: Vault | None, **changes: Any) -> Guarded:
    """Starts a server and waits until it listens."""
    folder.mkdir(exist_ok=True)
    vault = vault or Vault(folder)
    changes["server"] = {"certs": str(vault.credentials.folder), **changes.get("server", {})}
    with open(folder / "log", "ab") as log:
        child = subprocess.Popen(
            (sys.executable, *SMALL_SERVER, str(folder), json.dumps(changes)),
            stderr=log,
            stdout=log,
            cwd=ROOT,
            start_new_session=True,  # As a service: without a terminal that could be closed.
        )
    guarded = Guarded(folder, vault, child)
    deadline = time.monotonic() + 60
    while not guarded.url:
        assert child.poll() is None and time.monotonic() < deadline, guarded.said
        with suppress(OSError, ValueError):
            address = json.loads((folder / "server" / "address.json").read_bytes())
            guarded.url = address["url"] if address["pid"] == child.pid else ""
        time.sleep(0.01)
    assert guarded.url.startswith("https://")
    return guarded


def refused_in_the_handshake(
    url: str, identity: Credentials, method: str = "GET", path: str = "/healthz"
) -> bool:
    """Whether no request gets through, not even to be answered."""
    try:
        with client(url, identity) as asked, asked.stream(method, path):
            return False
    except (httpx.ConnectError, httpx.ReadError, httpx.WriteError, ssl.SSLError):
        return True
