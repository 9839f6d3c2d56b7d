"""A training program that is not ours: what a worker that was killed leaves of it, and to whom."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.observe.events import EventLog, read_events
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.messages import TrainerProgress
from diloco_cli.worker.agent import trainer_supervisor
from diloco_cli.worker.agent.command_trainer import CommandTrainer
from diloco_cli.worker.agent.trainer_supervisor import TrainerSupervisor
from diloco_cli.worker.handover import OWN_TRAINER, HandoverRecord
from diloco_cli.worker.mailbox import TRAINER_LOCK, FolderOwner, Mailbox
from tests.worker.fake_server import OWN, RUN, settings_in

AGENT = """
import sys
from pathlib import Path
from diloco_cli.worker.agent.command_trainer import CommandTrainer
from diloco_cli.worker.handover import HandoverRecord
from diloco_cli.worker.mailbox import Mailbox
folder, *command = sys.argv[1:]
nothing = lambda *_: None
trainer = CommandTrainer(command, Mailbox(Path(folder)), HandoverRecord((), "", "run", "owner"),
                         Path(folder) / "log", environment={}, on_output=nothing, on_end=nothing)
sys.stdin.read()
"""
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from diloco_cli.system.locks import FileLock
said, heard, lock = sys.argv[1:4]
if lock:
    FileLock(Path(lock)).acquire()
{child}
with open(said, "w") as pipe:
    print(os.getpid(), child, file=pipe)
open(heard).read()
"""
"""Says who it is and has started; ends when it is told to, and leaves what it has started."""
STARTED = """
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]).pid
"""
UNDER_TIMEOUT = """
words = ["timeout", "1h", "sh", "-c", "echo $$; exec sleep 600"]
child = int(subprocess.Popen(words, stdout=subprocess.PIPE).stdout.readline())
"""
FORKED = """
child = os.fork()
if not child:
    __import__("signal").pause()
"""


@pytest.fixture
def left_behind(tmp_path):
    """Handles of a program and of what it has started, whose worker was killed."""
    mailbox = Mailbox(tmp_path / "paris")
    mailbox.prepare()
    said, heard = tmp_path / "said", tmp_path / "heard"
    handles: list[int] = []

    def begin(*, joined: bool, child: str = STARTED) -> tuple[list[int], Path]:
        for fifo in (said, heard):
            os.mkfifo(fifo)
        lock = str(mailbox.folder / TRAINER_LOCK) if joined else ""
        program = [sys.executable, "-c", PROGRAM.format(child=child)]
        program += [str(said), str(heard), lock]
        words = [sys.executable, "-c", AGENT, str(mailbox.folder), *program]
        with subprocess.Popen(words, stdin=subprocess.PIPE) as agent:
            pids = said.read_text().split()  # Until the program has opened it, too.
            handles.extend(os.pidfd_open(int(pid)) for pid in pids)
            agent.send_signal(signal.SIGKILL)
        return handles, heard

    yield begin
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], 60)[0])


def test_a_program_that_had_not_joined_ends_with_its_worker_and_all_it_started(left_behind):
    (program, started), _ = left_behind(joined=False)
    assert ended(program) and ended(started)


def test_a_program_that_leads_a_group_of_its_own_ends_with_its_worker_too(left_behind):
    """As GNU `timeout` does, and whoever else calls setpgid."""
    (program, started), _ = left_behind(joined=False, child=f"os.setpgid(0, 0)\n{STARTED}")
    assert ended(program) and ended(started)


@pytest.fixture
def under_timeout(tmp_path, request):
    """A program that GNU `timeout` runs in a group of its own: its trainer, and a handle of it."""
    around = getattr(request, "param", [])
    mailbox, said = Mailbox(tmp_path / "paris"), tmp_path / "said"
    mailbox.prepare()
    os.mkfifo(said)
    trainer = CommandTrainer(
        [*around, "timeout", "1h", "sh", "-c", f"echo $$ > {said}; exec sleep 600"],
        mailbox,
        HandoverRecord((), "", "run", "owner"),
        tmp_path / "log",
        environment={},
        on_output=lambda _: None,
        on_end=lambda: None,
    )
    sleeping = os.pidfd_open(int(said.read_text()))
    yield trainer, sleeping
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(sleeping, signal.SIGKILL)
    os.close(sleeping)
    trainer.kill()


