"""The folder of certificates and tokens on the server's host: made, added to, taken from.

Every change ends with one file that a running server watches: `revoked.pem` for who may
connect, `tokens.json` for who is who. Doing the same thing twice changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from diloco_cli.errors import SpecError
from diloco_cli.server.access import authority
from diloco_cli.server.access.authority import KeyPair
from diloco_cli.server.access.tokens import (
    FILE,
    Role,
    TokenEntry,
    ended,
    hash_of,
    keep_entries,
    new_token,
    read_entries,
)
from diloco_cli.spec.schema import is_a_name
from diloco_cli.system.files import disk_errors, keep_bytes, make_folder
from diloco_cli.system.locks import FileLock

FOLDERS: dict[Role, str] = {"upload": "regions", "read": "readers", "admin": "admins"}
OPERATOR = "operator"
"""The admin that `certs init` makes, so that the server's own host can ask and stop."""

OVERLAP_SECONDS = 86_400.0
"""An old credential lasts so long after its renewal, for its host to take the new one."""


def bundle(folder: Path, role: Role, name: str) -> Path:
    """Where the files are that one region, reader or admin needs."""
    return folder / FOLDERS[role] / name


@dataclass(frozen=True)
class CredentialFolder:
    """Where certificates are made for one run."""

    folder: Path

    @property
    def tokens(self) -> Path:
        return self.folder / FILE

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Two commands at once would lose one of two changes."""
        make_folder(self.folder)
        with FileLock(self.folder / "lock", mode=0o600).held(wait=math.inf):
            yield

    def create_missing(self, run: str, hosts: Sequence[str], days: int) -> list[str]:
        """Makes what is missing, and says what that was."""
        with self._open():
            done = self._authority(run)
            ours = read_entries(self.tokens)[0]
            if ours != run:
                raise SpecError(
                    f"{self.folder} has the credentials of run {ours!r}, not of {run!r}.",
                    hint="Give each run a folder of its own with --dir.",
                )
            done += self._server(hosts, days)
            # One that was moved elsewhere is not missing, one whose renewal was cut short is.
            torn = bundle(self.folder, "admin", OPERATOR).exists() and not self._whole(
                "admin", OPERATOR
            )
            if torn or not self._live("admin", OPERATOR):
                self._issue("admin", OPERATOR, days)
                done.append(f"admin {OPERATOR!r} in {bundle(self.folder, 'admin', OPERATOR)}")
            return done

    def issue(self, role: Role, name: str, days: int, *, renew: bool) -> TokenEntry | None:
        """Makes a credential; None when there is a valid one already and none is renewed."""
        self.must_exist()
        if not is_a_name(name):
            raise SpecError(
                f"{name!r} cannot be a name.", hint="Names are small letters, digits, - and _."
            )
        with self._open():
            if self._whole(role, name) and not renew:
                return None
            return self._issue(role, name, days)

    def revoke(self, role: Role, name: str) -> list[TokenEntry]:
        """Ends every credential of a name, now; returns those that were valid."""
        self.must_exist()
        with self._open():
            run, entries = read_entries(self.tokens)
            mine = [entry for entry in entries if (entry.role, entry.name) == (role, name)]
            if not mine:
                known = ", ".join(sorted({f"{entry.role} {entry.name}" for entry in entries}))
                raise SpecError(
                    f"Nothing was ever issued to {role} {name!r}.", hint=f"Known here: {known}."
                )
            now = time.time()
            ending = [entry for entry in mine if entry.revoked is None]
            after = [replace(entry, revoked=now) if entry in ending else entry for entry in entries]
            keep_entries(self.tokens, run, after)
            self._list_revoked(after)
            return ending

    def entries(self) -> tuple[str, list[TokenEntry]]:
        self.must_exist()
        return read_entries(self.tokens)

    def must_exist(self) -> None:
        if not self.tokens.exists():
            raise SpecError(
                f"{self.folder} has no authority.",
                hint=f"diloco certs init --dir {self.folder} makes one.",
            )

    def _authority(self, run: str) -> list[str]:
        done = []
        certificate, key = self.folder / "ca.pem", self.folder / "ca.key"
        if not certificate.exists():
            authority.keep_pair(authority.make_authority(run), certificate, key)
            done.append(f"an authority of its own, {certificate}")
        if not self.tokens.exists():
            keep_entries(self.tokens, run, [])
        if not (self.folder / "revoked.pem").exists():
            self._list_revoked(read_entries(self.tokens)[1])
        return done

    def _server(self, hosts: Sequence[str], days: int) -> list[str]:
        certificate, key = self.folder / "server.pem", self.folder / "server.key"
        names: list[str] = []
        if certificate.exists() and key.exists():
            there = authority.read_certificate(certificate)
            names = [name for name in authority.names_of(there) if name not in authority.ALWAYS]
            wanted = set(authority.names_of(there)) >= set(hosts)
            if wanted and authority.days_left(there) > min(authority.SOON_DAYS, days / 2):
                return []
        every = list(dict.fromkeys((*names, *hosts)))
        made = authority.make_server(self._pair(), every, days)
        authority.keep_pair(made, certificate, key)
        shown = ", ".join(dict.fromkeys((*every, *authority.ALWAYS)))
        return [f"the server's certificate for {shown}"]

    def _pair(self) -> KeyPair:
        return authority.read_pair(self.folder / "ca.pem", self.folder / "ca.key")

    def _live(self, role: Role, name: str) -> list[TokenEntry]:
        """What of a name's is valid."""
        now, (_, entries) = time.time(), read_entries(self.tokens)
        mine = [entry for entry in entries if (entry.role, entry.name) == (role, name)]
        return [entry for entry in mine if entry.state(now) == "valid"]

    def _whole(self, role: Role, name: str) -> bool:
        """Whether the files of a name are there and open something; a crash may part them."""
        home = bundle(self.folder, role, name)
        try:
            token = (home / "token").read_text("utf-8", "replace").strip()
        except OSError:
            return False
        if not all((home / file).exists() for file in _BESIDE):
            return False
        return hash_of(token) in {entry.sha256 for entry in self._live(role, name)}

    def _issue(self, role: Role, name: str, days: int) -> TokenEntry:
        run, entries = read_entries(self.tokens)
        now, token = time.time(), new_token(run, name)
        made = authority.make_client(self._pair(), run, role, name, days)
        entry = TokenEntry(
            role=role,
            name=name,
            sha256=hash_of(token),
            serial=f"{made.certificate.serial_number:x}",
            issued=now,
            expires=made.certificate.not_valid_after_utc.timestamp(),
        )
        home = bundle(self.folder, role, name)
        make_folder(home)
        with disk_errors(home / "ca.pem"):
            keep_bytes(home / "ca.pem", (self.folder / "ca.pem").read_bytes())
        # Before the pair: a token that is listed then says that the pair is its own.
        with disk_errors(home / "token"):
            keep_bytes(home / "token", token.encode() + b"\n")
        authority.keep_pair(made, home / "client.pem", home / "client.key")
        # Last, so that what a crash leaves behind opens nothing.
        before = ended(entries, role, name, now + OVERLAP_SECONDS)
        keep_entries(self.tokens, run, [*before, entry])
        return entry

    def _list_revoked(self, entries: Sequence[TokenEntry]) -> None:
        serials = [int(entry.serial, 16) for entry in entries if entry.revoked is not None]
        number = int(time.time() * 1000)
        made = authority.revocations(self._pair(), serials, number)
        with disk_errors(self.folder / "revoked.pem"):
            keep_bytes(self.folder / "revoked.pem", made)


_BESIDE = ("ca.pem", "client.pem", "client.key")
