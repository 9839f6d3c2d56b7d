"""What a trainer does beside training: a thread that reads and writes its mail.

The main thread hands over host copies and goes on; encoding, compressing, waiting for
the disk and decoding happen here. Results are collected at the next step boundary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from safetensors import SafetensorError

from diloco_cli.errors import DilocoError
from diloco_cli.wire.frame import Header, pack
from diloco_cli.worker.mailbox import Image, Mailbox
from diloco_cli.worker.trainer import checkpoint as resume
from diloco_cli.worker.trainer.checkpoint import Checkpoint


@dataclass(frozen=True)
class IncomingImage:
    """A newer image, with our own frame decoded if the image says that it is merged."""

    image: Image
    merged: str
    flight: np.ndarray | None = field(repr=False)


@dataclass(frozen=True)
class OutgoingFrame:
    """A frame that is being written."""

    header: Header
    values: np.ndarray = field(repr=False)
    done: Future[str] = field(repr=False)
    """Gives the frame's digest."""


class MailThreads:
    """Reads images and writes posts in one thread, checkpoints in another."""

    def __init__(
        self,
        mailbox: Mailbox,
        region: str,
        *,
        level: int,
        ring: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self.mailbox = mailbox
        self.region = region
        self.level = level
        self._ring = ring
        self._tell = tell
        self._mail = ThreadPoolExecutor(1, thread_name_prefix="mail")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[str] | None = None
        self.effort = 0.0
        """Processor seconds that writing the last checkpoint took."""

    def post(self, header: Header, values: np.ndarray) -> OutgoingFrame:
        """Starts to write a frame; until it is done it does not exist."""
        return OutgoingFrame(header, values, self._soon(self._mail, self._post, header, values))

    def _post(self, header: Header, values: np.ndarray) -> str:
        frame = pack(header, values, level=self.level)
        self.mailbox.post(header.fragment, frame)
        self._tell("posted")
        return frame[-32:].hex()

    def read(self, fragment: int, size: int) -> Future[IncomingImage | None]:
        return self._soon(self._mail, self._read, fragment, size)

    def _read(self, fragment: int, size: int) -> IncomingImage | None:
        image = self.mailbox.image(fragment)
        if image is None:
            return None
        merged = image.merged.get(self.region, "")
        frame = self.mailbox.frame(fragment, size=size) if merged else None
        ours = frame is not None and frame.digest == merged
        return IncomingImage(image, merged, frame.values() if frame and ours else None)

    def save(self, checkpoint: Checkpoint) -> None:
        self._saving = self._soon(self._saver, self._save, checkpoint)

    def _save(self, checkpoint: Checkpoint) -> str:
        began = time.thread_time()
        try:
            resume.save(self.mailbox.checkpoint, checkpoint)
        except (OSError, SafetensorError, DilocoError) as error:
            return f"the checkpoint could not be written: {error}"
        finally:
            self.effort = time.thread_time() - began
        return ""

    @property
    def saving(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def saved(self) -> str:
        """Waits for the checkpoint being written; says what went wrong with it, if anything."""
        saving, self._saving = self._saving, None
        return saving.result() if saving else ""

    def trouble(self) -> str:
        """Says what went wrong with the last checkpoint, once, without waiting for one."""
        return "" if self.saving else self.saved()

    def close(self) -> None:
        self._mail.shutdown()
        self._saver.shutdown()

    def _soon(self, pool: ThreadPoolExecutor, act: Callable, *arguments: object) -> Future:
        future = pool.submit(act, *arguments)
        # A trainer that waits wants to know at once; one that trains looks at every step.
        future.add_done_callback(lambda _: self._ring())
        return future
