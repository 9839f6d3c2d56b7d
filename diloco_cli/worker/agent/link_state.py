"""Is the server in reach, and if so, what does not get through?

Reachable is not fast: a heartbeat that is answered means that the server is there, however long
a frame takes on the same line, and a server that refuses an upload for want of room is there too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from diloco_cli.errors import LinkError

CONTROL = "heartbeat"
"""The thread whose calls are short and never stop; it says whether the server is there."""
WHAT = {
    "calls": "news do not arrive",
    "upload": "uploads do not get through",
    "download": "versions do not arrive",
}


class Improvement(NamedTuple):
    """What a success says."""

    silent: float | None
    """Seconds after which the server is back; None if it was not away."""
    again: str
    """What no longer hinders."""
    hindered: str
    """What does not get through although the server answers; only where that is news."""


@dataclass
class LinkState:
    """What the threads of a region last found; not for several threads at once."""

    lost_at: float | None = None
    """Since when the server does not answer."""
    hindrances: dict[str, str] = field(default_factory=dict)
    """Why something else does not work, in words, by the thread that tried."""

    _suspected: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Failures that may mean that the server is gone, and when they were."""

    def failed(self, name: str, error: Exception, *, now: float) -> str:
        """Takes note of a failure; gives what to say about it, if it is news."""
        why = str(getattr(error, "message", error))
        if isinstance(error, OSError):
            return self._hindered(name, f"this folder cannot be written: {why}")
        answered = isinstance(error, LinkError) and error.answered
        if name == CONTROL and not answered:
            news, self.lost_at = self.lost_at is None, now if self.lost_at is None else self.lost_at
            self._suspected.clear()  # It follows from that.
            return why if news else ""
        hindrance = f"{WHAT.get(name, name)}: {why}"
        if answered:
            return self._hindered(name, hindrance)
        if self.lost_at is None:
            self._suspected[name] = now, hindrance  # The next heartbeat tells what it means.
        return ""

    def _hindered(self, name: str, why: str) -> str:
        news = name not in self.hindrances and why not in self.hindrances.values()
        self.hindrances[name] = why
        return why if news else ""

    def worked(self, name: str, *, began: float, now: float) -> Improvement:
        """Takes note of what `began` then and succeeded; says what is better, and what is not."""
        silent, hindered = None, ""
        if name == CONTROL:
            if self.lost_at is not None:
                silent, self.lost_at = now - self.lost_at, None
            before = {each: why for each, (at, why) in self._suspected.items() if at < began}
            self._suspected = {k: v for k, v in self._suspected.items() if k not in before}
            found = [self._hindered(each, why) for each, why in before.items()]
            hindered = "; ".join(filter(None, found))
        self._suspected.pop(name, None)
        return Improvement(silent, self.hindrances.pop(name, ""), hindered)

    @property
    def hindrance(self) -> str:
        """What people should know; nothing while the server is away, which they know."""
        reasons = dict.fromkeys(self.hindrances.values())
        return "; ".join(reasons) if self.lost_at is None else ""
