"""Single keys that somebody presses at a terminal, without Enter."""

from __future__ import annotations

import os
import select
import sys
import time
from types import TracebackType
from typing import Any


class Keys:
    """Reads keys while it is entered; where nobody can press one it only waits.

    The terminal keeps turning Ctrl-C and Ctrl-Z into signals, and is put back as it was.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @property
    def heard(self) -> bool:
        return self._before is not None

    def __enter__(self) -> Keys:
        try:
            import termios
            import tty

            if sys.stdin.isatty():
                self._before = termios.tcgetattr(sys.stdin)
                tty.setcbreak(sys.stdin, termios.TCSANOW)
        except (ImportError, OSError, ValueError):
            self._before = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """The next key, or nothing once the seconds are over."""
        if not self.heard:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "ignore") if ready else ""
