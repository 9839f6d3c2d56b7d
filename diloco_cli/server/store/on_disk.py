"""Where the server keeps what must not be lost.

    server/
      lock                          held by the one server that may write here
      run.json                      which run this is: id, spec and layout digests
      journal                       every decision, in order
      payloads/DIGEST.frame         contributions that no stored state contains yet
      parts/…                       frames that are half received: see `shelf`
      fragments/F/vNNNNNNNN.state   weights, momentum, published weights of one version in a few
      fragments/F/vNNNNNNNN.delta   the frame that leads from the version before
      fragments/F/vNNNNNNNN.DIGEST.frame   a contribution that was merged into it
      address.json                  where the server listens, while it does

The order of a contribution is payload, journal record, reply; of a version: files,
journal record, visible. A file that the journal does not speak of is never used. Versions
between two stored states are made again from their contributions, which stay until then.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import save_file

from diloco_cli.core.ledger import MadeVersion
from diloco_cli.registry import Registry
from diloco_cli.server.store import durable
from diloco_cli.server.store.archive import Archive, PayloadLost, StoredState
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.store.durable import FULL, DiskFull, disk_errors
from diloco_cli.server.store.journal import Journal, Notice, to_stderr
from diloco_cli.server.store.run_identity import open_run, take_lock
from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import draft_of, write_bytes
from diloco_cli.system.locks import FileLock

__all__ = ["Draft", "PayloadLost", "Store", "StoredState", "put_away", "stores"]


SOON_READ = 1 << 20
"""Bytes of contributions that are made into a version again in no time."""


class Store(Protocol):
    """What a server needs of its disk; raises DiskFull while there is no room."""

    run: str
    journal: Journal

    def draft_payload(self, size: int = 0, *, length: int = 0) -> Draft: ...
    def parts_folder(self, size: int = 0) -> Path: ...
    def keep_payload(self, digest: str, data: bytes | memoryview | Draft) -> None: ...
    def payload(self, digest: str) -> memoryview: ...
    def payloads(self) -> set[str]: ...
    def drop_payloads(self, digests: Iterable[str]) -> None: ...
    def file_members(self, fragment: int, version: int, digests: Iterable[str]) -> None: ...
    def members(self, fragment: int, version: int) -> dict[str, Path]: ...
    def publish(
        self,
        fragment: int,
        version: int,
        state: StoredState,
        delta_frame: bytes | None,
        *,
        whole: bool = True,
    ) -> str: ...
    def is_due(self, fragment: int, version: int, *, behind: int, size: int) -> bool: ...
    def published(self, fragment: int, version: int) -> np.ndarray | None: ...
    def load_state(self, fragment: int, version: int) -> StoredState: ...
    def delta(self, fragment: int, version: int) -> Path | None: ...
    def versions(self, fragment: int) -> list[int]: ...
    def prune(self, fragment: int, version: int, base: int) -> None: ...
    def is_long(self) -> bool: ...
    def compact(self, snapshot: int) -> None: ...
    def announce(self, url: str) -> None: ...
    def close(self) -> None: ...


class StoreKind(Protocol):
    def open(
        self, folder: Path, *, layout: str, spec: str, notice: Notice = ...
    ) -> tuple[Store, list[dict[str, Any]]]:
        """Opens or begins the run's store; gives the journal's records, number 1 first."""
        ...


stores: Registry[StoreKind] = Registry("store")


@stores.register("folder")
@dataclass(frozen=True)
class Folder:
    """A folder on a local disk."""

    history: Annotated[int, Field(ge=2)] = 8
    """Versions of each fragment that are kept; regions further behind fetch whole weights."""

    replay: Annotated[int, Field(ge=0)] = 8
    """Of these, newest first, how many keep the contributions they were made of, so that
    `diloco replay` can make them again."""

    whole: Annotated[int, Field(ge=1, le=64)] = 4
    """Of how many versions of a fragment one is stored as a whole. A start makes those after
    it again from their contributions, so more of them write less and start later."""

    journal: Annotated[int, Field(ge=1 << 12)] = 8 << 20
    """Bytes after which the journal is compacted: a snapshot takes the place of its records."""

    reserve: Annotated[int, Field(ge=0)] = 64 << 20
    """Bytes kept free for journal and versions: uploads are turned away before they run out."""

    def open(
        self, folder: Path, *, layout: str, spec: str, notice: Notice = to_stderr
    ) -> tuple[FolderStore, list[dict[str, Any]]]:
        """Takes the folder for this process; a second server, or another run, is refused."""
        durable.make_folder(folder)
        lock = take_lock(folder)
        try:
            durable.remove_drafts(folder)
            journal, records = open_run(folder, layout, spec, notice)
            for name in ("payloads", "parts", "fragments"):
                durable.make_folder(folder / name)
            durable.keep_names(folder)
        except BaseException:
            lock.release()
            raise
        return FolderStore(self, folder, journal, lock), records


class FolderStore(Archive):
    def __init__(self, kind: Folder, folder: Path, journal: Journal, lock: FileLock) -> None:
        super().__init__(folder, journal.run)
        self.kind, self.journal = kind, journal
        self._lock, self._shortest = lock, 0

    def draft_payload(self, size: int = 0, *, length: int = 0) -> Draft:
        """Begins a payload whose digest is not known yet, where there is room for `size` bytes.

        With `length` it will have so many, and takes them at once.
        """
        self.check_room(size + self.kind.reserve)
        return Draft(draft_of(self.folder / "payloads" / "upload"), length=length)

    def parts_folder(self, size: int = 0) -> Path:
        """Where frames wait that arrive in parts; there is room for `size` bytes more."""
        if size:
            self.check_room(size + self.kind.reserve)
        return self.folder / "parts"

    def keep_payload(self, digest: str, data: bytes | memoryview | Draft) -> None:
        """Makes a payload durable under its digest. Keeping it again changes nothing."""
        final = self.payload_path(digest)
        if isinstance(data, Draft):
            data.keep(final)
        else:
            durable.keep_bytes(final, data)

    def drop_payloads(self, digests: Iterable[str]) -> None:
        """Removes payloads that are merged or refused; those already gone are no error."""
        for digest in digests:
            self.payload_path(digest).unlink(missing_ok=True)

    def file_members(self, fragment: int, version: int, digests: Iterable[str]) -> None:
        """Files payloads with the version they were merged into; those gone are no error.

        Nothing needs to be flushed: the next version's files take these names along.
        """
        folder = self.folder / "fragments" / str(fragment)
        for digest in digests:
            if (payload := self.payload_path(digest)).exists():
                with disk_errors(payload):
                    os.replace(payload, folder / f"v{version:08d}.{digest}.frame")
                reach("members.filed")

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

        If not as a whole, only its delta: it is made again from its contributions.
        """
        folder = self.folder / "fragments" / str(fragment)
        durable.make_folder(folder)
        digest = state.digest
        about = {"fragment": str(fragment), "version": str(version), "digest": digest}
        files: dict[Path, Callable[[Path], None]] = {}
        if delta_frame is not None:
            files[self._file(fragment, version, "delta")] = lambda draft: write_bytes(
                draft, delta_frame
            )
        path = self._file(fragment, version, "state")
        if whole:
            files[path] = lambda draft: _save(draft, state, about)
        else:
            # A server that died before the record may have left one, made of other members.
            path.unlink(missing_ok=True)
        durable.keep_files(files, steps="version")
        return digest

    def is_due(self, fragment: int, version: int, *, behind: int, size: int) -> bool:
        """Says whether a version is to be stored as a whole.

        `behind` are the bytes of the contributions it would otherwise be made again from, `size`
        those of its state: reading many takes longer than reading what they amount to.
        """
        # Fragments take turns, so that writing is spread and a start has never all to make.
        return (version + fragment) % self.kind.whole == 0 or behind > max(size, SOON_READ)

    def prune(self, fragment: int, version: int, base: int) -> None:
        """Forgets what is older than the `history` newest versions up to `version`.

        Version `base` is the newest stored one: it stays, and what leads on from it.
        """
        least = version - self.kind.history
        oldest = {
            ".frame": version - self.kind.replay,
            ".delta": min(least, base),
            ".state": min(least, base - 1),
        }
        folder = self.folder / "fragments" / str(fragment)
        for name in os.listdir(folder):  # Some fifty, after every version: no paths of them.
            number, ending = name[1:].partition(".")[0], name[name.rfind(".") :]
            if name[:1] == "v" and int(number) <= oldest.get(ending, least):
                (folder / name).unlink(missing_ok=True)
                reach("versions.pruned")

    def is_long(self) -> bool:
        """Says whether the journal is worth compacting, and would become much shorter."""
        return self.journal.size > max(self.kind.journal, 2 * self._shortest)

    def compact(self, snapshot: int) -> None:
        """Leaves out of the journal what came before the record of a snapshot."""
        self.journal.compact(snapshot)
        self._shortest = self.journal.size

    def check_room(self, wanted: int) -> None:
        """Raises DiskFull unless `wanted` bytes are free."""
        with disk_errors(self.folder):
            disk = os.statvfs(self.folder)
        if (free := disk.f_bavail * disk.f_frsize) < wanted:
            raise DiskFull(
                f"{self.folder} needs {wanted:,} free bytes and has {free:,}.",
                hint="Free some space on this disk; the run then goes on by itself.",
            )

    def announce(self, url: str) -> None:
        """Says in `address.json` where the server listens, until `close`."""
        text = json.dumps({"url": url, "pid": os.getpid()})
        durable.keep_bytes(self.folder / "address.json", text.encode())

    def close(self) -> None:
        """Makes the journal durable and lets the folder go."""
        try:
            (self.folder / "address.json").unlink(missing_ok=True)
            self.journal.close()
        finally:
            self._lock.release()


def put_away(
    store: Store, fragment: int, version: int, base: int, made: Sequence[MadeVersion]
) -> None:
    """Files the contributions that are in the stored version; forgets what is too old.

    Those of later versions stay where they are: without them, these could not be made again.
    """
    for each in made:
        if each.version <= base:
            digests = [receipt.digest for receipt in each.receipts.values()]
            store.file_members(fragment, each.version, digests)
    store.prune(fragment, version, base)


def _save(draft: Path, state: StoredState, about: dict[str, str]) -> None:
    arrays = {"theta": state.theta, "momentum": state.momentum, "published": state.published}
    try:
        save_file(arrays, draft, metadata=about)
    except SafetensorError as error:  # Carries the number of the OS error in its text only.
        number = next((each for each in FULL if f"os error {each}" in str(error)), errno.EIO)
        raise OSError(number, str(error)) from error
    draft.chmod(0o600)
