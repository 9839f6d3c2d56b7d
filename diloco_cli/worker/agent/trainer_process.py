"""The trainer as a process: one that this agent started, or one that outlived its agent.

Its standard input wakes it, and its end tells it that the agent is gone: however an agent
dies, the kernel closes the pipe. The trainer then goes on alone for a while
(`trainer/parent_watch.py`), so that the next agent may take it over, and ends. Its standard
output wakes the agent. What it has to say in words goes into a log.

A trainer that was taken over is not our child. Its end shows in its process handle, or in
its lock, which the kernel releases; how it ended, only in its last report.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from diloco_cli.system import logs
from diloco_cli.system.process_end import LastWords
from diloco_cli.system.process_handle import open_process, signal_process
from diloco_cli.system.process_log import ProcessLog
from diloco_cli.system.wakeup import write_wakeup
from diloco_cli.wire.messages import TrainerProgress
from diloco_cli.worker.handover import HandoverRecord
from diloco_cli.worker.mailbox import Mailbox

LOOK_SECONDS = 0.5
LONGEST_PAUSE = 30.0


class StartedProcess(ABC):
    """A trainer that this agent started, its log, and a thread that waits for its end."""

    _child: subprocess.Popen[bytes]
    log: ProcessLog

    def _begin(self, on_output: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._on_output, self._on_end = on_output, on_end
        self._thread = threading.Thread(target=self._listen, name="trainer", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self._child.poll()

    @abstractmethod
    def wake(self) -> None:
        """Says that there is mail."""

    @abstractmethod
    def stop(self) -> None:
        """Asks it to checkpoint and leave."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it at once; may be called from a signal handler, so it does not wait."""

    def wait(self, seconds: float) -> None:
        """Waits until it is gone and its pipes are closed."""
        self._thread.join(seconds)

    def last_words(self) -> LastWords:
        """Quotes the reason it gave for ending, and its hint."""
        return self.log.last_words()

    @abstractmethod
    def _listen(self) -> None:
        """Passes on what it says, and its end."""


