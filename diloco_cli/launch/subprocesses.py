"""Starts processes on this machine and lets none outlive its parent.

A child gets its own session (a Ctrl-C in the terminal reaches only us), a log file, and
a pipe on its standard input that carries nothing: when we die, however we die, the
kernel closes the pipe and the child, started with `--with-parent`, stops by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.launch import Handle, Role
from diloco_cli.system.process_end import LastWords
from diloco_cli.system.process_log import ProcessLog


@dataclass(frozen=True)
class LocalLauncher:
    """Subprocesses of this one, with their logs in one folder."""

    logs: Path

    def start(self, role: Role) -> LocalProcess:
        log = ProcessLog(self.logs / f"{role.name}.log")
        with log.opened() as output:
            child = subprocess.Popen(
                role.argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        return LocalProcess(child, role, log)

    def stop(
        self,
        handles: Sequence[Handle],
        *,
        grace: float,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        for handle in handles:
            handle.ask()
        deadline = time.monotonic() + grace
        while any(handle.exit_code() is None for handle in handles):
            if time.monotonic() >= deadline or hurry():
                break
            time.sleep(0.05)
        # Also those that ended: something they started may be left in their session.
        for handle in handles:
            handle.kill()


class LocalProcess:
    """One child and the part of its log that it wrote itself."""

    def __init__(self, child: subprocess.Popen[bytes], role: Role, log: ProcessLog) -> None:
        self._child, self._role, self._log = child, role, log

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_code(self) -> int | None:
        self._log.keep_small()  # Whoever keeps it running asks again and again.
        code = self._child.poll()
        if code is not None:
            self._close_stdin()
        return code

    def url(self) -> str | None:
        try:
            address = json.loads(self._role.address.read_bytes()) if self._role.address else {}
        except (OSError, ValueError):
            return None
        # The file may be that of an earlier start.
        return address.get("url") if address.get("pid") == self._child.pid else None

    def ask(self) -> None:
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it any other signal."""
        if self._child.poll() is None:
            self._child.send_signal(number)

    def kill(self) -> None:
        # The child leads its own process group, so this reaches its children too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._close_stdin()

    def last_words(self) -> LastWords:
        return self._log.last_words()

    def _close_stdin(self) -> None:
        if self._child.stdin and not self._child.stdin.closed:
            self._child.stdin.close()
