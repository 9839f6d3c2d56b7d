"""A region of two hosts started by a real Slurm: `srun` says all, `requeue` and `scancel` cost it
nothing but time."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_cli.launch.ports import free_addresses
from tests.live.processes import Live
from tests.verify.regions.two_hosts import DEVICES, INNER, RIGHT, audit

COMMANDS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
missing = [command for command in COMMANDS if shutil.which(command) is None]
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing), reason=f"no Slurm here: {', '.join(missing)} not found"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a Slurm without munge needs root"),
]

CONFIGURATION = """
ClusterName=diloco
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=60
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
JOB = """#!/bin/sh
#SBATCH --job-name=right --ntasks=2 --requeue --open-mode=append --output={log}
export XLA_FLAGS={flags}
exec srun --kill-on-bad-exit=0 {python} -m diloco_cli work {spec} --region right --server {url} \
 --dir {folder}
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        ports = [address.rpartition(":")[2] for address in free_addresses(2)]
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        conf = folder / "slurm.conf"
        conf.write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                folder=folder,
                controller=ports[0],
                node=ports[1],
            )
        )
        self._environment = {**os.environ, "SLURM_CONF": str(conf)}
        self.daemons = [self._start(name, folder) for name in ("slurmctld", "slurmd")]

    def _start(self, name: str, folder: Path) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("w") as log:
            return subprocess.Popen([name, "-D"], env=self._environment, stdout=log, stderr=log)

    def ask(self, *words: str) -> str:
        asked = subprocess.run(words, env=self._environment, capture_output=True, text=True)
        return asked.stdout.strip() if asked.returncode == 0 else ""

    def is_up(self) -> bool:
        return self.ask("sinfo", "-h", "-o", "%T") == "idle"

    def state(self, job: str) -> str:
        return self.ask("squeue", "-h", "-j", job, "-o", "%T")

    def end(self) -> None:
        self.ask("scancel", "--state=RUNNING", "--name=right")
        deadline = time.monotonic() + 90
        while self.ask("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(60)


@pytest.fixture
def slurm(tmp_path) -> Iterator[Slurm]:
    made = Slurm(tmp_path / "slurm")
    try:
        yield made
    finally:
        made.end()


def test_srun_says_which_hosts_there_are_and_a_requeued_job_goes_on(live, slurm, tmp_path):
    run: Live = live(
        {"name": "left", "speed": 0.02}, RIGHT, sync={"fragments": 2, "every": 8}, inner=INNER
    )
    server, left = run.serve(), run.work("left")
    run.wait_for(slurm.is_up, server)
    script = tmp_path / "right.sh"
    script.write_text(
        JOB.format(
            log=tmp_path / "right.log",
            flags=DEVICES,
            python=sys.executable,
            spec=run.file,
            url=run.address["url"],
            folder=run.folder,
        )
    )

    def submit() -> str:
        return slurm.ask("sbatch", "--parsable", str(script))

    def trains_on(since: float, step: int) -> bool:
        report = run.folder / "regions" / "right" / "progress.json"
        if not report.exists() or report.stat().st_mtime <= since:
            return False
        progress = run.progress("right")
        return progress.training and progress.step > step

    job, began = submit(), time.time()
    assert job, (tmp_path / "slurm" / "slurmctld.log").read_text()[-2000:]
    run.wait_for(lambda: trains_on(began, 0), server, left, seconds=300)
    assert run.progress("right").devices == 4

    # Slurm ends all tasks and puts the job back into the queue.
    run.wait_for(lambda: run.status().tokens.applied > 0, server, left)
    assert slurm.state(job) == "RUNNING"
    slurm.ask("scontrol", "requeue", job)
    run.wait_for(lambda: slurm.state(job) != "RUNNING", server, left)
    step, since = run.progress("right").step, time.time()
    run.wait_for(lambda: trains_on(since, step), server, left, seconds=400)
    assert slurm.state(job) == "RUNNING"

    # Cancelled, and submitted again: another job, another port, the same region.
    slurm.ask("scancel", job)
    run.wait_for(lambda: not slurm.state(job), server, left)
    step, since, other = run.progress("right").step, time.time(), submit()
    assert other not in ("", job)
    run.wait_for(lambda: trains_on(since, step), server, left, seconds=300)
    slurm.ask("scancel", other)
    run.wait_for(lambda: not slurm.state(other), server, left)
    for process in (left, server):
        process.ask()
        assert run.exit_code(process) == 0
    books = audit(run)
    assert books["lost"] == 0, "Slurm asks before it kills, and the region then saves"
