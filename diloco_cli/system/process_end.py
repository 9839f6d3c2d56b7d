"""How did a process end? Its exit code in words, and the last error in its log.

Reads what `system/logs.py` and `cli/app.py` write: `error: …` with a `hint: …` below it, a log
line of level ERROR, or the same as JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 64_000

_LOGGED = re.compile(r"\d{4}-\d\d-\d\dT\S+ [A-Z]+ ")
_ERROR = re.compile(r"(?:error|\d{4}-\d\d-\d\dT\S+ ERROR [^:]+): ")


@dataclass(frozen=True)
class LastWords:
    """The reason a process gave for its end."""

    message: str = ""
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __bool__(self) -> bool:
        return bool(self.message)


def last_words(log: Path, *, since: int = 0) -> LastWords:
    """Quotes the last error of a log; without one, the last line that no logger wrote."""
    return last_words_in(tail(log, since=since))


def tail(log: Path, *, since: int = 0) -> bytes:
    """The end of a log, or of what was written `since`; empty if it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def last_words_in(text: bytes) -> LastWords:
    """The same of the end of a log, as it was read."""
    lines, stray = text.decode(errors="replace").splitlines(), ""
    for number, line in reversed(list(enumerate(lines))):
        if _ERROR.match(line):
            return _quoted(lines[number:])
        if (fields := _json(line)) is not None:
            if fields.get("level") == "error":
                return LastWords(str(fields.get("message")), fields.get("hint"))
        elif not _LOGGED.match(line):
            stray = stray or line.strip()
    return LastWords(stray)


def exit_in_words(code: int) -> str:
    """Puts an exit code into words; negative codes are signals."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _quoted(lines: list[str]) -> LastWords:
    """Reads the error that begins with the first of these lines, and its hint."""
    message = [_ERROR.sub("", lines[0], count=1)]
    for line in lines[1:]:
        if _LOGGED.match(line):
            break
        text = line.removeprefix("  ")
        if text.startswith("hint: "):
            return LastWords("\n".join(message).strip(), text.removeprefix("hint: ").strip())
        message.append(text)
    return LastWords("\n".join(message).strip())


def _json(line: str) -> dict[str, str] | None:
    try:
        fields = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
