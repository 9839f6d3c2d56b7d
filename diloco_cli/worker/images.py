"""Bringing a region's copy of the published weights up to date.

A version travels as a delta against the one before; the chain from ours to the newest
is added up one by one in float32, exactly as the server did, and the digest after each
says that we hold the server's bits. Where a chain is broken or does not add up, the
whole fragment is fetched instead. But weights of ours that the server's own deltas do not
continue are from another history: the server was set back to an older copy and went on from
there, and what we hold cannot be measured against it.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_cli.errors import StoreError, WireError
from diloco_cli.net.client import Gone, Server
from diloco_cli.wire.frame import Frame, vector_digest
from diloco_cli.worker.mailbox import Image


def bring_up(server: Server, fragment: int, have: Image | None, version: int) -> tuple[Image, str]:
    """Fetches `version` or newer; gives the image and why it could not come as deltas, if so."""
    why, frames = "there was none", None
    if have is not None:
        frames = server.chain(fragment, version, have.version)
        if frames is None:
            why = f"the server no longer has the deltas since version {have.version}"
        elif (image := add_up(have, frames)) is not None:
            return image, ""
        else:
            why = f"the deltas since version {have.version} do not add up"
    try:
        image = unpack(server.whole(fragment, version))
        if have is not None and frames:
            _refuse_other_history(fragment, have, frames[-1], image)
        return image, why
    except Gone:
        # The server moved on while we asked; the newest version is always there.
        latest = server.latest(fragment, after=-1, wait=0)
        if latest is None:
            raise
        return unpack(server.whole(fragment, latest.version)), why


def _refuse_other_history(fragment: int, have: Image, last: Frame, image: Image) -> None:
    """Raises if our weights are sound and the server's are, but theirs do not follow ours."""
    sound = vector_digest(have.weights) == have.published
    if sound and last.header.published == image.published:
        raise other_history(fragment, have.version, "what the server published after it")


def other_history(fragment: int, version: int, what: str) -> StoreError:
    """The server published other weights under the number that we hold."""
    return StoreError(
        f"Version {version} of fragment {fragment} that this region holds is not the one of "
        f"the server: {what} does not fit. The server was restored from an older copy and went "
        f"on from there.",
        hint="Restore a newer copy of the server's folder; or delete this region's folder to go "
        "on from what the server has.",
    )


def add_up(have: Image, chain: Sequence[Frame]) -> Image | None:
    """Applies deltas one by one; None when one does not lead to the weights it names."""
    weights, said = have.weights, None
    for frame in chain:
        weights = weights + frame.values()
        said = frame.header
        if vector_digest(weights) != said.published:
            return None
    if said is None:
        return have
    return Image(said.version, said.merged, said.published, weights)


def unpack(frame: Frame) -> Image:
    """Reads a whole version, bit for bit."""
    said, weights = frame.header, frame.values()
    digest = vector_digest(weights)
    if digest != said.published:
        raise WireError(
            f"Version {said.version} of fragment {said.fragment} hashes to {digest[:12]}…, "
            f"{said.published[:12]}… was published.",
            hint="It is fetched again; if this repeats, the server's copy is damaged.",
        )
    return Image(said.version, said.merged, said.published, weights)
