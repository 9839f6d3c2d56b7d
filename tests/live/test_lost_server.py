"""Disks and folders that are lost under running processes: the run goes on, nothing is made up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace

import pytest

from diloco_cli.assemble import resolve
from diloco_cli.errors import DilocoError
from diloco_cli.launch.roles import serve_role, work_role
from diloco_cli.net.client import Client
from diloco_cli.observe.events import read_events
from diloco_cli.wire.frame import open_frame
from diloco_cli.worker.mailbox import Mailbox
from tests.cli.harness import diloco
from tests.live.processes import Live

pytestmark = pytest.mark.live


def realigned(run: Live) -> list[dict]:
    log = read_events(run.folder / "events.jsonl")
    return [event.fields for event in log if event.kind == "realigned"]


def test_a_run_goes_on_from_its_regions_when_the_servers_disk_is_destroyed(live, capsys):
    run = live({"name": "paris"}, {"name": "tokyo"})
    server, tokyo = run.serve(), run.work("tokyo")
    role = work_role(run.file, run.folder, "paris", url=run.address["url"], cores=())
    # Dies when it has gone over: its folder is of the new run, what is in it of the old.
    paris = run.start(replace(role, argv=(*role.argv, "--failpoint", "realign.named=kill")))
    sent = Mailbox(run.folder / "regions" / "tokyo").outbox_file(0)
    run.wait_for(lambda: run.status().outer_steps >= 6 and sent.exists(), server, paris, tokyo)
    before, late = run.status(), sent.read_bytes()
    url = run.address["url"]
    os.kill(server.pid, signal.SIGKILL)
    run.exit_code(server)
    shutil.rmtree(run.folder / "server")
    lost_at = time.monotonic()

    code, out, said = diloco(
        capsys, "restore", "--from-regions", run.folder, "--dir", run.folder, "--yes"
    )
    assert code == 0, said
    assert f"continues {before.run}" in out and "momentum fresh" in out
    # The same address, so that workers that are still running find it.
    (run.folder / "server" / "address.json").write_text(json.dumps({"url": url, "pid": 0}))
    server = run.serve()
    assert run.status().run != before.run
    steps = run.status().outer_steps
    assert run.exit_code(paris) == -signal.SIGKILL
    workers = run.start(role), tokyo
    run.wait_for(lambda: len(realigned(run)) == 2, server, *workers)
    frame = open_frame(late).header
    for named in (before.run, ""):  # A late copy of what was sent to the lost server.
        with Client(url, run=named) as client, pytest.raises(DilocoError):
            client.submit(0, "tokyo", frame.base, frame.clock, late, epoch=1)
    run.wait_for(lambda: run.status().outer_steps >= steps + 6, server, *workers)
    seconds = time.monotonic() - lost_at
    after = run.status()
    print(f"down for {seconds:.1f} s; realigned: {realigned(run)}")
    assert after.tokens.applied > before.tokens.applied * 0.5
    assert after.rebuilt and after.rebuilt.continues == (before.run,) and not after.rebuilt.awaited
    sizes = [fragment.size for fragment in resolve(run.spec).layout.fragments]
    lost = sum(size * each["lost"][n] for each in realigned(run) for n, size in enumerate(sizes))
    assert after.rebuilt.lost == pytest.approx(lost / sum(sizes), abs=0.1)
    for worker in workers:
        worker.ask()
        assert run.exit_code(worker) == 0
    server.ask()
    assert run.exit_code(server) == 0
    assert run.summary()["balanced"], run.summary()
    assert diloco(capsys, "replay", run.folder)[0] == 0


def test_a_server_whose_journal_is_gone_acknowledges_nothing_and_says_so(live):
    run = live({"name": "paris"})
    server = run.serve()
    os.unlink(run.folder / "server" / "journal")
    assert run.exit_code(server) == 5
    said = server.last_words()
    assert "journal was deleted while the server ran" in said.message
    assert "--from-regions" in (said.hint or "")
    again = run.start(serve_role(run.file, run.folder))
    assert run.exit_code(again) == 5 and "journal is missing" in again.last_words().message


@pytest.mark.long
def test_a_worker_whose_folder_is_deleted_says_so_and_joins_as_another_owner(live):
    run = live({"name": "paris"})
    server, agent = run.serve(), run.work("paris")
    run.wait_for(lambda: run.status().outer_steps >= 2, server, agent)
    folder = run.folder / "regions" / "paris"
    before = Mailbox(folder).identity()
    folder.rename(folder.with_name("deleted"))  # At once: processes write there meanwhile.
    shutil.rmtree(folder.with_name("deleted"), ignore_errors=True)
    run.wait_for(lambda: "was deleted at about" in run.region("paris").why, server, agent)
    after = Mailbox(folder).identity()
    assert before and after and after.owner != before.owner
    steps = run.status().outer_steps
    run.wait_for(lambda: run.status().outer_steps >= steps + 2, server, agent)
    [trainer] = run.trainers()
    agent.ask()
    assert run.exit_code(agent) == 0
    assert not trainer.is_running() or run.trainers() == []
    server.ask()
    assert run.exit_code(server) == 0 and run.summary()["balanced"]
