"""A model on the tasks of lm-eval, EleutherAI's evaluation harness, through its exported folder."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diloco_cli.errors import DilocoError, RunFailed, SpecError
from diloco_cli.models.hf.read import HfWeights
from diloco_cli.run.model.export import export_hf
from diloco_cli.run.model.find import TrainedModel

NEWLINE = 10
"""What a model of bytes, whose documents have no end, reads before a text's first byte."""

BATCH = 16
"""Texts that the harness scores at a time; one by one takes several times as long on a CPU."""

Scores = dict[str, dict[str, float]]
"""Of each task, what each of its metrics is."""


def run_tasks(trained: TrainedModel, tasks: Sequence[str], include: Path | None = None) -> Scores:
    """Runs the harness in this process; `include` has task files of one's own."""
    missing = [name for name in ("lm_eval", "torch", "transformers") if not find_spec(name)]
    if missing:
        raise SpecError(
            f"--harness needs {' and '.join(missing)}, not installed here.",
            hint="pip install 'diloco-cli[lm-eval]'",
        )
    if include is not None and not include.is_dir():
        raise SpecError(
            f"--include {include} is no folder.", hint="Name the folder that has the task files."
        )
    text = trained.needed_text()
    known = import_module("lm_eval.tasks").TaskManager(include_path=include and str(include))
    if unknown := [each for each in tasks if not known.match_tasks([each])]:
        raise SpecError(
            f"lm-eval knows no task {', '.join(unknown)}.",
            hint="`lm_eval ls tasks` lists its own; --include FOLDER adds those of a folder.",
        )
    with tempfile.TemporaryDirectory(prefix="diloco-") as place:
        if isinstance(trained.weights, HfWeights):
            folder = Path(trained.name)
        else:
            folder = Path(place) / "hf"
            export_hf(trained, folder)
        about: dict[str, Any] = {"pretrained": str(folder), "dtype": "float32"}
        if text.end is None:
            about["prefix_token_id"] = NEWLINE
        found = _evaluated(about, known.match_tasks(list(tasks)), known)
    return {task: _metrics(each) for task, each in found.items()}


def _evaluated(about: dict[str, Any], tasks: list[str], known: Any) -> dict[str, dict[str, Any]]:
    evaluate = import_module("lm_eval").simple_evaluate
    device = "cuda" if import_module("torch").cuda.is_available() else "cpu"
    options = {"device": device, "batch_size": BATCH, "task_manager": known, "log_samples": False}
    try:
        found = evaluate(model="hf", model_args=about, tasks=tasks, **options)
    except DilocoError:
        raise
    except Exception as error:  # Whatever a task's data, its code or the network does.
        raise RunFailed(
            ": ".join(filter(None, ["lm-eval failed", type(error).__name__, str(error)])) + ".",
            hint="Tasks fetch their data once, from the Hugging Face Hub; tasks that generate need "
            "a tokenizer with a token that ends a text, which bytes have not.",
        ) from error
    assert found is not None, "None is for the processes that only help."
    return found["results"]


def _metrics(found: dict[str, Any]) -> dict[str, float]:
    """`acc,none` → `acc`: the name of a filter only where there is one."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in found.items()
        if "," in key and isinstance(value, (int, float))
    }