class TrainerProcess(StartedProcess):
    """The built-in trainer: pipes wake both sides."""

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        on_output: Callable[[bytes], None],
        on_end: Callable[[], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` replaces our own."""
        self.log = ProcessLog(log)
        with self.log.opened() as output:
            # In our own process group, so that a signal to the group ends the trainer too.
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                env=environment,
            )
        assert self._child.stdin and self._child.stdout
        self._input = self._child.stdin.fileno()
        os.set_blocking(self._input, False)
        self._begin(on_output, on_end)

    def wake(self) -> None:
        with self._lock:
            if self._child.stdin and not self._child.stdin.closed:
                write_wakeup(self._input, "mail")

    def stop(self) -> None:
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._child.poll() is None:
            self._child.kill()

    def _listen(self) -> None:
        stdout = self._child.stdout
        assert stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while words := os.read(stdout.fileno(), 4096):
                self._on_output(words)
        self._child.wait()
        stdout.close()
        with self._lock, contextlib.suppress(OSError):
            if self._child.stdin:
                self._child.stdin.close()
        self._on_end()


class InheritedTrainer:
    """A trainer that an earlier agent started; the same methods as `TrainerProcess`."""

    def __init__(
        self,
        mailbox: Mailbox,
        pid: int,
        fifos: tuple[int, int],
        log: Path,
        *,
        ours: bool,
        on_output: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """A program that is not `ours` is a trainer only while it holds the lock."""
        self.pid = pid
        self.code: int | None = None
        self._mailbox, self.log = mailbox, ProcessLog(log)
        self.log.begin()
        self._input, self._output = fifos
        self._process = open_process(pid) if ours else None
        self._on_output, self._on_end = on_output, on_end
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="trainer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        with self._lock:
            if self.code is None:
                write_wakeup(self._input, "mail")

    def stop(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def last_words(self) -> LastWords:
        return self.log.last_words()

    def _send(self, number: signal.Signals) -> None:
        if self.code is None and self._is_there():
            signal_process(self._process, self.pid, number)

    def _is_there(self) -> bool:
        # With a handle it is there until the handle says otherwise. It releases its lock a
        # little earlier, and its pid may be another process's later.
        return self._process is not None or self._mailbox.trainer_lock_holder() == self.pid

    def _listen(self) -> None:
        handles = [self._output] if self._process is None else [self._output, self._process]
        while True:
            with contextlib.suppress(BlockingIOError):
                ready, _, _ = select.select(handles, [], [], LOOK_SECONDS)
                if self._process in ready or not self._is_there():
                    break
                if self._output in ready and (words := os.read(self._output, 4096)):
                    self._on_output(words)
                elif self._output in ready:  # It has closed its end and is about to go.
                    handles.remove(self._output)
        progress = self._mailbox.progress()
        stopped = progress is not None and progress.why.startswith("stopped:")
        with self._lock:
            self.code = 0 if stopped else 1
            for handle in {self._input, self._output, self._process} - {None}:
                os.close(handle)
        self._on_end()


def take_over(
    mailbox: Mailbox,
    record: HandoverRecord,
    log: Path,
    *,
    ours: bool = True,
    on_output: Callable[[bytes], None],
    on_end: Callable[[], None],
) -> InheritedTrainer | None:
    """Takes over the trainer that is at work here, if it is ours; stops any other."""
    pid = mailbox.trainer_lock_holder()
    if pid is None:
        return None
    fifos = open_fifos(mailbox) if record.run and record.names(mailbox, pid) else None
    if fifos is None:
        end_trainer(mailbox, signal.SIGTERM)
        return None
    return InheritedTrainer(mailbox, pid, fifos, log, ours=ours, on_output=on_output, on_end=on_end)


def end_trainer(mailbox: Mailbox, number: signal.Signals = signal.SIGKILL) -> None:
    """Ends whatever trainer is at work in a region's folder."""
    if (pid := mailbox.trainer_lock_holder()) is None:
        return
    with contextlib.suppress(OSError):
        handle = open_process(pid)
        # It may have ended since, and its pid may be another process's by now.
        if mailbox.trainer_lock_holder() == pid:
            signal_process(handle, pid, number)
        if handle is not None:
            os.close(handle)


def open_fifos(mailbox: Mailbox) -> tuple[int, int] | None:
    """Opens the way to a trainer and back; None if it does not listen."""
    output = None
    try:
        # The way back first: the trainer looks for it as soon as it hears us.
        output = os.open(mailbox.agent_fifo, os.O_RDONLY | os.O_NONBLOCK)
        return os.open(mailbox.trainer_fifo, os.O_WRONLY | os.O_NONBLOCK), output
    except OSError:
        if output is not None:
            os.close(output)
        return None


def how_far(progress: TrainerProgress) -> str:
    """Says in one line what a trainer reports of itself."""
    loss, speed = progress.loss, progress.tokens_per_second
    return ", ".join(
        (
            f"step {progress.step}",
            f"loss {loss:.3f}" if loss is not None else "no loss yet",
            f"{speed:.0f} tokens/s" if speed else "no pace yet",
            f"versions {[fragment.version for fragment in progress.fragments]}",
            progress.why or "training",
        )
    )


def trainer_argv(
    region: str, cores: Sequence[int] | None, spec_file: Path, folder: Path
) -> list[str]:
    """The command that starts a trainer of ours."""
    own = [sys.executable, "-m", "diloco_cli", "trainer", str(spec_file)]
    own += ["--region", region, "--dir", str(folder)]
    own += logs.options()
    return own + (["--cores", ",".join(map(str, cores))] if cores else [])


def pause_before(failures: int) -> float:
    """Seconds to wait before the next start, after so many in a row that came to nothing.

    The first is made up for at once: whatever killed the trainer need not be its own fault.
    """
    return 0.0 if failures <= 1 else min(LONGEST_PAUSE, 0.5 * 2 ** min(failures - 2, 10))
