"""The handover record: which trainer is at work in a region's folder, for the next agent.

A trainer outlives its agent for a while. The next agent takes it over only if it was
started with the same command line for the same spec and run, by an agent of this very
folder; any other is told to stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco_cli.system.files import keep_bytes
from diloco_cli.wire.messages import WIRE_VERSION
from diloco_cli.worker.mailbox import FolderOwner, Mailbox


@dataclass(frozen=True)
class HandoverRecord:
    """What a trainer and the agent that takes it over must have in common."""

    argv: tuple[str, ...]
    """The command line without the interpreter."""
    spec: str
    """Digest of the resolved spec."""
    run: str
    owner: str
    wire: int = WIRE_VERSION

    @staticmethod
    def of(argv: Sequence[str], spec_file: Path, identity: FolderOwner) -> HandoverRecord:
        text = spec_file.read_bytes() if spec_file.exists() else b""
        digest = hashlib.sha256(text).hexdigest()
        return HandoverRecord(tuple(argv[1:]), digest, identity.run, identity.owner)

    def write(self, mailbox: Mailbox) -> None:
        """Says that this process is the trainer; call it under the trainer's lock."""
        with contextlib.suppress(OSError):  # Then it cannot be taken over, no more.
            keep_bytes(mailbox.trainer_file, self._bytes(os.getpid()), durable=False)

    def names(self, mailbox: Mailbox, pid: int) -> bool:
        """Says whether the record in the folder is this one, of that process."""
        try:
            return mailbox.trainer_file.read_bytes() == self._bytes(pid)
        except OSError:
            return False

    def _bytes(self, pid: int) -> bytes:
        return json.dumps({"pid": pid, **asdict(self)}).encode()
