"""An agent keeps its trainer running, and neither outlives the other for long."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from diloco_cli.errors import SpecError, StoreError
from diloco_cli.net.options import Options
from diloco_cli.observe.events import read_events
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.messages import FragmentProgress, TrainerProgress
from diloco_cli.worker.agent.agent import Agent
from diloco_cli.worker.agent.trainer_process import pause_before
from diloco_cli.worker.mailbox import Mailbox
from tests.worker.fake_server import SHARED, settings_in


def test_its_uploads_keep_to_the_rate_limit_of_the_spec(tmp_path):
    settings, options = settings_in(Mailbox(tmp_path / "paris")), Options(rate_limit=8e6)
    agent = Agent(settings, tmp_path, "http://x", SHARED, Wakeup(), argv=[], options=options)
    with agent.connect(agent.options) as client:
        throttle = client.lane(1).throttle
        assert throttle is not None and throttle.bytes_per_second == 1e6
        assert throttle is client.lane(0).throttle, "all connections share one"


def is_up(counter):
    """Says whether the trainer was heard: only then the agent has nothing to say for it."""
    return any(beat.why == "" for beat in counter.heartbeats)


def restarts(counter):
    return max((beat.restarts for beat in counter.heartbeats), default=0)


def test_the_trainer_starts_when_all_images_are_here(agent, counter, tmp_path):
    running = agent(first="pass")
    counter.wait_for(lambda: running.agent.supervisor.trainer is not None)
    mailbox = running.agent.mailbox
    assert [mailbox.image_version(number) for number in range(2)] == [0, 0]


def test_a_trainer_that_dies_is_started_again_and_counted(agent, counter, log_lines, tmp_path):
    agent(first="sys.exit(1)")
    counter.wait_for(lambda: restarts(counter) >= 2)
    assert "the trainer ended (exit code 1), restarting at once" in log_lines
    counter.wait_for(lambda: len(started(tmp_path)) >= 3)
    died = [
        event.fields["pid"]
        for event in read_events(tmp_path / "events.jsonl")
        if event.kind == "trainer-died"
    ]
    assert died[:2] == [event.fields["pid"] for event in started(tmp_path)][:2]


def started(folder):
    return [e for e in read_events(folder / "events.jsonl") if e.kind == "trainer-started"]


def test_only_starts_in_a_row_that_came_to_nothing_make_the_next_one_wait(agent, counter, tmp_path):
    report = tmp_path / "regions" / "paris" / "progress.json"
    progress = TrainerProgress.none(2).model_copy(update={"training": True, "step": 1})
    training = f"open({str(report)!r}, 'w').write({progress.model_dump_json()!r})"
    running = agent(first=training, on_mail="pass")
    for count in range(1, 5):
        counter.wait_for(lambda count=count: len(started(tmp_path)) == count and is_up(counter))
        counter.heartbeats.clear()
        os.kill(started(tmp_path)[-1].fields["pid"], signal.SIGKILL)
    assert running.agent.supervisor._failures <= 1
    assert [pause_before(failures) for failures in range(1, 5)] == [0.0, 0.5, 1.0, 2.0]
    assert pause_before(100) == 30.0


def test_a_worker_follows_a_server_that_began_anew_under_it(agent, counter, log_lines):
    running = agent()
    mailbox = running.agent.mailbox
    counter.wait_for(lambda: is_up(counter))
    owner, trainer = mailbox.identity().owner, running.agent.supervisor.trainer
    mailbox.post(0, b"never sent")
    with counter.change:
        counter.run, counter.was, counter.high = "run-2", ("run-1",), -1
    counter.wait_for(lambda: mailbox.identity().run == "run-2")
    counter.heartbeats.clear()
    counter.wait_for(lambda: is_up(counter))
    assert mailbox.identity().owner != owner
    assert mailbox.frame(0) is None and running.agent.supervisor.restarts == 0
    assert trainer.code is not None, "its trainer had the old run's weights"
    assert "run run-1 trained nothing; beginning anew in run run-2" in log_lines


def test_a_server_of_another_run_ends_the_worker(agent, counter):
    running = agent()
    counter.wait_for(lambda: is_up(counter))
    with counter.change:
        counter.run = "run-2"
    outcome = running.ended()
    assert isinstance(outcome, SpecError) and "run-2" in outcome.message


@pytest.mark.parametrize("code, kind", [(2, SpecError), (5, StoreError)])
def test_a_trainer_that_cannot_be_mended_ends_the_agent_with_its_words(agent, code, kind):
    words = r"error: the sky is falling\nhint: hold it up\n"
    running = agent(first=f'os.write(2, b"{words}"); sys.exit({code})')
    outcome = running.ended()
    assert isinstance(outcome, kind)
    assert (outcome.message, outcome.hint) == ("the sky is falling", "hold it up")


def test_a_region_that_is_out_for_good_says_goodbye_with_the_reason(agent, counter):
    running = agent(first="sys.stderr.write('error: no data here.\\n'); sys.exit(2)")
    assert isinstance(running.ended(), SpecError)
    last = counter.heartbeats[-1]
    assert last.stopping and last.why == "no data here."


def test_it_says_when_training_begins_and_then_every_so_often(
    agent, counter, log_lines, tmp_path, monkeypatch
):
    monkeypatch.setattr("diloco_cli.worker.agent.trainer_supervisor.TELL_SECONDS", 0.0)
    fragments = tuple(FragmentProgress(version=version, steps=1.0) for version in (3, 4))
    averages = {"loss": 2.5, "tokens_per_second": 99.6}
    told = {"step": 7, "training": True, "why": "training", "fragments": fragments, **averages}
    progress = TrainerProgress.none(2).model_copy(update=told)
    report = tmp_path / "regions" / "paris" / "progress.json"
    agent(first=f"open({str(report)!r}, 'w').write({progress.model_dump_json()!r})")
    line = "step 7, loss 2.500, 100 tokens/s, versions [3, 4], training"
    counter.wait_for(lambda: line in log_lines)
    assert log_lines.index(f"training begins: {line}") < log_lines.index(line)


def test_mail_wakes_the_trainer(agent, counter, tmp_path):
    heard = tmp_path / "heard"
    agent(on_mail=f"open({str(heard)!r}, 'ab').write(data)")
    counter.wait_for(lambda: is_up(counter))
    counter.publish(0)
    counter.wait_for(heard.exists)


def test_told_to_stop_it_waits_for_its_trainer_and_says_goodbye(agent, counter, tmp_path):
    left = tmp_path / "left"
    first = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: "
        f"(open({str(left)!r}, 'w').close(), sys.exit(0)))"
    )
    running = agent(first=first)
    counter.wait_for(lambda: is_up(counter))
    running.agent.wakeup.stop("told to stop by SIGTERM")
    assert running.ended() == 0 and left.exists()
    assert counter.heartbeats[-1].stopping


def test_a_frame_that_cannot_be_read_does_not_keep_it_from_saying_goodbye(agent, counter):
    running = agent()
    counter.wait_for(lambda: is_up(counter))
    running.agent.mailbox.post(0, b"no frame")
    running.agent.wakeup.stop("told to stop by SIGTERM")
    assert running.ended() == 0
    assert counter.heartbeats[-1].stopping


def test_a_stop_of_the_whole_run_reaches_the_trainer(agent, counter):
    running = agent()
    counter.wait_for(lambda: running.agent.supervisor.trainer is not None)
    counter.tell(stop=True)
    assert running.ended() == 0 and counter.heartbeats[-1].stopping


def test_a_finished_run_is_left_when_the_trainer_has_ended_by_itself(agent, counter):
    running = agent(on_mail="sys.exit(0)")
    counter.wait_for(lambda: is_up(counter))
    counter.tell(finished=True)
    assert running.ended() == 0 and running.agent.supervisor.restarts == 0


def test_a_finished_run_is_left_when_the_trainer_only_ends(agent, counter):
    running = agent(first="sys.exit(1)")
    counter.wait_for(lambda: restarts(counter) >= 1)
    counter.tell(finished=True)
    assert running.ended() == 0 and counter.heartbeats[-1].stopping


def test_a_worker_that_comes_when_the_run_is_finished_is_told_so(agent, counter, log_lines):
    counter.state = "finished"
    running = agent()
    assert running.ended() == 0 and running.agent.supervisor.trainer is None
    assert log_lines[-1] == "the run is finished: there is nothing left to train"
    assert "join" not in counter.asked


def test_a_fenced_agent_stops_its_trainer_and_joins_again(agent, counter):
    epochs = iter([1, 2])
    counter.join = lambda owner, boot: next(epochs)
    running = agent()
    counter.wait_for(lambda: running.agent.supervisor.trainer is not None)
    first = running.agent.supervisor.trainer
    counter.fenced = True
    counter.tell()
    counter.wait_for(lambda: counter.asked.count("join") == 2)
    assert first.code is not None
    counter.fenced = False
    counter.wait_for(lambda: running.agent.supervisor.trainer not in (None, first))
    counter.wait_for(lambda: counter.heartbeats[-1].epoch == 2)


CHILD = "import os, sys; sys.stdout.write('x'); sys.stdout.flush(); os.read(0, 1)"
PARENT = """
import sys, threading
from pathlib import Path
from diloco_cli.worker.agent.trainer_process import TrainerProcess
up = threading.Event()
trainer = TrainerProcess([sys.executable, "-S", "-c", sys.argv[1]], Path(sys.argv[2]),
                         on_output=lambda _: up.set(), on_end=lambda: None)
