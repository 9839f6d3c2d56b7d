"""The handover record: which trainer is at work in a region's folder, for the next agent.

A trainer outlives its agent for a while. The next agent takes it over only if it was
started with the same command line for the same run, by an agent of this very folder, and
trains by the settings that the next agent would start it with; any other is told to stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from diloco_cli.core.terms import flat
from diloco_cli.spec.amendable import trainer_reads
from diloco_cli.spec.resolved import resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.files import keep_bytes
from diloco_cli.wire.messages import WIRE_VERSION
from diloco_cli.worker.mailbox import FolderOwner, Mailbox

TERMS = "--terms"
"""Last option of a trainer's command line: its number may rise without a new start."""

OWN_TRAINER = ("", "own trainer")
"""Stands for the command line of a trainer that is not ours, whoever has started it how."""


@dataclass(frozen=True)
class HandoverRecord:
    """What a trainer and the agent that takes it over must have in common."""

    argv: tuple[str, ...]
    """The command line without the interpreter and without the number of the terms."""
    spec: str
    """Digest of the settings that a trainer reads."""
    run: str
    owner: str
    wire: int = WIRE_VERSION

    @staticmethod
    def of(
        argv: Sequence[str], spec: RunSpec, region: str, identity: FolderOwner
    ) -> HandoverRecord:
        words = tuple(argv[1:-2] if TERMS in argv[-2:-1] else argv[1:])
        return HandoverRecord(words, trainer_digest(spec, region), identity.run, identity.owner)

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


def trainer_digest(spec: RunSpec, region: str) -> str:
    """Of the settings that a region's trainer works by: it need not start anew while it stays."""
    settings = {key: value for key, value in flat(resolved(spec)) if trainer_reads(key, region)}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
