"""One listening port; reloads TLS certificates without a restart.

When a certificate file changes, a second listener with the new files takes over the same port;
the old one is told to finish, and its connections are closed soon after. Clients reconnect, and a
revoked certificate is refused within a few seconds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.server.access import authority
from diloco_cli.server.access.tokens import FILE, TokenList, read_entries
from diloco_cli.server.http.asgi import Guarded
from diloco_cli.server.http.idle import SWEEP_SECONDS, IdleConnections
from diloco_cli.server.http.listener import Listener
from diloco_cli.system.private_files import check_private

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Certificates:
    """The folder that `diloco certs` keeps on the server's host."""

    folder: Path

    @property
    def listed(self) -> tuple[Path, Path, Path, Path]:
        """The server's certificate, its key, the authority it trusts, and the revocation list."""
        names = ("server.pem", "server.key", "ca.pem", "revoked.pem")
        certificate, key, ca, revoked = (self.folder / name for name in names)
        return certificate, key, ca, revoked

    def check(self) -> None:
        """Raises what would keep a listener from using these files."""
        certificate, key, ca, revoked = self.listed
        for path in (certificate, key, ca, revoked, self.folder / FILE):
            if not path.is_file():
                raise SpecError(
                    f"server.certs: {path} is missing.",
                    hint=f"diloco certs init --dir {self.folder}",
                )
        check_private(key)
        # First, because OpenSSL would ask the terminal for the password of a key that has one.
        if why := authority.why_unusable(key, ca, revoked):
            raise self._unusable(why)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(ca)
            context.load_verify_locations(revoked)
        except (OSError, ssl.SSLError) as error:
            raise self._unusable(str(error.strerror or error)) from None

    def _unusable(self, why: str) -> SpecError:
        return SpecError(
            f"server.certs: the files in {self.folder} cannot be used: {why}.",
            hint=f"Restore them, or `diloco certs init --dir {self.folder}`.",
        )

    def tokens(self, run: str) -> TokenList:
        return TokenList(self.folder / FILE, run)

    def names(self) -> list[str]:
        """What others may call this host, by the server's certificate."""
        certificate = authority.read_certificate(self.folder / "server.pem")
        return [name for name in authority.names_of(certificate) if name not in authority.ALWAYS]

    def expiries(self) -> dict[str, float]:
        """Until when the certificates and the newest credential of everybody are good."""
        found: dict[str, float] = {}
        with suppress(StoreError):  # Nobody gets in then, which says it all.
            for name in ("ca", "server"):
                certificate = authority.read_certificate(self.folder / f"{name}.pem")
                found[name] = certificate.not_valid_after_utc.timestamp()
            for entry in read_entries(self.folder / FILE)[1]:
                if entry.revoked is None:
                    whose = f"{entry.role}:{entry.name}"
                    found[whose] = max(found.get(whose, 0.0), entry.expires)
        return found

    def seen(self) -> tuple[tuple[int, ...], ...]:
        """Changes when a file is replaced."""
        stats = [path.stat() for path in self.listed]
        # With its mode: a key that other users could read is taken once they no longer can.
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_mode) for stat in stats)


def refuse_open(taken: socket.socket, certificates: Certificates | None) -> None:
    """Refuses to listen beyond this host without TLS and tokens."""
    host = str(taken.getsockname()[0]).partition("%")[0]
    if certificates is None and not ipaddress.ip_address(host).is_loopback:
        raise SpecError(
            f"server.listen: {host} can be reached by other machines, but server.certs names no "
            "certificates, so anybody could read and change the run.",
            hint="`diloco certs init`, then server.certs: certs; or listen on 127.0.0.1.",
        )


class TlsListener:
    """Serves the application on a bound socket until it is told to end."""

    def __init__(
        self,
        app: Guarded,
        taken: socket.socket,
        certificates: Certificates | None,
        *,
        idle: float,
    ) -> None:
        self._app, self._taken, self._certificates = app, taken, certificates
        self._sweeper = IdleConnections(taken.getsockname()[1], app.met, idle=idle)
        self._seen = certificates.seen() if certificates else ()
        self._trouble: tuple[object, str] | None = None
        self._listener = self._make()
        self._watching: list[asyncio.Task[None]] = []

    def _make(self) -> Listener:
        files = self._certificates.listed if self._certificates else None
        return Listener(self._app, self._taken.dup(), files)

    @property
    def serving(self) -> asyncio.Task[None]:
        """Ends when nothing is listened to any more."""
        return self._watching[0]

    async def start(self) -> None:
        await self._listener.start()
        self._watching = [asyncio.create_task(self._watch()), asyncio.create_task(self._sweep())]

    async def end(self) -> None:
        self._taken.close()
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._listener.end()

    async def _watch(self) -> None:
        while not (current := self._listener.serving).done():
            await asyncio.wait({current}, timeout=LOOK_SECONDS)
            if self._certificates and not current.done():
                await self._look(self._certificates)

    async def _look(self, certificates: Certificates) -> None:
        seen = ()
        try:
            seen = certificates.seen()
            if seen == self._seen:
                return
            # Several files are replaced one after the other: wait until nothing moves.
            await asyncio.sleep(LOOK_SECONDS / 4)
            if seen != certificates.seen():
                return
            certificates.check()
            following = self._make()
            await following.start()
        except (DilocoError, OSError) as error:
            # Tried again at the next look: what was missing need not be one of these files.
            if (trouble := (seen, str(error))) != self._trouble:
                log.warning(f"the new certificates are not used: {error}")
            self._trouble = trouble
            return
        self._seen, self._trouble = seen, None
        before, self._listener = self._listener, following
        await before.end(alone=False)
        log.info("the certificates have changed and are in use")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if peers := await asyncio.to_thread(self._sweeper.sweep):
                # Strangers may come by the hundred; their addresses are few.
                hosts = sorted({host for host, _ in peers})
                who = ", ".join(hosts[:3]) + (" …" if len(hosts) > 3 else "")
                log.info(f"closed {len(peers)} idle connections", extra={"peer": who})
