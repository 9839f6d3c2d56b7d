"""Amendments on a real run: its regions follow by themselves, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from diloco_cli.assemble import build_terms, resolve, settings_of
from diloco_cli.launch import Role
from diloco_cli.launch.roles import work_role
from diloco_cli.net.client import Client
from diloco_cli.observe.events import read_events
from diloco_cli.server.recovery.verify import replay
from diloco_cli.wire.messages import Amend, Amended
from diloco_cli.worker.mailbox import Mailbox
from diloco_cli.worker.trainer.checkpoints import checkpoint
from tests.live.processes import Live

pytestmark = pytest.mark.live

NAMES = ("paris", "tokyo")


def amend(run: Live, id: str, changes: dict[str, Any], *, sure: bool = False) -> Amended:
    with Client(run.address["url"]) as client:
        return client.amend(Amend(id=id, sure=sure, set=changes))


def events(run: Live, kind: str) -> list[dict[str, Any]]:
    log = read_events(run.folder / "events.jsonl")
    return [dict(event.fields) for event in log if event.kind == kind]


def follow(run: Live, terms: int, *names: str) -> bool:
    regions = [run.region(name) for name in names or NAMES]
    return all(region.terms == terms and region.training for region in regions)


def trainer_of(run: Live, region: str) -> int:
    pid = Mailbox(run.folder / "regions" / region).trainer_lock_holder()
    assert pid is not None
    return pid


def merged_more(run: Live, *alive: Any) -> None:
    """Waits until both regions are in new versions."""
    before = {name: run.progress(name).tokens.applied[0] for name in NAMES}
    run.wait_for(
        lambda: all(run.progress(name).tokens.applied[0] > before[name] for name in NAMES), *alive
    )


def test_regions_follow_by_themselves_and_the_books_balance(live):
    run = live(*({"name": name} for name in NAMES))
    server, paris = run.serve(), run.work("paris")
    role = work_role(run.file, run.folder, "tokyo", url=run.address["url"], cores=())
    tokyo = run.start(Role(role.name, (*role.argv, "--failpoint", "terms.heard=kill")))
    run.wait_for(lambda: run.status().outer_steps >= 2 and follow(run, 0), server, paris, tokyo)
    first = {name: trainer_of(run, name) for name in NAMES}

    # What trainers read: each of them starts anew, once, and nobody counts it as a failure. An
    # agent that is killed when it has just heard of it leaves its trainer under the old terms.
    keys = {"inner.optimizer.lr": 0.001, "sync.adopt": "blend", "wire.up.kind": "int8"}
    assert amend(run, "one", keys).terms == 1
    run.wait_for(lambda: follow(run, 1, "paris"), server, paris)
    assert run.exit_code(tokyo) == -signal.SIGKILL
    mailbox = Mailbox(run.folder / "regions" / "tokyo")
    assert mailbox.terms().terms == 1 and trainer_of(run, "tokyo") == first["tokyo"]
    step = run.progress("tokyo").step
    run.wait_for(lambda: run.progress("tokyo").step > step + 20, server, paris)

    # The next agent does not take over a trainer that works under other settings.
    tokyo = run.work("tokyo")
    run.wait_for(lambda: follow(run, 1), server, paris, tokyo)
    second = {name: trainer_of(run, name) for name in NAMES}
    assert not {*first.values()} & {*second.values()} and events(run, "trainer-adopted") == []
    [resumed] = [it for it in events(run, "first-step") if it["pid"] == second["tokyo"]]
    assert resumed["resumed"] and resumed["step"] > step + 20 and resumed["lost"] == 0
    merged_more(run, server, paris, tokyo)

    # What only the server reads: it is in force at once, and the trainers stay.
    amend(run, "two", {"outer.lr": 0.3, "sync.every": 16, "merge": {"kind": "mean"}})
    run.wait_for(lambda: follow(run, 2), server, paris, tokyo)
    merged_more(run, server, paris, tokyo)
    assert {name: trainer_of(run, name) for name in NAMES} == second
    assert [run.region(name).restarts for name in NAMES] == [0, 0]
    assert events(run, "trainer-died") == []

    for agent in (paris, tokyo):
        agent.ask()
        assert run.exit_code(agent) == 0
    run.wait_for(lambda: not any(run.region(name).alive for name in NAMES), server)
    server.ask()
    assert run.exit_code(server) == 0
    assert run.summary()["balanced"], run.summary()
    for name in NAMES:
        mailbox = Mailbox(run.folder / "regions" / name)
        terms = checkpoint.load(mailbox.checkpoint).meta["terms"]
        assert terms["number"] == 1 and terms["since"] > 0 and terms["rate"]["lr"] == 0.001
        frame = mailbox.frame(0)
        assert frame is not None and frame.header.codec["kind"] == "int8"
    settings = settings_of(run.spec, resolve(run.spec))
    found = replay(settings, run.folder / "server", build=build_terms)
    assert found.lines and all(line.made for line in found.lines)


@pytest.mark.long
def test_a_finished_run_is_opened_again_while_an_agent_is_still_there(live):
    run = live(
        *({"name": name} for name in NAMES),
        budget={"tokens": 30_000},
        inner={"batch": 2, "sequence": 16, "schedule": {"kind": "cosine", "warmup": 20}},
        server={"lease": 20.0},
    )
    server, agents = run.serve(), {name: run.work(name) for name in NAMES}

    # Each is halted at its first steps: one alone would soon have trained the whole budget.
    halted: dict[str, int] = {}

    def all_halted() -> bool:
        for name in NAMES:
            if name not in halted and run.progress(name).step > 0:
                halted[name] = trainer_of(run, name)
                os.kill(halted[name], signal.SIGSTOP)
        return len(halted) == len(NAMES)

    run.wait_for(all_halted, server, *agents.values())

    # Tokyo stands still, so that paris has drained before the run can be finished; then paris
    # stands still, so that its agent hears of the end while its trainer does not.
    os.kill(halted["paris"], signal.SIGCONT)
    run.wait_for(lambda: run.progress("paris").ended, server, *agents.values())
    os.kill(halted["paris"], signal.SIGSTOP)
    os.kill(halted["tokyo"], signal.SIGCONT)
    assert run.exit_code(agents["tokyo"], seconds=180) == 0
    run.wait_for(lambda: run.status().state == "finished", server, agents["paris"])

    # With more than anybody trains here, so that both are seen at work before it ends.
    assert amend(run, "more", {"budget.tokens": 10**9}).reopens
    os.kill(halted["paris"], signal.SIGCONT)
    run.wait_for(lambda: follow(run, 1, "paris"), server, agents["paris"])
    assert run.region("paris").restarts == 0
    agents["tokyo"] = run.work("tokyo")
    run.wait_for(lambda: follow(run, 1), server, *agents.values())
    budget = round(run.status().tokens.applied)
    assert amend(run, "enough", {"budget.tokens": budget}, sure=True).terms == 2
    assert [run.exit_code(agents[name], seconds=180) for name in NAMES] == [0, 0]
    assert run.exit_code(server) == 0
    summary = run.summary()
    assert summary["state"] == "finished" and summary["balanced"]
    assert summary["tokens"]["applied"] >= budget > 30_000
    saved = checkpoint.load(Mailbox(run.folder / "regions" / "paris").checkpoint).meta["terms"]
    assert saved["number"] > 0 and saved["rate"]["since"] > 0
