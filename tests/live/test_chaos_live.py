"""`diloco chaos` for real: what the schedule says is inflicted, and the run survives it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from diloco_cli.observe.events import read_events
from diloco_cli.sim.faults import load, planned
from diloco_cli.spec.load import load_spec

pytestmark = [pytest.mark.live, pytest.mark.timeout(2000)]

SPEC = """
spec: 1
name: rough
budget: {tokens: 100_000_000}
model: {kind: decoder, layers: 1, width: 32, heads: 2}
data: {kind: python-source, limit: 300_000}
inner: {batch: 4, sequence: 32, optimizer: {kind: adamw, lr: 5e-3}}
regions: [{name: left}, {name: right}]
sync: {fragments: 2, every: 6, overlap: 1}
evaluate: {every: 8, batches: 1}
server: {lease: 3}
chaos:
  seconds: SECONDS
  step_seconds: 0.1
  faults:
    - {kind: kill-trainer, region: left, at: 1}
    - {kind: cut, region: right, at: 2, duration: 2}
    - {kind: pause, region: right, at: 5, duration: PAUSE}
"""


class Rough:
    """One `diloco chaos` in a folder of its own."""

    def __init__(self, place: Path, **values: int) -> None:
        self.place, self.folder = place, place / "runs" / "rough-decoupled"
        text = SPEC
        for name, value in values.items():
            text = text.replace(name, str(value))
        (place / "run.yaml").write_text(text)
        command = [sys.executable, "-m", "diloco_cli", "chaos", "run.yaml"]
        with open(place / "said", "w") as said:
            self.child = subprocess.Popen(command, cwd=place, stdout=said, stderr=said)

    def left(self) -> list[str]:
        """Every process of the run, whoever its parent is by now."""
        here = [
            process
            for process in psutil.process_iter(["cwd", "cmdline"])
            if process.info["cwd"] == str(self.place)
            and "diloco_cli" in str(process.info["cmdline"])
        ]
        return [" ".join(process.info["cmdline"]) for process in here]

    def until(self, told, seconds: float = 900.0) -> None:
        deadline = time.monotonic() + seconds
        while not told():
            said = (self.place / "said").read_text()
            assert self.child.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)

    def faults(self) -> list[str]:
        events = read_events(self.folder / "events.jsonl")
        return [event.fields["fault"] for event in events if event.kind == "fault"]

    def read(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        for process in psutil.process_iter(["cwd"]):
            if process.info["cwd"] == str(self.place):
                process.kill()


@pytest.fixture
def rough_in(tmp_path):
    made = []

    def make(**values: int) -> Rough:
        made.append(Rough(tmp_path, **values))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_a_schedule_is_inflicted_survived_and_can_be_inflicted_again(rough_in):
    rough = rough_in(SECONDS=9, PAUSE=1)
    assert rough.child.wait(900) == 0, (rough.place / "said").read_text()
    assert rough.left() == []

    record, summary = rough.read("chaos.json"), rough.read("summary.json")
    assert [fault["kind"] for fault in record["faults"]] == ["kill-trainer", "cut", "pause"]
    assert [fault for fault in record["faults"] if "skipped" in fault] == []
    assert all(fault["at"] >= fault["time"] for fault in record["faults"])
    deaths = [
        event
        for event in read_events(rough.folder / "events.jsonl")
        if event.kind in ("trainer-died", "trainer-exited") and event.fields.get("code") == -9
    ]
    assert {event.fields["region"] for event in deaths} == {"left"}

    assert summary["balanced"] and summary["state"] == "stopped"
    assert summary["tokens"]["applied"] > 0 and record["seconds"] >= 9
    # However fast this machine is, nobody stepped faster than the pace; reports lag by 3 steps.
    assert record["tokens"]["fault_free"] == pytest.approx(2 * 128 / 0.1 * record["seconds"], 1e-3)
    assert record["tokens"]["trained"] <= record["tokens"]["fault_free"] + 2 * 128 * 12

    # Only who is struck on the way to the server has an emulated link.
    assert {*record["links"]} == {"right"} and min(record["links"]["right"].values()) > 0

    spec = load_spec(rough.place / "run.yaml").spec
    assert spec.chaos
    plan = planned(spec.chaos, ["left", "right"])
    assert load(rough.folder / "schedule.json", ["left", "right"]) == plan
    assert [fault["time"] for fault in record["faults"]] == [fault.time for fault in plan]


@pytest.mark.long
def test_who_is_stopped_meanwhile_leaves_nobody_behind_paused_or_not(rough_in):
    rough = rough_in(SECONDS=1000, PAUSE=900)
    rough.until(lambda: "pause" in rough.faults())
    rough.child.send_signal(signal.SIGINT)
    assert rough.child.wait(900) == 130
    assert rough.left() == []
    record = rough.read("chaos.json")
    assert len(record["faults"]) == 3 and record["seconds"] < 1000
    assert rough.read("summary.json")["balanced"]