@pytest.mark.parametrize(
    "under_timeout", [[], ["sh", "-c", '"$0" "$@"; true']], indirect=True, ids=["itself", "script"]
)
def test_a_program_in_a_group_of_its_own_is_killed_with_all_it_started(under_timeout):
    trainer, sleeping = under_timeout
    trainer.kill()
    assert ended(sleeping)
    trainer.wait(60)
    assert trainer.code == -signal.SIGKILL


def test_what_a_script_runs_in_a_group_of_its_own_ends_with_the_worker_too(left_behind):
    (program, started), _ = left_behind(joined=False, child=UNDER_TIMEOUT)
    assert ended(program) and ended(started)


def test_what_a_killed_launcher_leaves_in_a_group_of_its_own_is_ended(under_timeout):
    trainer, sleeping = under_timeout
    os.kill(trainer.pid, signal.SIGKILL)
    assert ended(sleeping)


def test_what_holds_the_lock_of_a_program_that_was_killed_later_is_ended_as_well(left_behind):
    """A process that was forked has the lock, too; the next trainer would wait for it."""
    (program, started), _ = left_behind(joined=True, child=FORKED)
    signal.pidfd_send_signal(program, signal.SIGKILL)
    assert ended(program) and ended(started)


def test_of_a_program_that_had_joined_nothing_is_left_when_it_has_ended(left_behind):
    (program, started), heard = left_behind(joined=True)
    heard.write_text("")  # Now it ends, by itself.
    assert ended(program) and ended(started)


HANGING = """
import json, os, signal, sys
from pathlib import Path
from diloco_cli.system.locks import FileLock
from diloco_cli.worker.handover import HandoverRecord
from diloco_cli.worker.mailbox import TRAINER_LOCK, Mailbox
mailbox, record = Mailbox(Path(sys.argv[1])), json.loads(sys.argv[2])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Whoever hangs hears of nothing.
FileLock(mailbox.folder / TRAINER_LOCK).acquire()
HandoverRecord(**{**record, "argv": tuple(record["argv"])}).write(mailbox)
ear = os.open(mailbox.trainer_fifo, os.O_RDONLY | os.O_NONBLOCK)
print("joined", flush=True)
signal.pause()
"""


@pytest.fixture
def own(tmp_path, counter) -> RunSpec:
    """The file of a region whose program hangs as well."""
    counter.high = -1
    spec = OWN.model_dump(exclude_unset=True)
    pause = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    spec["regions"][0]["trainer"] = {"command": pause, "patience": "1s"}
    return RunSpec.model_validate(spec)


def test_a_program_is_told_its_folder_so_that_it_finds_it_from_anywhere(
    agent, own, tmp_path, monkeypatch
):
    said = tmp_path / "said"
    os.mkfifo(said)
    script = 'cd / && echo "$DILOCO_FOLDER" "$1" > "$2" && exec sleep 600'
    spec = own.model_dump(exclude_unset=True)
    command = ["sh", "-c", script, "sh", "{folder}", str(said)]
    spec["regions"][0]["trainer"] = {"command": command}
    monkeypatch.chdir(tmp_path)
    agent(own=RunSpec.model_validate(spec), folder=Path("runs/tiny"))
    assert said.read_text().split() == [str(tmp_path / "runs" / "tiny")] * 2


