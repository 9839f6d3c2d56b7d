"""A region follows the amendments of its run; its trainer starts anew only if it has to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from diloco_cli.assemble import build_amended, spelled_out
from diloco_cli.errors import StoreError
from diloco_cli.observe.events import read_events
from diloco_cli.spec.load import load_spec
from diloco_cli.spec.resolved import resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.messages import Amendment, Amendments, TrainerProgress
from diloco_cli.worker.handover import OWN_TRAINER, HandoverRecord
from diloco_cli.worker.mailbox import FINISHED, FolderOwner, Mailbox
from tests.worker.fake_server import OWN, settings_in

LR = {"inner.optimizer.lr": 0.5}
ORDERLY = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"


def events(folder, kind):
    return [e.fields for e in read_events(folder / "events.jsonl") if e.kind == kind]


def heard(*changes, **more):
    """Amendments as an agent hears of them."""
    made = [
        Amendment.model_validate({"number": n, "id": f"a{n}", "set": change, **more})
        for n, change in enumerate(changes, 1)
    ]
    return Amendments(terms=len(made), amendments=tuple(made))


def written(mailbox):
    return load_spec(mailbox.spec_file).spec


# What a trainer is told


@pytest.fixture
def mailbox(tmp_path):
    made = Mailbox(tmp_path / "regions" / "paris")
    made.prepare()
    return made


def own_file(**changes):
    return spelled_out(RunSpec.model_validate({**resolved(OWN), **changes}))


def test_amended_keys_are_the_runs_and_all_others_the_regions_own(mailbox):
    own = own_file(
        inner={"batch": 8, "clip": 0.25},
        regions=[{"name": "paris", "speed": 0.5, "token_file": "/secret"}, {"name": "tokyo"}],
        wire={"rate_limit": "8Mbit"},
    )
    settings = settings_in(mailbox, own)
    settings.follow(heard({"inner.batch": 4, "regions.tokyo.inner.batch": 2}, LR))
    settings.write()
    spec = written(mailbox)
    assert settings.terms == 2 and settings.trouble == ""
    assert (spec.inner.batch, spec.inner.clip, spec.inner.optimizer["lr"]) == (4, 0.25, 0.5)
    assert (spec.region("paris").speed, spec.wire.rate_limit) == (0.5, "8Mbit")
    assert spec.inner_of("paris").batch == 4 and spec.inner_of("tokyo").batch == 2


@pytest.mark.parametrize(
    "change, anew",
    [
        (LR, True),
        ({"sync.adopt": "replace"}, True),
        ({"budget.tokens": 2_000_000}, True),
        ({"regions.paris.inner.batch": 4}, True),
        ({"regions.tokyo.inner.batch": 4}, False),
        ({"sync.every": 12, "sync.quorum": 2, "outer.lr": 0.1, "server.lease": 3.0}, False),
    ],
)
def test_only_what_a_trainer_reads_changes_its_digest(mailbox, change, anew):
    settings = settings_in(mailbox)
    before = settings.digest
    settings.follow(heard(change))
    assert settings.terms == 1 and (settings.digest != before) is anew


def test_the_trainer_reads_back_what_the_agent_compares(mailbox):
    settings = settings_in(mailbox)
    settings.follow(heard(LR))
    settings.write()
    identity, argv = FolderOwner("me", 1, "run-1"), ["python", "-m", "x", "--terms", "1"]
    found = build_amended(resolved(written(mailbox)))
    of_trainer = HandoverRecord.of(argv, found, "paris", identity)
    of_agent = HandoverRecord.of(argv[:3], settings.spec, "paris", identity)
    assert of_trainer == of_agent and of_agent.argv == ("-m", "x")
    # An agent with another credential takes over all the same, one with another speed does not.
    for change, same in (({"token_env": "T"}, True), ({"speed": 0.5}, False)):
        own = own_file(regions=[{"name": "paris", **change}, {"name": "tokyo"}])
        other = settings_in(mailbox, own)
        other.follow(heard(LR))
        assert (HandoverRecord.of(argv, other.spec, "paris", identity) == of_agent) is same


def test_terms_that_do_not_fit_the_regions_own_file_are_not_followed(mailbox):
    own = own_file(inner={"optimizer": {"kind": "sgd", "lr": 0.1}})
    settings = settings_in(mailbox, own)
    settings.follow(heard({"inner.batch": 4}, {"inner.optimizer.beta1": 0.8}, {"inner.clip": 0.1}))
    assert settings.terms == 1 and settings.spec.inner.batch == 4
    assert "amendment 3 does not fit" in settings.trouble and "beta1" in settings.trouble
    settings.follow(
        heard({"inner.batch": 4}, {"inner.optimizer.beta1": 0.8}, {"inner.optimizer": None})
    )
    assert settings.terms == 3 and settings.trouble == ""


def test_a_region_that_no_terms_list_trains_as_the_run_says(mailbox):
    settings = settings_in(mailbox, own_file(regions=[{"name": "tokyo"}]))
    settings.follow(heard(LR, add=[{"name": "oslo"}]))
    assert settings.terms == 1 and settings.spec.inner_of("paris") == settings.spec.inner


def test_damaged_terms_are_named(mailbox):
    mailbox.write_terms(heard(LR))
    assert mailbox.terms() == heard(LR)
    mailbox.terms_file.write_text("{")
    with pytest.raises(StoreError, match=r"terms\.json is damaged") as caught:
        mailbox.terms()
    assert "learns them again" in (caught.value.hint or "")


# What an agent does


def reports(counter, terms):
    return any(beat.terms == terms and beat.why == "" for beat in counter.heartbeats)


def test_a_trainer_that_reads_a_changed_key_leaves_in_order_and_starts_anew(
    agent, counter, tmp_path, log_lines
):
    leave = tmp_path / "leave"
    orderly = f"""
