"""What the server must not lose: payloads and versions as blobs, decisions as a journal.

Frames, states and records come in; after a crash they come back, whole or not at all.
Start with run_store.py: the rest of the server calls nothing else here.

    run_store.py       the run's store by payload digest, fragment and version: reads and writes
    archive.py         the same, reading only: for `pull`, `replay` and the server itself
    retention.py       pure rules: what is stored whole, moved, deleted; over names alone
    blob_names.py      how a payload, a state, a delta and a merged contribution are named
    state_format.py    one version of a fragment as bytes (safetensors), and back
    filed_state.py     a version whose vectors are in a file, mapped while they are needed
    on_disk.py         the store that is a folder: blobs are files
    draft.py           an upload on its way in: a local file that no reader sees
    run_identity.py    one server at a time, one run for ever: the lock and run.json
    journal.py         the journal as a file: append, sync, compact
    journal_format.py  the journal's bytes: records in a hash chain, torn tails, damage
    group_commit.py    many callers wait for one flush of the journal

Another kind of store implements `StoreKind`, `Store` and `Blobs` and calls
`stores.register`. Names are strings and contents are bytes, so blobs may live in an object
store. Two things stay on the server's own disk whatever the kind: drafts of uploads (a kind
that keeps blobs elsewhere uploads `draft.view()` in `Blobs.keep`) and `scratch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from diloco_cli.core.journal_records import Entry
from diloco_cli.registry import Registry
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.store.journal_format import JournalContent
from diloco_cli.server.store.on_disk import Folder
from diloco_cli.server.store.retention import Retention


class BlobReader(Protocol):
    """An open blob; it can be read to its end even if it is deleted meanwhile."""

    def read_now(self, offset: int, length: int) -> bytes | None:
        """Reads what is in memory; None if that would wait. Called on the event loop."""
        ...

    def read(self, offset: int, length: int) -> bytes: ...
    def close(self) -> None: ...


class Blobs(Protocol):
    """Named bytes that never change. A name is a path with slashes, such as `fragments/0/v1`.

    Reading raises FileNotFoundError, or another OSError; writing raises a StoreError, which is
    DiskFull while there is no room.
    """

    def put(
        self,
        contents: Mapping[str, Iterable[bytes | memoryview]],
        *,
        durable: bool = True,
        steps: str = "",
    ) -> None:
        """Makes blobs durable, then visible in the order of the mapping.

        After a crash all of them are there, or the first ones, or none. `steps` is the first
        word of the failpoints on the way.
        """
        ...

    def keep(self, name: str, draft: Draft) -> None:
        """Makes a draft a durable blob; the draft is used up."""
        ...

    def view(self, name: str) -> memoryview: ...
    def open(self, name: str) -> BlobReader: ...
    def size(self, name: str) -> int | None:
        """Bytes of a blob; None if there is none of that name."""
        ...

    def names(self, prefix: str) -> list[str]:
        """The names that begin with `prefix` and have no slash after it."""
        ...

    def move(self, old: str, new: str) -> None:
        """Renames a blob; a name that does not exist is no error. Durable with the next `put`."""
        ...

    def drop(self, names: Iterable[str]) -> None:
        """Deletes blobs; a name that does not exist is no error."""
        ...

    def locate(self, name: str) -> str:
        """Where a blob is, for error messages."""
        ...


class Journal(Protocol):
    """Records in order. One thread appends; another may `sync` or `compact` meanwhile."""

    base: int
    """Number of the record before the first one that is kept."""

    @property
    def last(self) -> int:
        """Number of the newest record, durable or not; 0 before the first."""
        ...

    @property
    def size(self) -> int:
        """Bytes of what is durable."""
        ...

    def append(self, record: Mapping[str, Any]) -> int: ...
    def sync(self) -> None: ...
    def compact(self, number: int) -> None: ...
    def check(self) -> None:
        """Raises once what is appended would be nowhere after a restart."""
        ...


class Store(Protocol):
    """The store of one run, held by this process."""

    run: str
    was: tuple[str, ...]
    """Ids of runs that this one replaced before they had trained anything."""
    journal: Journal
    blobs: Blobs
    retention: Retention
    scratch: Path
    """A local folder for frames that are half received."""

    def check_room(self, size: int) -> None:
        """Raises DiskFull unless an upload of `size` bytes fits beside the reserve."""
        ...

    def draft(self, *, length: int = 0) -> Draft:
        """Begins an upload; with `length` it allocates so many bytes with the first write."""
        ...

    def close(self) -> None: ...


class StoreKind(Protocol):
    def open(
        self, folder: Path, *, layout: str, spec: str, base: int = 0
    ) -> tuple[Store, list[Entry]]:
        """Takes or begins the run's store for this process; gives the journal's records.

        One that is begun numbers them from `base` + 1 on.
        """
        ...

    def read(self, folder: Path, *, layout: str, spec: str) -> tuple[Blobs, JournalContent]:
        """Reads a store without taking it; changes nothing."""
        ...


class Payloads(Protocol):
    """Accepted contributions by digest: all that computing a version needs of a store."""

    run: str

    def payload(self, digest: str) -> memoryview: ...


stores: Registry[StoreKind] = Registry("store")
stores.register("folder")(Folder)
