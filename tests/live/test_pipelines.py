"""The pipelines people start from do what they say, and the weights are what was learned."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from diloco_cli.assemble import load_run
from diloco_cli.worker.trainer.task import prepare

pytestmark = pytest.mark.live

PIPELINES = Path(__file__).parents[2] / "pipelines"


def diloco(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco_cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def ran(folder: Path, pipeline: str, *options: str) -> dict:
    done = diloco("run", str(PIPELINES / pipeline), "--dir", str(folder), *options)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    tokens = summary["tokens"]
    accounted = sum(tokens[fate] for fate in ("applied", "pending", "refused", "discarded"))
    assert summary["state"] == "finished" and summary["balanced"]
    assert tokens["trained"] == accounted >= tokens["budget"]
    return summary


def test_the_quickstart_learns_even_with_a_quarter_of_its_budget(tmp_path):
    summary = ran(tmp_path / "run", "quickstart.yaml", "--set", "budget.tokens=300_000")
    loss = summary["loss"]
    assert loss["heldout"] < 2.4 < loss["first"]
    assert summary["wire"]["bits_per_parameter_up"] < 3.5


def test_the_pulled_weights_have_the_held_out_loss_the_server_reports(tmp_path):
    folder, file = tmp_path / "run", tmp_path / "model.safetensors"
    summary = ran(folder, "smoke.yaml", "--set", "outer.ema=0.5")
    pulled = diloco("pull", str(folder), "--out", str(file))
    assert pulled.returncode == 0, pulled.stderr
    spec = load_run(folder / "spec.resolved.yaml").spec
    task = prepare(spec, min(region.name for region in spec.regions))  # It evaluates.
    batches = list(task.stream.heldout(spec.evaluate.batches))
    loss = task.step.engine().evaluate(load_file(file), batches)
    assert loss == pytest.approx(summary["loss"]["heldout"], abs=1e-5)
    averaged = diloco("pull", str(folder), "--ema", "--out", str(file))
    assert averaged.returncode == 0, averaged.stderr
    average = task.step.engine().evaluate(load_file(file), batches)
    assert average != loss and average == pytest.approx(summary["loss"]["ema"], abs=1e-5)
    assert summary["loss"]["ema_at"] == summary["outer_steps"]
    evaluated = diloco("evaluate", str(folder), "--format", "json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["loss"] == pytest.approx(loss, abs=1e-5)
