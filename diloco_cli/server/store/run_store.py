"""The store of a running server: everything that archive.py reads, and the writing.

Which blobs are written, moved and deleted follows from `retention`; where they are is up to
the kind of store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_cli.core.journal_records import Entry
from diloco_cli.core.ledger import MadeVersion
from diloco_cli.server.store import Store, blob_names, retention, stores
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.store.filed_state import FiledState
from diloco_cli.server.store.state_format import StoredState, encode
from diloco_cli.system.failpoints import reach


def open_store(
    choice: Mapping[str, Any], folder: Path, *, layout: str, spec: str, base: int = 0
) -> tuple[RunStore, list[Entry]]:
    """Opens the store that a spec names; gives the journal's records, the oldest kept first."""
    store, records = stores.build(choice).open(folder, layout=layout, spec=spec, base=base)
    return RunStore(store), records


class RunStore(Archive):
    def __init__(self, store: Store) -> None:
        super().__init__(store.blobs, store.run)
        self.journal, self.retention, self.scratch = store.journal, store.retention, store.scratch
        self.check_room, self.close = store.check_room, store.close
        self.was, self._store, self._compacted_size = store.was, store, 0

    def draft_payload(self, size: int = 0, *, length: int = 0) -> Draft:
        """Begins a payload whose digest is not known yet, if there is room for `size` bytes."""
        self.check_room(size)
        return self._store.draft(length=length)

    def keep_payload(self, digest: str, data: bytes | memoryview | Draft) -> None:
        """Makes a payload durable under its digest. Keeping it again changes nothing."""
        name = blob_names.payload(digest)
        if isinstance(data, Draft):
            self.blobs.keep(name, data)
        else:
            self.blobs.put({name: (data,)})

    def drop_payloads(self, digests: Iterable[str]) -> None:
        """Deletes payloads that are merged or refused; those already gone are no error."""
        self.blobs.drop(map(blob_names.payload, digests))

    def publish(
        self,
        fragment: int,
        version: int,
        state: StoredState,
        delta_frame: bytes | None,
        *,
        whole: bool = True,
    ) -> str:
        """Makes one version durable and gives its state's digest; doing it again is harmless.

        If not `whole`, only its delta: a restart recomputes it from its contributions.
        """
        digest = state.digest
        contents: dict[str, Iterable[bytes | memoryview]] = {}
        if delta_frame is not None:
            contents[blob_names.delta(fragment, version)] = (delta_frame,)
        name = blob_names.state(fragment, version)
        if whole:
            contents[name] = _file_of(fragment, version, state)
        else:
            # A server that died before the record may have left one, of other contributions.
            self.blobs.drop([name])
        self.blobs.put(contents, steps="version")
        return digest

    def set_aside(self, fragment: int, version: int, state: StoredState) -> FiledState:
        """Writes a version that is not stored, so that it need not stay in memory.

        Nothing waits for the disk, and the next start deletes it: what is durable is the same
        with it and without it.
        """
        file = FiledState(self, fragment, version, state.digest, stored=False)
        self.blobs.put({file.name: _file_of(fragment, version, state)}, durable=False)
        return file

    def put_away(self, fragment: int, version: int, base: int, made: Sequence[MadeVersion]) -> None:
        """Moves the payloads that the stored version `base` contains; deletes what is too old."""
        for old, new in retention.merged_moves(fragment, base, made):
            self.blobs.move(old, new)
            reach("members.filed")
        self.prune(fragment, version, base)

    def prune(self, fragment: int, version: int, base: int) -> None:
        """Deletes what is too old once `version` is the newest and `base` the newest whole one."""
        names = self.blobs.names(blob_names.fragment(fragment))
        for name in retention.expired(self.retention, names, version=version, base=base):
            self.blobs.drop([name])
            reach("versions.pruned")
        self._drop_set_aside(fragment, before=version)

    def _drop_set_aside(self, fragment: int, *, before: int) -> None:
        names = self.blobs.names(f"{blob_names.CACHE}{fragment}-")
        newest = blob_names.set_aside(fragment, before)
        self.blobs.drop(name for name in names if name.endswith(".state") and name < newest)

    def is_long(self) -> bool:
        """Says whether the journal is worth compacting."""
        return retention.is_long(self.retention, self.journal.size, self._compacted_size)

    def compact(self, snapshot: int) -> None:
        """Deletes the journal's records before that of a snapshot."""
        self.journal.compact(snapshot)
        self._compacted_size = self.journal.size


def _file_of(fragment: int, version: int, state: StoredState) -> list[bytes | memoryview]:
    metadata = {"fragment": str(fragment), "version": str(version), "digest": state.digest}
    return encode(state, metadata)
