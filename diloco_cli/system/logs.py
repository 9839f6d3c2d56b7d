"""What the processes of a run log: one line to stderr, for people or as JSON.

    2026-11-18T01:02:03.456+00:00 INFO paris: joined as epoch 1, versions [0, 0]
    {"time": "…", "level": "info", "process": "worker", "region": "paris", "message": "joined …"}

A process calls `set_up` once; its modules log through `logging.getLogger(__name__)`. A record
may carry `extra={"region": …}` or `extra={"peer": …}` when it is about one of several.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime
from enum import StrEnum

OURS = "diloco_cli"


class LogFormat(StrEnum):
    text = "text"
    json = "json"


class LineFormatter(logging.Formatter):
    """Writes a record as one line that says when, how bad, who and what."""

    def __init__(self, form: LogFormat, process: str, region: str | None) -> None:
        super().__init__()
        self.form, self.process, self.region = form, process, region

    def format(self, record: logging.LogRecord) -> str:
        created = datetime.fromtimestamp(record.created).astimezone()
        time = created.isoformat(timespec="milliseconds")
        fields = {
            "time": time,
            "level": record.levelname.lower(),
            "process": self.process,
            "region": getattr(record, "region", self.region),
            "peer": getattr(record, "peer", None),
            "message": record.getMessage(),
            "hint": getattr(record, "hint", None),
            "traceback": self.formatException(record.exc_info) if record.exc_info else None,
        }
        if self.form is LogFormat.json:
            return json.dumps({key: value for key, value in fields.items() if value})
        who = " ".join(filter(None, (fields["region"], self._role(), fields["peer"])))
        hint = f"hint: {fields['hint']}" if fields["hint"] else None
        text = "\n".join(filter(None, (fields["message"], hint, fields["traceback"])))
        # Indented, so that no text from elsewhere can look like a line of its own.
        return f"{time} {record.levelname} {who}: {text}".replace("\n", "\n  ")

    def _role(self) -> str | None:
        return None if self.region and self.process == "worker" else self.process


_active: tuple[logging.Handler, LogFormat] | None = None


def set_up(process: str, form: LogFormat = LogFormat.text, *, region: str | None = None) -> None:
    """Sends what this process logs to stderr: our own lines, and the warnings of libraries."""
    global _active
    tear_down()
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(form, process, region))
    logging.getLogger().addHandler(handler)
    logging.getLogger(OURS).setLevel(logging.INFO)
    logging.captureWarnings(True)
    _active = handler, form


def tear_down() -> None:
    """Undoes `set_up`, if it was called."""
    global _active
    if _active:
        logging.getLogger().removeHandler(_active[0])
        logging.getLogger(OURS).setLevel(logging.NOTSET)
        logging.captureWarnings(False)
    _active = None


def log_fatal(message: str, hint: str | None) -> bool:
    """Logs the error that ends this process; False where `set_up` was not called."""
    if _active:
        logging.getLogger(OURS).error("%s", message, extra={"hint": hint})
    return _active is not None


def options() -> list[str]:
    """The command-line options that make a child process log in the same form."""
    return ["--log-format", "json"] if _active and _active[1] is LogFormat.json else []
