"""What came in since the trainer last looked?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from diloco_cli.core.fragments import Fragment
from diloco_cli.wire.messages import News
from diloco_cli.worker.mailbox import Fate, Mailbox, Stamp, stamp
from diloco_cli.worker.trainer.mail import IncomingImage, MailThreads

LOOK_SECONDS = 1.0
"""The mailbox is looked into at least this often, woken or not."""


class Inbox:
    """The agent's side of the mailbox, as a trainer sees it; files are read when they change."""

    def __init__(self, mailbox: Mailbox, fragments: Sequence[Fragment]) -> None:
        self.mailbox = mailbox
        self.fragments = fragments
        self.news: News | None = None
        self.fates: list[Fate | None] = [None] * len(fragments)
        self.reads: list[Future[IncomingImage | None] | None] = [None] * len(fragments)
        """Images on their way from the disk, one a fragment."""
        self._seen: dict[Path, Stamp | None] = {}
        self._look_at = 0.0
        # Images are read once at the start. What is noted now, before that, is no later
        # than what was read, so a change in between is seen.
        for fragment in fragments:
            self._is_new(mailbox.image_file(fragment.number))

    def is_due(self, *, now: float) -> bool:
        return now >= self._look_at

    def look(self, desk: MailThreads) -> None:
        """Reads what changed; images are read at the desk."""
        self._look_at = time.monotonic() + LOOK_SECONDS
        if self._is_new(self.mailbox.calls_file):
            self.news = self.mailbox.calls() or self.news
        for fragment in self.fragments:
            number = fragment.number
            if self._is_new(self.mailbox.fate_file(number)):
                self.fates[number] = self.mailbox.fate(number)
            if self._is_new(self.mailbox.image_file(number)):
                self.reads[number] = desk.read(number, fragment.size)

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
