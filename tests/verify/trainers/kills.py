"""One run with a JAX region, a PyTorch region and a PyTorch region of two processes, killed often.

    python -m tests.verify.trainers.kills --kills 20

Trainers and agents are killed in turn, at random moments. At the end everything is stopped in
order: the books must balance to the token, and a replay must give every version to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import psutil

from diloco_cli.assemble import build_terms, resolve, settings_of
from diloco_cli.server.recovery.verify import replay
from diloco_cli.worker.agent.trainer_process import end_trainer
from diloco_cli.worker.mailbox import Mailbox
from tests import ROOT
from tests.live.processes import Live

LOOP = str(ROOT / "pipelines" / "own-trainer" / "pytorch_loop.py")
TORCHRUN = ["{python}", "-m", "torch.distributed.run", "--nproc-per-node=2"]
REGIONS: list[dict] = [
    {"name": "jax"},
    {"name": "torch", "trainer": {"command": ["{python}", LOOP]}},
    {"name": "two", "inner": {"batch": 8}, "trainer": {"command": [*TORCHRUN, LOOP]}},
]


def main(kills: int, regions: int, folder: Path, seconds: float) -> dict:
    os.chdir(ROOT)
    run = Live(
        folder,
        REGIONS[:regions],
        model={"kind": "decoder", "layers": 2, "width": 64, "heads": 4, "kv_heads": 2},
        inner={"batch": 4, "sequence": 64, "schedule": {"kind": "constant"}},
        sync={"fragments": 2, "every": 16},
        server={"lease": 10.0},
    )
    names, draw = [each["name"] for each in REGIONS[:regions]], random.Random(0)
    server = run.serve()
    agents = {name: run.work(name) for name in names}
    done: list[str] = []
    try:
        run.wait_for(lambda: all(run.progress(n).step > 20 for n in names), server, seconds=seconds)
        for number in range(kills):
            name = names[number % len(names)]
            mailbox = Mailbox(folder / "regions" / name)
            time.sleep(draw.uniform(0.0, 3.0))  # At any moment of a round.
            if number % 4 == 3:
                os.kill(agents[name].pid, signal.SIGKILL)
                run.exit_code(agents[name])
                agents[name] = run.work(name)
                done.append(f"agent of {name}")
            elif (pid := mailbox.trainer_lock_holder()) is not None:
                psutil.Process(pid).kill()
                done.append(f"trainer of {name}")
            step = run.progress(name).step
            further = lambda n=name, s=step: run.progress(n).step > s + 5  # noqa: E731
            run.wait_for(further, server, seconds=seconds)
        outer = run.status().outer_steps
        run.wait_for(lambda: run.status().outer_steps > outer, server, seconds=seconds)
        shares = {each.name: each.share for each in run.status().regions}
        for agent in agents.values():
            agent.ask()
        codes = [run.exit_code(agent, seconds=120.0) for agent in agents.values()]
        server.ask()
        codes.append(run.exit_code(server, seconds=120.0))
    finally:
        run.launcher.stop(run.started, grace=0.0)
        for name in names:
            end_trainer(Mailbox(folder / "regions" / name))
    summary = run.summary()
    settings = settings_of(run.spec, resolve(run.spec))
    lines = replay(settings, folder / "server", build=build_terms).lines
    return {
        "kills": done,
        "exit_codes": codes,
        "balanced": summary["balanced"],
        "tokens": summary["tokens"],
        "shares": shares,
        "heldout": summary["loss"],
        "replayed": len(lines),
        "replay_equal": bool(lines) and all(line.made for line in lines),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--regions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=900.0, help="patience for each restart")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "run"
        print(json.dumps(main(chosen.kills, chosen.regions, home, chosen.seconds), indent=1))
