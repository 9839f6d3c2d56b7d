"""What the agent logs, as a list that grows."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def log_lines(monkeypatch):
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ours, handler = logging.getLogger("diloco_cli"), Lines()
    monkeypatch.setattr(ours, "level", logging.INFO)
    ours.addHandler(handler)
    yield lines
    ours.removeHandler(handler)
