"""The examples of training loops, run as their first lines say, with a budget of seconds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.live

FOLDER = ROOT / "pipelines" / "own-trainer"
TORCH = ("torch", "transformers", "accelerate")
DIGITS = ["{python}", "digits.py"]
# Four processes with torch are many for two cores.
HALVES = [{"name": f"r{n}", "trainer": {"command": [*DIGITS, f"{n}/2"]}} for n in range(2)]


@pytest.mark.parametrize(
    "spec, loop, needs, tokens, first",
    [
        ("jax.yaml", "jax_loop.py", (), 40_000, math.log(256)),
        ("digits.yaml", "digits.py", ("torch", "sklearn"), 150_000, math.log(10)),
        ("hf-trainer.yaml", "hf_trainer.py", TORCH, 20_000, math.log(256)),
        ("pytorch.yaml", None, TORCH, 30_000, math.log(256)),
    ],
)
def test_an_example_runs(spec: str, loop: str | None, needs, tokens, first, tmp_path: Path):
    if missing := [name for name in needs if not find_spec(name)]:
        pytest.skip(f"{missing[0]} is not installed")

    def ran(*words: object) -> str:
        command = [sys.executable, *map(str, words)]
        ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
        return ended.stdout

    changes = ["--set", f"budget.tokens={tokens}"]
    if loop:
        file = tmp_path / "init.safetensors"
        assert str(file) in ran(loop, "--describe", file)
        changes += ["--set", f"model.file={file}"]
    if loop == "digits.py":
        changes += ["--set", f"regions={json.dumps(HALVES)}"]
    ran("-m", "diloco_cli", "run", spec, "--dir", tmp_path / "run", *changes)

    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["state"] == "finished" and found["balanced"], found
    assert found["tokens"]["applied"] == found["tokens"]["trained"] >= tokens
    assert found["loss"]["train"] < 0.95 * first
    if spec != "hf-trainer.yaml":  # A `Trainer` has its own ways to evaluate.
        assert found["loss"]["first"] == pytest.approx(first, rel=0.05)
        assert found["loss"]["heldout"] < 0.95 * first