import signal
def at_end(*_):
    os.write(1, b"progress\\n")
    while not os.path.exists({str(leave)!r}):
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, at_end)
"""
    running = agent(first=orderly)
    counter.wait_for(lambda: reports(counter, 0))
    counter.amend(LR)
    why = "following amendment 1"
    counter.wait_for(lambda: sum(beat.why == why for beat in counter.heartbeats) > 2)
    leave.touch()
    counter.wait_for(lambda: reports(counter, 1))
    said = [beat.why for beat in counter.heartbeats if beat.terms == 0]
    assert set(said[said.index(why) :]) == {why}, "whatever the one that leaves still reports"
    first, second = events(tmp_path, "trainer-started")
    assert first["pid"] != second["pid"] and second["restarts"] == 0
    assert running.agent.supervisor.restarts == 0 and events(tmp_path, "trainer-died") == []
    left = events(tmp_path, "trainer-exited")
    assert [(it["pid"], it["why"]) for it in left] == [(first["pid"], why)]
    assert written(running.agent.mailbox).inner.optimizer["lr"] == 0.5
    assert running.agent.mailbox.terms().terms == 1
    assert running.agent.supervisor.trainer._child.args[-2:] == ["--terms", "1"]


def test_a_change_of_the_servers_settings_leaves_the_trainer_alone(agent, counter, tmp_path):
    running = agent(first=ORDERLY)
    counter.wait_for(lambda: reports(counter, 0))
    counter.amend({"sync.quorum": 2, "sync.every": 12})
    counter.wait_for(lambda: reports(counter, 1))
    assert len(events(tmp_path, "trainer-started")) == 1
    assert running.agent.mailbox.terms().terms == 1


def test_terms_are_durable_before_a_trainer_starts_under_them(agent, counter, tmp_path):
    counter.amend(LR)
    # The trainer is not to be there before both files are.
    terms, spec = (str(tmp_path / "regions" / "paris" / n) for n in ("terms.json", "spec.yaml"))
    agent(first=f"assert os.path.exists({terms!r}) and '0.5' in open({spec!r}).read()")
    counter.wait_for(lambda: reports(counter, 1))
    assert len(events(tmp_path, "trainer-started")) == 1, "it follows before it starts one"


def test_a_region_that_was_away_follows_with_its_next_answer(agent, counter, tmp_path):
    agent(first=ORDERLY)
    counter.wait_for(lambda: reports(counter, 0))
    counter.away = True
    counter.amend({"sync.quorum": 2})
    counter.amend(LR)
    beats = len(counter.heartbeats)
    counter.wait_for(lambda: len(counter.heartbeats) > beats + 1)
    assert len(events(tmp_path, "trainer-started")) == 1, "meanwhile it trains on"
    counter.away = False
    counter.wait_for(lambda: reports(counter, 2))
    assert len(events(tmp_path, "trainer-started")) == 2


def test_a_trainer_that_will_not_leave_is_ended(agent, counter, tmp_path, monkeypatch):
    monkeypatch.setattr("diloco_cli.worker.agent.trainer_supervisor.STOP_SECONDS", 0.2)
    running = agent(first="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    counter.wait_for(lambda: reports(counter, 0))
    counter.amend(LR)
    counter.wait_for(lambda: reports(counter, 1))
    assert running.agent.supervisor.restarts == 0


def test_what_cannot_be_followed_is_said_and_the_region_trains_on(agent, counter, tmp_path):
    agent(first=ORDERLY, own=own_file(inner={"optimizer": {"kind": "sgd"}}))
    counter.wait_for(lambda: reports(counter, 0))
    counter.amend({"inner.optimizer.beta1": 0.8})
    counter.wait_for(lambda: any("amendment 1 does not fit" in b.why for b in counter.heartbeats))
    assert counter.heartbeats[-1].terms == 0
    assert len(events(tmp_path, "trainer-started")) == 1


def test_a_server_that_has_fewer_amendments_is_believed(agent, counter, tmp_path):
    Mailbox(tmp_path / "regions" / "paris").prepare()
    Mailbox(tmp_path / "regions" / "paris").write_terms(heard({"inner.batch": 2}, {"seed": 9}))
    counter.amend(LR)
    running = agent()
    counter.wait_for(lambda: reports(counter, 1))
    assert running.agent.settings.spec.inner.batch == OWN.inner.batch


ATTACHED = """
import signal, sys
from pathlib import Path
from diloco_cli.assemble import load_run, spelled_out
from diloco_cli.system.wakeup import Wakeup, stop_on_signals
from diloco_cli.worker.handover import OWN_TRAINER, HandoverRecord
from diloco_cli.worker.mailbox import TRAINER_LOCK, Mailbox
from diloco_cli.worker.trainer.parent_watch import ParentWatch
mailbox, wakeup = Mailbox(Path(sys.argv[1])), Wakeup()
stop_on_signals(wakeup, signal.SIGTERM)
spec = spelled_out(load_run(mailbox.spec_file).spec)
with mailbox.locked(TRAINER_LOCK, seconds=60):
    HandoverRecord.of(OWN_TRAINER, spec, "paris", mailbox.identity()).write(mailbox)
    parent = ParentWatch(wakeup, mailbox, None)
    parent.listen()
    while not wakeup.stop_reason:
        parent.tell("progress")
        wakeup.pause(0.2)