@pytest.fixture
def hanging(tmp_path, own):
    """A program that an earlier worker started for this run, or another, and that hangs."""
    mailbox, started = Mailbox(tmp_path / "regions" / "paris"), []
    mailbox.prepare()
    owner = FolderOwner("me", 1, RUN, region="paris")
    mailbox.write_identity(owner)
    stepping = {"training": True, "step": 5}
    mailbox.write_progress(TrainerProgress.none(2).model_copy(update=stepping))

    def start(run: str = RUN) -> subprocess.Popen:
        record = asdict(HandoverRecord.of(OWN_TRAINER, own, "paris", replace(owner, run=run)))
        words = [sys.executable, "-c", HANGING, str(mailbox.folder), json.dumps(record)]
        program = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(program)
        assert program.stdout and program.stdout.readline() == "joined\n"
        return program

    yield start
    for program in started:
        program.kill()
        program.communicate()


def test_a_program_that_was_taken_over_is_killed_when_it_makes_no_step_for_its_patience(
    agent, counter, own, hanging, tmp_path
):
    program = hanging()
    agent(own=own)
    assert program.wait(60) == -signal.SIGKILL
    log = tmp_path / "events.jsonl"
    counter.wait_for(lambda: "trainer-started" in [event.kind for event in read_events(log)])
    # The next one hangs as well, and may have been killed meanwhile: the first events count.
    happened = {event.kind: event.fields for event in reversed(list(read_events(log)))}
    assert happened["trainer-adopted"]["pid"] == happened["trainer-died"]["pid"] == program.pid
    assert "it made no step for 1s" in happened["trainer-died"]["why"]


@pytest.fixture
def supervisor(own, tmp_path) -> Iterator[TrainerSupervisor]:
    """One that looks at a folder before it has joined."""
    settings = settings_in(Mailbox(tmp_path / "regions" / "paris"), own)
    events = EventLog(tmp_path / "events.jsonl", "paris")
    how: dict[str, Any] = {"argv": OWN_TRAINER, "say_goodbye": lambda _: None}
    supervisor = TrainerSupervisor(settings, tmp_path, events, Wakeup(), **how)
    yield supervisor
    supervisor.kill()
    if supervisor.trainer:
        supervisor.trainer.wait(60)


def test_a_trainer_that_was_sent_away_and_joined_again_as_ours_stays(
    hanging, supervisor, own, monkeypatch, log_lines
):
    monkeypatch.setattr(trainer_supervisor, "STOP_SECONDS", -1)
    program = hanging(run="another")
    supervisor.adopt()
    mailbox, before = supervisor.mailbox, supervisor.trainer
    ours = HandoverRecord.of(OWN_TRAINER, own, "paris", mailbox.identity())
    mailbox.trainer_file.write_text(json.dumps({"pid": program.pid, **asdict(ours)}))
    supervisor.adopt()
    assert before is None and supervisor.trainer and supervisor.trainer.pid == program.pid
    supervisor.end_who_stays()
    assert not any("it stayed" in line for line in log_lines)


def test_a_folder_is_not_vacated_before_who_was_sent_away_is_gone(hanging, supervisor, monkeypatch):
    monkeypatch.setattr(trainer_supervisor, "STOP_SECONDS", 0.2)
    program = hanging(run="another")
    supervisor.adopt()
    supervisor.vacate()
    assert program.wait(60) == -signal.SIGKILL


def test_a_stop_while_a_trainer_is_still_leaving_leaves_its_folder_alone(
    agent, own, hanging, counter, tmp_path
):
    counter.run, counter.was = "run-2", (RUN,)
    program = hanging(run="another")
    worker = agent(own=own)
    counter.wait_for(lambda: "run" in counter.asked)
    worker.agent.wakeup.stop("a test")
    assert worker.ended() == 0 and program.poll() is None
    owner = Mailbox(tmp_path / "regions" / "paris").identity()
    assert owner and owner.run == RUN


def test_a_trainer_that_was_sent_away_and_does_not_go_is_killed(
    agent, own, hanging, log_lines, monkeypatch
):
    # The next one waits for it a little longer than that, and then the region is out for good.
    monkeypatch.setattr(trainer_supervisor, "STOP_SECONDS", 0.2)
    program = hanging(run="another")
    agent(own=own)
    assert program.wait(60) == -signal.SIGKILL
    said = f"the trainer {program.pid} of another run or other settings is killed: it stayed"
    assert said in log_lines
