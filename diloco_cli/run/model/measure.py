"""The loss of a model: on a run's held-out text, on another dataset's, or on files."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.data import datasets
from diloco_cli.errors import SpecError
from diloco_cli.run.folder import spec_base
from diloco_cli.run.model.export import longest
from diloco_cli.run.model.find import TrainedModel
from diloco_cli.spec.schema import RegionSpec, RunSpec

ROWS = 8
"""Sequences of a batch, where no region says."""

BATCHES = 8
"""Of a dataset's held-out text, where nobody says."""


@dataclass(frozen=True)
class Measured:
    """What a model makes of some text."""

    loss: float
    """Nats per token."""
    tokens: int
    of: str
    """Which text."""


def measure_heldout(trained: TrainedModel, batches: int | None = None) -> Measured:
    """Measures the held-out text of the model's own run, as the region that evaluates does.

    With `batches` it is so much of it, instead of what the run's spec says.
    """
    if trained.spec is None:
        raise SpecError(
            f"{trained.name} is no run of this host, so there is no held-out text that is its own.",
            hint="Name files with --data.",
        )
    from diloco_cli.worker.trainer.task import prepare, set_up

    set_up(None)
    spec = _on_one_device(trained.spec)
    chosen = min(each.name for each in spec.regions)
    with contextlib.chdir(spec_base(trained.folder) if trained.folder else "."):
        task = prepare(spec, chosen)
        found = task.stream.heldout(batches or spec.evaluate.batches)
    loss = task.step.engine().evaluate(dict(trained.weights), found)
    return Measured(loss, _predicted(found), f"held-out text of {chosen}")


def measure_dataset(trained: TrainedModel, choice: dict[str, Any], batches: int) -> Measured:
    """Measures the held-out text of a dataset, given as in a spec."""
    dataset = datasets.build(choice)
    _refuse_larger(trained, dataset.vocabulary, str(choice.get("kind")))
    seed = trained.spec.seed if trained.spec else 0
    stream = dataset.open(seed, ROWS, longest(trained.spec))
    found = stream.heldout(batches)
    loss = _loss(trained, found, stream.separator)
    return Measured(loss, _predicted(found), f"held-out text of {choice}")


def measure_files(trained: TrainedModel, patterns: Sequence[str]) -> Measured:
    """Measures all text of some files, in sequences one after another."""
    codec, paths = trained.needed_text(), []
    for pattern in patterns:
        found = sorted(Path(each) for each in glob.glob(pattern, recursive=True))
        if not (files := [path for path in found if path.is_file()]):
            raise SpecError(f"--data: no file matches {pattern!r} in {Path.cwd()}.")
        paths += files
    tokens = np.concatenate(
        [np.array(codec.encode(path.read_text("utf-8", "replace")), np.int32) for path in paths]
    )
    size = longest(trained.spec) if trained.spec else 256
    if tokens.size < 2:
        raise SpecError(f"--data: {', '.join(patterns)} holds no two tokens to predict one from.")
    size = min(size, tokens.size - 1)
    _refuse_larger(trained, int(tokens.max()) + 1, "these files")
    # Every token but the first is predicted once; the last sequence begins a little earlier.
    starts = list(range(0, tokens.size - size, size))
    rows = np.stack([tokens[start : start + size + 1] for start in starts])
    batches = [rows[at : at + ROWS] for at in range(0, len(rows), ROWS)]
    if (rest := tokens[starts[-1] + size :]).size > 1:
        batches.append(rest[None])
    named = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files"
    return Measured(_loss(trained, batches), _predicted(batches), named)


def _loss(
    trained: TrainedModel, batches: Sequence[np.ndarray], separator: int | None = None
) -> float:
    from diloco_cli.models.generate_flax import mean_loss
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    return mean_loss(trained.model, trained.weights, batches, separator)


def _predicted(batches: Sequence[np.ndarray]) -> int:
    return sum(batch.shape[0] * (batch.shape[1] - 1) for batch in batches)


def _refuse_larger(trained: TrainedModel, vocabulary: int, what: str) -> None:
    own = trained.model.shape.vocabulary
    if vocabulary > own:
        raise SpecError(
            f"{trained.name} knows {own} tokens, the tokenizer of {what} makes {vocabulary}.",
            hint="Measure it with the tokenizer that it was trained with.",
        )


def _on_one_device(spec: RunSpec) -> RunSpec:
    """The same run, whose regions have one device each: this host need not have theirs."""

    def plain(region: RegionSpec) -> RegionSpec:
        return region.model_copy(update={"mesh": None, "devices": None})

    return spec.model_copy(update={"regions": tuple(map(plain, spec.regions))})
