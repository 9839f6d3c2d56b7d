"""Where the server keeps what must not be lost.

    server/
      lock                          held by the one server that may write here
      run.json                      which run this is: id, spec and layout digests
      journal                       every decision, in order
      payloads/DIGEST.frame         contributions of open rounds
      parts/…                       frames that are half received: see `shelf`
      fragments/F/vNNNNNNNN.state   weights, momentum, published weights of one version
      fragments/F/vNNNNNNNN.delta   the frame that leads from the version before
      address.json                  where the server listens, while it does

The order of a contribution is payload, journal record, reply; of a version: files,
journal record, visible. A file that the journal does not speak of is never used.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from blake3 import blake3
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diloco_cli.errors import StoreError
from diloco_cli.registry import Registry
from diloco_cli.server import durable
from diloco_cli.server.claim import FROM_COPY, open_run, take_lock
from diloco_cli.server.durable import DiskFull, disk_errors
from diloco_cli.server.journal import Journal, Notice, to_stderr

_DIGEST = re.compile(r"[0-9a-f]{64}")


class PayloadLost(StoreError):
    """An accepted payload cannot be read; its work goes back to the region that sent it."""


@dataclass(frozen=True, eq=False, slots=True)
class FragmentState:
    """One version of a fragment: flat float32 vectors."""

    theta: np.ndarray
    momentum: np.ndarray
    published: np.ndarray

    @property
    def digest(self) -> str:
        """BLAKE3 of every bit; two states are the same exactly if it is."""
        summary = blake3()
        for name in ("theta", "momentum", "published"):
            values = np.ascontiguousarray(getattr(self, name), np.dtype("<f4"))
            summary.update(f"{name} {values.size}\n".encode())
            summary.update(values.view(np.uint8).data)
        return summary.hexdigest()


class Draft:
    """A payload on its way in: written as it arrives, visible only once it is kept."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        """With `again` it goes on with what may be there."""
        self.path, self.size = path, 0
        new = 0 if again else os.O_EXCL
        with disk_errors(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | new, 0o600)

    def write(self, data: bytes | memoryview) -> None:
        with disk_errors(self.path):
            durable.write_all(self._handle, data)
        self.size += len(data)

    def write_pieces(self, pieces: Sequence[bytes], offset: int | None = None) -> None:
        """Writes pieces one after another, as they are: at the end, or at a place of their own.

        `size` counts only what is written at the end.
        """
        at = self.size if offset is None else offset
        with disk_errors(self.path):
            written = os.pwritev(self._handle, pieces, at)
            if written < (length := sum(map(len, pieces))):
                left = memoryview(b"".join(pieces))[written:]
                while left:
                    written = length - len(left)
                    left = left[os.pwrite(self._handle, left, at + written) :]
        if offset is None:
            self.size += length

    def read_at(self, offset: int, length: int) -> bytes:
        with disk_errors(self.path):
            return os.pread(self._handle, length, offset)

    def read(self) -> bytes:
        """Everything written so far, to be checked before it is kept."""
        with disk_errors(self.path):
            return self.path.read_bytes()

    def view(self) -> memoryview:
        """Everything written so far, where it is: nothing is read before it is looked at."""
        if not self.size:
            return memoryview(b"")
        with disk_errors(self.path):
            return memoryview(mmap.mmap(self._handle, self.size, access=mmap.ACCESS_READ))

    def keep(self, final: Path) -> None:
        """Makes the payload durable, then visible under its name; the draft is used up."""
        try:
            with disk_errors(final):
                os.fsync(self._handle)
                os.replace(self.path, final)
                durable.sync_folder(final.parent)
        finally:
            self.discard()

    def discard(self) -> None:
        """Closes the draft; removes it unless it was kept."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self.path.unlink(missing_ok=True)


class Store(Protocol):
    """What a server needs of its disk; raises DiskFull while there is no room."""

    run: str
    journal: Journal

    def draft_payload(self, size: int = 0) -> Draft: ...
    def parts_folder(self, size: int = 0) -> Path: ...
    def keep_payload(self, digest: str, data: bytes | memoryview | Draft) -> None: ...
    def payload(self, digest: str) -> memoryview: ...
    def payloads(self) -> set[str]: ...
    def drop_payloads(self, digests: Iterable[str]) -> None: ...
    def publish(
        self, fragment: int, version: int, state: FragmentState, delta_frame: bytes | None
    ) -> str: ...
    def load_state(self, fragment: int, version: int) -> FragmentState: ...
    def delta(self, fragment: int, version: int) -> Path | None: ...
    def versions(self, fragment: int) -> list[int]: ...
    def prune(self, fragment: int, version: int) -> None: ...
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
            os.close(lock)
            raise
        return FolderStore(self, folder, journal, lock), records


