"""What does `Region` cost a PyTorch loop? The same loop alone and as a region, in one process.

    python -m tests.verify.trainers.overhead --steps 200

Steps alone, then steps as a region with a real server and worker beside them. Both are counted in
processor time of the training process, threads included, which other programs on the machine
change little; wall time is given too, and says something only on a machine with nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests import ROOT

SEQUENCE, BATCH = 128, 8
GOAL = 0.97


def child(steps: int, file: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from diloco_cli import Region
    from diloco_cli.region.names import transformers_names
    from diloco_cli.region.torch_weights import TorchOptimizer, TorchWeights

    torch.set_num_threads(1)
    region = Region.here()
    config, names = transformers_names(region.settings().model, sequence=SEQUENCE)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).train()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE + 1))

    def step() -> torch.Tensor:
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss

    def timed(body) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        body()
        return time.process_time() - cpu, time.perf_counter() - wall

    def alone() -> None:
        for _ in range(steps):
            step()

    step()
    before = timed(alone)
    with region.join(TorchWeights(model, names=names), optimizer=TorchOptimizer(adam)) as outer:

        def as_region() -> None:
            for _ in range(steps):
                assert outer.go_on()
                outer.stepped(tokens=BATCH * SEQUENCE, loss=step())

        for _ in range(5):
            assert outer.go_on()
            outer.stepped(tokens=BATCH * SEQUENCE, loss=step())
        within = timed(as_region)
        versions = outer.versions
    after = timed(alone)
    found = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "steps": steps,
        "step_seconds": before[1] / steps,
        "versions_adopted": sum(versions),
        "ratio_cpu": (before[0] + after[0]) / 2 / within[0],
        "ratio_wall": (before[1] + after[1]) / 2 / within[1],
        "goal": GOAL,
        "load": os.getloadavg()[0],
    }
    file.write_text(json.dumps(found))


def main(steps: int, folder: Path) -> dict:
    from diloco_cli.worker.agent.trainer_process import end_trainer
    from diloco_cli.worker.mailbox import Mailbox
    from tests.live.processes import Live

    os.chdir(ROOT)
    folder.mkdir(parents=True)
    result = folder.parent / "overhead.json"
    command = [sys.executable, "-m", "tests.verify.trainers.overhead", str(steps), str(result)]
    run = Live(
        folder,
        [{"name": "paris", "trainer": {"command": command}}],
        model={"kind": "decoder", "size": "mini"},
        inner={"batch": BATCH, "sequence": SEQUENCE},
        sync={"fragments": 4, "every": 24},
    )
    try:
        server = run.serve()
        agent = run.work("paris")
        run.wait_for(result.exists, server, agent, seconds=3600.0)
        return json.loads(result.read_text())
    finally:
        run.launcher.stop(run.started, grace=5.0)
        end_trainer(Mailbox(folder / "regions" / "paris"))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        child(int(sys.argv[1]), Path(sys.argv[2]))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        made = main(chosen.steps, Path(place) / "run")
        print(json.dumps(made, indent=1))
        sys.exit(0 if made["ratio_cpu"] >= GOAL else 1)
