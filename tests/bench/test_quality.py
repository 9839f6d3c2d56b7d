"""The quality table's harness is DiLoCo: against a loop of its own, and against itself."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from diloco_cli.bench.quality import runner
from diloco_cli.bench.quality.cells import CUT, GOALS, HASTY, SYNCHRONOUS, Cell, table
from diloco_cli.bench.quality.command import chosen, seeds_of
from diloco_cli.bench.quality.experiment import (
    Budget,
    about,
    evaluate,
    heldout_of,
    name_of,
    run_cell,
    scenario_of,
    spec_of,
    task_of,
)
from diloco_cli.bench.quality.learner import TrainingOptions, TrainingRegion
from diloco_cli.bench.quality.runner import read, run_cells
from diloco_cli.bench.quality.setting import QualitySetting, shape_of
from diloco_cli.bench.quality.table import rows, verdicts
from diloco_cli.bench.quality.training import Trained, Training
from diloco_cli.cli.app import main
from diloco_cli.core import unmerged_work
from diloco_cli.core.rounds import Receipt
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
        ("outer", {"kind": "nesterov", "lr": 0.4, "momentum": 0.9, "warmup": 0}),
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
            after, states[region], _ = engines[region].snapshot()
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


def test_versions_that_no_region_can_ask_for_are_dropped():
    training, _ = train(PLAIN)
    for tip, images in zip(training.tips, training.images, strict=True):
        assert len(images) <= 2 < tip.number == max(images)


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


def test_a_region_that_comes_back_after_half_the_run_does_not_set_the_others_back():
    """Its weight was always limited; merged at its full length the loss rises by 5 % here."""
    budget = replace(SMALL, tokens=3 * 2 * 16 * 320, batch=6, warmup=10)
    cell = Cell(
        "cut", 3, (*EVEN, *HASTY, ("sync.every", EVERY), ("sync.fragments", 1)), absence=CUT
    )
    spec = spec_of(cell, budget, SEED)
    tasks = {f"r{n}": task_of(spec, f"r{n}", n, 3) for n in range(3)}
    seen: list[tuple[float, float]] = []

    class Watched(Training):
        def _make(self, fragment: int, receipts: list[Receipt], *, drain: bool) -> None:
            super()._make(fragment, receipts, drain=drain)
            loss = float(np.mean([evaluate(spec, self.weights(), part) for part in heldout]))
            seen.append((max(receipt.steps for receipt in receipts), loss))

    heldout = heldout_of(spec, 256)
    Watched(spec, scenario_of(cell, spec, tasks), tasks).train()
    back = next(number for number, (steps, _) in enumerate(seen) if steps > 100)
    assert seen[back][1] < 1.015 * seen[back - 1][1]


def test_frames_take_the_time_of_their_bytes_on_a_narrow_line():
    wide, narrow = train(PLAIN), train(replace(PLAIN, slower=85.0))
    assert narrow[1].versions < wide[1].versions
    rate = narrow[0].learners[0].site.link.rate
    assert rate == pytest.approx(16 * sum(narrow[0].scenario.sizes) / 85.0)
    # Those that the drain made travel no more.
    sent = narrow[0].tally.bytes_up, narrow[0].tally.bytes_down
    assert 0 < sent[0] < narrow[0].up_bytes and 0 < sent[1] < 2 * narrow[0].down_bytes


def test_a_curve_is_measured_while_the_weights_are_trained():
    spec = spec_of(PLAIN, SMALL, SEED)
    parts = heldout_of(spec, SMALL.windows)
    for cell, seconds in ((PLAIN, 0.0), (PARALLEL, 5.0)):
        plain, watched = run_cell(cell, SMALL, SEED), run_cell(cell, SMALL, SEED, every=5.0)
        assert watched["loss"] == plain["loss"] and "curve" not in plain
        times, tokens, losses = zip(*watched["curve"], strict=True)
        assert times[0] == seconds and list(tokens) == sorted(tokens)
        assert all(b - a == pytest.approx(5.0) for a, b in pairwise(times))
        assert losses[-1] < losses[0]
        start = evaluate(spec, task_of(spec, "r0", 0, 2).model.init(SEED), parts[0])
        assert losses[0] == pytest.approx(start, abs=1e-4) if seconds == 0.0 else losses[0] < start


def test_a_region_without_its_disk_goes_on_from_the_newest_weights_with_nothing_else():
    kept, lost, away = (
        replace(PLAIN, absence=(0.5, 0.6), struck=struck)
        for struck in ("kill-trainer", "kill-region", "leave")
    )
    habits = TrainingOptions(checkpoint=1)
    trained = {}
    for cell in (kept, lost, away):
        training, done = train(cell, habits=habits)
        last = learners(training)[-1]
        trained[cell.struck] = done
        tokens = [sum(one._trained() for one in learners(training)), SMALL.tokens]
        for learner in learners(training):
            assert all(abs(unmerged_work.account(book)) < 1e-6 for book in learner.own.books)
        if cell is lost:
            assert last._trained() < 0.6 * learners(training)[0]._trained()
            assert tokens[0] + done.lost < tokens[1] and done.lost > 0
        else:
            assert tokens[0] == tokens[1]
    names = trained["leave"].weights
    for one, other in (("kill-trainer", "kill-region"), ("kill-region", "leave")):
        pair = trained[one].weights, trained[other].weights
        assert any(not np.array_equal(pair[0][name], pair[1][name]) for name in names)


def test_regions_in_turns_are_there_one_after_the_other():
    spec_steps = SMALL.tokens // (SMALL.batch * SMALL.sequence)
    cell = replace(PLAIN, turns=0.5)
    training, done = train(cell)
    first, second = learners(training)
    # One of two at a time: as many tokens, in twice the time and what four returns take, by both.
    assert 2 * spec_steps <= done.seconds <= 2 * spec_steps + 4 * 3
    assert first._trained() + second._trained() == SMALL.tokens
    assert 0.3 < first._trained() / SMALL.tokens < 0.7 and done.members < 0.75
    assert name_of(cell, SMALL, 1) != name_of(PLAIN, SMALL, 1)
    alone = spec_of(replace(PLAIN, regions=3), replace(SMALL, batch=6), SEED)
    tasks = {
        region.name: task_of(alone, region.name, n, 3) for n, region in enumerate(alone.regions)
    }
    struck = scenario_of(replace(PLAIN, regions=3, turns=0.5), alone, tasks).faults
    assert [fault.region for fault in struck[:3]] == ["r1", "r2", "r1"]


def test_speeds_that_the_spec_does_not_know_change_nothing():
    """Learning rates follow the run's tokens; once they followed the speeds of the spec."""
    settings = (*PLAIN.settings, ("inner.schedule", {"kind": "cosine", "warmup": 2}))
    mixed = replace(PLAIN, settings=settings, speeds=(1.0, 0.25))
    told, untold = train(mixed)[1], train(replace(mixed, told=False))[1]
    assert all(np.array_equal(told.weights[name], untold.weights[name]) for name in told.weights)


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

    told = [one["settings"] for one in first]
    assert told[0]["tokens"] == SMALL.tokens and told[0]["model"] == SMALL.model
    assert all(one == told[0] for one in told)
    assert [one["against"] for one in first[:2]] == ["", "data parallel"]
    assert len({one["way"] for one in first}) == 2 and len({one["id"] for one in first}) == 4

    table_rows = rows(cells, first)
    assert table_rows[1].change is not None and table_rows[1].interval is not None
    losses = {(one["cell"], one["seed"]): one["loss"] for one in first}
    changes = [losses["plain", s] / losses["data parallel", s] - 1 for s in (1, 2)]
    assert table_rows[1].change == pytest.approx(np.mean(changes))


