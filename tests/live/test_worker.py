"""Workers beside a real server: whatever is killed, the run goes on and every token counts once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from diloco_cli.assemble import spelled_out
from diloco_cli.launch.local import LocalLauncher, LocalProcess, Role, serve_role, work_role
from diloco_cli.net.client import Server
from diloco_cli.observe.events import read_events
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.worker.adopted import end_trainer
from diloco_cli.worker.mailbox import Mailbox

pytestmark = pytest.mark.live


class Live:
    """Real processes on one folder."""

    def __init__(self, folder: Path, regions: list[dict[str, Any]], **changes: Any) -> None:
        self.folder = folder
        spec = {
            "spec": 1,
            "name": "tiny",
            "budget": {"tokens": 10**9},
            "model": {"kind": "decoder", "layers": 1, "width": 16, "heads": 2},
            "data": {"kind": "python-source", "limit": 400_000},
            "inner": {"batch": 2, "sequence": 16, "schedule": {"kind": "constant"}},
            "regions": regions,
            "sync": {"fragments": 2, "every": 32},
            "server": {"lease": 3.0},
            "evaluate": {"batches": 2, "every": 50},
            **changes,
        }
        self.spec = spelled_out(RunSpec.model_validate(spec))
        self.file = write_resolved(self.spec, folder)
        self.launcher = LocalLauncher(folder / "logs")
        self.started: list[LocalProcess] = []

    def start(self, role: Role) -> LocalProcess:
        process = self.launcher.start(role)
        self.started.append(process)
        return process

    def serve(self) -> LocalProcess:
        server = self.start(serve_role(self.file, self.folder))
        self.wait_for(lambda: self.address.get("pid") == server.pid, server)
        return server

    def work(self, region: str, folder: Path | None = None) -> LocalProcess:
        home = folder or self.folder
        return self.start(work_role(self.file, home, region, url=self.address["url"], cores=()))

    @property
    def address(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "server" / "address.json").read_text())
        return {}

    def status(self) -> dict[str, Any]:
        with Server(self.address["url"]) as server:
            return server.status()

    def region(self, name: str) -> dict[str, Any]:
        return next(one for one in self.status()["regions"] if one["name"] == name)

    def progress(self, region: str) -> dict[str, Any]:
        return Mailbox(self.folder / "regions" / region).progress() or {"step": 0}

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def trainers(self) -> list[psutil.Process]:
        """The trainers of this run, found by the run folder in their arguments."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "trainer" in words and str(self.folder) in words:
                found.append(process)
        return found

    def wait_for(
        self, happened: Callable[[], bool], *alive: LocalProcess, seconds: float = 120.0
    ) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            for process in alive:
                assert process.exit_code() is None, process.last_words()
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.05)  # Other processes have no bell for us to wait on.

    def exit_code(self, process: LocalProcess, seconds: float = 60.0) -> int:
        self.wait_for(lambda: process.exit_code() is not None, seconds=seconds)
        code = process.exit_code()
        assert code is not None
        return code


@pytest.fixture
def live(tmp_path) -> Iterator[Callable[..., Live]]:
    made: list[Live] = []

    def begin(*regions: dict[str, Any], **changes: Any) -> Live:
        made.append(Live(tmp_path / "run", list(regions), **changes))
        return made[-1]

    yield begin
    for one in made:
        one.launcher.stop(one.started, grace=0.0)
        for region in one.spec.regions:
            end_trainer(Mailbox(one.folder / "regions" / region.name))


