"""`diloco run` for real: whatever is killed, the run goes on, and the same command finishes it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from diloco_cli.errors import LinkError
from diloco_cli.observe.status import RegionStatus, Status
from diloco_cli.run.ask import ShortCalls
from diloco_cli.run.folder import address_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

SPEC = """
spec: 1
name: short
budget: {tokens: BUDGET}
model: {kind: decoder, layers: 1, width: 32, heads: 2}
data: {kind: python-source, limit: 300_000}
inner: {batch: 4, sequence: 32, optimizer: {kind: adamw, lr: 5e-3}}
regions: [{name: left}, {name: right}, {name: late}]
sync: {fragments: 2, every: 6, overlap: 1}
evaluate: {every: 8, batches: 1}
server: {lease: 3}
"""


class Run:
    """A run in a folder of its own, as a person at a terminal sees it."""

    def __init__(self, place: Path, budget: int, *options: str) -> None:
        self.place, self.folder = place, place / "runs" / "short"
        self.options = options
        self.started: list[subprocess.Popen[str]] = []
        (place / "run.yaml").write_text(SPEC.replace("BUDGET", str(budget)))
        self._asking = ShortCalls()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "diloco_cli", *arguments]
        with open(self.place / "said", "a") as said:
            child = subprocess.Popen(command, cwd=self.place, stdout=said, stderr=said, text=True)
        self.started.append(child)
        return child

    def run(self, *more: str) -> subprocess.Popen[str]:
        return self.start("run", "run.yaml", *self.options, *more)

    def status(self) -> Status | None:
        url = address_of(self.folder).url
        try:
            return self._asking.status(url) if url else None
        except LinkError:
            return None

    def until(self, what, seconds=600.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := what():
                return found
            time.sleep(0.1)
        raise AssertionError(
            f"it did not happen; the run said:\n{(self.place / 'said').read_text()}"
        )

    def until_steps(self, least: int) -> int:
        return self.until(
            lambda: (now := self.status()) and now.outer_steps >= least and now.outer_steps
        )

    def pids(self, *words: str) -> list[int]:
        here = (str(self.folder.relative_to(self.place)), *words)
        found = []
        for process in psutil.process_iter(["cmdline", "cwd"]):
            if process.info["cwd"] == str(self.place) and {*here} <= {
                *(process.info["cmdline"] or [])
            }:
                found.append(process.pid)
        return found

    def end(self) -> None:
        """After a test, however it went: nobody stays."""
        self._asking.close()
        for child in self.started:
            child.kill()
            child.wait()
        self.until(lambda: self.pids() == [])

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture
def run_in(tmp_path):
    runs = []

    def make(budget: int, *options: str) -> Run:
        runs.append(Run(tmp_path, budget, *options))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


def accounted(tokens: dict) -> float:
    fates = ("applied", "uncounted", "pending", "refused", "discarded")
    return sum(tokens[fate] for fate in fates)


def test_whatever_is_killed_the_same_command_finishes_the_run(run_in):
    run = run_in(200_000, "--regions", "left,right")
    first = run.run()
    run.until_steps(2)
    first.send_signal(signal.SIGINT)
    assert first.wait(600) == 130
    assert run.summary()["state"] == "stopped" and run.pids() == []
    assert "held-out text" in (run.place / "said").read_text(), "its files are named"

    second = run.run()
    run.until_steps(run.summary()["outer_steps"] + 1)
    (worker,) = run.pids("work", "left")
    os.kill(worker, signal.SIGKILL)
    run.until(lambda: set(run.pids("work", "left")) - {worker})
    (server,) = run.pids("serve")
    os.kill(server, signal.SIGKILL)
    run.until(lambda: set(run.pids("serve")) - {server})
    # It may even end by itself: what regions held while the server was away can be all there was.
    before = run.until(run.status).outer_steps
    run.until(
        lambda: second.poll() is not None or ((now := run.status()) and now.outer_steps > before)
    )

    second.kill()
    second.wait()
    third = run.run()
    assert third.wait(600) == 0
    summary = run.summary()
    assert summary["state"] == "finished" and summary["balanced"]
    assert summary["tokens"]["applied"] >= 200_000
    assert accounted(summary["tokens"]) == pytest.approx(summary["tokens"]["trained"])
    run.until(lambda: run.pids() == [])
    # Who serves a finished run has nothing to add to it.
    summary_before = (run.folder / "summary.json").read_bytes()
    server = run.start("serve", str(run.folder / "spec.resolved.yaml"), "--dir", str(run.folder))
    run.until(run.status)
    server.send_signal(signal.SIGTERM)
    assert server.wait(600) == 0
    assert (run.folder / "summary.json").read_bytes() == summary_before


@pytest.mark.long
def test_a_start_that_trained_nothing_takes_a_corrected_spec(run_in):
    run = run_in(10_000)
    spec = run.place / "run.yaml"
    right = spec.read_text().replace(", {name: late}", "")
    (run.place / "x").write_text("too short to make a row of")
    spec.write_text(right.replace("kind: python-source, limit: 300_000", "kind: text, files: [x]"))
    assert run.run().wait(600) == 2, "only who reads the text knows"
    spec.write_text(right.replace("width: 32", "width: 16").replace("fragments: 2", "fragments: 3"))
    assert run.run().wait(600) == 0
    said = (run.place / "said").read_text()
    assert "runs/short had trained nothing and begins anew: its spec has another" in said
    assert run.summary()["state"] == "finished" and run.summary()["balanced"]
    assert len(run.summary()["fragments"]) == 3


@pytest.mark.long
def test_a_region_joins_late_another_leaves_and_the_weights_are_there_for_all(run_in, tmp_path):
    run = run_in(10**9, "--regions", "left,right")
    running = run.run()
    run.until_steps(2)
    url = run.until(run.status).url
    late = run.start("work", "run.yaml", "--region", "late", "--server", url, "--dir", "runs/late")
    run.until(lambda: any(r.name == "late" and r.contributing for r in _regions(run)))

    (worker,) = run.pids("work", "left")
    os.kill(worker, signal.SIGTERM)
    run.until(lambda: worker not in run.pids("work", "left"))
    steps = run.until(run.status).outer_steps
    run.until_steps(steps + 2)
    assert run.start("pull", url, "--out", "live.safetensors").wait(600) == 0

    assert run.start("stop", "run.yaml").wait(600) == 0
    assert running.wait(600) == 0 and late.wait(600) == 0
    assert run.summary()["state"] == "stopped" and run.pids() == []
    shares = [region["share"] for region in run.summary()["regions"].values()]
    assert all(share > 0 for share in shares) and sum(shares) == pytest.approx(1)

    assert run.start("pull", "run.yaml", "--out", "past.safetensors").wait(600) == 0
    live, past = (load_file(tmp_path / f"{name}.safetensors") for name in ("live", "past"))
    assert live.keys() == past.keys()
    assert any(not np.array_equal(live[name], past[name]) for name in live)


def _regions(run: Run) -> tuple[RegionStatus, ...]:
    return status.regions if (status := run.status()) else ()
