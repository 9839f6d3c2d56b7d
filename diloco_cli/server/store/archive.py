"""The blobs of a run by payload digest, fragment and version; reading only."""

from __future__ import annotations

import numpy as np

from diloco_cli.errors import StoreDamaged, StoreError, WireError
from diloco_cli.server.store import Blobs, blob_names
from diloco_cli.server.store.state_format import StoredState, decode
from diloco_cli.wire.frame import open_frame


class PayloadLost(StoreError):
    """An accepted payload cannot be read; its work goes back to the region that sent it."""


class Archive:
    """Payloads, versions and merged contributions of one run."""

    def __init__(self, blobs: Blobs, run: str) -> None:
        self.blobs, self.run = blobs, run

    def payload(self, digest: str) -> memoryview:
        """An accepted payload, mapped: it takes no memory of the process."""
        return self._frame(blob_names.payload(digest))

    def payloads(self) -> set[str]:
        """Digests of all payloads, also of those that no record names."""
        return set(map(blob_names.payload_digest, self.blobs.names(blob_names.PAYLOADS)))

    def members(self, fragment: int, version: int) -> MergedPayloads:
        return MergedPayloads(self, fragment, version)

    def load_state(self, fragment: int, version: int) -> StoredState:
        """Maps one stored version and checks every bit of it."""
        return self.read_state(blob_names.state(fragment, version), fragment, version)

    def read_state(self, name: str, fragment: int, version: int) -> StoredState:
        """Maps the state in the blob `name`; StoreDamaged unless it is sound and that version."""
        where = self.blobs.locate(name)
        try:
            state, metadata = decode(self.blobs.view(name))
        except FileNotFoundError:
            raise StoreDamaged(
                f"Fragment {fragment} is published at version {version}, but {where} is missing."
            ) from None
        except (ValueError, OSError) as error:
            raise StoreDamaged(f"{where} cannot be read: {error}.") from error
        recorded = tuple(metadata.get(key) for key in ("fragment", "version", "digest"))
        actual = (str(fragment), str(version), state.digest)
        if recorded != actual:
            raise StoreDamaged(
                f"{where} is damaged: it says fragment, version, digest are {recorded}, "
                f"its content {actual}."
            )
        return state

    def published(self, fragment: int, version: int) -> np.ndarray | None:
        """The published weights of a version: stored, or summed from deltas; None if deleted."""
        base = max((kept for kept in self.versions(fragment) if kept <= version), default=None)
        if base is None:
            return None
        deltas = [blob_names.delta(fragment, number) for number in range(base + 1, version + 1)]
        if None in map(self.blobs.size, deltas):
            return None
        weights = self.load_state(fragment, base).published
        for name in deltas:
            where = self.blobs.locate(name)
            try:
                frame = open_frame(self.blobs.view(name), size=weights.size)
                weights, digest = frame.added_to(weights)
            except (OSError, WireError) as error:
                raise StoreDamaged(f"{where} cannot be read: {error}.") from error
            if digest != frame.header.published:
                raise StoreDamaged(
                    f"{where} leads to weights with the digest {digest[:12]}, it says "
                    f"{frame.header.published[:12]}."
                )
        return weights

    def versions(self, fragment: int) -> list[int]:
        """Versions whose state is kept, oldest first; the newest may not be journaled yet."""
        blobs = map(blob_names.parse, self.blobs.names(blob_names.fragment(fragment)))
        return sorted(blob.version for blob in blobs if blob and blob.kind == "state")

    def _frame(self, name: str) -> memoryview:
        try:
            return self.blobs.view(name)
        except OSError as error:
            raise PayloadLost(
                f"The payload {self.blobs.locate(name)} cannot be read: {error.strerror}.",
                hint="Its region sends the work again with its next contribution.",
            ) from error


class MergedPayloads:
    """The contributions that one version was made of, wherever they are by now."""

    def __init__(self, archive: Archive, fragment: int, version: int) -> None:
        self.run, self._archive = archive.run, archive
        names = archive.blobs.names(blob_names.fragment(fragment))
        parsed = ((name, blob_names.parse(name)) for name in names)
        self._moved = {
            blob.digest: name
            for name, blob in parsed
            if blob and blob.digest and blob.version == version
        }

    def __len__(self) -> int:
        """Contributions that were moved beside their version."""
        return len(self._moved)

    def __contains__(self, digest: str) -> bool:
        payload = blob_names.payload(digest)
        return digest in self._moved or self._archive.blobs.size(payload) is not None

    def payload(self, digest: str) -> memoryview:
        # A server that died right after publishing has not moved it yet.
        return self._archive._frame(self._moved.get(digest) or blob_names.payload(digest))
