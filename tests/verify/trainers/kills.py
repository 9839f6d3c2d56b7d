"""One run with regions of every make, killed again and again until its budget is trained.

    python -m tests.verify.trainers.kills --kills 20
    python -m tests.verify.trainers.kills --kills 0 --regions jax,jax-2,jax-3 --seeds 2

Trainers, agents and the processes that follow are killed in turn, at random moments. At the end
the books must balance to the token, and a replay must give every version to the bit. With
`--against` each seed is trained twice, so and by three undisturbed JAX regions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from diloco_cli.assemble import build_terms, resolve, settings_of
from diloco_cli.launch.ports import free_addresses
from diloco_cli.launch.roles import follower_role, work_role
from diloco_cli.launch.subprocesses import LocalProcess
from diloco_cli.server.recovery.verify import replay
from diloco_cli.worker.agent.trainer_process import end_trainer
from diloco_cli.worker.mailbox import Mailbox
from tests import ROOT
from tests.live.processes import Live

LOOP = ["{python}", "-m", "tests.verify.trainers.torch_text"]
EXAMPLE = str(ROOT / "pipelines" / "own-trainer" / "pytorch_loop.py")
TORCHRUN = ["{python}", "-m", "torch.distributed.run", "--nproc-per-node=2", EXAMPLE]
JAX = ("jax", "jax-2", "jax-3")
REGIONS: dict[str, dict[str, Any]] = {
    **{name: {"speed": 0.3} for name in JAX},
    "torch": {"trainer": {"command": LOOP}},
    "pair": {"hosts": 2, "mesh": {"fsdp": 2}},
    "torchrun": {"inner": {"batch": 8}, "trainer": {"command": TORCHRUN}},
}
"""JAX in one process, PyTorch in one, JAX in two (`hosts: 2`), PyTorch in two (FSDP2)."""
MIXED = ("jax", "torch", "pair")


class Region:
    """The processes of one region."""

    def __init__(self, run: Live, name: str) -> None:
        self.run, self.name = run, name
        self.mailbox = Mailbox(run.folder / "regions" / name)
        hosts = run.spec.region(name).host_count
        self.coordinator = free_addresses(1)[0] if hosts > 1 else ""
        self.agent, self.killed_at = self._start(), 0
        self.others = [self._follow(host) for host in range(1, hosts)]

    def _start(self) -> LocalProcess:
        url = self.run.address["url"]
        role = work_role(
            *(self.run.file, self.run.folder, self.name),
            url=url,
            cores=(),
            coordinator=self.coordinator,
        )
        return self.run.start(role)

    def _follow(self, host: int) -> LocalProcess:
        return self.run.start(
            follower_role(
                *(self.run.file, self.run.folder, self.name),
                host=host,
                coordinator=self.coordinator,
                cores=(),
            )
        )

    def trains(self) -> bool:
        """It has made some steps since it was killed."""
        return self.run.progress(self.name).step > self.killed_at + 5

    def kill_trainer(self) -> bool:
        if (pid := self.mailbox.trainer_lock_holder()) is None:
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def kill_agent(self) -> bool:
        os.kill(self.agent.pid, signal.SIGKILL)
        self.run.exit_code(self.agent)
        self.agent = self._start()
        return True

    def kill_follower(self) -> bool:
        children = [each for one in self.others for each in psutil.Process(one.pid).children()]
        if children:
            children[0].kill()
        return bool(children)

    def ways(self) -> list[tuple[str, Callable[[], bool]]]:
        ways = [("trainer", self.kill_trainer), ("agent", self.kill_agent)]
        return [*ways, ("follower", self.kill_follower)] if self.others else ways


def main(
    names: Sequence[str], *, kills: int, tokens: int, seed: int, folder: Path, seconds: float
) -> dict[str, Any]:
    os.chdir(ROOT)
    run = Live(
        folder,
        [{"name": name, **REGIONS[name]} for name in names],
        seed=seed,
        budget={"tokens": tokens},
        data={"kind": "python-source"},
        model={"kind": "decoder", "layers": 2, "width": 64, "heads": 4, "kv_heads": 2},
        inner={"batch": 4, "sequence": 64, "schedule": {"kind": "constant"}},
        sync={"fragments": 2, "every": 16},
        server={"lease": 10.0},
        evaluate={"batches": 64, "every": 1000, "region": "jax"},
    )
    done, began = [], time.monotonic()
    try:
        server = run.serve()
        regions = [Region(run, name) for name in names]
        done = _killed(run, server, regions, kills, random.Random(seed), seconds)
        run.wait_for(lambda: server.exit_code() is not None, seconds=seconds)
        codes = [run.exit_code(each, seconds=120.0) for each in (server, *_agents(regions))]
    finally:
        run.launcher.stop(run.started, grace=0.0)
        for name in names:
            end_trainer(Mailbox(folder / "regions" / name))
    summary = run.summary()
    settings = settings_of(run.spec, resolve(run.spec))
    lines = replay(settings, folder / "server", build=build_terms).lines
    return {
        "regions": list(names),
        "seed": seed,
        "kills": done,
        "exit_codes": codes,
        "balanced": summary["balanced"],
        "tokens": summary["tokens"],
        "shares": {name: each["share"] for name, each in summary["regions"].items()},
        "loss": summary["loss"],
        "replayed": len(lines),
        "replay_equal": bool(lines) and all(line.made for line in lines),
        "seconds": round(time.monotonic() - began),
        "load": round(os.getloadavg()[0]),
    }


def _agents(regions: Sequence[Region]) -> list[LocalProcess]:
    return [region.agent for region in regions]


def _killed(
    run: Live,
    server: LocalProcess,
    regions: Sequence[Region],
    kills: int,
    draw: random.Random,
    seconds: float,
) -> list[str]:
    """Kills somebody again and again, whoever trains; says who it was."""
    done: list[str] = []
    queues = {region.name: region.ways() for region in regions}
    deadline = time.monotonic() + seconds
    while len(done) < kills and server.exit_code() is None and time.monotonic() < deadline:
        time.sleep(draw.uniform(0.0, 3.0))  # At any moment of a round.
        if not (able := [region for region in regions if region.trains()]):
            continue
        region = draw.choice(able)
        word, strike = queues[region.name].pop(0)
        queues[region.name].append((word, strike))
        step = run.progress(region.name).step
        if strike():
            region.killed_at = step
            done.append(f"{word} of {region.name}")
            print(f"{len(done)}: {done[-1]} at step {step}", file=sys.stderr, flush=True)
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--regions", default=",".join(MIXED), help=", ".join(REGIONS))
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--against", action="store_true", help="train with three JAX regions too")
    parser.add_argument("--seconds", type=float, default=3000.0, help="patience for a run")
    asked = parser.parse_args()
    for one_seed in map(int, asked.seeds.split(",")):
        cells = [(asked.regions.split(","), asked.kills)]
        cells += [(list(JAX), 0)] if asked.against else []
        for chosen, count in cells:
            with tempfile.TemporaryDirectory() as place:
                found = main(
                    chosen,
                    kills=count,
                    tokens=asked.tokens,
                    seed=one_seed,
                    folder=Path(place) / "run",
                    seconds=asked.seconds,
                )
            print(json.dumps(found), flush=True)