def test_cells_of_other_settings_in_the_file_are_in_no_table(tmp_path: Path, monkeypatch):
    """One file may hold tables of several models: each is made of what was asked for."""

    def trained(cell: Cell, budget: Budget, seed: int) -> dict[str, object]:
        return {**about(cell, budget, seed), "loss": 1000.0 * budget.layers + seed}

    monkeypatch.setattr(runner, "run_cell", trained)
    cells = [PARALLEL, replace(PLAIN, against="data parallel")]
    budgets = [SMALL, replace(SMALL, layers=2), replace(SMALL, tokens=2 * SMALL.tokens)]
    found = [
        run_cells(cells, [1, 2], budget, tmp_path / "cells.jsonl", lambda _: None)
        for budget in budgets
    ]
    assert len(read(tmp_path / "cells.jsonl")) == 12
    assert [[one["loss"] for one in records] for records in found] == [
        [1001.0, 1001.0, 1002.0, 1002.0],
        [2001.0, 2001.0, 2002.0, 2002.0],
        [1001.0, 1001.0, 1002.0, 1002.0],
    ]
    settings = [json.dumps(records[0]["settings"]) for records in found]
    assert len(set(settings)) == 3, "a record says which of them it is of"
    ways = {each["way"] for records in found for each in records}
    assert len(ways) == 6, "and cells of one way differ by their seeds alone"


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
    assert only.ratio == pytest.approx(1.005)
    assert only.met is None, "one seed says nothing about others"
    # Two seeds, +0.4 and +0.6 %: the interval is ± 12.7 times half their distance.
    found += [record("regions 2", 2, 9.054), record("data parallel", 3, 4.0)]
    (only,) = verdicts([*found[:2], record("regions 2", 1, 2.008), *found[-2:]])
    assert only.ratio == pytest.approx(1.005 + 12.706 * 0.001, rel=1e-4) and not only.met
    (only,) = verdicts([*found[:2], record("regions 2", 1, 2.00998), record("regions 2", 2, 9.045)])
    assert only.ratio == pytest.approx(1.005, abs=2e-4) and only.met


