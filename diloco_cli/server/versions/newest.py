"""Published versions of every fragment: encoded once, served many times.

The newest version lives in memory; its arrays are never changed, only replaced, so a
reader that holds them reads one version however long it takes. The store has the deltas of
the last versions and, from the first request on, the newest whole frame (a cache: emptied by
the next start).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store import blob_names
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.versions.export import ModelDownload
from diloco_cli.server.versions.next_version import Version, frame_header
from diloco_cli.server.versions.send import ImmutableResource
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import pack
from diloco_cli.wire.messages import Links, version_path

WORTH_BYTES = 1 << 16
"""A client that is told that the whole is shorter asks once more: no gain if it is by less."""


class PublishedVersions:
    """Every fragment's newest version, and what is kept of the ones before."""

    def __init__(
        self, settings: ServerSettings, archive: Archive, newest: Sequence[Version]
    ) -> None:
        self.settings = settings
        self.newest = list(newest)
        self._archive, self._blobs = archive, archive.blobs
        self._encoding: dict[tuple[int, int], asyncio.Future[ImmutableResource]] = {}

    def install(self, fragment: int, version: Version) -> None:
        """Makes a version the newest; deletes the whole frame of the one before the last."""
        self.newest[fragment] = version
        # The last one may be about to be read.
        for number in [n for f, n in self._encoding if f == fragment and n < version.number - 1]:
            del self._encoding[fragment, number]
            self._blobs.drop([blob_names.whole(fragment, number)])

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
            loop = asyncio.get_running_loop()
            self._encoding[key] = loop.run_in_executor(None, self._encode, fragment, newest)
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

    def model(self, version: int | None = None) -> ModelDownload | None:
        """The whole model at one version; None when some fragment no longer has it."""
        vectors, digests = [], []
        for fragment, newest in enumerate(self.newest):
            if version is None or version == newest.number:
                vectors.append((newest.number, newest.state.published))
                digests.append(newest.digest)
                continue
            past = version < newest.number
            published = self._archive.published(fragment, version) if past else None
            if published is None:
                return None
            vectors.append((version, published))
            digests.append(vector_digest(published))
        return ModelDownload(self.settings.layout, self._archive.run, vectors, digests)

    def _encode(self, fragment: int, version: Version) -> ImmutableResource:
        piece = self.settings.layout.fragments[fragment]
        header = frame_header(self.settings, self._archive.run, "whole", piece, version)
        data = pack(header, version.state.published)
        name = blob_names.whole(fragment, version.number)
        self._blobs.put({name: (data,)}, durable=False)
        etag = f'"{version.number}-{data[-16:].hex()}"'
        return ImmutableResource(self._blobs, ((name, len(data)),), etag)

    def _last_bytes(self, name: str, size: int) -> str:
        """The end of a frame: part of its digest, so it identifies the content."""
        reader = self._blobs.open(name)
        try:
            return reader.read(size - 16, 16).hex()
        finally:
            reader.close()
