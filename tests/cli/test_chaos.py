"""`diloco chaos` refuses what it cannot do before it starts anything, and ends when told to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco_cli.cli.app import main
from diloco_cli.cli.study.chaos import ChaosMethod, _load
from diloco_cli.spec.resolved import write_resolved
from tests.cli.harness import SPEC

CHAOS = SPEC + "chaos: {faults: [{kind: kill-trainer, per_hour: 324}]}\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("calm.yaml").write_text(SPEC)
    Path("rough.yaml").write_text(CHAOS)


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["chaos", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_spec_without_chaos_is_told_what_to_add(capsys):
    assert "kind: kill-trainer" in refused(capsys, "calm.yaml")


def test_a_folder_with_a_run_is_left_alone(capsys):
    folder = Path("runs/tiny-decoupled")
    write_resolved(_load(Path("rough.yaml"), [], ChaosMethod.decoupled), folder)
    (folder / "chaos.json").write_text("{}")
    said = refused(capsys, "rough.yaml")
    assert "holds a run already" in said and "--fresh" in said
    assert (folder / "chaos.json").read_text() == "{}" and not (folder / "schedule.json").exists()


@pytest.mark.parametrize(
    "schedule, said",
    [
        ({"faults": [{"time": 1, "kind": "kill-trainer", "region": "rome"}]}, "rome"),
        ({"faults": [{"time": 1, "kind": "narrow", "region": "left", "duration": 1}]}, "link"),
        (
            {"faults": [{"time": 1, "kind": "pause", "region": "left"}]},
            "how long it lasts",
        ),
    ],
)
def test_a_schedule_that_cannot_be_inflicted_is_refused(capsys, schedule: dict, said: str):
    Path("schedule.json").write_text(json.dumps(schedule))
    assert said in refused(capsys, "rough.yaml", "--schedule", "schedule.json")
    assert not Path("runs").exists()


@pytest.mark.parametrize("text", ["", "{}", '{"tokens": {"trained": 0}, "seconds": 3}'])
def test_a_fault_free_record_has_to_be_one(capsys, text: str):
    Path("record.json").write_text(text)
    assert "no record" in refused(capsys, "rough.yaml", "--fault-free", "record.json")


def test_a_link_that_only_looks_like_one_is_refused_before_the_start(capsys):
    said = refused(capsys, "rough.yaml", "--set", "chaos.link=1Mbit/50ms/out=2s")
    assert "out" in said or "time" in said
    assert not Path("runs").exists()


def test_methods_are_settings_of_the_same_run():
    ways = {method: _load(Path("rough.yaml"), [], method).sync for method in ChaosMethod}
    assert ways[ChaosMethod.decoupled].quorum == 1
    lockstep, streaming = ways[ChaosMethod.synchronous], ways[ChaosMethod.streaming]
    assert (lockstep.quorum, lockstep.overlap, lockstep.fragments) == (2, 0, 1)
    assert (streaming.quorum, streaming.overlap, streaming.fragments) == (2, 1, 2)
    assert {lockstep.grace.kind, streaming.grace.kind} == {"none"}
    assert ways[ChaosMethod.rigid] == ways[ChaosMethod.elastic] == ways[ChaosMethod.decoupled]


def test_a_data_parallel_job_ends_when_told_to_even_if_its_shell_ignores_that():
    """Started in the background, a process inherits that SIGINT is ignored."""
    words = [sys.executable, "-m", "diloco_cli", "chaos", "rough.yaml", "--method", "elastic"]
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *words]
    job = subprocess.Popen(ignoring, stderr=subprocess.PIPE, text=True)
    try:
        assert job.stderr and "starting 2 members" in job.stderr.readline()
        members = _members_once_there(job, count=2)
        job.send_signal(signal.SIGINT)
        with job.stderr:
            said = job.stderr.read()
        assert job.wait(timeout=250) == 128 + signal.SIGINT and "there is no record" in said
    finally:
        job.kill()
        job.wait()
    assert not [pid for pid in members if _alive(pid)]


def _members_once_there(job: subprocess.Popen[str], *, count: int) -> list[int]:
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    while job.poll() is None:
        if len(found := [int(pid) for pid in children.read_text().split()]) == count:
            return found
        time.sleep(0.01)
    raise AssertionError(f"it ended with {job.returncode}")


def _alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
