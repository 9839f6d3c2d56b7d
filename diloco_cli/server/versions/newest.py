"""Immutable versions of every fragment: encoded once, served many times.

The newest version lives in memory; its arrays are never changed, only replaced, so a
reader that holds them reads one clock however long it takes. On disk are the deltas of
the last versions (the store keeps them) and, once somebody has asked, the newest whole
frame (a cache: gone at the next start).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco_cli.core.fragments import Layout, Piece
from diloco_cli.errors import StoreError
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.durable import disk_errors
from diloco_cli.server.store.on_disk import Store
from diloco_cli.server.versions.next_version import Version, frame_header
from diloco_cli.server.versions.pieces import PIECE_BYTES, Reading, Ready
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import pack
from diloco_cli.wire.messages import Links, version_path

WORTH_BYTES = 1 << 16
"""Whoever is told that the whole is shorter asks once more: no gain if it is by less."""


@dataclass(frozen=True)
class ImmutableResource:
    """Bytes that never change: one or more files, one after another."""

    files: tuple[tuple[Path, int], ...]
    """Each with its length."""
    etag: str

    @property
    def size(self) -> int:
        return sum(length for _, length in self.files)

    def read(self, start: int = 0, stop: int | None = None) -> Reading:
        """Gives the bytes from `start` to `stop`, a piece at a time."""
        return Reading(self.files, start, self.size if stop is None else stop)


class PublishedVersions:
    """Every fragment's newest version, and what is kept of the ones before."""

    def __init__(
        self, recipe: ServerSettings, store: Store, newest: Sequence[Version], cache: Path
    ) -> None:
        self.recipe = recipe
        self.newest = list(newest)
        self._store = store
        self._cache = cache
        self._encoding: dict[tuple[int, int], asyncio.Future[ImmutableResource]] = {}
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)

    def install(self, fragment: int, version: Version) -> None:
        """Makes a version the newest; the whole frame of the one before the last is forgotten."""
        self.newest[fragment] = version
        # The last one may be about to be read; the one before it had its time.
        for number in [n for f, n in self._encoding if f == fragment and n < version.number - 1]:
            del self._encoding[fragment, number]
            self._whole_path(fragment, number).unlink(missing_ok=True)

    def chain(self, fragment: int, since: int, version: int) -> ImmutableResource | None:
        """The deltas that lead from `since` to `version`; None when one is no longer kept."""
        files = []
        for number in range(since + 1, version + 1):
            path = self._store.delta(fragment, number)
            if path is None or number > self.newest[fragment].number:
                return None
            files.append((path, path.stat().st_size))
        if not files:
            return None
        return ImmutableResource(tuple(files), f'"{since}-{version}-{_last_bytes(files[-1][0])}"')

    async def whole(self, fragment: int, version: int) -> ImmutableResource | None:
        """The whole frame of a version, encoded by whoever asks first; None when it is gone."""
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
        raw = 4 * self.recipe.layout.fragments[fragment].size
        # Weights do not shrink to half: nobody need encode them to know.
        if chain.size < raw // 2 or chain.size < WORTH_BYTES:
            return None
        whole = await self.whole(fragment, version)
        return whole if whole and whole.size + WORTH_BYTES < chain.size else None

    def links(self, fragment: int, since: int) -> Links:
        """Where the newest version is: whole, and as deltas if that is the shorter way."""
        version = self.newest[fragment].number
        chain = self.chain(fragment, since, version) if since >= 0 else None
        size = self.recipe.layout.fragments[fragment].size
        short = chain is not None and chain.size < codecs.build({"kind": "fp32"}).body_size(size)
        return Links(
            whole=version_path(fragment, version),
            delta=version_path(fragment, version, since=since) if short else None,
        )

    def model(self, version: int | None = None) -> ModelDownload | None:
        """The whole model at one clock; None when some fragment no longer has that version."""
        if version is None:
            taken = [(each.number, each.state.published) for each in self.newest]
            digests = [each.digest for each in self.newest]
            return ModelDownload(self.recipe.layout, self._store.run, taken, digests)
        vectors, digests = [], []
        for fragment, newest in enumerate(self.newest):
            if version == newest.number:
                vectors.append((version, newest.state.published))
                digests.append(newest.digest)
                continue
            past = version < newest.number
            published = self._store.published(fragment, version) if past else None
            if published is None:
                return None
            vectors.append((version, published))
            digests.append(vector_digest(published))
        return ModelDownload(self.recipe.layout, self._store.run, vectors, digests)

    def _encode(self, fragment: int, version: Version) -> ImmutableResource:
        about = self.recipe.layout.fragments[fragment]
        header = frame_header(self.recipe, self._store.run, "whole", about, version)
        data = pack(header, version.state.published)
        path = self._whole_path(fragment, version.number)
        try:
            with disk_errors(path):
                path.write_bytes(data)
        except StoreError:
            path.unlink(missing_ok=True)
            raise
        return ImmutableResource(((path, len(data)),), f'"{version.number}-{data[-16:].hex()}"')

    def _whole_path(self, fragment: int, number: int) -> Path:
        return self._cache / f"{fragment}-v{number:08d}.whole"


