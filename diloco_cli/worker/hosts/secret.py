"""What do the hosts of a region know that nobody else does?

The first of these that there is:

    DILOCO_HOSTS_SECRET        any text, the same on every host
    the region's token         as `diloco certs issue` made it; every host needs a copy
    hosts.secret               in the region's folder, made by whichever host looks first: for
                               hosts that share the run folder, which one machine always does

It is drawn through a hash with the names of run and region, so that it opens nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from diloco_cli.errors import StoreError

VARIABLE = "DILOCO_HOSTS_SECRET"
FILE = "hosts.secret"


def take_secret(run: str, region: str, *, token: str, folder: Path) -> bytes:
    """Finds the region's secret, and takes it out of the environment."""
    known = os.environ.pop(VARIABLE, "") or token or _shared_file(folder / FILE)
    return hmac.digest(known.encode(), f"hosts of {region} in {run}".encode(), hashlib.sha256)


def hand_down(secret: bytes) -> dict[str, str]:
    """The environment by which a child process learns it."""
    return {**os.environ, VARIABLE: secret.hex()}


def inherited() -> bytes:
    """What our parent process handed down."""
    return bytes.fromhex(os.environ.pop(VARIABLE))


def _shared_file(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{FILE}.{os.getpid()}.draft")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)  # Whoever comes first, all read the same.
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        return path.read_text("ascii")
    except OSError as error:
        raise StoreError(
            f"The secret of the region's hosts in {path} cannot be used: {error.strerror}.",
            hint=f"Fix the permissions, or set {VARIABLE} to the same text on every host.",
        ) from None
