"""Training programs that are not ours: started, attached, killed, handed over, and counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from diloco_cli import Region
from diloco_cli.assemble import build_terms, resolve, settings_of
from diloco_cli.observe.events import read_events
from diloco_cli.region import NumpyWeights
from diloco_cli.server.recovery.verify import replay
from diloco_cli.worker.mailbox import Mailbox
from tests import ROOT
from tests.region.linear_loop import first

pytestmark = pytest.mark.live

NAMES = ("paris", "oslo", "rome", "lima")
LOOP = [sys.executable, "-m", "tests.region.linear_loop"]
ATTACH = """
import sys
from diloco_cli import Region
from tests.region import linear_loop
Region.here = lambda: Region(sys.argv[1], "oslo", sys.argv[2])
join = Region.join
Region.join = lambda self, *args, **named: join(self, *args, **named, agent="start")
linear_loop.main("sleep=0.01")
"""


@pytest.fixture
def linear(live, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = Region.describe(NumpyWeights(first()), tmp_path / "init.safetensors")

    def begin(*trainers: dict, **changes):
        regions = [
            {"name": name, "pace": 2000, "trainer": trainer}
            for name, trainer in zip(NAMES, trainers, strict=False)
        ]
        model = {"kind": "tensors", "file": str(file)}
        return live(*regions, model=model, sync={"fragments": 2, "every": 16}, **changes)

    return begin


def gave_up(run) -> bool:
    notes = [str(e.fields.get("why", "")) for e in read_events(run.folder / "events.jsonl")]
    named = ("has the value nan", "the loss was not finite")
    return any(words in note for note in notes for words in named)


def holder(run, region: str = "paris") -> int | None:
    return Mailbox(run.folder / "regions" / region).trainer_lock_holder()


def test_programs_of_others_are_kept_running_and_every_token_counts(linear, tmp_path):
    happened = tmp_path / "once"
    happened.mkdir()
    # At its eighth step the first one's weights are no numbers, once.
    command = [*LOOP, f"once={happened}", "sleep=0.01", "rubbish"]
    run = linear({"command": command}, {"attach": True})
    server, agent = run.serve(), run.work("paris")
    attached = subprocess.Popen([sys.executable, "-c", ATTACH, str(run.file), str(run.folder)])
    try:
        run.wait_for(lambda: all(run.progress(n).step > 40 for n in ("paris", "oslo")), server)
        run.wait_for(lambda: all(r.share for r in run.status().regions), server, agent)
        # Rubbish is named, not sent: by the frame that has it or by the losses, whichever is first.
        run.wait_for(lambda: gave_up(run), server, agent)

        # The program is killed: another goes on from what is durable.
        first_one = holder(run)
        assert first_one is not None
        psutil.Process(first_one).kill()
        run.wait_for(lambda: run.region("paris").restarts == 1, server, agent)
        run.wait_for(lambda: holder(run) not in (None, first_one), server, agent)
        step = run.progress("paris").step
        run.wait_for(lambda: run.progress("paris").step > step, server, agent)

        # Its agent is killed: the program trains on, and the next agent takes it over.
        second = holder(run)
        os.kill(agent.pid, signal.SIGKILL)
        run.exit_code(agent)
        step = run.progress("paris").step
        run.wait_for(lambda: run.progress("paris").step > step + 10, server)
        agent = run.work("paris")

        def adopted() -> list[int]:
            log = read_events(run.folder / "events.jsonl")
            found = [event.fields for event in log if event.kind == "trainer-adopted"]
            return [each["pid"] for each in found if each["region"] == "paris"]

        run.wait_for(lambda: adopted() == [second], server, agent)
        step = run.progress("paris").step
        run.wait_for(lambda: run.progress("paris").step > step + 10, server, agent)
        assert holder(run) == second

        # Whoever started first leaves first, and takes its worker with it.
        attached.send_signal(signal.SIGTERM)
        assert attached.wait(60) == 0
        run.wait_for(lambda: not run.region("oslo").alive, server)
    finally:
        attached.kill()
        attached.wait()
    agent.ask()
    assert run.exit_code(agent) == 0 and holder(run) is None
    server.ask()
    assert run.exit_code(server) == 0
    assert run.summary()["balanced"], run.summary()
    settings = settings_of(run.spec, resolve(run.spec))
    found = replay(settings, run.folder / "server", build=build_terms)
    assert found.lines and all(line.made for line in found.lines)


def test_a_program_that_cannot_train_costs_the_run_nothing(linear, tmp_path):
    run = linear(
        {"command": [*LOOP, "exit"]},
        {"command": [*LOOP, "shape"]},
        {"command": ["no-such-program"]},
        {"command": [*LOOP, f"once={tmp_path}", "hang"], "patience": "4s"},
    )
    server = run.serve()
    dies, wrong, none, hangs = (run.work(name) for name in NAMES)
    # One that ends is started again and again; what it is like is in the status.
    run.wait_for(lambda: (run.region("paris").restarts or 0) >= 2, server, dies)
    run.wait_for(lambda: "exit code 7" in run.region("paris").why, server, dies)
    # One whose weights are others would only be wrong again.
    assert run.exit_code(wrong) == 2
    words = str(wrong.last_words())
    assert "w has the shape [3, 6], the model's [6, 3]" in words and "hint: Map names" in words
    assert run.exit_code(none) == 2
    missing = "cannot be started: No such file or directory: 'no-such-program'"
    assert missing in str(none.last_words())
    # One that hangs is killed, and the next goes on.
    log = run.folder / "events.jsonl"
    died = "killed by SIGKILL: it made no step for 4s"
    run.wait_for(lambda: any(e.fields.get("why") == died for e in read_events(log)), server, hangs)
    step = run.progress("lima").step
    run.wait_for(lambda: run.progress("lima").step > step + 10, server, hangs)
    for agent in (dies, hangs):
        agent.ask()
    assert [run.exit_code(agent) for agent in (dies, hangs)] == [0, 0]
    server.ask()
    assert run.exit_code(server) == 0
    assert run.summary()["balanced"], run.summary()
