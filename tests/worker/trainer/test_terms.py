"""A trainer that starts under other terms: whatever changed, the work it holds counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diloco_cli.core.unmerged_work import Work
from diloco_cli.observe.events import read_events
from diloco_cli.spec.schema import RunSpec
from diloco_cli.worker.trainer.checkpoints import checkpoint
from diloco_cli.worker.trainer.task import prepare
from tests.worker.trainer.harness import Stage, again, honest, local, post, save, steps, until

TOKENS = 2 * 16


def amended(trainer: Any, number: int = 1, **changes: Any) -> Any:
    """The task of the same region under other terms."""
    data = trainer.task.spec.model_dump(exclude_unset=True)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data[section] = {**data.get(section, {}), name: value}
    return prepare(RunSpec.model_validate(data), "paris", terms=number)


def follow(stage: Stage, trainer: Any, number: int = 1, **changes: Any) -> Any:
    """Leaves in order and starts under other terms."""
    save(trainer)
    trainer.close()
    task = amended(trainer, number, **changes)
    if task.stream.order.named != trainer.lanes.order:
        stage.spec = task.spec  # Another text: the server hears of it and grants its lanes.
        stage.read()
        stage.grant(range(stage.order.lanes), grant=2)
    return stage.trainer(task)


def saved(stage: Stage) -> dict[str, Any]:
    return checkpoint.load(stage.mailbox.checkpoint).meta["terms"]


def averages(trainer: Any) -> dict[str, np.ndarray]:
    return trainer.weights.engine.snapshot().optimizer


def test_the_checkpoint_says_under_which_terms_and_since_when(play):
    stage, trainer = play()
    steps(trainer, 3)
    save(trainer)
    assert (saved(stage)["number"], saved(stage)["since"], saved(stage)["place"]) == (0, 0, 3)
    trainer = follow(stage, trainer, inner__clip=0.5)
    steps(trainer, 2)
    save(trainer)
    assert (saved(stage)["number"], saved(stage)["since"]) == (1, 3)
    trainer = again(stage, trainer)
    steps(trainer, 1)
    save(trainer)
    assert (saved(stage)["number"], saved(stage)["since"], saved(stage)["place"]) == (1, 3, 6)


@pytest.mark.parametrize(
    "changes, tokens",
    [
        ({"inner__batch": 4}, 64),
        ({"inner__sequence": 32}, 64),
        ({"inner__accumulate": 2}, 32),
        ({"inner__clip": 0.1}, 32),
        ({"wire__up": {"kind": "int8", "block": 512}}, 32),
        ({"sync__overlap": 0}, 32),
    ],
)
def test_settings_of_the_step_change_at_one_clock(play, changes, tokens):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    first, before = stage.frame(0), local(trainer, 1)
    trainer = follow(stage, trainer, **changes)
    np.testing.assert_array_equal(local(trainer, 1), before)
    assert stage.frame(0).digest == first.digest, "what was posted stays as it is"
    steps(trainer, 1)
    assert trainer.weights.books[0].held == Work(2 * TOKENS + tokens, 3)
    stage.merge(0)
    until(trainer, lambda: trainer.weights.versions[0] == 1)
    post(stage, trainer, 0)
    frame = stage.frame(0).header
    assert (frame.tokens, frame.steps) == (tokens, 1)
    assert frame.codec == trainer.task.spec.wire.up
    assert honest(trainer)


@pytest.mark.parametrize("adopt, kept", [("replace", 0.0), ("blend", 0.5), ("rebase", 1.0)])
def test_a_frame_merged_meanwhile_is_settled_by_the_alpha_of_the_start(play, adopt, kept):
    stage, trainer = play(adopt="rebase" if adopt != "rebase" else "replace")
    steps(trainer, 2)
    post(stage, trainer, 0)
    steps(trainer, 2)
    save(trainer)
    trainer.close()
    stage.merge(0)
    trainer = stage.trainer(amended(trainer, sync__adopt=adopt))
    assert trainer.weights.books[0].held == Work(kept * 2 * TOKENS, kept * 2)
    assert trainer.weights.books[0].totals.applied == 2 * TOKENS
    assert honest(trainer)


def test_another_optimizer_begins_fresh_and_the_schedule_goes_on(play):
    stage, trainer = play()
    steps(trainer, 3)
    trainer = follow(stage, trainer, inner__optimizer={"kind": "sgd", "lr": 0.01})
    state = averages(trainer)
    traces = [values for name, values in state.items() if "trace" in name]
    assert traces and all(not values.any() for values in traces)
    assert trainer.place.next == 3
    steps(trainer, 1)
    assert trainer.weights.engine.snapshot().place == trainer.place.next == 4
    notes = [e.fields.get("why") for e in read_events(stage.folder / "events.jsonl")]
    assert "the inner optimiser (sgd) begins without averages" in notes
    # The same kind with another state, too; and a restart under the same terms keeps it.
    trainer = follow(stage, trainer, 2, inner__optimizer={"kind": "sgd", "momentum": 0.0})
    steps(trainer, 1)
    save(trainer)
    trainer = again(stage, trainer)
    assert trainer.weights.engine.snapshot().place == 5 and not trainer.weights.new_optimizer


def test_the_averages_of_another_kind_are_not_taken_over_even_if_they_fit(play):
    stage, trainer = play()
    steps(trainer, 3)
    trainer.close()
    mine = trainer.weights.checkpoint()
    terms = {**mine.meta["terms"], "optimizer": "another"}
    mine = replace(mine, meta={**mine.meta, "terms": terms})
    checkpoint.save(stage.mailbox.checkpoint, mine)
    trainer = again(stage, trainer)
    assert trainer.weights.new_optimizer
    assert not any(values.any() for name, values in averages(trainer).items() if "mu" in name)


def test_a_fresh_adam_corrects_its_averages_from_its_own_beginning(play):
    stage, trainer = play()
    steps(trainer, 3)
    trainer = follow(stage, trainer, inner__optimizer={"kind": "sgd", "lr": 0.01})
    steps(trainer, 1)
    trainer = follow(stage, trainer, 2, inner__optimizer={"kind": "adamw"})
    steps(trainer, 1)
    counts = {n: int(v) for n, v in averages(trainer).items() if n.endswith(".count")}
    assert sorted(counts.values()) == [1, 5], counts


def test_other_rates_keep_the_averages(play):
    stage, trainer = play()
    steps(trainer, 3)
    before = averages(trainer)
    trainer = follow(stage, trainer, inner__optimizer={"kind": "adamw", "lr": 0.5})
    for name, values in averages(trainer).items():
        np.testing.assert_array_equal(values, before[name])


def test_a_restart_after_a_change_gives_the_same_rates(play):
    stage, trainer = play()
    steps(trainer, 3)
    save(trainer)
    trainer.close()
    schedule = {"kind": "constant", "warmup": 8}
    task = amended(trainer, inner__optimizer={"kind": "adamw", "lr": 0.5}, inner__schedule=schedule)
    first = stage.trainer(task)
    assert first.task.rate.since == 3 and first.task.rate.before is not None
    first.close()
    # Killed before its first checkpoint: the next one finds the same.
    second = stage.trainer(task)
    assert second.task.rate == first.task.rate
    steps(second, 2)
    save(second)
    third = stage.trainer(task)
    assert third.task.rate == first.task.rate
    assert third.task.rate.at(5) < third.task.rate.at(11) == 0.5


def test_the_news_say_how_often_to_report(play):
    stage, trainer = play(every=5)
    trainer.boundary()
    reports = []
    report = trainer.report
    trainer.report = lambda: (reports.append(trainer.weights.clock), report())
    stage.tell()
    trainer.wakeup.wake()
    steps(trainer, 8)
    assert reports == [2, 4, 5, 7], "every two steps, and when a round is full"
    stage.tell(every=2)
    trainer.wakeup.wake()
    steps(trainer, 3)
    assert reports == [2, 4, 5, 7, 9, 10, 11]


def test_a_run_that_is_opened_again_is_trained_on(play):
    stage, trainer = play()
    steps(trainer, 2)
    stage.tell(end=True)
    until(trainer, lambda: trainer.ended)
    stage.tell()
    until(trainer, lambda: not trainer.ended)
    assert not trainer._waits_for()
