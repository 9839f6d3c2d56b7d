"""Files with secrets in them: who but their owner can read them?"""

from __future__ import annotations

import logging
from pathlib import Path

from diloco_cli.errors import SpecError

log = logging.getLogger(__name__)

OTHERS, GROUP = 0o037, 0o040


def check_private(path: Path) -> None:
    """Refuses a secret that any user of this host can read; a group's is accepted and said.

    Secrets that Kubernetes mounts with an fsGroup are the group's, and cannot be otherwise.
    """
    mode = path.stat().st_mode
    if mode & OTHERS:
        raise SpecError(
            f"{path} can be read by other users of this host.", hint=f"chmod 600 {path}"
        )
    if mode & GROUP:
        log.warning(f"{path} can be read by its group; nobody else should be in it")
