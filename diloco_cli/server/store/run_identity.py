"""The identity of a server folder: one server at a time (lock), one run for ever (run.json).

A run that trained nothing may be replaced; was.json then names it, for its regions.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from diloco_cli.core.journal_records import Entry
from diloco_cli.errors import SpecError, StoreDamaged, StoreError
from diloco_cli.server.store.journal import FileJournal, read_journal
from diloco_cli.system.files import disk_errors, keep_bytes
from diloco_cli.system.locks import Busy, FileLock

WAS = "was.json"
"""Ids of the runs that began in this folder and trained nothing, oldest first."""

STORE = 1
"""Version of the folder's layout; any other is refused."""


def take_lock(folder: Path) -> FileLock:
    """Locks the folder until the lock is released or the process ends."""
    lock = FileLock(folder / "lock", mode=0o600)
    try:
        with disk_errors(lock.path):
            lock.acquire()
    except Busy as busy:
        raise in_use(folder, busy.pid) from None
    return lock


def in_use(folder: Path, pid: str) -> StoreError:
    return StoreError(
        f"{folder} is in use by another server (process {pid}).",
        hint="Stop that one with `diloco stop`, or use another folder with --dir.",
    )


def open_run(
    folder: Path, layout: str, spec: str, *, base: int = 0
) -> tuple[FileJournal, list[Entry]]:
    """Opens the journal of this run, or begins both; the journal comes first, then run.json.

    A journal that is begun numbers its records from `base` + 1 on.
    """
    path, identity = folder / "journal", folder / "run.json"
    if not path.exists():
        for other in (identity, folder / "fragments"):
            if other.exists():
                raise StoreDamaged(f"{other} exists, but {path} is missing.")
        journal, records = FileJournal.create(path, run=secrets.token_hex(8), base=base), []
    else:
        journal, records = FileJournal.open(path)
    try:
        if identity.exists():
            check_run(folder, journal.run, layout, spec)
        elif records:
            raise StoreDamaged(f"{path} has {len(records)} records, but {identity} is missing.")
        else:
            fields = {"store": STORE, "run": journal.run}
            fields |= {"layout_digest": layout, "spec_digest": spec}
            with disk_errors(identity):
                keep_bytes(identity, json.dumps(fields, indent=2).encode())
        whole = records and records[0]["kind"] in ("snapshot", "rebuilt")
        if journal.base and not whole and journal.base != base:
            raise StoreDamaged(
                f"{path} begins with record {journal.base + 1}, which is no snapshot of those "
                "before."
            )
        journal.stands_with(identity)
    except BaseException:
        journal.close()
        raise
    return journal, records


def runs_before(folder: Path) -> tuple[str, ...]:
    """Ids of the runs that this one replaced before they had trained anything."""
    try:
        return tuple(map(str, json.loads((folder / WAS).read_bytes())))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise StoreDamaged(f"{folder / WAS} cannot be read: {error}.") from error


def run_of(folder: Path) -> str | None:
    """The run whose server has this folder, or had; None if it does not say."""
    try:
        return str(json.loads((folder / "run.json").read_bytes())["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def all_runs_before(folder: Path) -> tuple[str, ...]:
    """As `runs_before`, and those that the run was rebuilt from; nothing is changed."""
    records = read_journal(folder / "journal").records
    first = records[0] if records else {}
    rebuilt = first.get("was") or first.get("ledger", {}).get("continues") or ()
    return (*runs_before(folder), *map(str, rebuilt))


def check_run(folder: Path, run: str, layout: str, spec: str) -> None:
    """Raises unless run.json says that the folder holds this run; changes nothing."""
    path = folder / "run.json"
    try:
        fields = json.loads(path.read_bytes())
        store, named = int(fields["store"]), fields["run"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path} cannot be read: {error}.") from error
    if store != STORE:
        raise StoreError(
            f"{path} has store version {store}, this version of diloco reads {STORE}.",
            hint="Start the server with the version of diloco that wrote it.",
        )
    if named != run:
        raise StoreDamaged(f"{path} is of run {named}, the journal of {run}.")
    for key, digest in (("spec_digest", spec), ("layout_digest", layout)):
        if fields.get(key) != digest:
            raise SpecError(
                f"{folder} holds another run: its {key} is {str(fields.get(key))[:12]}, "
                f"the spec's is {digest[:12]}.",
                hint="Use the spec this run began with, or another folder with --dir.",
            )
