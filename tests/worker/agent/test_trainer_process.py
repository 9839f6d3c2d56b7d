"""The trainer as a process: killed at any moment, it goes on from what is durable."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from diloco_cli.assemble import spelled_out
from diloco_cli.core.lanes import Cursor
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.messages import TrainerProgress
from diloco_cli.worker.agent.trainer_process import take_over
from diloco_cli.worker.handover import HandoverRecord
from diloco_cli.worker.trainer.checkpoints import checkpoint
from tests.worker.trainer.harness import Stage, tiny_spec


class Process:
    """A trainer in a process of its own, which wakes us when it has something to say."""

    def __init__(self, stage: Stage, alone: float) -> None:
        spec_file = write_resolved(stage.spec, stage.folder)
        argv = [sys.executable, "-m", "diloco_cli", "trainer", str(spec_file)]
        self.stage = stage
        self.child = subprocess.Popen(
            [*argv, "--region", "paris", "--dir", str(stage.folder), "--alone", str(alone)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def wake_up(self) -> None:
        assert self.child.stdin
        self.child.stdin.write(b"mail\n")

    def progress(self) -> TrainerProgress:
        return self.stage.mailbox.progress() or TrainerProgress.none(2)

    def wait_for(self, happened, seconds: float = 90.0) -> None:
        assert self.child.stdout
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline and self.child.poll() is None
            os.read(self.child.stdout.fileno(), 4096)  # It wakes us every few steps.

    def end(self) -> int:
        assert self.child.stdin
        self.child.stdin.close()
        return self.child.wait(60)

    def close(self) -> None:
        assert self.child.stdin and self.child.stdout
        self.child.kill()
        self.child.wait()
        self.child.stdin.close()
        self.child.stdout.close()


@pytest.fixture
def start():
    started = []

    def begin(stage: Stage, alone: float = 0.0) -> Process:
        started.append(Process(stage, alone))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def windows(cursor: Cursor) -> int:
    """How many have been read, all lanes together."""
    return sum(at.position for at in cursor.lanes.values())


def test_a_trainer_killed_in_mid_run_goes_on_and_every_merged_token_counts_once(start, tmp_path):
    stage = Stage(tmp_path, tiny_spec(tmp_path))
    killed = start(stage)
    killed.wait_for(lambda: killed.progress().step >= 5)
    stage.tell({0: 0})
    killed.wake_up()
    killed.wait_for(lambda: stage.mailbox.frame(0) is not None)
    killed.child.send_signal(signal.SIGKILL)
    assert killed.end() == -signal.SIGKILL
    frame = stage.frame(0).header
    stage.merge(0)

    revived = start(stage)
    revived.wait_for(lambda: revived.progress().tokens.applied[0] == frame.tokens)
    step = revived.progress().step
    assert step >= frame.clock
    revived.wait_for(lambda: revived.progress().step > step)
    assert revived.end() == 0, "the end of its input is a reason to leave in order"

    saved = checkpoint.load(stage.mailbox.checkpoint)
    assert saved.books[0]["totals"]["applied"] == frame.tokens
    assert windows(saved.cursor) > windows(Cursor.of(frame.cursor)) > 0
    last = revived.progress()
    assert last.why == "stopped: the agent is gone" and not last.training
    for number in range(2):
        tokens = {fate: values[number] for fate, values in last.tokens}
        assert tokens["trained"] == tokens["applied"] + tokens["pending"] > 0


def test_whoever_takes_a_trainer_over_in_time_is_its_agent(start, tmp_path):
    stage = Stage(tmp_path, tiny_spec(tmp_path))
    process = start(stage, alone=60.0)
    process.wait_for(lambda: process.progress().step >= 5)
    argv, identity = [str(one) for one in process.child.args], stage.mailbox.identity()
    assert process.child.stdin and identity
    process.child.stdin.close()
    record = HandoverRecord.of(argv, spelled_out(stage.spec), "paris", identity)
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    ended = threading.Event()

    log = tmp_path / "log"
    trainer = take_over(stage.mailbox, record, log, on_output=heard.put, on_end=ended.set)
    assert trainer and trainer.pid == process.child.pid and trainer.code is None
    while b"progress" not in heard.get(timeout=60):
        pass  # It speaks to its new agent, and goes on.
    step = process.progress().step
    while process.progress().step <= step + 20:
        heard.get(timeout=60)
    # It hears its new agent: mail is answered at the next step, not at the next look.
    stage.tell({0: 0})
    trainer.wake()
    while stage.mailbox.frame(0) is None:
        heard.get(timeout=60)
    trainer.stop()
    assert process.child.wait(60) == 0 and ended.wait(60)
    assert trainer.code == 0 and stage.mailbox.trainer_lock_holder() is None


@pytest.mark.parametrize("differs", ["run", "settings"])
def test_a_trainer_of_another_run_or_other_settings_is_sent_away(start, tmp_path, differs):
    stage = Stage(tmp_path, tiny_spec(tmp_path))
    process = start(stage, alone=60.0)
    process.wait_for(lambda: process.progress().step >= 5)
    argv, identity = [str(one) for one in process.child.args], stage.mailbox.identity()
    assert process.child.stdin and identity
    process.child.stdin.close()
    spec = spelled_out(stage.spec)
    if differs == "run":
        identity = replace(identity, run="run-2")
    else:
        spec = spec.model_copy(update={"sync": spec.sync.model_copy(update={"adopt": "replace"})})
    record = HandoverRecord.of(argv, spec, "paris", identity)
    quiet = {"on_output": lambda words: None, "on_end": lambda: None}
    assert take_over(stage.mailbox, record, tmp_path / "log", **quiet) is None
    assert process.child.wait(60) == 0
    assert process.progress().why == "stopped: told to stop by SIGTERM"


def test_sigterm_means_checkpoint_and_leave_however_often_it_comes(start, tmp_path):
    stage = Stage(tmp_path, tiny_spec(tmp_path))
    process = start(stage)
    process.wait_for(lambda: process.progress().step >= 5)
    # A closed terminal and whoever signals the whole group reach us beside the agent.
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        process.child.send_signal(each)
    assert process.child.wait(60) == 0
    assert checkpoint.load(stage.mailbox.checkpoint).clock == process.progress().step >= 5


def test_a_paced_trainer_answers_mail_and_leaves_between_two_steps(start, tmp_path):
    calm = tiny_spec(tmp_path, every=2).model_dump(exclude_unset=True)
    paced = RunSpec.model_validate({**calm, "chaos": {"step_seconds": 1000.0}})
    stage = Stage(tmp_path, paced)
    process = start(stage)
    process.wait_for(lambda: process.progress().step >= 1)
    stage.tell({0: 0})
    process.wake_up()
    process.wait_for(lambda: stage.mailbox.frame(0) is not None)
    assert stage.frame(0).header.clock == 1
    process.child.send_signal(signal.SIGTERM)
    assert process.child.wait(60) == 0 and process.progress().step == 1