def _last_bytes(path: Path) -> str:
    """The end of a frame: part of its own digest, so it names the content."""
    with open(path, "rb") as file:
        file.seek(-16, os.SEEK_END)
        return file.read().hex()


class ModelDownload:
    """The published weights of all fragments, as one safetensors file that is never written.

    The same versions of the same run are the same bytes, which is what the etag says.
    """

    def __init__(
        self,
        layout: Layout,
        run: str,
        taken: Sequence[tuple[int, np.ndarray]],
        digests: Sequence[str],
    ) -> None:
        """`digests` are those of the vectors."""
        self.versions = [number for number, _ in taken]
        self._vectors = [vector for _, vector in taken]
        self._tensors: dict[str, list[tuple[int, Piece]]] = {}
        for fragment in layout.fragments:
            for piece in fragment.pieces:
                self._tensors.setdefault(piece.tensor, []).append((fragment.number, piece))
        for pieces in self._tensors.values():
            pieces.sort(key=lambda found: found[1].start)
        self._head = self._header(
            {"run": run, "versions": json.dumps(self.versions), "layout": layout.digest}
        )
        self.size = len(self._head) + 4 * layout.size
        named = hashlib.sha256(self._head + "".join(digests).encode())
        self.etag = f'"{named.hexdigest()[:32]}"'

    def read(self, start: int = 0, stop: int | None = None) -> Ready:
        """Gives the file from `start` to `stop`, a piece at a time."""
        return Ready(self._pieces(start, self.size if stop is None else stop))

    def _pieces(self, start: int, stop: int) -> Iterator[bytes]:
        at = 0
        for data in self._stretches():
            first, last = max(start - at, 0), min(stop - at, data.nbytes)
            for place in range(first, last, PIECE_BYTES):
                yield bytes(data[place : min(place + PIECE_BYTES, last)])
            at += data.nbytes

    def _stretches(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        for name in sorted(self._tensors):
            for fragment, piece in self._tensors[name]:
                values = np.ascontiguousarray(self._vectors[fragment][piece.span], "<f4")
                yield values.data.cast("B")

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        described: dict[str, object] = {"__metadata__": metadata}
        offset = 0
        for name in sorted(self._tensors):
            pieces = [piece for _, piece in self._tensors[name]]
            stop = offset + 4 * sum(piece.size for piece in pieces)
            described[name] = {
                "dtype": "F32",
                "shape": _joined(pieces),
                "data_offsets": [offset, stop],
            }
            offset = stop
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # Readers may map the numbers, so they start aligned.
        return len(text).to_bytes(8, "little") + text


def _joined(pieces: Sequence[Piece]) -> list[int]:
    """The shape of the tensor that the pieces, in order, make up."""
    first = pieces[0].shape
    return [sum(piece.shape[0] for piece in pieces), *first[1:]] if first else []
