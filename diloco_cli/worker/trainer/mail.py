"""The trainer's mail: a thread that reads images and writes frames, and what came in lately.

The main thread hands over work that has begun and goes on; waiting for the devices, encoding,
compressing, waiting for the disk and decoding happen here. Results are collected at the next
step boundary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diloco_cli.core.fragments import Fragment
from diloco_cli.wire.frame import Header
from diloco_cli.wire.messages import LaneAssignment, News
from diloco_cli.worker.engines import HeldWork, Vector
from diloco_cli.worker.mailbox import Fate, Image, Mailbox, Stamp, stamp

LOOK_SECONDS = 1.0
"""The mailbox is looked into at least this often, woken or not."""


@dataclass(frozen=True)
class IncomingImage:
    """A newer image, with our own frame decoded if the image says that it is merged."""

    image: Image
    merged: str
    weights: Vector = field(repr=False)
    """Those of the image, where the engine keeps them."""
    flight: Vector | None = field(repr=False)


@dataclass(frozen=True)
class OutgoingFrame:
    """A frame that is being written."""

    header: Header
    work: HeldWork = field(repr=False)
    done: Future[str] = field(repr=False)
    """Gives the frame's digest."""


class MailThread:
    """Reads images and writes frames, one after the other."""

    def __init__(
        self,
        mailbox: Mailbox,
        region: str,
        *,
        level: int,
        wake: Callable[[], None],
        tell: Callable[[str], None],
        keep: Callable[[int, np.ndarray], Vector],
    ) -> None:
        """`wake` wakes the trainer, `tell` its agent; `keep` brings values to the engine."""
        self.mailbox = mailbox
        self.region = region
        self.level = level
        self._wake = wake
        self._tell = tell
        self._keep = keep
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="mail")

    def post(self, header: Header, work: HeldWork) -> OutgoingFrame:
        """Starts to write a frame; until it is done it does not exist."""
        return OutgoingFrame(header, work, self._soon(self._post, header, work))

    def _post(self, header: Header, work: HeldWork) -> str:
        frame = work.pack(header, level=self.level)
        self.mailbox.post(header.fragment, frame)
        self._tell("posted")
        return frame[-32:].hex()

    def read(self, fragment: int, size: int) -> Future[IncomingImage | None]:
        return self._soon(self._read, fragment, size)

    def _read(self, fragment: int, size: int) -> IncomingImage | None:
        image = self.mailbox.image(fragment)
        if image is None:
            return None
        merged = image.merged.get(self.region, "")
        frame = self.mailbox.frame(fragment, size=size) if merged else None
        ours = frame is not None and frame.digest == merged
        flight = self._keep(fragment, frame.values()) if frame and ours else None
        return IncomingImage(image, merged, self._keep(fragment, image.weights), flight)

    def close(self) -> None:
        self._threads.shutdown()

    def _soon(self, act: Callable, *arguments: object) -> Future:
        future = self._threads.submit(act, *arguments)
        # A trainer that waits wants to know at once; one that trains looks at every step.
        future.add_done_callback(lambda _: self._wake())
        return future


class Inbox:
    """The agent's side of the mailbox, as a trainer sees it; files are read when they change."""

    def __init__(self, mailbox: Mailbox, fragments: Sequence[Fragment]) -> None:
        self.mailbox = mailbox
        self.fragments = fragments
        self.news: News | None = None
        self.lanes: LaneAssignment | None = None
        self.fates: list[Fate | None] = [None] * len(fragments)
        self.reads: list[Future[IncomingImage | None] | None] = [None] * len(fragments)
        """Images on their way from the disk, one per fragment."""
        self.profile_asked = False
        """Somebody wants a trace, or wanted one."""
        self._seen: dict[Path, Stamp | None] = {}
        self._look_at = 0.0
        # Images are read once at the start. What is noted now, before that, is no later
        # than what was read, so a change in between is seen.
        for fragment in fragments:
            self._is_new(mailbox.image_file(fragment.number))

    def is_due(self, *, now: float) -> bool:
        return now >= self._look_at

    def look(self, mail: MailThread) -> None:
        """Reads what changed; images are read in the mail thread."""
        self._look_at = time.monotonic() + LOOK_SECONDS
        if self._is_new(self.mailbox.calls_file):
            self.news = self.mailbox.calls() or self.news
        if self._is_new(self.mailbox.lanes_file):
            self.lanes = self.mailbox.lanes()
        self.profile_asked |= self._is_new(self.mailbox.profile_file)
        for fragment in self.fragments:
            number = fragment.number
            if self._is_new(self.mailbox.fate_file(number)):
                self.fates[number] = self.mailbox.fate(number)
            if self._is_new(self.mailbox.image_file(number)):
                self.reads[number] = mail.read(number, fragment.size)

    def take(self, number: int) -> IncomingImage | None:
        """Gives a newer image once it has been read."""
        read = self.reads[number]
        if read is None or not read.done():
            return None
        self.reads[number] = None
        return read.result()

    def _is_new(self, path: Path) -> bool:
        before, self._seen[path] = self._seen.get(path), stamp(path)
        return self._seen[path] is not None and self._seen[path] != before
