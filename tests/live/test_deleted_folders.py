"""Files deleted under running processes: noticed at once, said, and nothing is made up."""

from __future__ import annotations

import os
import shutil

import pytest

from diloco_cli.launch.roles import serve_role
from diloco_cli.worker.mailbox import Mailbox

pytestmark = pytest.mark.live


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
