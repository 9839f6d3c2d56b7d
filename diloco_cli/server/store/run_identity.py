"""Whose folder is this: one server at a time, one run for ever."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from diloco_cli.errors import SpecError, StoreError
from diloco_cli.server.store import durable
from diloco_cli.server.store.durable import disk_errors
from diloco_cli.server.store.journal import Journal, Notice, read_journal
from diloco_cli.system.locks import Busy, FileLock

STORE = 1
"""Version of the folder's form; any other is refused."""

FROM_COPY = "Restore the server folder from a copy."


def take_lock(folder: Path) -> FileLock:
    """Holds the folder until the lock is released or the process dies, however it dies."""
    lock = FileLock(folder / "lock", mode=0o600)
    try:
        with disk_errors(lock.path):
            lock.acquire()
    except Busy as busy:
        raise StoreError(
            f"{folder} is in use by another server (process {busy.pid}).",
            hint="Stop that one with `diloco stop`, or use another folder with --dir.",
        ) from None
    return lock


def open_run(
    folder: Path, layout: str, spec: str, notice: Notice
) -> tuple[Journal, list[dict[str, Any]]]:
    """Opens the journal of this run, or begins both; the journal comes first, then run.json."""
    path, about = folder / "journal", folder / "run.json"
    if not path.exists():
        for other in (about, folder / "fragments"):
            if other.exists():
                raise StoreError(f"{other} exists, but {path} is missing.", hint=FROM_COPY)
        journal, records = Journal.create(path, run=secrets.token_hex(8)), []
    else:
        journal, records = Journal.open(path, notice=notice)
    known = {"store": STORE, "run": journal.run, "layout_digest": layout, "spec_digest": spec}
    try:
        if about.exists():
            _check_run(about, known)
        elif records:
            raise StoreError(
                f"{path} has {len(records)} records, but {about} is missing.", hint=FROM_COPY
            )
        else:
            durable.keep_bytes(about, json.dumps(known, indent=2).encode())
    except BaseException:
        journal.close()
        raise
    if journal.base and (not records or records[0]["kind"] != "snapshot"):
        journal.close()
        raise StoreError(
            f"{path} begins with record {journal.base + 1}, which is no snapshot of those before.",
            hint=FROM_COPY,
        )
    return journal, records


def check_folder(folder: Path, layout: str, spec: str) -> None:
    """Raises unless this folder holds the run of that spec; changes nothing."""
    run = read_journal(folder / "journal").run
    wanted = {"store": STORE, "run": run, "layout_digest": layout, "spec_digest": spec}
    _check_run(folder / "run.json", wanted)


def _check_run(path: Path, wanted: dict[str, Any]) -> None:
    """Raises unless the folder is the wanted run's."""
    try:
        found = json.loads(path.read_bytes())
        form, run = int(found["store"]), found["run"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} cannot be read: {error}.", hint=FROM_COPY) from error
    if form != STORE:
        raise StoreError(
            f"{path} has store version {form}, this version of diloco reads {STORE}.",
            hint="Start the server with the version of diloco that wrote it.",
        )
    if run != wanted["run"]:
        raise StoreError(f"{path} is of run {run}, the journal of {wanted['run']}.", hint=FROM_COPY)
    for key in ("spec_digest", "layout_digest"):
        if found.get(key) != wanted[key]:
            raise SpecError(
                f"{path.parent} holds another run: its {key} is {str(found.get(key))[:12]}, "
                f"the spec's is {wanted[key][:12]}.",
                hint="Use the spec this run began with, another folder with --dir, or --fresh.",
            )
