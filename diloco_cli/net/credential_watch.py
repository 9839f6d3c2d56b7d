"""A credential that is renewed while it is in use: the files change, and the new one is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from diloco_cli.errors import DilocoError
from diloco_cli.net.credentials import Credentials

log = logging.getLogger(__name__)

Stamps = tuple[tuple[int, ...], ...]


class CredentialWatch:
    """Looks whether the files of a credential have changed."""

    def __init__(self, credentials: Credentials, reload: Callable[[], Credentials]) -> None:
        """`reload` reads the files again; it may raise a DilocoError while they are replaced."""
        self._files, self._reload = credentials.files, reload
        self._used = self._last = self._stamps()

    def look(self) -> Credentials | None:
        """The new credential, once, when the files have changed and rest."""
        before, self._last = self._last, self._stamps()
        # Several files are replaced one after the other: wait until nothing moves.
        if self._last == self._used or self._last != before:
            return None
        self._used = self._last
        try:
            credentials = self._reload()
            credentials.context()  # A certificate without its key is found here.
        except DilocoError as error:
            log.warning(f"the new credential is not used: {error.message}")
            return None
        self._files = credentials.files
        self._used = self._last = self._stamps()
        log.info("the credential has changed and is in use")
        return credentials

    def _stamps(self) -> Stamps:
        return tuple(map(_stamp, self._files))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()  # Of what a link leads to: Kubernetes replaces the link.
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_mode
