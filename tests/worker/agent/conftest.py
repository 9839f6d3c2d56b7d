"""What the agent logs, as a list that grows; agents whose trainers are small scripts."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from diloco_cli.system.wakeup import Wakeup
from diloco_cli.worker.agent.agent import Agent
from diloco_cli.worker.handover import OWN_TRAINER
from diloco_cli.worker.mailbox import Mailbox
from tests.worker.fake_server import OWN, SHARED, Counter, settings_in

TRAINER = """
import os, sys, time
{first}
os.write(1, b"progress\\n")
while data := os.read(0, 100):
    {on_mail}
"""


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


class Running:
    """An agent in a thread."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.outcome: int | Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.agent.run(wait=1)
        except Exception as error:
            self.outcome = error

    def ended(self) -> int | Exception | None:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.outcome


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def agent(tmp_path, counter, log_lines) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def make(first="pass", on_mail="pass", own=OWN, retiring=False, folder=tmp_path) -> Running:
        argv = [sys.executable, "-S", "-c", TRAINER.format(first=first, on_mail=on_mail)]
        argv = OWN_TRAINER if own.region("paris").trainer else argv
        settings = settings_in(Mailbox(folder / "regions" / "paris"), own)
        made = Agent(settings, folder, "http://x", SHARED, Wakeup(), argv=argv)
        made.connect = counter.connect
        made.retiring = retiring
        running.append(Running(made))
        return running[-1]

    yield make
    for one in running:
        one.agent.wakeup.stop("the test is over")
        one.ended()