"""


def ready_terms(mailbox):
    """Under which terms a trainer may attach now; None where none may."""
    ready = mailbox.ready()
    return ready and ready.terms


def test_a_trainer_that_attaches_finds_the_newest_terms(agent, counter, tmp_path, mailbox):
    """Its agent once waited for ever for one that works by settings which nobody had written."""
    regions = [{"name": "paris", "trainer": {"attach": True}}, {"name": "tokyo"}]
    with mailbox.locked():
        running = agent(own=own_file(regions=regions))
        running.agent.supervisor.argv = OWN_TRAINER
        counter.wait_for(lambda: mailbox.ready() is not None)
        counter.amend(LR)  # While nobody is there.
        counter.wait_for(lambda: ready_terms(mailbox) == 1)
        assert written(mailbox).inner.optimizer["lr"] == 0.5
        attached = subprocess.Popen([sys.executable, "-c", ATTACHED, str(mailbox.folder)])
        try:
            counter.wait_for(lambda: reports(counter, 1), seconds=120)
            counter.amend({"inner.batch": 4})  # It is asked to leave.
            assert attached.wait(120) == 0
        finally:
            attached.kill()
        awaits = "following amendment 2; waiting for the trainer, which is started elsewhere"
        counter.wait_for(lambda: counter.heartbeats[-1].why.startswith(awaits))
        counter.wait_for(lambda: ready_terms(mailbox) == 2)
        assert written(mailbox).inner.batch == 4


# The end that is taken back


def finished_trainer(tmp_path, leaves):
    """A trainer that leaves at the end of the run, once `leaves` is there, but only once."""
    mailbox = Mailbox(tmp_path / "regions" / "paris")
    progress = TrainerProgress.none(2).model_copy(update={"why": f"stopped: {FINISHED}"})
    once = tmp_path / "once"
    return f"""
if not os.path.exists({str(once)!r}):
    os.write(1, b"progress\\n")
    while not os.path.exists({str(leaves)!r}):
        time.sleep(0.01)
    open({str(once)!r}, "w").close()
    open({str(mailbox.progress_file)!r}, "w").write({progress.model_dump_json()!r})
    sys.exit(0)
"""


def test_an_agent_that_hears_of_a_reopening_starts_its_trainer_again(agent, counter, tmp_path):
    leaves = tmp_path / "leaves"
    running = agent(first=finished_trainer(tmp_path, leaves))
    counter.wait_for(lambda: reports(counter, 0))
    counter.tell(finished=True)
    counter.wait_for(lambda: running.agent._finished_at is not None)
    counter.tell(finished=False)  # Opened again before the trainer has left.
    counter.wait_for(lambda: running.agent._finished_at is None)
    leaves.touch()
    counter.wait_for(lambda: len(events(tmp_path, "trainer-started")) == 2)
    assert running.agent.supervisor.restarts == 0 and running.outcome is None


def test_a_trainer_killed_while_it_follows_is_no_failure(agent, counter, tmp_path):
    once = tmp_path / "once"
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    first = f"if not os.path.exists({str(once)!r}): {stubborn}; open({str(once)!r}, 'w').close()"
    running = agent(first=first)
    counter.wait_for(lambda: reports(counter, 0))
    counter.amend(LR)
    counter.wait_for(lambda: any("following" in beat.why for beat in counter.heartbeats))
    os.kill(events(tmp_path, "trainer-started")[0]["pid"], signal.SIGKILL)
    counter.wait_for(lambda: reports(counter, 1))
    assert running.agent.supervisor.restarts == 0