class FolderStore:
    def __init__(self, kind: Folder, folder: Path, journal: Journal, lock: int) -> None:
        self.kind, self.folder, self.journal, self.run = kind, folder, journal, journal.run
        self._lock = lock

    def draft_payload(self, size: int = 0) -> Draft:
        """Begins a payload of about `size` bytes whose digest is not known yet."""
        self.check_room(size + self.kind.reserve)
        return Draft(durable.draft_of(self.folder / "payloads" / "upload"))

    def parts_folder(self, size: int = 0) -> Path:
        """Where frames wait that arrive in parts; there is room for `size` bytes more."""
        if size:
            self.check_room(size + self.kind.reserve)
        return self.folder / "parts"

    def keep_payload(self, digest: str, data: bytes | memoryview | Draft) -> None:
        """Makes a payload durable under its digest. Keeping it again changes nothing."""
        final = self._payload(digest)
        if isinstance(data, Draft):
            data.keep(final)
        else:
            durable.keep_bytes(final, data)

    def payload(self, digest: str) -> memoryview:
        """An accepted payload, where it lies: it takes no memory of ours."""
        path = self._payload(digest)
        try:
            return _mapped(path)
        except OSError as error:
            raise PayloadLost(
                f"The payload {path} cannot be read: {error.strerror}.",
                hint="Its region sends the work again with its next contribution.",
            ) from error

    def payloads(self) -> set[str]:
        """Digests of all payloads here, also of those that no record speaks of."""
        return {path.stem for path in (self.folder / "payloads").glob("*.frame")}

    def drop_payloads(self, digests: Iterable[str]) -> None:
        """Removes payloads that are merged or refused; those already gone are no error."""
        for digest in digests:
            self._payload(digest).unlink(missing_ok=True)

    def publish(
        self, fragment: int, version: int, state: FragmentState, delta_frame: bytes | None
    ) -> str:
        """Makes one version durable and gives its state's digest; doing it again is harmless."""
        folder = self.folder / "fragments" / str(fragment)
        durable.make_folder(folder)
        digest = state.digest
        about = {"fragment": str(fragment), "version": str(version), "digest": digest}
        files: dict[Path, Callable[[Path], None]] = {}
        if delta_frame is not None:
            files[self._file(fragment, version, "delta")] = lambda draft: durable.write_bytes(
                draft, delta_frame
            )
        files[self._file(fragment, version, "state")] = lambda draft: _save(draft, state, about)
        durable.keep_files(files)
        return digest

    def load_state(self, fragment: int, version: int) -> FragmentState:
        """Reads one version and checks every bit of it."""
        path = self._file(fragment, version, "state")
        try:
            with safe_open(path, framework="np") as file:
                about = file.metadata() or {}
                state = FragmentState(*map(file.get_tensor, ("theta", "momentum", "published")))
        except FileNotFoundError:
            raise StoreError(
                f"Fragment {fragment} is published at version {version}, but {path} is missing.",
                hint=FROM_COPY,
            ) from None
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{path} cannot be read: {error}.", hint=FROM_COPY) from error
        said = (about.get("fragment"), about.get("version"), about.get("digest"))
        found = (str(fragment), str(version), state.digest)
        if said != found:
            raise StoreError(
                f"{path} is damaged: it says fragment, version, digest are {said}, "
                f"its content {found}.",
                hint=FROM_COPY,
            )
        return state

    def delta(self, fragment: int, version: int) -> Path | None:
        """The frame that leads from `version` - 1 to `version`, if it is still kept."""
        path = self._file(fragment, version, "delta")
        return path if path.exists() else None

    def versions(self, fragment: int) -> list[int]:
        """Versions whose state is kept, oldest first; the newest may not be journaled yet."""
        found = (self.folder / "fragments" / str(fragment)).glob("v*.state")
        return sorted(int(path.stem[1:]) for path in found)

    def prune(self, fragment: int, version: int) -> None:
        """Forgets what is older than the `history` newest versions up to `version`."""
        for path in (self.folder / "fragments" / str(fragment)).glob("v*.*"):
            if int(path.stem[1:]) <= version - self.kind.history:
                path.unlink(missing_ok=True)

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
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _payload(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):  # It becomes a file name.
            raise ValueError(f"{digest!r} is not a SHA-256 in hexadecimal")
        return self.folder / "payloads" / f"{digest}.frame"

    def _file(self, fragment: int, version: int, what: str) -> Path:
        return self.folder / "fragments" / str(fragment) / f"v{version:08d}.{what}"


def _mapped(path: Path) -> memoryview:
    with open(path, "rb") as file:
        # Read once: what the disk cannot give is an error here, but the end of a process
        # that finds out while it looks at mapped memory.
        while file.read(1 << 20):
            pass
        if not file.tell():
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _save(draft: Path, state: FragmentState, about: dict[str, str]) -> None:
    arrays = {"theta": state.theta, "momentum": state.momentum, "published": state.published}
    save_file(arrays, draft, metadata=about)
    draft.chmod(0o600)
