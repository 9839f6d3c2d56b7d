"""Data parallel as real processes: one step of all is one step, whoever dies in between."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.bench.baselines.job import run_parallel
from diloco_cli.sim.faults import Fault
from diloco_cli.spec.schema import ChaosSpec, RunSpec
from diloco_cli.worker.trainer.checkpoints import checkpoint

PATIENCE = 240.0
"""Seconds a run may take on a machine that does something else."""
TEXT = b"".join(b"%d bottles of beer on the wall, take one down. " % n for n in range(4000))


def spec_of(folder: Path, *regions: str, step_seconds: float = 0.05, **inner: Any) -> RunSpec:
    text = folder / "text.txt"
    text.write_bytes(TEXT)
    spec = RunSpec.model_validate(
        {
            "spec": 1,
            "name": "tiny",
            "budget": {"tokens": 1_000_000},
            "model": {"kind": "decoder", "layers": 1, "width": 16, "heads": 2},
            "data": {"kind": "text", "files": [str(text)]},
            "inner": {"batch": 2, "sequence": 16, "schedule": {"kind": "constant"}, **inner},
            "regions": [{"name": name} for name in regions],
            "sync": {"fragments": 2, "every": 4, "overlap": 1},
            "evaluate": {"batches": 2},
        }
    )
    return spec.model_copy(update={"chaos": ChaosSpec(step_seconds=step_seconds)})


def moments(reducer: Any, what: str, region: str) -> list[float]:
    return [at for at, which, name, _ in list(reducer.news) if (which, name) == (what, region)]


def trained_alone(spec: RunSpec, regions: list[str], steps: int) -> dict[str, np.ndarray]:
    """One process with everybody's batches in one, which is what all together must equal."""
    from diloco_cli.bench.baselines.member import place_of
    from diloco_cli.worker.trainer.task import prepare

    tasks = [prepare(spec, region) for region in regions]
    engine = tasks[0].step.engine()
    engine.load(tasks[0].model.init(spec.seed), None)
    texts = [task.stream.part(*place_of(spec, task.region)) for task in tasks]
    cursors = [text.start() for text in texts]
    for _ in range(steps):
        read = [text.batch(at) for text, at in zip(texts, cursors, strict=True)]
        cursors = [cursor for _, cursor in read]
        engine.step(np.concatenate([rows for rows, _ in read]))
    return engine.snapshot().params


def test_rigid_goes_back_to_the_checkpoint_and_repeats_what_was_lost(tmp_path: Path):
    spec = spec_of(tmp_path, "paris", "tokyo", optimizer={"kind": "sgd", "lr": 0.1})
    killed: list[int] = []
    news: list[Any] = []

    def until(reducer: Any) -> bool:
        """Kills once eight steps are made, of which only the first is in the checkpoint."""
        news[:] = reducer.news
        if not killed and reducer.step >= 8 and reducer.took:
            killed.append(reducer.step)
            os.kill(reducer.members["tokyo"].hello["pid"], signal.SIGKILL)
        return len(moments(reducer, "stepped", "tokyo")) == 2 and reducer.step >= 6

    record: Any = run_parallel(
        spec,
        [],
        tmp_path / "run",
        elastic=False,
        seconds=PATIENCE,
        say=print,
        checkpoint=PATIENCE,
        until=until,
    )
    own = record["parallel"]
    loaded = [more["step"] for _, what, name, more in news if (what, name) == ("loaded", "paris")]
    assert loaded == [0, 1]  # Also who was not killed goes back.
    assert own["restarts_of_all"] == 1
    assert own["steps_lost"] >= killed[0] - 1  # All but the one in the checkpoint.
    assert len(own["digests"]) == 1
    each = 2 * 2 * 16
    assert record["tokens"]["applied"] == own["steps"] * each
    assert record["tokens"]["trained"] == (own["steps"] + own["steps_lost"]) * each
    assert record["goodput"]["participation"] == 1.0

    last = checkpoint.load(tmp_path / "run" / "parallel" / "checkpoint.safetensors")
    assert last.step == own["steps"] + 1  # The clock starts with the first.
    alone = trained_alone(spec.model_copy(update={"chaos": None}), ["paris", "tokyo"], last.step)
    for name, values in last.params.items():
        np.testing.assert_allclose(values, alone[name], rtol=2e-4, atol=2e-6)


def test_elastic_goes_on_without_the_dead_and_takes_it_in_again(tmp_path: Path):
    spec = spec_of(tmp_path, "paris", "tokyo")

    def until(reducer: Any) -> bool:
        back = [at for at in moments(reducer, "stepped", "tokyo") if at > died(reducer)]
        later = [one for one in reducer.accounts.counted if back and one.at + reducer.t0 > back[0]]
        return len(later) >= 4

    def died(reducer: Any) -> float:
        return min(moments(reducer, "lost", "tokyo"), default=float("inf"))

    record: Any = run_parallel(
        spec,
        [Fault(0.1, "kill-trainer", "tokyo"), Fault(0.2, "kill-server")],
        tmp_path / "run",
        elastic=True,
        seconds=PATIENCE,
        say=print,
        link="200Mbit/2ms",
        until=until,
    )
    own = record["parallel"]
    assert own["steps_lost"] == own["restarts_of_all"] == 0
    assert len(own["digests"]) == 1
    assert record["tokens"]["applied"] == record["tokens"]["trained"]
    assert 1 / 2 < record["goodput"]["participation"] < 1
    killed, server = record["faults"]
    assert set(killed["recovery"]) == {"detect", "start", "compile", "fetch", "total"}
    assert record["recovery"]["count"] == 1
    assert "neither server" in server["skipped"]
    losses = [loss for _, loss, _ in record["loss"]["curve"]]
    assert losses[-1] == record["loss"]["heldout"] < losses[0]
