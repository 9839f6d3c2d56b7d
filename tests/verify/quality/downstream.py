"""A score besides the loss: which of four continuations of held-out code is the real one?

    python -m tests.verify.quality.downstream build/ladder-weights docs/results/raw/downstream.jsonl

The weights are those that `ladder.py --weights` kept. A question is a stretch of held-out code as
long as those that were trained on; its last quarter stands beside three that end other stretches,
and the model takes the one that it finds likeliest. Guessing is right one time in four. All weights
of a rung answer the same questions, so what the questions share cancels out in the difference.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from diloco_cli.spec.schema import RunSpec

CHOICES = 4
QUESTIONS = 4096
NAME = re.compile(r"(\w+), (.+), seed (\d+), rate (\S+)")


def questions(windows: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Stretches with four endings each, the real one first: (count, 4, length)."""
    rows = windows[:count]
    ending = rows.shape[1] // CHOICES
    rng, asked = np.random.default_rng(seed), np.repeat(rows[:, None], CHOICES, axis=1)
    for choice in range(1, CHOICES):
        # Another stretch for everybody: a shift without a fixed point.
        shift = int(rng.integers(1, len(rows)))
        asked[:, choice, -ending:] = np.roll(rows[:, -ending:], shift, axis=0)
    same = (asked[:, 1:, -ending:] == asked[:, :1, -ending:]).all(axis=2).any(axis=1)
    return asked[~same]


@functools.cache
def _losses(model: Any) -> Any:
    """The loss of every row. All endings of a question have the same beginning, so the loss of
    the whole orders the endings."""
    import jax

    loss = model.loss_fn(penalties=False)
    return jax.jit(lambda params, rows: jax.vmap(lambda row: loss(params, row[None])[0])(rows))


def answers(model: Any, weights: dict[str, np.ndarray], asked: np.ndarray) -> np.ndarray:
    """Whether the likeliest ending is the real one, question by question."""
    from diloco_cli.worker.engines.placement import place_model

    params, flat = place_model(model).place(weights), asked.reshape(-1, asked.shape[-1])
    parts = np.split(flat, CHOICES)
    found = np.concatenate([np.asarray(_losses(model)(params, part)) for part in parts])
    return found.reshape(asked.shape[:2]).argmin(axis=1) == 0


def asked_of(path: Path, count: int) -> tuple[dict[str, Any], RunSpec, np.ndarray]:
    """Of a file of weights: what its name says, the spec of its model, and what it is asked."""
    from diloco_cli.bench.quality.cells import Cell
    from diloco_cli.bench.quality.experiment import Budget, heldout_of, spec_of
    from tests.verify.quality.ladder import LARGE, MIDDLE, MILLION, SMALL

    match = NAME.fullmatch(path.stem)
    rungs = {rung.name: rung for rung in (SMALL, MIDDLE, LARGE, MILLION)}
    if match is None or match[1] not in rungs:
        raise SystemExit(f"{path} is not named as ladder.py names weights.")
    rung = rungs[match[1]]
    shape = {"layers": rung.layers, "width": rung.width, "heads": rung.heads}
    spec = spec_of(Cell("", 0), Budget(batch=rung.batch, sequence=rung.sequence, **shape), 0)
    both = heldout_of(spec, max(64, count // 64 * 64))
    about = {"id": path.stem, "rung": match[1], "cell": match[2], "seed": int(match[3])}
    return about, spec, questions(np.concatenate([*both[0], *both[1]]), count)


def score(folder: Path, count: int) -> list[dict[str, Any]]:
    """One record for each file of weights in a folder."""
    from diloco_cli.models import models

    records = []
    for path in sorted(folder.glob("*.npz")):
        about, spec, asked = asked_of(path, count)
        with np.load(path) as weights:
            right = answers(models.build(spec.model), dict(weights), asked)
        found = {"questions": len(right), "right": round(float(right.mean()), 5)}
        records.append({**about, **found})
    return records


def told(records: Sequence[dict[str, Any]]) -> str:
    """A row for each way to train; differences to data parallel are taken seed by seed."""
    from diloco_cli.bench.quality.table import half_interval

    by: dict[tuple[str, str], dict[int, float]] = {}
    for each in records:
        by.setdefault((each["rung"], each["cell"]), {})[each["seed"]] = 100 * each["right"]
    lines = [
        "| rung | | seeds | right | against data parallel |",
        "| --- | --- | --: | --: | --: |",
    ]
    for (rung, cell), mine in by.items():
        other = by.get((rung, "data parallel, adamw"), {})
        gaps = [value - other[seed] for seed, value in mine.items() if seed in other]
        half = half_interval(gaps)
        gap = f"{statistics.fmean(gaps):+.2f}" if gaps else "–"
        gap += f" ± {half:.2f} points" if half else ""
        right = statistics.fmean(mine.values())
        lines.append(f"| {rung} | {cell} | {len(mine)} | {right:.2f} % | {gap} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("file", type=Path, help="rows of other weights stay")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    options = parser.parse_args(words)
    from diloco_cli.bench.quality.runner import append, read
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    records = {record["id"]: record for record in read(options.file)}
    records |= {record["id"]: record for record in score(options.weights, options.questions)}
    options.file.unlink(missing_ok=True)
    for record in records.values():
        append(options.file, record)
    print(told(list(records.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
