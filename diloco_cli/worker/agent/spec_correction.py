"""A spec that this folder's run did not begin with: may the worker come with it?

Only the server knows whether a run has trained anything. A worker whose folder has seen no
version that somebody's work is in therefore asks it first: where the server began anew, its
regions take the corrected spec; otherwise the spec is refused as it always is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.errors import SpecError
from diloco_cli.spec.amendable import changes_in_a_run
from diloco_cli.spec.resolved import replace_resolved, write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.worker.mailbox import Mailbox


@dataclass(frozen=True)
class SpecCorrection:
    """A spec that is not written down yet."""

    spec: RunSpec
    folder: Path
    refusal: SpecError

    def make(self, was: Sequence[str]) -> None:
        """Writes it down, unless a region of this host is in a run that none replaced."""
        owners = [mailbox.identity() for mailbox in _mailboxes(self.folder)]
        if any(owner and owner.run and owner.run not in was for owner in owners):
            raise self.refusal
        replace_resolved(self.spec, self.folder)


def keep_or_correct(spec: RunSpec, folder: Path) -> SpecCorrection | None:
    """Writes the spec down; gives a correction to make if another one is there already."""
    try:
        # What differs from an earlier start is the region's own affair, or the server refuses it.
        write_resolved(spec, folder, may_differ=changes_in_a_run)
    except SpecError as error:
        if _has_trained(folder):
            raise
        return SpecCorrection(spec, folder, error)
    return None


def _has_trained(folder: Path) -> bool:
    """Says whether a region of this host has seen a version that somebody's work is in."""
    return any(
        mailbox.image_version(int(path.stem)) > 0
        for mailbox in _mailboxes(folder)
        for path in (mailbox.folder / "image").glob("[0-9]*.safetensors")
    )


def _mailboxes(folder: Path) -> list[Mailbox]:
    return [Mailbox(path) for path in (folder / "regions").glob("*") if path.is_dir()]
