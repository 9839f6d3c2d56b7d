"""A trainer that outlived its agent, in the hands of the next one.

It is not our child, so its end shows in its lock, which the kernel releases, and how it
ended only in what it left: a trainer that left in order has said so in its last report.
A trainer is taken over only if it was started with the same words for the same run, by an
agent of this very folder; any other is sent away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco_cli.system.files import keep_bytes
from diloco_cli.system.wakeup import write_wakeup
from diloco_cli.wire.messages import WIRE_VERSION
from diloco_cli.worker.agent.trainer_process import last_words
from diloco_cli.worker.mailbox import FolderOwner, Mailbox

LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class HandoverRecord:
    """What a trainer and the agent that takes it over must have in common."""

    argv: tuple[str, ...]
    spec: str
    run: str
    owner: str
    wire: int = WIRE_VERSION


def papers(argv: Sequence[str], spec_file: Path | None, identity: FolderOwner) -> HandoverRecord:
    """Writes down who a trainer is: its command line without the interpreter, spec and run."""
    text = spec_file.read_bytes() if spec_file and spec_file.exists() else b""
    digest = hashlib.sha256(text).hexdigest()
    return HandoverRecord(tuple(argv[1:]), digest, identity.run, identity.owner)


def show_papers(mailbox: Mailbox, own: HandoverRecord) -> None:
    """Says who holds the trainer's lock; call it under the lock."""
    with contextlib.suppress(OSError):  # Then it cannot be taken over, no more.
        about = {"pid": os.getpid(), **asdict(own)}
        keep_bytes(mailbox.trainer_file, json.dumps(about).encode(), durable=False)


def adopt(
    mailbox: Mailbox,
    wanted: HandoverRecord,
    log: Path,
    *,
    heard: Callable[[bytes], None],
    ended: Callable[[], None],
) -> InheritedTrainer | None:
    """Takes over the trainer that is at work here, if it is ours; sends any other away."""
    pid = mailbox.trainer_lock_holder()
    if pid is None:
        return None
    found = mailbox.trainer_papers()
    expected = json.loads(json.dumps({"pid": pid, **asdict(wanted)}))
    fifos = _open_fifos(mailbox) if wanted.run and found == expected else None
    if fifos is None:
        end_trainer(mailbox, signal.SIGTERM)
        return None
    return InheritedTrainer(mailbox, pid, fifos, log, heard=heard, ended=ended)


def end_trainer(mailbox: Mailbox, number: signal.Signals = signal.SIGKILL) -> None:
    """Ends whatever trainer is at work in a region's folder, whoever started it."""
    if (pid := mailbox.trainer_lock_holder()) is None:
        return
    with contextlib.suppress(OSError):
        handle = _open_process(pid)
        # It may have ended since, and its number may be another's by now.
        if mailbox.trainer_lock_holder() == pid:
            _signal(handle, pid, number)
        if handle is not None:
            os.close(handle)


class InheritedTrainer:
    """Speaks of a trainer as `TrainerProcess` does of its own child."""

    def __init__(
        self,
        mailbox: Mailbox,
        pid: int,
        fifos: tuple[int, int],
        log: Path,
        *,
        heard: Callable[[bytes], None],
        ended: Callable[[], None],
    ) -> None:
        self.pid = pid
        self.code: int | None = None
        self._mailbox, self._log = mailbox, log
        self._began = log.stat().st_size if log.exists() else 0
        self._voice, self._ear = fifos
        self._process = _open_process(pid)
        self._heard, self._ended = heard, ended
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="trainer", daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """Says that there is mail."""
        with self._guard:
            if self.code is None:
                write_wakeup(self._voice, "mail")

    def stop(self) -> None:
        """Asks it to checkpoint and leave."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once; may be called from a signal handler, so it does not wait."""
        self._send(signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def last_words(self) -> tuple[str, str | None]:
        return last_words(self._log, self._began)

    def _send(self, number: signal.Signals) -> None:
        if self.code is None and self._is_there():
            _signal(self._process, self.pid, number)

    def _is_there(self) -> bool:
        # With a handle it is there until the handle says otherwise. Its lock it gives back a
        # little earlier, and its number may be another's later.
        return self._process is not None or self._mailbox.trainer_lock_holder() == self.pid

    def _listen(self) -> None:
        watched = [self._ear] if self._process is None else [self._ear, self._process]
        while True:
            with contextlib.suppress(BlockingIOError):
                ready, _, _ = select.select(watched, [], [], LOOK_SECONDS)
                if self._process in ready or not self._is_there():
                    break
                if self._ear in ready and (words := os.read(self._ear, 4096)):
                    self._heard(words)
                elif self._ear in ready:  # It has closed its end and is about to go.
                    watched = [one for one in watched if one != self._ear]
        why = str((self._mailbox.progress() or {}).get("why") or "")
        with self._guard:
            self.code = 0 if why.startswith("stopped:") else 1
            for handle in {self._voice, self._ear, self._process} - {None}:
                os.close(handle)
        self._ended()


def _open_fifos(mailbox: Mailbox) -> tuple[int, int] | None:
    """Opens the way to a trainer and back; None if it does not listen."""
    ear = None
    try:
        # Our ear first: the trainer looks for it as soon as it hears us.
        ear = os.open(mailbox.agent_fifo, os.O_RDONLY | os.O_NONBLOCK)
        return os.open(mailbox.trainer_fifo, os.O_WRONLY | os.O_NONBLOCK), ear
    except OSError:
        if ear is not None:
            os.close(ear)
        return None


def _open_process(pid: int) -> int | None:
    """A handle that stays with this process when its number is given to another."""
    if not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None


def _signal(handle: int | None, pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        if handle is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
