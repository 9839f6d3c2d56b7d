"""Who is asking? Tokens by their hashes, looked up anew whenever the file changes.

The file holds no token, only SHA-256 of each; a token is 256 random bits, so its hash gives
nothing away. It is looked at (one `stat`) on every request: what `diloco certs revoke` has
written counts from the next request on, without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from diloco_cli.errors import StoreError
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.system.files import disk_errors, keep_bytes

log = logging.getLogger(__name__)

Role = Literal["upload", "read", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
FORM = 1

FILE = "tokens.json"
_ISSUE = "`diloco certs issue` on the server's host makes a new one."


@dataclass(frozen=True)
class TokenEntry:
    """One credential: whose it is, until when, and the hash of its token."""

    role: Role
    name: str
    sha256: str
    serial: str
    """Of the certificate that was made with it, hexadecimal."""

    issued: float
    expires: float
    revoked: float | None = None

    def state(self, now: float) -> str:
        if self.revoked is not None:
            return "revoked"
        return "expired" if now >= self.expires else "valid"


@dataclass(frozen=True)
class Caller:
    """Somebody whose token is good."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role}:{self.name}"


def new_token(run: str, name: str) -> str:
    """Makes a token; what stands before the secret is there for people who find it."""
    return f"diloco.{run}.{name}.{secrets.token_urlsafe(32)}"


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def read_entries(path: Path) -> tuple[str, list[TokenEntry]]:
    """Reads the run's name and its credentials."""
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        if document["form"] != FORM:
            raise ValueError(f"it has form {document['form']}, this version reads {FORM}")
        entries = [TokenEntry(**each) for each in document["entries"]]
        if any(each.role not in ROLES for each in entries):
            raise ValueError("it names a role that does not exist")
        return str(document["run"]), entries
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"The credentials in {path} cannot be read: {error}.",
            hint="Restore the file from a copy; `diloco certs show` checks it.",
        ) from None


def keep_entries(path: Path, run: str, entries: Iterable[TokenEntry]) -> None:
    data = {"form": FORM, "run": run, "entries": [asdict(each) for each in entries]}
    with disk_errors(path):
        keep_bytes(path, json.dumps(data, indent=2).encode() + b"\n")


def ended(entries: Iterable[TokenEntry], role: str, name: str, at: float) -> list[TokenEntry]:
    """The same credentials, those of one person ending at `at` at the latest."""
    return [
        replace(each, expires=min(each.expires, at))
        if (each.role, each.name) == (role, name)
        else each
        for each in entries
    ]


class TokenList:
    """The credentials of a running server."""

    def __init__(self, path: Path, run: str, *, clock: Callable[[], float] = time.time) -> None:
        """Reads the file once; what is wrong with it is raised now rather than later."""
        self.path, self.run, self._clock = path, run, clock
        self._seen: tuple[int, ...] | None = None
        self._entries: list[TokenEntry] = []
        self._trouble: StoreError | None = None
        self._refresh()
        if self._trouble:
            raise self._trouble

    def who(self, token: str | None) -> Caller:
        """Says whose token this is, or why it opens nothing."""
        self._refresh()
        if self._trouble:
            raise HttpRefusal(
                "closing",
                "The server cannot read its list of credentials.",
                "Its operator finds the reason in the server's log.",
                headers={"retry-after": "10"},
            )
        if not token:
            raise _unauthorised("no-credential", "This call needs a token, none was sent.")
        entry = self._find(hash_of(token))
        if entry is None:
            raise _unauthorised("unknown-credential", self._unknown(token))
        state = entry.state(self._clock())
        if state != "valid":
            raise _unauthorised(
                f"{state}-credential", f"The credential of {entry.role} {entry.name!r} is {state}."
            )
        return Caller(entry.role, entry.name)

    def trouble_of(self, region: str) -> str:
        """Says in words why no credential of a region opens anything; empty if one does."""
        self._refresh()
        own = [each for each in self._entries if (each.role, each.name) == ("upload", region)]
        if self._trouble or any(each.state(self._clock()) == "valid" for each in own):
            return ""
        again = f"`diloco certs issue --region {region}` makes a new one"
        if not own:
            return f"it has no credential; {again}"
        last = max(own, key=lambda each: each.issued)
        state, when = last.state(self._clock()), last.revoked or last.expires
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
        return f"its credential is {state} since {day}; {again}"

    def _find(self, sha256: str) -> TokenEntry | None:
        """Compares with every hash, in a time that says nothing about any of them."""
        match = None
        for entry in self._entries:
            if hmac.compare_digest(entry.sha256, sha256):
                match = entry
        return match

    def _unknown(self, token: str) -> str:
        start, _, rest = token.partition(".")
        run = rest.partition(".")[0][:64]
        if start == "diloco" and run.isprintable() and run != self.run:
            return f"This token is of run {run!r}, this server runs {self.run!r}."
        return "This server knows no such token."

    def _refresh(self) -> None:
        try:
            stat = self.path.stat()
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        except OSError:
            seen = ()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            run, entries = read_entries(self.path)
            if run != self.run:
                raise StoreError(
                    f"{self.path} has the credentials of run {run!r}, this is {self.run!r}.",
                    hint="Give each run a folder of its own with `diloco certs init --dir`.",
                )
            self._entries, self._trouble = entries, None
        except StoreError as error:
            # Nobody gets in on a list that cannot be read, and nobody is told to go away.
            if self._trouble is None:
                log.warning(error.message)
            self._entries, self._trouble = [], error
            self._seen = None  # It may have been the reading that failed.


def _unauthorised(code: str, message: str) -> HttpRefusal:
    headers = {"www-authenticate": 'Bearer realm="diloco", Basic realm="diloco"'}
    return HttpRefusal(code, message, _ISSUE, headers=headers)
