"""Published versions of every fragment: encoded once, served many times.

Vectors are in memory or in files (held.py); they are never changed, only replaced, so a reader
that holds or opened them reads one version however long it takes. The store has the deltas of
the last versions and, from the first request on, the newest whole frame (a cache: emptied by
the next start).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import FileIO

import numpy as np

from diloco_cli.errors import StoreDamaged
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store import BlobReader, blob_names
from diloco_cli.server.store.filed_state import FiledState
from diloco_cli.server.store.on_disk import FileReader
from diloco_cli.server.store.run_store import RunStore
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.versions.export import InMemory, ModelDownload, about_model
from diloco_cli.server.versions.held import holds_all
from diloco_cli.server.versions.next_version import Version, frame_header
from diloco_cli.server.versions.send import ImmutableResource
from diloco_cli.system.files import disk_errors, write_all
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import pack
from diloco_cli.wire.messages import Links, version_path

WORTH_BYTES = 1 << 16
"""A client that is told that the whole is shorter asks once more: no gain if it is by less."""


class PublishedVersions:
    """Every fragment's newest version, and what is kept of the ones before."""

    def __init__(
        self,
        settings: ServerSettings,
        store: RunStore,
        newest: Sequence[Version],
        recompute: Callable[[int], StoredState],
    ) -> None:
        """`recompute` makes a fragment's newest version again as a restart would."""
        self.settings = settings
        self.newest = list(newest)
        self.recompute = recompute
        self._store, self._blobs = store, store.blobs
        self._turn = asyncio.Lock()
        self._checked: dict[int, str] = {}
        self._encoding: dict[tuple[int, int], asyncio.Future[ImmutableResource | None]] = {}

    def install(self, fragment: int, version: Version) -> None:
        """Makes a version the newest; deletes the whole frame of the one before the last."""
        self.newest[fragment] = version
        # The last one may be about to be read.
        for number in [n for f, n in self._encoding if f == fragment and n < version.number - 1]:
            del self._encoding[fragment, number]
            self._blobs.drop([blob_names.whole(fragment, number)])

    def keep_merged(self, merged: Sequence[Mapping[str, str]]) -> None:
        """Forgets the last merged frames of names that the ledger has forgotten."""
        for fragment, (version, names) in enumerate(zip(self.newest, merged, strict=True)):
            if version.merged.keys() - names.keys():
                kept = {name: it for name, it in version.merged.items() if name in names}
                self.newest[fragment] = replace(version, merged=kept)

    def chain(self, fragment: int, since: int, version: int) -> ImmutableResource | None:
        """The deltas that lead from `since` to `version`; None when one is no longer kept."""
        deltas = []
        for number in range(since + 1, version + 1):
            name = blob_names.delta(fragment, number)
            size = self._blobs.size(name)
            if size is None or number > self.newest[fragment].number:
                return None
            deltas.append((name, size))
        if not deltas:
            return None
        etag = f'"{since}-{version}-{self._last_bytes(*deltas[-1])}"'
        return ImmutableResource(self._blobs, tuple(deltas), etag)

    async def whole(self, fragment: int, version: int) -> ImmutableResource | None:
        """The whole frame of a version, encoded on the first request; None when it is gone."""
        key = (fragment, version)
        if key not in self._encoding:
            newest = self.newest[fragment]
            if newest.number != version:
                return None
            self._encoding[key] = asyncio.ensure_future(self._encode_in_turn(fragment, newest))
        try:
            return await asyncio.shield(self._encoding[key])
        except Exception:
            self._encoding.pop(key, None)  # The disk may have room for it next time.
            raise

    async def shorter(
        self, fragment: int, version: int, chain: ImmutableResource
    ) -> ImmutableResource | None:
        """The whole frame of a version, if it has fewer bytes than the deltas that lead there."""
        raw = 4 * self.settings.layout.fragments[fragment].size
        # Weights never shrink to half: no need to encode them to know.
        if chain.size < raw // 2 or chain.size < WORTH_BYTES:
            return None
        whole = await self.whole(fragment, version)
        return whole if whole and whole.size + WORTH_BYTES < chain.size else None

    def links(self, fragment: int, since: int) -> Links:
        """Where the newest version is: whole, and as deltas if they are shorter."""
        version = self.newest[fragment].number
        chain = self.chain(fragment, since, version) if since >= 0 else None
        size = self.settings.layout.fragments[fragment].size
        short = chain is not None and chain.size < codecs.build({"kind": "fp32"}).body_size(size)
        return Links(
            whole=version_path(fragment, version),
            delta=version_path(fragment, version, since=since) if short else None,
        )

    def average(self) -> ModelDownload | None:
        """The average of the newest versions; None when some fragment has none.

        Takes as long as reading it, and memory for one fragment.
        """
        vectors: list[tuple[int, BlobReader]] = []
        digests = []
        for fragment in range(len(self.newest)):
            number, values = self._averaged(fragment)
            if values is None:
                return None
            vectors.append((number, self._out_of_the_way(values)))
            digests.append(vector_digest(values))
        about = about_model(self.settings, average=True)
        return ModelDownload(self.settings.layout, self._store.run, vectors, digests, about)

    def _averaged(self, fragment: int) -> tuple[int, np.ndarray | None]:
        while True:
            newest = self.newest[fragment]
            try:
                return newest.number, newest.state.average
            except StoreDamaged:
                if self.newest[fragment].number == newest.number:
                    raise
                # A newer one took its place, and its file.

    def model(self, version: int | None = None) -> ModelDownload | None:
        """The whole model at one version; None when some fragment no longer has it.

        Takes as long as reading it, and memory for one fragment.
        """
        vectors: list[tuple[int, BlobReader]] = []
        digests = []
        for fragment in range(len(self.newest)):
            newest, reader = self._opened(fragment)
            if version is None or version == newest.number:
                vectors.append((newest.number, reader))
                digests.append(newest.digest)
                continue
            past = version < newest.number
            published = self._store.published(fragment, version) if past else None
            if published is None:
                return None
            vectors.append((version, self._out_of_the_way(published)))
            digests.append(vector_digest(published))
        return ModelDownload(
            self.settings.layout, self._store.run, vectors, digests, about_model(self.settings)
        )

    def _opened(self, fragment: int) -> tuple[Version, BlobReader]:
        """The newest version, with its published weights open and checked."""
        while True:
            newest = self.newest[fragment]
            if isinstance(newest.state, StoredState):
                return newest, InMemory(newest.state.published)
            try:
                return newest, self._open(fragment, newest.state, newest.digest)
            except StoreDamaged:
                if self.newest[fragment].number == newest.number:
                    raise
                # A newer one took its place, and its file.

    def _open(self, fragment: int, state: FiledState, digest: str) -> BlobReader:
        file = state.open_published()
        if self._checked.get(fragment) != digest:  # Once is enough for ranges of one file.
            if (found := file.digest()) != digest:
                raise _other_weights(self._blobs.locate(state.name), found, digest)
            self._checked[fragment] = digest
        return file

    def _out_of_the_way(self, vector: np.ndarray) -> BlobReader:
        """A vector to be sent, in a file without a name unless models stay in memory here."""
        if holds_all(self.settings):
            return InMemory(vector)
        scratch = self._store.scratch
        with disk_errors(scratch), tempfile.TemporaryFile(dir=scratch, buffering=0) as file:
            write_all(file.fileno(), vector.view(np.uint8).data)
            return FileReader(FileIO(os.dup(file.fileno())))

    async def _encode_in_turn(self, fragment: int, version: Version) -> ImmutableResource | None:
        # In turns, so that no more than one frame and its vector are in memory. The lock is the
        # loop's: a thread that waited for another would hold up a thread that has work.
        async with self._turn:
            loop = asyncio.get_running_loop()
            frame = await loop.run_in_executor(None, self._encode, fragment, version)
        if (fragment, version.number) in self._encoding:
            return frame
        # Overtaken meanwhile: `install` deleted its file before it was there.
        self._blobs.drop([blob_names.whole(fragment, version.number)])
        return None

    def _encode(self, fragment: int, version: Version) -> ImmutableResource | None:
        piece = self.settings.layout.fragments[fragment]
        header = frame_header(self.settings, self._store.run, "whole", piece, version)
        name = blob_names.whole(fragment, version.number)
        try:
            values = self._values(version)
        except StoreDamaged:
            if self.newest[fragment].number == version.number:
                raise
            return None
        data = pack(header, values)
        self._blobs.put({name: (data,)}, durable=False)
        etag = f'"{version.number}-{data[-16:].hex()}"'
        return ImmutableResource(self._blobs, ((name, len(data)),), etag)

    def _values(self, version: Version) -> np.ndarray:
        if isinstance(version.state, StoredState):
            return version.state.published
        values = version.state.open_published().values()
        if (found := vector_digest(values)) != version.digest:
            raise _other_weights(self._blobs.locate(version.state.name), found, version.digest)
        return values

    def _last_bytes(self, name: str, size: int) -> str:
        """The end of a frame: part of its digest, so it identifies the content."""
        reader = self._blobs.open(name)
        try:
            return reader.read(size - 16, 16).hex()
        finally:
            reader.close()


def _other_weights(where: str, found: str, digest: str) -> StoreDamaged:
    return StoreDamaged(
        f"The published weights in {where} have the digest {found[:12]}; those that were published "
        f"have {digest[:12]}."
    )