def test_a_run_survives_the_death_of_each_of_its_processes(live):
    run = live({"name": "paris"})
    server, agent = run.serve(), run.work("paris")
    run.wait_for(lambda: run.status()["outer_steps"] >= 3, server, agent)

    # The trainer: the agent starts another, which goes on from what is durable.
    [trainer] = run.trainers()
    trainer.kill()
    run.wait_for(lambda: run.region("paris")["restarts"] == 1, server, agent)
    # What the dead one had posted may still be applied first: wait for the new one's own work.
    run.wait_for(lambda: len(run.trainers()) == 1, server, agent)
    step = run.progress("paris")["step"]
    run.wait_for(lambda: run.progress("paris")["step"] > step, server, agent)

    # The agent: its trainer trains on, and the next agent takes it over. No step is lost.
    [trainer] = run.trainers()
    os.kill(agent.pid, signal.SIGKILL)
    run.exit_code(agent)
    step = run.progress("paris")["step"]
    run.wait_for(lambda: run.progress("paris")["step"] > step + 50, server)
    agent = run.work("paris")
    applied = run.status()["tokens"]["applied"]
    run.wait_for(lambda: run.status()["tokens"]["applied"] > applied, server, agent)
    assert [one.pid for one in run.trainers()] == [trainer.pid]
    assert run.region("paris")["training"]
    log = list(read_events(run.folder / "events.jsonl"))
    assert [e.fields["pid"] for e in log if e.kind == "trainer-adopted"] == [trainer.pid]
    assert [e.kind for e in log].count("first-step") == 2, "only the one that was killed began anew"

    # The server: training goes on without it, and what was trained meanwhile is merged.
    server.kill()
    step = run.progress("paris")["step"]
    run.wait_for(lambda: run.progress("paris")["step"] > step + 50, agent)
    server = run.serve()
    assert [one.pid for one in run.trainers()] == [trainer.pid]
    outer_steps = run.status()["outer_steps"]
    run.wait_for(lambda: run.status()["outer_steps"] >= outer_steps + 3, server, agent)
    events = [e.kind for e in read_events(run.folder / "events.jsonl") if e.process == "paris"]
    assert "link-lost" in events and "link-back" in events

    # And a stop in good order: everything posted is handed over, nobody is left.
    agent.ask()
    assert run.exit_code(agent) == 0 and run.trainers() == []
    run.wait_for(lambda: not run.region("paris")["alive"], server)
    server.ask()
    assert run.exit_code(server) == 0
    assert run.summary()["balanced"], run.summary()


def test_a_short_run_ends_by_itself_with_every_token_merged(live):
    run = live(
        {"name": "paris"},
        {"name": "tokyo", "speed": 0.25, "inner": {"batch": 1}},
        budget={"tokens": 60_000},
    )
    server = run.serve()
    agents = [run.work(name) for name in ("paris", "tokyo")]
    assert [run.exit_code(agent, seconds=180) for agent in agents] == [0, 0]
    assert run.exit_code(server) == 0
    summary = run.summary()
    assert summary["state"] == "finished" and summary["balanced"]
    assert summary["tokens"]["applied"] == summary["tokens"]["trained"] >= 60_000
    assert summary["loss"]["heldout"] < summary["loss"]["first"]
    assert 0 < summary["regions"]["tokyo"]["share"] < summary["regions"]["paris"]["share"]
    assert run.trainers() == []


def test_a_second_worker_stands_by_and_takes_over(live, tmp_path):
    run = live({"name": "paris"})
    server, first = run.serve(), run.work("paris")
    run.wait_for(lambda: run.status()["outer_steps"] >= 1, server, first)
    other = tmp_path / "other"
    write_resolved(run.spec, other)
    second = run.work("paris", other)
    log = run.folder / "logs" / "paris.log"
    run.wait_for(lambda: "waiting to take over" in log.read_text(), server, first, second)
    first.kill()
    applied = run.status()["tokens"]["applied"]
    run.wait_for(lambda: run.status()["tokens"]["applied"] > applied, server, second)
    assert (other / "regions" / "paris" / "progress.json").exists()


def test_a_worker_with_another_spec_is_told_which_key_differs(live, tmp_path):
    run = live({"name": "paris"})
    run.serve()
    other = Live(tmp_path / "other", [{"name": "paris"}], sync={"fragments": 2, "every": 8})
    role = work_role(other.file, other.folder, "paris", url=run.address["url"], cores=())
    stranger = run.start(role)
    assert run.exit_code(stranger) == 2
    assert "sync.every: 32 there, 8 here" in stranger.last_words()


def test_without_a_server_a_worker_says_so_and_ends_with_4(live):
    run = live({"name": "paris"})
    role = work_role(run.file, run.folder, "paris", url="http://127.0.0.1:9", cores=())
    lost = run.start(Role(role.name, (*role.argv, "--wait", "1")))
    assert run.exit_code(lost) == 4
    assert "127.0.0.1:9" in lost.last_words() and "hint:" in lost.last_words()
