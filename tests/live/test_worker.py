"""Workers beside a real server: whatever is killed, the run goes on and every token counts once."""

from __future__ import annotations

import os
import signal

import pytest

from diloco_cli.launch import Role
from diloco_cli.launch.roles import work_role
from diloco_cli.observe.events import read_events
from diloco_cli.spec.resolved import write_resolved
from tests.live.processes import Live

pytestmark = pytest.mark.live


def test_a_run_survives_the_death_of_each_of_its_processes(live):
    run = live({"name": "paris"})
    server, agent = run.serve(), run.work("paris")
    run.wait_for(lambda: run.status().outer_steps >= 3, server, agent)

    # The trainer: the agent starts another, which goes on from what is durable.
    [trainer] = run.trainers()
    trainer.kill()
    run.wait_for(lambda: run.region("paris").restarts == 1, server, agent)
    # What the dead one had posted may still be applied first: wait for the new one's own work.
    run.wait_for(lambda: len(run.trainers()) == 1, server, agent)
    step = run.progress("paris").step
    run.wait_for(lambda: run.progress("paris").step > step, server, agent)

    # The agent: its trainer trains on, and the next agent takes it over. No step is lost.
    [trainer] = run.trainers()
    os.kill(agent.pid, signal.SIGKILL)
    run.exit_code(agent)
    step = run.progress("paris").step
    run.wait_for(lambda: run.progress("paris").step > step + 50, server)
    agent = run.work("paris")
    applied = run.status().tokens.applied
    run.wait_for(lambda: run.status().tokens.applied > applied, server, agent)
    assert [one.pid for one in run.trainers()] == [trainer.pid]
    assert run.region("paris").training
    log = list(read_events(run.folder / "events.jsonl"))
    assert [e.fields["pid"] for e in log if e.kind == "trainer-adopted"] == [trainer.pid]
    assert [e.kind for e in log].count("first-step") == 2, "only the one that was killed began anew"

    # The server: training goes on without it, and what was trained meanwhile is merged.
    server.kill()
    step = run.progress("paris").step
    run.wait_for(lambda: run.progress("paris").step > step + 50, agent)
    server = run.serve()
    assert [one.pid for one in run.trainers()] == [trainer.pid]
    outer_steps = run.status().outer_steps
    run.wait_for(lambda: run.status().outer_steps >= outer_steps + 3, server, agent)

    def noted() -> list[str]:
        log = read_events(run.folder / "events.jsonl")
        return [event.kind for event in log if event.process == "paris"]

    assert "link-lost" in noted()
    # Uploads may find the server before the next heartbeat does.
    run.wait_for(lambda: "link-back" in noted(), server, agent)

    # And a stop in good order: everything posted is handed over, nobody is left.
    agent.ask()
    assert run.exit_code(agent) == 0 and run.trainers() == []
    run.wait_for(lambda: not run.region("paris").alive, server)
    server.ask()
    assert run.exit_code(server) == 0
    assert run.summary()["balanced"], run.summary()


def test_a_short_run_ends_by_itself_with_every_token_merged(live):
    run = live(
        # Steps of a millisecond are faster than what is believed of a region without a pace.
        {"name": "paris", "pace": 5000},
        {"name": "tokyo", "pace": 5000, "speed": 0.25, "inner": {"batch": 1}},
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
    run.wait_for(lambda: run.status().outer_steps >= 1, server, first)
    other = tmp_path / "other"
    write_resolved(run.spec, other)
    second = run.work("paris", other)
    log = run.folder / "logs" / "paris.log"
    run.wait_for(lambda: "waiting to take over" in log.read_text(), server, first, second)
    first.kill()
    applied = run.status().tokens.applied
    run.wait_for(lambda: run.status().tokens.applied > applied, server, second)
    progress = other / "regions" / "paris" / "progress.json"
    run.wait_for(progress.exists, server, second)


def test_a_worker_with_another_spec_is_told_which_key_differs(live, tmp_path):
    run = live({"name": "paris"})
    run.serve()
    other = Live(tmp_path / "other", [{"name": "paris"}], sync={"fragments": 2, "every": 8})
    role = work_role(other.file, other.folder, "paris", url=run.address["url"], cores=())
    stranger = run.start(role)
    assert run.exit_code(stranger) == 2
    assert "sync.every: 32 there, 8 here" in str(stranger.last_words())


def test_without_a_server_a_worker_says_so_and_ends_with_4(live):
    run = live({"name": "paris"})
    role = work_role(run.file, run.folder, "paris", url="http://127.0.0.1:9", cores=())
    lost = run.start(Role(role.name, (*role.argv, "--wait", "1")))
    assert run.exit_code(lost) == 4
    assert "127.0.0.1:9" in str(lost.last_words()) and "hint:" in str(lost.last_words())
