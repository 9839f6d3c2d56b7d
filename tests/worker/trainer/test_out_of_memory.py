"""A step that does not fit the devices is said in a sentence, and costs nothing."""

from __future__ import annotations

import subprocess
import sys

from tests import ROOT

TRAINS = """
import os, resource, sys
from pathlib import Path
import psutil
from diloco_cli.errors import SpecError
from diloco_cli.worker.engines.jax_engine import use_compile_cache
from diloco_cli.worker.trainer.built_in_trainer import train
from tests.worker.trainer.harness import Stage, honest, save, steps, tiny_spec

use_compile_cache()
folder = Path(sys.argv[1])
spec = tiny_spec(folder / "text")
stage = Stage(folder, spec)
trainer = stage.trainer()
steps(trainer, 3)
save(trainer)
trainer.close()

used = psutil.Process().memory_info().vms
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 1_500_000_000, most))
inner = spec.inner.model_copy(update={"batch": 200_000})
large = spec.model_copy(update={"inner": inner})
listens, _ = os.pipe()
os.dup2(listens, 0)  # An agent that has nothing to say.
try:
    train(large, "paris", folder)
except SpecError as error:
    print(error.message, "|", error.hint, flush=True)
else:
    print("it fitted", flush=True)

resource.setrlimit(resource.RLIMIT_AS, (most, most))
again = stage.trainer()
print(again.weights.clock, honest(again), flush=True)
os._exit(0)
"""


def test_a_step_that_does_not_fit_is_refused_and_nothing_is_lost(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", TRAINS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = [line for line in ended.stdout.splitlines() + ended.stderr.splitlines() if line]
    said = next((line for line in lines if line.startswith("The first step")), ended.stderr[-2000:])
    assert "The first step of region paris does not fit its devices (" in said
    assert " of kind cpu), which asked for " in said and "Lower `inner.batch`" in said
    assert "3 True" in lines
