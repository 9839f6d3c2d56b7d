"""What does it cost an inner step that learning rate and gradient norm are known, and kept?

    python -m tests.verify.trainers.metrics_cost --turns 30

The quickstart's step, compiled with these results and without them, in turns of some steps. With
them, every few steps they are read to the host and a line is written, which in a run
the agent does, another process: so this is more than a trainer pays. Counted in processor time,
which other programs on the machine change little; the median of the turns' ratios is the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests import ROOT

GOAL = 0.99
STEPS, EVERY = 12, 6
"""Steps of a turn, and steps between two reports: a quarter of the quickstart's `every`."""


def measure(turns: int) -> dict[str, Any]:
    import jax

    from diloco_cli.assemble import load_run, spelled_out
    from diloco_cli.observe.metrics_file import MetricsFile
    from diloco_cli.worker.engines.jax_engine import JaxStep
    from diloco_cli.worker.trainer.task import prepare

    spec = spelled_out(load_run(ROOT / "pipelines" / "quickstart.yaml").spec)
    task = prepare(spec, spec.regions[0].name)
    step = task.step
    assert isinstance(step, JaxStep)
    bare = jax.jit(lambda *given: step.step(*given)[:3], donate_argnums=(0, 1))
    tokens = np.random.default_rng(0).integers(0, 250, (task.inner.batch, task.inner.sequence + 1))
    tokens = tokens.astype(np.int32)
    engine = step.engine()
    engine.load(task.model.init(0), None)
    params = step.placement.place(task.model.init(0))
    state = step.init_state(params)

    def without() -> None:
        nonlocal params, state
        for _ in range(STEPS):
            params, state, _ = bare(params, state, tokens)
        jax.block_until_ready(params)

    def with_metrics(file: MetricsFile, turn: int) -> None:
        for number in range(STEPS):
            engine.step(tokens)
            if number % EVERY == 0 and (facts := engine.facts()):
                fields = {**facts._asdict(), "loss": 1.0, "tokens": 1.0, "trained": 1.0}
                file.note(turn * STEPS + number + 1, 1.0, fields, last=True)
        engine.wait()

    ratios, walls = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = MetricsFile(Path(folder))
        without()
        with_metrics(file, 0)
        for turn in range(1, turns + 1):
            spent = {}
            bodies = [("without", without), ("with", lambda turn=turn: with_metrics(file, turn))]
            for name, body in bodies if turn % 2 else bodies[::-1]:
                cpu, wall = time.process_time(), time.perf_counter()
                body()
                spent[name] = time.process_time() - cpu, time.perf_counter() - wall
            ratios.append(spent["without"][0] / spent["with"][0])
            walls.append(spent["without"][1] / spent["with"][1])
    return {
        "turns": turns,
        "speed": round(statistics.median(ratios), 4),
        "quartiles": [round(each, 4) for each in statistics.quantiles(ratios, n=4)],
        "wall": round(statistics.median(walls), 4),
        "goal": GOAL,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    print(json.dumps(measure(parser.parse_args().turns)))


if __name__ == "__main__":
    main()
