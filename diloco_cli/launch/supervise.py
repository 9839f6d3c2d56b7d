"""Keeps a process running, and knows when to stop trying.

    running ──died──▶ waiting ──delay over──▶ running
       │ left            ▲ delays 1, 2, 4 … 30 s; a minute of health starts them again
       ▼                 │
      done    gone ◀── a failure that another start cannot cure, or too many in a row

`tend` is called again and again with the time; it never waits. Once `retire`d, a process
is let go however it ends. One that was `send_away` is started again when its time is over,
however it ended, and nobody counts that as a failure.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from diloco_cli.launch import Handle, Launcher, Role
from diloco_cli.system.process_end import LastWords, exit_in_words

LEFT = frozenset({0, 128 + signal.SIGINT, 128 + signal.SIGTERM})
"""Exit codes of a process that stopped because it was asked to, or had nothing left to do."""

INCURABLE = frozenset({2, 5})
"""Exit codes that another start would only repeat: a wrong spec, damaged state."""


@dataclass(frozen=True)
class Patience:
    """How soon and how often to try again."""

    first: float = 1.0
    largest: float = 30.0
    healthy: float = 60.0
    """Seconds of running after which earlier failures are forgotten."""

    tries: int = 10
    """Failures in a row after which it is given up."""

    def delay(self, failures: int) -> float:
        return min(self.largest, self.first * 2.0 ** min(failures - 1, 30))


@dataclass(frozen=True)
class Change:
    """Something that happened to a process, in words."""

    name: str
    what: Literal["died", "restarted", "left", "gone"]
    code: int | None = None
    why: str = ""
    delay: float = 0.0
    restarts: int = 0


class Supervisor:
    """Keeps one process running."""

    def __init__(
        self,
        launcher: Launcher,
        role: Role,
        *,
        patience: Patience | None = None,
        incurable: frozenset[int] = INCURABLE,
    ) -> None:
        self.role = role
        self.state: Literal["new", "running", "waiting", "done", "gone"] = "new"
        self.restarts = 0
        self.code: int | None = None
        self.last_words = LastWords()
        self.handle: Handle | None = None
        self._launcher = launcher
        self._patience = patience or Patience()
        self.incurable = incurable
        self._retired = False
        self._moving = False
        self._back_at: float | None = None
        self._failures = 0
        self._since = 0.0
        self._again_at = 0.0

    @property
    def why(self) -> str:
        """Why it ended last, with the hint it gave."""
        return str(self.last_words)

    @property
    def over(self) -> bool:
        return self.state in ("done", "gone")

    def start(self, *, now: float) -> None:
        self.handle = self._launcher.start(self.role)
        self.state, self._since = "running", now

    def retire(self) -> None:
        """Lets the process go: it runs on, but is not started again."""
        self._retired = True
        if self.state in ("new", "waiting"):
            self.state = "done"

    def move(self, role: Role) -> None:
        """Asks the process to leave and starts it again, without delay, in its new role."""
        self.role = role
        if self.state == "running" and self.handle:
            self._moving = True
            self.handle.ask()

    def send_away(self, *, until: float, kill: bool) -> None:
        """Kills the process or asks it to leave, and starts it again at that time."""
        if self.state == "running" and self.handle:
            self._back_at = until
            self.handle.kill() if kill else self.handle.ask()

    def call_back(self) -> None:
        """Lets the next `tend` start what is away or waits, whatever its time."""
        self._again_at = 0.0
        self._back_at = 0.0 if self._back_at is not None else None

    def tend(self, *, now: float) -> Change | None:
        """Does what is due and says what changed."""
        if self.state == "waiting" and now >= self._again_at:
            return self._again(now)
        if self.state != "running" or self.handle is None:
            return None
        if now - self._since >= self._patience.healthy:
            self._failures = 0
        code = self.handle.exit_code()
        return None if code is None else self._ended(code, now)

    def _again(self, now: float) -> Change:
        self.start(now=now)
        self.restarts += 1
        return Change(self.role.name, "restarted", self.code, self.why, restarts=self.restarts)

    def _ended(self, code: int, now: float) -> Change:
        assert self.handle is not None
        self.code = code
        if self._moving and not self._retired:
            self._moving = False
            return self._again(now)
        if self._back_at is not None and not self._retired:
            return self._goes_away(self._back_at, now)
        if code in LEFT or self._retired:
            self.state = "done"
            return Change(self.role.name, "left", code, restarts=self.restarts)
        self.last_words = self._reason(self.handle, code)
        self._failures += 1
        if code in self.incurable or self._failures > self._patience.tries:
            self.state = "gone"
            return Change(self.role.name, "gone", code, self.why, restarts=self.restarts)
        delay = self._patience.delay(self._failures)
        self.state, self._again_at = "waiting", now + delay
        return Change(self.role.name, "died", code, self.why, delay, self.restarts)

    def _reason(self, handle: Handle, code: int) -> LastWords:
        if code == -signal.SIGKILL:
            return LastWords(f"{exit_in_words(code)}; out of memory, perhaps")
        words = LastWords() if code < 0 else handle.last_words()
        return words or LastWords(exit_in_words(code))

    def _goes_away(self, until: float, now: float) -> Change:
        self.state, self._again_at, self._back_at = "waiting", until, None
        self.last_words = LastWords("sent away on purpose")
        delay = max(0.0, until - now)
        return Change(self.role.name, "died", self.code, self.why, delay, self.restarts)