def test_a_setting_is_read_or_refused():
    assert shape_of("2x64") == {"layers": 2, "width": 64, "heads": 2}
    for wrong in ("", "64", "0x64", "2x60", "2x64x2", "tiny"):
        with pytest.raises(SpecError, match="as in 2x64"):
            shape_of(wrong)
    budget = replace(SMALL, **shape_of("1x32"), batch=16, sequence=32).per_parameter(20)
    assert budget.tokens % (16 * 32) == 0 and abs(budget.tokens / 24_700 - 20) < 0.5
    own = replace(SMALL, lr_regions=1e-3)
    assert spec_of(PARALLEL, own, 1).inner.optimizer["lr"] == SMALL.lr
    assert spec_of(PLAIN, own, 1).inner.optimizer["lr"] == 1e-3


def test_what_is_left_out_is_the_published_table():
    asked, published = QualitySetting(), Budget()
    assert shape_of(asked.model) == {
        key: published.model[key] for key in ("layers", "width", "heads")
    }
    assert (asked.batch, asked.sequence, asked.lr) == (
        published.batch,
        published.sequence,
        published.lr,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tokens", "4096"), "--tokens 4096 is too few: 'data parallel' needs at least 6144"),
        (("--tokens-per-parameter", "0.001"), "0.001 makes 2048 tokens, too few: 'data parallel'"),
        (("--tokens", "9000", "--batch", "128"), "needs at least 12288 tokens"),
        (("--batch", "0"), "'--batch'"),
        (("--sequence", "0"), "'--sequence'"),
        (("--tokens", "0"), "'--tokens'"),
        (("--lr", "0"), "0 is not more than 0"),
        (("--tokens-per-parameter", "-1"), "-1 is not more than 0"),
    ],
)
def test_a_setting_that_trains_nothing_is_refused(words, said, tmp_path, capsys):
    file = str(tmp_path / "quality.jsonl")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "quality", "--only", "^data", "--seeds", "1", "--file", file, *words])
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_is_no_run_says_what_is_wrong_with_it():
    with pytest.raises(SpecError, match="one round takes at least 192 tokens"):
        spec_of(PARALLEL, replace(SMALL, tokens=1), 1)


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