up.wait(60)
print(trainer.pid, flush=True)
sys.stdin.read()
"""


def test_a_trainer_does_not_outlive_an_agent_that_was_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout
        handle = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    assert select.select([handle], [], [], 20)[0], "the trainer is still there"
    os.close(handle)


def test_no_part_of_an_agent_loads_jax():
    probe = "import sys, diloco_cli.worker.agent.agent; print(*{'jax', 'flax'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).split() == []


def test_a_trainer_with_long_last_words_is_started_again(agent, counter):
    agent(first="sys.stderr.write('error: ' + 'x' * 5000); sys.exit(1)")
    counter.wait_for(lambda: restarts(counter) >= 1)


def test_the_log_of_a_trainer_is_kept_small_while_it_trains(agent, counter, tmp_path):
    logs = tmp_path / "logs"
    agent(first='os.write(2, b"x" * (17 << 20))')
    counter.wait_for((logs / "paris.trainer.log.1").exists)
    counter.wait_for(lambda: (logs / "paris.trainer.log").stat().st_size == 0)


def test_waiting_for_images_costs_nothing(agent, counter, monkeypatch):
    turns = []
    pause = Wakeup.pause
    monkeypatch.setattr(Wakeup, "pause", lambda self, s: (turns.append(s), pause(self, s)))
    running = agent()
    counter.wait_for(lambda: running.agent.supervisor.trainer is not None)
    assert all(seconds > 0 for seconds in turns)
