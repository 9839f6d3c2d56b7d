"""Bringing a region's copy of the published weights up to date.

A version travels as a delta against the one before; the chain from ours to the newest
is added up one by one in float32, exactly as the server did, and the digest after each
says that we hold the server's bits. Where a chain is broken, does not add up or has more
bytes than the whole fragment (the server knows), that is fetched instead. But weights of ours
that the server's own deltas do not continue are from another history: the server was set back
to an older copy and went on from there, and what we hold cannot be measured against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from diloco_cli.errors import SET_BACK, StoreError, WireError
from diloco_cli.net.client import Client, Gone
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Frame
from diloco_cli.wire.messages import Holding
from diloco_cli.worker.mailbox import Image, Mailbox


class PublishedWeights:
    """The images in a region's folder: which version of each fragment, and of what bits.

    At the start every image is hashed once: one that a disk has changed is fetched whole,
    as is one of which the server says that it published other bits.
    """

    def __init__(self, mailbox: Mailbox, fragments: int) -> None:
        self.mailbox = mailbox
        self.mended = 0
        """Images that held other bits than were published and have been replaced."""
        self.holds: dict[int, Holding] = {}
        self._wrong: dict[int, str] = {}
        identity = mailbox.identity()
        self._was = identity.was if identity else ()
        for number in range(fragments):
            self._look_at(number)

    def _look_at(self, number: int) -> None:
        try:
            image = self.mailbox.image(number)
        except StoreError:
            self._wrong[number] = "our copy could not be read"
            return
        if image is None or image.run in self._was:
            return  # Weights of a run that was lost stay until those of this run replace them.
        if vector_digest(image.weights) == image.published:
            self.holds[number] = Holding(version=image.version, digest=image.published)
        else:
            self._wrong[number] = f"our copy of version {image.version} was damaged on disk"

    def version(self, number: int) -> int:
        """The version we have of a fragment, or −1."""
        return self.holds[number].version if number in self.holds else -1

    def doubt(self, wrong: Mapping[int, str]) -> bool:
        """Lets go of images with these digests; says whether there were any.

        Raises if such an image is sound: then it is the server that has another history.
        """
        # One that was replaced since it was reported is not the one meant.
        found = [n for n, held in list(self.holds.items()) if held.digest == wrong.get(n)]
        for number in found:
            held = self.holds.pop(number)
            self._look_at(number)
            if number in self.holds:
                raise other_history(number, held.version, f"its digest {held.digest[:12]}")
        return bool(found)

    def fetch(self, server: Client, number: int, version: int) -> tuple[Image, str]:
        """Fetches `version` or newer; gives it, and why it came whole if that is worth a word."""
        have = self.mailbox.image(number) if number in self.holds else None
        image, why = bring_up(server, number, have, version)
        latest = server.latest(number, after=image.version - 1, wait=0)
        image = replace(image, counted=latest.counted if latest else {})
        return image, self._wrong.get(number, "") or (why if have else "")

    def put(self, number: int, image: Image) -> None:
        self.mailbox.write_image(number, image)
        self.mended += self._wrong.pop(number, None) is not None
        self.holds[number] = Holding(version=image.version, digest=image.published)


def bring_up(server: Client, fragment: int, have: Image | None, version: int) -> tuple[Image, str]:
    """Fetches `version` or newer; gives the image and why it could not come as deltas, if so."""
    why, frames = "there was none", None
    if have is not None:
        frames = server.chain(fragment, version, have.version)
        if frames is None:
            why = f"the deltas since version {have.version} are longer, or no longer there"
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
        hint=SET_BACK,
    )


def add_up(have: Image, chain: Sequence[Frame]) -> Image | None:
    """Applies deltas one by one; None when one does not lead to the weights it names."""
    weights, said = have.weights, None
    for frame in chain:
        weights, digest = frame.added_to(weights)
        said = frame.header
        if digest != said.published:
            return None
    if said is None:
        return have
    return Image(said.version, said.merged, said.published, weights, said.run)


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
    return Image(said.version, said.merged, said.published, weights, said.run)
