"""When does a trainer speak up, and what does it say of work that it gives up?"""

from __future__ import annotations

import numpy as np
import pytest

from diloco_cli.observe.events import read_events
from diloco_cli.worker.trainer.divergence import DivergenceCount
from tests.worker.trainer.harness import post, steps, until

TOKENS = 2 * 16


def test_every_few_steps_and_at_once_when_a_fragment_has_enough_for_a_round(play):
    """Four make a round; every second step alone would say so one too late."""
    stage, trainer = play()
    steps(trainer, 1)
    trainer.report()
    told = []
    for _ in range(6):
        steps(trainer, 1)
        told.append(stage.mailbox.progress().step)
    assert told == [1, 3, 4, 4, 6, 6]


def test_what_a_device_gives_follows_from_the_pace_and_the_shapes(play):
    stage, trainer = play()
    steps(trainer, 3)
    trainer.report()
    said, task = stage.mailbox.progress(), trainer.task
    per_token = task.model.step_flops(task.inner.batch, task.inner.sequence) / task.tokens
    assert said.tflops == pytest.approx(said.tokens_per_second * per_token / 1e12)
    assert said.tflops > 0 and said.devices == 1
    assert said.mfu is None, "what a processor can do at best is not known"


# Work that is given up again and again


def count_of(*spans: int) -> DivergenceCount:
    """Gives up after each of these numbers of sound steps."""
    count = DivergenceCount()
    for span in spans:
        for _ in range(span):
            count.stepped(sound=True)
        count.stepped(sound=False)
        count.gave_up("why", 32.0, step=span, now=float(span))
    return count


def test_nothing_is_said_while_nothing_is_given_up():
    assert count_of().report(now=9.0) is None


def test_times_and_tokens_add_up_since_the_first():
    told = count_of(7, 9, 9).report(now=30.0)
    assert told is not None
    assert (told.times, told.tokens, told.step, told.seconds) == (3, 96.0, 7, 23.0)
    assert told.why == "why"


def test_weights_on_which_no_step_is_sound_are_told_from_those_that_are_spoiled_by_training():
    spoiled, unstable = count_of(7, 0).report(now=9.0), count_of(7, 1).report(now=9.0)
    assert spoiled and spoiled.published
    assert unstable and not unstable.published


def test_a_frame_ends_the_count_if_its_work_is_of_later_and_was_sound():
    count = count_of(7, 9)
    count.stepped(sound=False)
    count.merged(10)
    assert count.times == 2, "no step since was sound"
    count.stepped(sound=True)
    count.merged(9)
    assert count.times == 2, "it was sent before the work went bad"
    count.merged(10)
    assert count.times == 0 and count.report(now=99.0) is None
    count.gave_up("again", 8.0, step=50, now=100.0)
    told = count.report(now=100.0)
    assert told and (told.times, told.tokens, told.step) == (1, 8.0, 50), "it begins anew"


def test_a_region_reports_what_it_gives_up_and_takes_it_back_when_it_is_merged(play):
    stage, trainer = play()
    for _ in range(3):
        steps(trainer, 2)
        trainer.give_up("a test", {0, 1})
    told = stage.mailbox.progress().divergence
    assert told.times == 3 and told.tokens == 3 * 2 * TOKENS and told.why == "a test"
    steps(trainer, 1)
    post(stage, trainer, 0)
    stage.merge(0)
    until(trainer, lambda: trainer.weights.books[0].version == 1)
    trainer.report()
    assert stage.mailbox.progress().divergence is None


def test_a_region_whose_work_is_merged_between_two_bad_stretches_does_not_diverge(play):
    stage, trainer = play(every=8)
    for round_ in range(4):
        for number in range(2):
            steps(trainer, 3)
            post(stage, trainer, number)
            stage.merge(number)
            adopted = round_ + 1
            until(trainer, lambda n=number, v=adopted: trainer.weights.books[n].version == v)
        trainer.give_up("a bad stretch", {0, 1})
        assert stage.mailbox.progress().divergence.times == 1


def test_one_incident_counts_once_however_many_frames_were_being_written(play):
    stage, trainer = play()
    steps(trainer, 3)
    poisoned = {name: values * np.nan for name, values in trainer.weights.engine.params.items()}
    trainer.weights.engine.params = poisoned
    stage.tell({0: 0, 1: 0})
    until(trainer, lambda: trainer.weights.books[1].totals.refused > 0)
    told = stage.mailbox.progress().divergence
    assert (told.times, told.tokens, told.published) == (1, 3 * TOKENS, False)


def test_what_was_held_beside_a_frame_in_flight_counts_as_thrown_away(play):
    stage, trainer = play()
    steps(trainer, 2)
    for number in range(2):
        post(stage, trainer, number)
    steps(trainer, 3)
    trainer.give_up("a test", {0, 1})
    assert stage.mailbox.progress().divergence.tokens == 3 * TOKENS


def test_losses_that_are_not_finite_are_counted_and_the_run_log_stays_readable(play):
    stage, trainer = play()
    steps(trainer, 1)
    for _ in range(40):
        for _ in range(5):
            trainer.stepped(float("nan"), TOKENS, began=0.0)
        trainer._catch_up()
        trainer.boundary()
    told = stage.mailbox.progress().divergence
    assert told.times == 40 and told.published and "not finite 5 times in a row" in told.why
    notes = [e for e in read_events(stage.folder / "events.jsonl") if e.kind == "note"]
    assert [n.fields["why"].partition("(")[2] for n in notes] == [
        "",
        *(f"time {number} in a row)" for number in (2, 3, 4, 8, 16, 32)),
    ]
