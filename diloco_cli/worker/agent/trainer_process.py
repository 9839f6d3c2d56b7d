"""The trainer as a process: started, rung, told to stop, never left behind for good.

Its standard input is our doorbell and its lifeline: when we die, however we die, the
kernel closes it. The trainer then goes on alone for a while (`lifeline`), so that our
successor may take it over (`adopted`), and ends. Its standard output is its doorbell to
us. What it has to say in words goes into a log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco_cli.system.wakeup import write_wakeup

TAIL_BYTES = 64_000
MOST_LETTERS = 600
"""Of a reason that is passed on; a heartbeat has room for a thousand."""


class TrainerProcess:
    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        heard: Callable[[bytes], None],
        ended: Callable[[], None],
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with open(log, "ab") as output:
            self._began = output.tell()
            # In our own process group, so that whoever ends the group ends the trainer too.
            self._child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, bufsize=0
            )
        assert self._child.stdin and self._child.stdout
        self._input = self._child.stdin.fileno()
        os.set_blocking(self._input, False)
        self._guard = threading.Lock()
        self._heard, self._ended = heard, ended
        self._thread = threading.Thread(target=self._listen, name="trainer", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self._child.poll()

    def ring(self) -> None:
        """Says that there is mail."""
        with self._guard:
            if self._child.stdin and not self._child.stdin.closed:
                write_wakeup(self._input, "mail")

    def stop(self) -> None:
        """Asks it to checkpoint and leave."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once; may be called from a signal handler, so it does not wait."""
        if self._child.poll() is None:
            self._child.kill()

    def wait(self, seconds: float) -> None:
        """Waits until it is gone and its pipes are closed."""
        self._thread.join(seconds)

    def last_words(self) -> tuple[str, str | None]:
        """Quotes the reason it gave for ending, and its hint."""
        return last_words(self._log, self._began)

    def _listen(self) -> None:
        stdout = self._child.stdout
        assert stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while words := os.read(stdout.fileno(), 4096):
                self._heard(words)
        self._child.wait()
        stdout.close()
        with self._guard, contextlib.suppress(OSError):
            if self._child.stdin:
                self._child.stdin.close()
        self._ended()


def last_words(log: Path, since: int) -> tuple[str, str | None]:
    """Quotes the last reason a trainer gave in its log, and its hint."""
    try:
        with open(log, "rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return "", None
    _, found, said = f"\n{text}".rpartition("\nerror: ")
    if not found:
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1].strip()[:MOST_LETTERS] if lines else "", None
    message, _, hint = said.partition("hint: ")
    return message.strip()[:MOST_LETTERS], hint.strip()[:MOST_LETTERS] or None


def how_it_ended(code: int) -> str:
    """Puts an exit code into words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
