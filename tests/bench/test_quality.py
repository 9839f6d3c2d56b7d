"""The quality table's harness is DiLoCo: against a loop of its own, and against itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diloco_cli.bench.quality.cells import GOALS, SYNCHRONOUS, Cell, table
from diloco_cli.bench.quality.command import chosen, seeds_of
from diloco_cli.bench.quality.experiment import (
    Budget,
    name_of,
    run_cell,
    scenario_of,
    spec_of,
    task_of,
)
from diloco_cli.bench.quality.learner import TrainingOptions, TrainingRegion
from diloco_cli.bench.quality.runner import read, run_cells
from diloco_cli.bench.quality.table import rows, verdicts
from diloco_cli.bench.quality.training import Trained, Training
from diloco_cli.core import unmerged_work
from diloco_cli.errors import SpecError, StoreError

EVERY, ROUNDS, SEED = 4, 5, 7
SMALL = Budget(
    tokens=2 * 2 * 16 * EVERY * ROUNDS, batch=4, sequence=16, width=16, heads=1, windows=128
)
EVEN = (("inner.schedule", {"kind": "constant"}),)  # One compiled step for all horizons.
EXACT = (*EVEN, ("wire.up", {"kind": "fp32"}), ("wire.down", {"kind": "fp32"}))
TEXTBOOK = Cell(
    "textbook",
    2,
    (
        *EXACT,
        *SYNCHRONOUS,
        *(("sync.every", EVERY), ("sync.quorum", 2), ("merge.kind", "mean")),
    ),
    lockstep=True,
)
PLAIN = Cell("plain", 2, (*EVEN, ("sync.every", EVERY), ("sync.fragments", 2)))
PARALLEL = Cell("data parallel", 0, EVEN)


def train(cell: Cell, budget: Budget = SMALL, **options: object) -> tuple[Training, Trained]:
    spec = spec_of(cell, budget, SEED)
    tasks = {
        region.name: task_of(spec, region.name, number, len(spec.regions))
        for number, region in enumerate(spec.regions)
    }
    scenario = scenario_of(cell, spec, tasks)
    training = Training(spec, scenario, tasks, **options)  # pyright: ignore[reportArgumentType]
    return training, training.train()


def learners(training: Training) -> list[TrainingRegion]:
    return [one for one in training.regions.values() if isinstance(one, TrainingRegion)]


def textbook_loop() -> dict[str, np.ndarray]:
    """DiLoCo as published, in as few lines as it takes."""
    spec = spec_of(TEXTBOOK, SMALL, SEED)
    tasks = [task_of(spec, f"r{n}", n, 2) for n in range(2)]
    weights = tasks[0].model.init(SEED)
    speed = {name: np.zeros_like(values) for name, values in weights.items()}
    lr, momentum = (np.float32(spec.outer[key]) for key in ("lr", "momentum"))
    engines = [task.step.engine() for task in tasks]
    states: list = [None, None]
    cursors = [task.stream.start() for task in tasks]
    for number in range(ROUNDS):
        moved = []
        for region, task in enumerate(tasks):
            engines[region].load(weights, states[region])
            for _ in range(EVERY):
                tokens, cursors[region] = task.stream.batch(cursors[region])
                engines[region].step(tokens)
            after, states[region] = engines[region].snapshot()
            moved.append({name: weights[name] - after[name] for name in weights})
        for name in weights:
            mean = (moved[0][name] + moved[1][name]) / 2
            if number == ROUNDS - 1:  # What the end drains moves without momentum.
                weights[name] = weights[name] - lr * mean
                continue
            speed[name] = momentum * speed[name] + mean
            weights[name] = weights[name] - lr * (mean + momentum * speed[name])
    return weights


def test_two_regions_in_lockstep_are_textbook_diloco():
    _, trained = train(TEXTBOOK, habits=TrainingOptions(lockstep=True))
    expected = textbook_loop()
    first = spec_of(TEXTBOOK, SMALL, SEED)
    start = task_of(first, "r0", 0, 2).model.init(SEED)
    assert max(np.abs(expected[name] - start[name]).max() for name in start) > 1e-3
    for name, values in trained.weights.items():
        # Two regions in one call add up in another order; Adam makes steps of 2e-2 out of that.
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=2e-5, err_msg=name)
    assert trained.versions == ROUNDS - 1 and trained.members == 1.0


def test_a_cell_is_the_same_to_the_bit_every_time():
    one, again = (train(PLAIN)[1] for _ in range(2))
    assert all(np.array_equal(one.weights[name], again.weights[name]) for name in one.weights)
    assert run_cell(PLAIN, SMALL, 1)["loss"] != run_cell(PLAIN, SMALL, 2)["loss"]


@pytest.mark.parametrize("adopt", ["rebase", "replace", "blend"])
def test_every_token_has_a_fate_when_speeds_differ(adopt: str):
    settings = (*PLAIN.settings, ("sync.adopt", adopt))
    cell = replace(PLAIN, settings=settings, speeds=(1.0, 0.25), jitter=0.1)
    training, _ = train(cell)
    for learner in learners(training):
        for book in learner.own.books:
            assert abs(unmerged_work.account(book)) < 1e-6
            assert book.flight is None and book.held.steps < 1
    trained = sum(learner.own.books[0].totals.trained for learner in learners(training))
    assert trained == SMALL.tokens


def test_deaths_lose_only_what_no_disk_has_and_the_budget_is_trained_all_the_same():
    cell = replace(PLAIN, kills=20_000.0)
    habits = TrainingOptions(checkpoint=6)
    training, trained = train(cell, habits=habits, refund=True)
    assert trained.kills > 0 and trained.lost > 0
    kept = sum(learner._trained() for learner in learners(training))
    tokens = learners(training)[0].task.tokens
    assert SMALL.tokens - tokens < kept <= SMALL.tokens + 1e-6
    for learner in learners(training):
        assert all(abs(unmerged_work.account(book)) < 1e-6 for book in learner.own.books)


def test_what_is_in_the_file_is_not_run_again(tmp_path: Path):
    file, said = tmp_path / "cells.jsonl", []
    cells = [PARALLEL, replace(PLAIN, against="data parallel")]
    first = run_cells(cells, [1, 2], SMALL, file, said.append)
    kept = file.read_text()
    assert run_cells(cells, [1, 2], SMALL, file, said.append) == first
    assert file.read_text() == kept and said[-1] == f"4 cells, 4 of them in {file}"

    file.write_text(kept[:-40])  # Killed while it wrote the last line.
    again = run_cells(cells, [1, 2], SMALL, file, said.append)
    assert [one["loss"] for one in again] == [one["loss"] for one in first]
    assert len(read(file)) == 4
    file.write_text("no cell\n" + kept)
    with pytest.raises(StoreError, match="line 1"):
        read(file)

    table_rows = rows(cells, first)
    assert table_rows[1].change is not None and table_rows[1].noise is not None
    losses = {(one["cell"], one["seed"]): one["loss"] for one in first}
    changes = [losses["plain", s] / losses["data parallel", s] - 1 for s in (1, 2)]
    assert table_rows[1].change == pytest.approx(np.mean(changes))


def test_a_cell_is_known_by_all_that_decides_its_result():
    known = name_of(PLAIN, SMALL, 1)
    assert name_of(replace(PLAIN, name="other", against="x"), SMALL, 1) == known
    for other in (
        replace(PLAIN, jitter=0.1),
        replace(PLAIN, travel=5.0),
        replace(PLAIN, settings=(*PLAIN.settings, ("outer.lr", 0.1), ("outer.kind", "nesterov"))),
    ):
        assert name_of(other, SMALL, 1) != known
    assert name_of(PLAIN, replace(SMALL, tokens=SMALL.tokens * 2), 1) != known
    assert name_of(PLAIN, SMALL, 2) != known


def test_every_cell_is_a_run_and_is_compared_with_one_of_the_table():
    cells = {cell.name: cell for cell in table()}
    assert len(cells) == len(table())
    for cell in cells.values():
        spec_of(cell, Budget(), 1)
        assert cell.against in cells or not cell.against
    assert {goal.cell for goal in GOALS} | {goal.against for goal in GOALS} <= set(cells)


def test_goals_are_judged_by_seeds_that_both_have():
    def record(cell: str, seed: int, loss: float) -> dict[str, object]:
        return {"cell": cell, "seed": seed, "loss": loss, "goodput": 1.0}

    assert verdicts([]) == []
    found = [record("data parallel", 1, 2.0), record("data parallel", 2, 9.0)]
    found += [record("regions 2", 1, 2.01), {"cell": "regions 4", "seed": 1, "failed": "diverged"}]
    (only,) = verdicts(found)
    assert only["ratio"] == pytest.approx(1.005) and only["met"]
    (only,) = verdicts([found[0], record("regions 2", 1, 2.02)])
    assert not only["met"]


def test_a_cell_comes_with_the_one_it_is_compared_with():
    names = [cell.name for cell in chosen("^int8 up")]
    expected = ["data parallel", "regions 4", "fp32 up and down", "int8 up, fp32 down"]
    assert names == expected
    assert seeds_of("3,1") == [3, 1]
    for wrong in ("a", "1,1", "-1", ""):
        with pytest.raises(SpecError):
            seeds_of(wrong)
    with pytest.raises(SpecError, match="matches no cell"):
        chosen("nothing like this")
    with pytest.raises(SpecError, match="no pattern"):
        chosen("(")
    json.dumps([cell.settings for cell in table()])
