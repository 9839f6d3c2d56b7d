"""A region that is removed leaves and says what is lost; one that leaves for good drains first."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from diloco_cli.errors import LinkError
from diloco_cli.net.client import Dismissed
from diloco_cli.net.refusal import refusal
from diloco_cli.wire.error_bodies import error_body
from diloco_cli.wire.frame import Header, pack
from diloco_cli.wire.messages import (
    Answer,
    TrainerProgress,
)
from diloco_cli.worker.mailbox import Mailbox
from tests.worker.fake_server import LAYOUT, RUN, SIZE

ORDERLY = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"


def progress(pending: float, *, drained: bool = False) -> TrainerProgress:
    none = TrainerProgress.none(2)
    tokens = none.tokens.model_copy(
        update={"trained": (pending,) * 2, "pending": (pending, 3 * pending)}
    )
    return none.model_copy(update={"tokens": tokens, "drained": drained, "training": True})


@pytest.fixture
def mailbox(tmp_path) -> Mailbox:
    made = Mailbox(tmp_path / "regions" / "paris")
    made.prepare()
    return made


def is_up(counter):
    return bool(counter.heartbeats) and counter.heartbeats[-1].training


def removed(owner, boot):
    raise Dismissed("paris was removed by admin:eve: sold.", hint="--add-region paris")


def test_a_removed_region_stops_training_and_says_what_is_discarded(agent, counter, mailbox):
    mailbox.write_progress(progress(50.0))
    running = agent(first=ORDERLY)
    counter.wait_for(lambda: is_up(counter))
    trainer = running.agent.supervisor.trainer
    counter.join, counter.fenced = removed, True
    counter.tell()
    outcome = running.ended()
    assert isinstance(outcome, Dismissed) and outcome.exit_code == 2
    assert outcome.message.startswith("paris was removed by admin:eve: sold. 100 tokens")
    assert outcome.hint == "--add-region paris" and trainer.code is not None
    # Added again, the same folder is let in again.
    counter.join, counter.fenced = lambda owner, boot: 2, False
    agent(first=ORDERLY)
    counter.wait_for(lambda: counter.heartbeats[-1].epoch == 2)


def test_what_the_server_says_of_a_removed_region_is_read_as_such():
    body = error_body("retired", "paris was removed.", "Ask.")
    assert isinstance(refusal("http://x", 403, json.dumps(body).encode()), Dismissed)


def test_a_region_that_leaves_has_its_trainer_drain_and_is_retired_then(agent, counter, mailbox):
    mailbox.write_progress(progress(50.0))
    running = agent(first=ORDERLY, retiring=True)
    counter.wait_for(lambda: is_up(counter))
    told = mailbox.calls()
    assert told and told.end and not running.agent.supervisor._sync.news.end
    assert counter.heartbeats[-1].retiring and not counter.heartbeats[-1].stopping
    mailbox.write_progress(progress(0.0, drained=True))
    assert running.ended() == 0
    assert counter.heartbeats[-1].retiring and counter.heartbeats[-1].stopping


def test_it_does_not_go_while_a_frame_has_no_answer(agent, counter, mailbox, log_lines):
    header = Header(
        kind="contribution",
        run=RUN,
        layout=LAYOUT,
        fragment=0,
        size=SIZE,
        codec={"kind": "fp32"},
        base=0,
        version=0,
        region="paris",
        clock=6,
        tokens=8.0,
        steps=1.0,
    )
    mailbox.post(0, pack(header, np.ones(SIZE, np.float32)))
    mailbox.write_progress(progress(0.0, drained=True))
    answers = []
    seen = threading.Event()

    def decide(frame):
        seen.wait(20)
        answers.append(frame)
        return Answer(fate="merged")

    counter.decide = decide
    running = agent(first=ORDERLY, retiring=True)
    counter.wait_for(lambda: is_up(counter))
    beats = len(counter.heartbeats)
    counter.wait_for(lambda: len(counter.heartbeats) > beats + 9)
    assert not any("leaving" in line for line in log_lines), "it waits"
    seen.set()
    assert running.ended() == 0 and len(answers) == 1
    assert counter.heartbeats[-1].retiring and counter.heartbeats[-1].stopping


def test_a_region_that_nobody_merges_goes_after_a_time(
    agent, counter, mailbox, monkeypatch, log_lines
):
    monkeypatch.setattr("diloco_cli.worker.agent.agent.LEAVE_SECONDS", 0.1)
    monkeypatch.setattr("diloco_cli.worker.agent.agent.LEAVE_LEASES", 0)
    mailbox.write_progress(progress(50.0))
    assert agent(first=ORDERLY, retiring=True).ended() == 0
    assert counter.heartbeats[-1].retiring and counter.heartbeats[-1].stopping
    assert any("it is discarded" in line for line in log_lines)


def test_stopped_on_its_way_out_it_stays_a_member(agent, counter, mailbox):
    mailbox.write_progress(progress(50.0))
    running = agent(first=ORDERLY, retiring=True)
    counter.wait_for(lambda: is_up(counter))
    running.agent.wakeup.stop("told to stop by SIGTERM")
    assert running.ended() == 0
    assert counter.heartbeats[-1].stopping and not counter.heartbeats[-1].retiring


def test_a_server_that_does_not_hear_of_it_is_an_error(agent, counter, mailbox):
    mailbox.write_progress(progress(50.0))
    running = agent(first=ORDERLY, retiring=True)
    counter.wait_for(lambda: is_up(counter))
    counter.away = True
    mailbox.write_progress(progress(0.0, drained=True))
    outcome = running.ended()
    assert isinstance(outcome, LinkError) and "leaves for good" in outcome.message


def test_the_key_of_a_folder_is_drawn_once_and_shown_at_every_join(agent, counter, mailbox):
    running = agent(first=ORDERLY)
    counter.wait_for(lambda: bool(counter.heartbeats))
    key = mailbox.identity().key
    assert len(key) == 32 and counter.keys == [key]
    running.agent.wakeup.stop("enough")
    running.ended()
    counter.heartbeats.clear()
    agent(first=ORDERLY)
    counter.wait_for(lambda: bool(counter.heartbeats))
    assert counter.keys == [key, key]
