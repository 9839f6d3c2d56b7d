"""A server that is away for long, one that comes back older, and a region that is sent away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from diloco_cli.net.credentials import load_credentials
from diloco_cli.server.access.issue import CredentialFolder
from tests.live.processes import Live

pytestmark = pytest.mark.live


def diloco(*arguments: Any) -> tuple[int, str, str]:
    """Runs the command as a person would."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DILOCO_")}
    argv = [sys.executable, "-m", "diloco_cli", *map(str, arguments)]
    ended = subprocess.run(argv, env=clean, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


def held(run: Live) -> float:
    """Steps of work that the trainer holds, all fragments together."""
    return sum(fragment.steps for fragment in run.progress("paris").fragments)


def outbox(run: Live) -> list[Path]:
    return list((run.folder / "regions" / "paris" / "outbox").glob("*.frame"))


def test_a_server_long_away_and_one_that_comes_back_older(live):
    run = live({"name": "paris"})
    server, agent = run.serve(), run.work("paris")
    run.wait_for(lambda: run.status().outer_steps >= 2, server, agent)
    os.kill(server.pid, signal.SIGKILL)
    run.exit_code(server)
    old = shutil.copytree(run.folder / "server", run.folder.parent / "copy")

    # Away: the region trains on and holds what it has; what it wants to send does not pile up.
    step = run.progress("paris").step
    run.wait_for(lambda: run.progress("paris").step > step + 200, agent)
    before = held(run)
    run.wait_for(lambda: held(run) > before + 100, agent)
    assert len(outbox(run)) <= 2, "one frame for each fragment"
    code, printed, said = diloco("status", run.folder)
    assert code == 4 and "the server is out of reach since 2" in printed, (printed, said)

    # Back: what was trained meanwhile is merged.
    server = run.serve()
    seen = run.status().outer_steps
    run.wait_for(lambda: run.status().outer_steps >= seen + 4, server, agent)
    run.wait_for(lambda: held(run) < before, server, agent)
    assert "out of reach" not in diloco("status", run.folder)[1]

    # Back once more, from an old copy: nobody trains on from there as if nothing had been.
    server.kill()
    run.exit_code(server)
    shutil.rmtree(run.folder / "server")
    shutil.move(old, run.folder / "server")
    server = run.serve()
    assert run.exit_code(agent) == 5
    assert "is the newest version here" in str(agent.last_words())
    assert "--set-back" in str(agent.last_words()), "the command that heals it"
    assert run.trainers() == []
    # Started again, it says the same.
    again = run.work("paris")
    assert run.exit_code(again) == 5
    assert "restored from an older copy" in str(again.last_words())


def test_people_and_regions_behind_tls_until_one_is_revoked(live, tmp_path, monkeypatch):
    credentials = CredentialFolder(tmp_path / "certs")
    credentials.create_missing("tiny", [], 30)
    credentials.issue("upload", "paris", 30, renew=False)
    run = live({"name": "paris"}, server={"lease": 3.0, "certs": str(credentials.folder)})
    operator = credentials.folder / "admins" / "operator"
    run.credentials = load_credentials(operator)
    server = run.serve()
    monkeypatch.setenv("DILOCO_TOKEN", (credentials.folder / "regions/paris/token").read_text())
    agent = run.work("paris")
    run.wait_for(lambda: run.status().outer_steps >= 1, server, agent)
    url = run.address["url"]
    [trainer] = run.trainers()
    assert "DILOCO_TOKEN" not in trainer.environ(), "who trains needs no key to the server"

    # People, with the credential beside the run, with one of their own, and without.
    code, printed, _ = diloco("status", run.folder)
    assert code == 0 and "paris" in printed
    code, printed, _ = diloco("status", url, "--certs", operator)
    assert code == 0 and "paris" in printed
    code, printed, said = diloco("status", url)
    assert code in (2, 4) and not printed and "hint:" in said
    weights = tmp_path / "weights.safetensors"
    code, _, said = diloco("pull", url, "--certs", operator, "--out", weights)
    assert code == 0 and weights.stat().st_size > 1000, said
    code, _, said = diloco("stop", url, "--certs", credentials.folder / "regions" / "paris")
    assert code == 2 and "stop" in said, said
    shown = run.credentials
    with httpx.Client(verify=shown.context(), headers=shown.headers, trust_env=False) as client:
        assert "diloco_" in client.get(f"{url}/metrics").text

    # The region, revoked while it trains: it ends, says why, and leaves nobody behind.
    credentials.revoke("upload", "paris")
    assert run.exit_code(agent) == 2
    assert "revoked" in str(agent.last_words()) and "hint:" in str(agent.last_words())
    assert run.trainers() == []

    # A server that takes in what was revoked may hear nobody for a moment.
    answers: list[str] = []
    run.wait_for(lambda: _stopped(url, operator, answers), seconds=60.0)
    assert "has stopped" in answers[-1], answers
    assert run.exit_code(server) == 0


def _stopped(url: str, operator: Path, answers: list[str]) -> bool:
    code, _, words = diloco("stop", url, "--certs", operator)
    answers.append(words)
    assert code in (0, 4), words
    return code == 0
