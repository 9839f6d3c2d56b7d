"""A training program that is not ours, as a process that this agent started.

It may be anything: a Python script, a shell script, a launcher of many processes. Whatever it
prints goes into the log. Somewhere below it a process joins the region (`region/region.py`): it
takes the trainer's lock, names itself in the handover record and listens at the FIFOs.

    command ──▶ … ──▶ trainer.lock, trainer.json ──▶ linked: wake-ups both ways

Until it has joined it knows nothing of us, so a guard beside it knows (program_guard.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from diloco_cli.errors import SpecError
from diloco_cli.system.process_handle import descendants, kill_group_of, open_process
from diloco_cli.system.process_log import ProcessLog
from diloco_cli.system.wakeup import write_wakeup
from diloco_cli.worker.agent import program_guard
from diloco_cli.worker.agent.trainer_process import (
    StartedProcess,
    end_trainer,
    open_fifos,
)
from diloco_cli.worker.handover import HandoverRecord
from diloco_cli.worker.mailbox import TRAINER_LOCK, Mailbox

LOOK_SECONDS = 0.2


class CommandTrainer(StartedProcess):
    """Started in a process group of its guard's; linked once somebody below it has joined.

    It, or what it has started, may lead another group, as GNU `timeout` does: that is killed with
    it. When it ends by itself, only a group that it leads itself is still known.
    """

    def __init__(
        self,
        command: Sequence[str],
        mailbox: Mailbox,
        record: HandoverRecord,
        log: Path,
        *,
        environment: Mapping[str, str],
        on_output: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._mailbox, self._record, self.log = mailbox, record, ProcessLog(log)
        with self.log.opened() as output:
            # The guard first, so that there is no moment without one.
            self._guard = subprocess.Popen(
                program_guard.argv(mailbox.folder / TRAINER_LOCK),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                bufsize=0,
                process_group=0,
            )
            try:
                # In a group of its own, so that all it starts can be ended with it.
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **environment},
                    process_group=self._guard.pid,
                )
            except OSError as error:
                self._end_guard()
                raise SpecError(
                    f"The trainer's command {list(command)} cannot be started: {error.strerror}: "
                    f"{command[0]!r}.",
                    hint="Correct regions[].trainer.command; it runs where the worker was started, "
                    f"in {Path.cwd()}.",
                ) from None
        assert self._guard.stdin is not None
        write_wakeup(self._guard.stdin.fileno(), str(self._child.pid))
        self._process = open_process(self._child.pid)
        self._fifos: tuple[int, int] | None = None
        self._begin(on_output, on_end)

    def wake(self) -> None:
        with self._lock:
            if self._fifos:
                write_wakeup(self._fifos[0], "mail")

    def stop(self) -> None:
        """Asks whoever has joined to checkpoint and leave; a launcher then ends by itself."""
        if self._child.poll() is None:
            if self._mailbox.trainer_lock_holder() is not None:
                end_trainer(self._mailbox, signal.SIGTERM)
            else:
                self._child.terminate()

    def kill(self) -> None:
        """Ends it and all it has started; may be called from a signal handler."""
        groups = [self._guard.pid]
        if self._child.returncode is None:  # Its pid is its own.
            groups += [self._child.pid, *descendants(self._child.pid)]
        for each in groups:
            kill_group_of(each)

    def _listen(self) -> None:
        group = 0
        while self._child.poll() is None:
            if self._fifos is None:
                with self._lock:
                    self._fifos = self._link()
            heard = [self._fifos[1]] if self._fifos else []
            ends = [] if self._process is None else [self._process]
            ready, _, _ = select.select([*heard, *ends], [], [], LOOK_SECONDS)
            with contextlib.suppress(OSError):  # It has ended perhaps, but keeps its number.
                group = os.getpgid(self._child.pid)
            if self._fifos and self._fifos[1] in ready:
                self._hear(self._fifos[1])
        self._child.wait()
        # Workers of a launcher that died would go on for no one.
        if group == self._child.pid:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        self._end_guard()
        end_trainer(self._mailbox)
        self._unlink()
        if self._process is not None:
            os.close(self._process)
        self._on_end()

    def _end_guard(self) -> None:
        """Ends the guard and with it all that is left of the group."""
        kill_group_of(self._guard.pid)
        self._guard.wait()
        if self._guard.stdin:
            self._guard.stdin.close()

    def _hear(self, handle: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if words := os.read(handle, 4096):
                self._on_output(words)
            else:  # It has left the region and may join again.
                self._unlink()
                threading.Event().wait(LOOK_SECONDS)

    def _link(self) -> tuple[int, int] | None:
        """The way to whoever has joined and back; None while nobody has."""
        pid = self._mailbox.trainer_lock_holder()
        if pid is None or not self._record.names(self._mailbox, pid):
            return None
        return open_fifos(self._mailbox)

    def _unlink(self) -> None:
        with self._lock:
            fifos, self._fifos = self._fifos, None
        for handle in fifos or ():
            os.close(handle)


def filled(command: Sequence[str], region: str, folder: Path) -> list[str]:
    """A command of somebody else's, with what only the worker knows."""
    known = {"{python}": sys.executable, "{region}": region, "{folder}": str(folder)}
    words = list(command)
    for name, value in known.items():
        words = [word.replace(name, value) for word in words]
    return words
