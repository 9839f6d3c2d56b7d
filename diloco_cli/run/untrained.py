"""A run that has trained nothing: its folder takes any spec, and the run begins anew.

A first start often fails for a mistake in its spec, and correcting it must not be a matter of
--fresh. Once the server has accepted a single contribution a spec changes by amendments alone.

    .server.next/was.json   the ids of the runs before, durable
    server → .server.old    from here on there is no old run
    .server.next → server   and from here on there is a new one, without an id yet
    spec.resolved.yaml      the corrected spec

Whoever is interrupted in between is finished by the next start, with whatever spec it has.
Regions find the id that their folders name among those before, and begin anew as well.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from diloco_cli.core.journal_records import FrameDecided
from diloco_cli.observe.event_file import older
from diloco_cli.run.folder import cannot_write, is_a_regions, refuse_served
from diloco_cli.server.store.journal import read_journal
from diloco_cli.server.store.run_identity import WAS, runs_before, take_lock
from diloco_cli.spec.resolved import replace_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.files import keep_bytes, sync_folder

NEXT, OLD = ".server.next", ".server.old"
MOST_KEPT = 64
"""Ids of runs before; a region that slept through more attempts must be told by hand."""


def has_trained_nothing(folder: Path) -> bool:
    """Says whether no contribution was ever accepted here, so that nothing can be lost."""
    finish(folder)
    if is_a_regions(folder):
        return False  # Only its server, elsewhere, knows.
    journal = folder / "server" / "journal"
    if not journal.exists():
        # Without a journal, versions are those of a run whose journal is gone.
        return not (folder / "server" / "fragments").exists()
    content = read_journal(journal)
    return not content.base and not any(
        entry["kind"] == FrameDecided.kind and entry["fate"] == "pending"
        for entry in content.records
    )


def begin_anew(spec: RunSpec, folder: Path) -> None:
    """Makes the folder that of a new run with this spec; call it when nothing was trained."""
    server = folder / "server"
    refuse_served(folder)
    try:
        if server.exists():
            lock = take_lock(server)
            try:
                _replace(folder, server)
            finally:
                lock.release()
        replace_resolved(spec, folder)
        events = folder / "events.jsonl"
        for told in (folder / "summary.json", events, older(events)):
            told.unlink(missing_ok=True)
        finish(folder)
    except OSError as error:
        raise cannot_write(Path(error.filename or folder), error) from None


def finish(folder: Path) -> None:
    """Does what an interrupted `begin_anew` had still to do."""
    server, following = folder / "server", folder / NEXT
    if (following / WAS).exists() and not server.exists():
        os.rename(following, server)
        sync_folder(folder)
    for leftover in (following, folder / OLD):
        shutil.rmtree(leftover, ignore_errors=True)


def _replace(folder: Path, server: Path) -> None:
    journal, following = server / "journal", folder / NEXT
    was = [*runs_before(server), *([read_journal(journal).run] if journal.exists() else [])]
    shutil.rmtree(folder / OLD, ignore_errors=True)
    shutil.rmtree(following, ignore_errors=True)
    following.mkdir(mode=0o700)
    keep_bytes(following / WAS, json.dumps(was[-MOST_KEPT:]).encode())
    os.rename(server, folder / OLD)
    os.rename(following, server)
    sync_folder(folder)
