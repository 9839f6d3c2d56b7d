"""Whom does a trainer answer to, and for how long does it go on alone?

Its first agent holds both ends of its pipes: standard input says that there is mail, standard
output wakes the agent. When that agent dies, however it dies, the kernel closes the pipe. The
trainer trains on, because all its mail is in files, and waits for another agent to take it over:

    trainer.fifo   FIFO   agent ─▶ trainer; held open by the agent for as long as it lives
    agent.fifo     FIFO   trainer ─▶ agent

A trainer that is not ours has no pipes: it is found through the FIFOs from the start.

Nobody within `ALONE_SECONDS`: it checkpoints and leaves. So nothing that was left behind
trains for long, and no inner step is lost when only an agent was killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

from diloco_cli.system.wakeup import LAST_MOMENT, Wakeup, write_wakeup
from diloco_cli.worker.mailbox import Mailbox

ALONE_SECONDS = 60.0
LOOK_SECONDS = 0.1


class ParentWatch:
    """A trainer's connection to its agent, whichever that is."""

    def __init__(
        self,
        wakeup: Wakeup,
        mailbox: Mailbox,
        agent_output: int | None,
        *,
        alone: float = ALONE_SECONDS,
    ) -> None:
        """`agent_output` is where our first agent listens; None if it has given us no pipes."""
        self._piped = agent_output is not None
        self._wakeup, self._mailbox, self._agent_output, self._alone = (
            wakeup,
            mailbox,
            agent_output,
            alone,
        )
        self._ear: int | None = None
        self.orphaned = False
        """The agent that started us is gone."""

    def listen(self) -> None:
        # Where the disk knows no FIFOs nobody finds us, and we leave with our agent.
        with contextlib.suppress(OSError):
            self._ear = os.open(self._mailbox.trainer_fifo, os.O_RDONLY | os.O_NONBLOCK)
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def tell(self, word: str) -> None:
        if self._agent_output is not None:  # Otherwise it finds our mail when it finds us.
            write_wakeup(self._agent_output, word)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while self._piped and os.read(0, 4096):
                self._wakeup.wake()
        self.orphaned = True
        while self._ear is not None and self._is_found(self._ear):
            self._agent_output = _speak(self._mailbox) or self._agent_output
            self._obey(self._ear)
        self._wakeup.stop("the agent is gone")
        if not self._piped:
            return  # How long a step of theirs takes is not for us to say.
        threading.Event().wait(LAST_MOMENT)
        os._exit(1)

    def _is_found(self, handle: int) -> bool:
        """Waits for an agent at the other end; says whether one came in time."""
        deadline = time.monotonic() + self._alone
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                if not os.read(handle, 4096):  # No bytes and no error: nobody is there.
                    threading.Event().wait(LOOK_SECONDS)
                    continue
            return True
        return False

    def _obey(self, handle: int) -> None:
        """Wakes the trainer for everything an agent says, until it is gone."""
        self._wakeup.wake()
        self.tell("posted progress")
        while True:
            select.select([handle], [], [])
            with contextlib.suppress(BlockingIOError):
                if not os.read(handle, 4096):
                    return
                self._wakeup.wake()


def _speak(mailbox: Mailbox) -> int | None:
    try:
        return os.open(mailbox.agent_fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def take_over_stdout() -> int:
    """Keeps standard output for wake-ups to the agent; whatever libraries print goes to the log."""
    handle = os.dup(1)
    os.dup2(2, 1)
    # An agent that does not read must not stop the training.
    os.set_blocking(handle, False)
    return handle
