"""The log of a process that we start: two files of a bounded size, and its last words.

    paris.trainer.log      what it writes, appended
    paris.trainer.log.1    what was there when that grew too large

The process holds the file itself, so that it may outlive us. So the file is not moved: it is copied
and cut, and the process, which appends, goes on at its beginning. What it writes between the two is
lost, a line or two of megabytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from diloco_cli.system.process_end import TAIL_BYTES, LastWords, last_words_in, tail

MOST_BYTES = 16 << 20
"""Of each of the two."""


class ProcessLog:
    """One process's part of a log: from its start on."""

    def __init__(self, path: Path, *, most: int = MOST_BYTES) -> None:
        self.path, self._most = path, most
        self._older = path.with_name(f"{path.name}.1")
        self._start = 0
        self._start_in_older: int | None = None
        """Where its part begins in the older file; None while all of it is in the newer one."""

    def begin(self) -> None:
        """What is written from now on is this process's."""
        self._start = self.path.stat().st_size if self.path.exists() else 0
        self._start_in_older = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Opens it for a process that is about to start."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.keep_small()
        with open(self.path, "ab") as output:
            self.begin()
            yield output

    def keep_small(self) -> None:
        """Begins the file anew if it is too large; to be called now and then."""
        draft = self.path.with_name(f".{self.path.name}.draft")
        try:
            size = os.stat(self.path).st_size
            if size <= self._most:
                return
            with open(self.path, "rb") as file:
                file.seek(size - self._most)
                draft.write_bytes(file.read(self._most))
            os.replace(draft, self._older)
            os.truncate(self.path, 0)
        except OSError:  # There is none yet; or the disk is full, and it cannot grow anyway.
            with contextlib.suppress(OSError):
                draft.unlink()
            return
        self._start_in_older = max(0, self._start - (size - self._most))
        self._start = 0

    def last_words(self) -> LastWords:
        """Quotes the reason that the process gave for its end."""
        text = tail(self.path, since=self._start)
        if self._start_in_older is not None and len(text) < TAIL_BYTES:
            text = tail(self._older, since=self._start_in_older) + text
        return last_words_in(text)
