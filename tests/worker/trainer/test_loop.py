"""A trainer trains, posts what it holds when called, adopts what arrives; no token is lost."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from safetensors.numpy import save_file

from diloco_cli.assemble import resolve, settings_of
from diloco_cli.core.fragments import scatter
from diloco_cli.core.guard import Norms, inspect
from diloco_cli.core.lanes import Cursor
from diloco_cli.core.unmerged_work import Work
from diloco_cli.errors import StoreError
from diloco_cli.models import models
from diloco_cli.observe.events import read_events
from diloco_cli.server.intake.examine import BelievedClaim, examine
from diloco_cli.server.terms import TermsHistory
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import open_frame, seal
from diloco_cli.wire.messages import HeldOut
from diloco_cli.worker.mailbox import FolderOwner, stamp
from diloco_cli.worker.trainer.evaluation import sampler_of
from diloco_cli.worker.trainer.mail import LOOK_SECONDS
from diloco_cli.worker.trainer.pacing import pacing_of
from tests.worker.trainer.harness import (
    TEXT,
    Stage,
    again,
    honest,
    local,
    post,
    posted,
    steps,
    until,
)

TOKENS = 2 * 16


# The first start


def test_a_new_region_starts_from_the_published_weights(play):
    stage, trainer = play()
    for number in range(2):
        np.testing.assert_array_equal(local(trainer, number), stage.published[number])
        assert trainer.weights.books[number].version == 0


def test_a_region_whose_disk_was_lost_starts_above_every_clock_the_server_has_seen(play):
    stage, trainer = play()
    stage.mailbox.write_identity(FolderOwner("other", 1, "run-1", high=77))
    assert again(stage, trainer).weights.clock == 78


def test_a_missing_image_is_named(play):
    stage, trainer = play()
    stage.mailbox.image_file(1).unlink()
    with pytest.raises(StoreError, match="image of fragment 1"):
        again(stage, trainer)


# Posting


def test_a_call_is_answered_with_all_that_is_held(play):
    stage, trainer = play()
    steps(trainer, 3)
    held = trainer.weights.held(1)
    post(stage, trainer, 1)
    frame = stage.frame(1)
    assert (frame.header.tokens, frame.header.steps, frame.header.base) == (3 * TOKENS, 3, 0)
    assert frame.header.totals["trained"] == 3 * TOKENS
    assert Cursor.of(frame.header.cursor) == trainer.weights.cursor
    assert frame.header.clock == trainer.weights.clock == 3
    # Four bits to a number: the error is below a seventh of the largest in a block.
    assert np.max(np.abs(frame.values() - held)) < np.max(np.abs(held)) / 7


def test_a_call_without_work_is_not_answered(play):
    stage, trainer = play()
    stage.tell({0: 0, 1: 0})
    trainer.boundary()
    assert stage.mailbox.frame(0) is None and trainer.drafts == [None, None]


def test_a_second_call_finds_the_first_frame_in_flight_and_changes_nothing(play):
    stage, trainer = play()
    steps(trainer, 1)
    post(stage, trainer, 0)
    digest = stage.frame(0).digest
    steps(trainer, 1)
    stage.tell({0: 0})
    until(trainer, lambda: trainer.inbox.news.calls == {0: 0})
    assert stage.frame(0).digest == digest and trainer.drafts[0] is None


def test_training_goes_on_while_a_frame_is_written(play):
    stage, trainer = play()
    steps(trainer, 2)
    stage.tell({0: 0})
    trainer.wakeup.wake()
    steps(trainer, 2)  # Whether or not the frame is written by now.
    until(trainer, lambda: posted(trainer, 0))
    assert trainer.weights.books[0].held.steps == 4
    assert stage.frame(0).header.steps == 2 and trainer.weights.books[0].fresh == Work(
        2 * TOKENS, 2
    )


# Adopting


@pytest.mark.parametrize("adopt", ["rebase", "replace", "blend"])
def test_what_was_trained_less_what_was_merged_is_what_is_held(play, adopt):
    """Rounding errors included: what the codec loses stays in `held`, to one part in a million."""
    stage, trainer = play(adopt=adopt)
    alpha, sums = trainer.task.alpha, [np.zeros(v.size) for v in stage.published]
    for turn in range(6):
        for _ in range(3):
            before = [local(trainer, n).astype(float) for n in range(2)]
            steps(trainer, 1)
            for n in range(2):
                sums[n] += before[n] - local(trainer, n)
        number = turn % 2
        post(stage, trainer, number)
        merged, version = stage.merge(number), stage.versions[number]
        until(trainer, lambda n=number, v=version: trainer.weights.books[n].version == v)
        sums[number] = alpha * (sums[number] - merged)
    for n in range(2):
        np.testing.assert_allclose(trainer.weights.held(n), sums[n], atol=1e-6)
        np.testing.assert_allclose(local(trainer, n), stage.published[n] - sums[n], atol=1e-6)
    assert honest(trainer)


def test_a_version_without_our_frame_leaves_it_in_flight_and_keeps_the_work(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    held = trainer.weights.held(0)
    stage.move_on(0)
    until(trainer, lambda: trainer.weights.books[0].version == 1)
    assert posted(trainer, 0)
    np.testing.assert_allclose(trainer.weights.held(0), held, atol=1e-6)
    np.testing.assert_allclose(local(trainer, 0), stage.published[0] - held, atol=1e-6)


def test_a_mended_image_moves_the_anchor_and_keeps_the_work(play):
    stage, trainer = play()
    steps(trainer, 2)
    held = trainer.weights.held(0)
    stage.published[0] = stage.published[0] + np.float32(0.25)
    stage.publish(0)
    until(trainer, lambda: np.array_equal(trainer.weights.anchors[0], stage.published[0]))
    np.testing.assert_allclose(trainer.weights.held(0), held, atol=1e-6)
    assert trainer.weights.books[0].version == 0 and honest(trainer)


def test_adopting_keeps_the_inner_optimiser(play):
    stage, trainer = play()
    steps(trainer, 2)
    before = trainer.weights.engine.snapshot().optimizer
    stage.move_on(0)
    until(trainer, lambda: trainer.weights.books[0].version == 1)
    after = trainer.weights.engine.snapshot().optimizer
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_under_replace_an_open_call_is_answered_before_the_work_is_dropped(play):
    stage, trainer = play(adopt="replace")
    steps(trainer, 2)
    stage.move_on(0)
    stage.tell({0: 1})
    until(trainer, lambda: trainer.weights.books[0].version == 1 and posted(trainer, 0))
    assert stage.frame(0).header.base == 0 and stage.frame(0).header.steps == 2
    np.testing.assert_array_equal(local(trainer, 0), stage.published[0])


def test_a_stranger_who_contributed_for_this_region_costs_the_unmerged_work(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    stage.merge(0, by="f" * 64)
    until(trainer, lambda: trainer.weights.books[0].version == 1)
    book = trainer.weights.books[0]
    assert book.flight is None and book.held == Work() and book.prev == "f" * 64
    assert book.totals.discarded == 2 * TOKENS and honest(trainer)
    np.testing.assert_array_equal(local(trainer, 0), stage.published[0])


# Answers


def test_a_returned_frame_leaves_the_work_to_be_sent_again_under_a_new_name(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    first = stage.frame(0)
    stage.decide(0, "returned", "the server could not read it")
    until(trainer, lambda: trainer.weights.books[0].flight is None)
    post(stage, trainer, 0)
    second = stage.frame(0)
    assert second.header.clock > first.header.clock and second.header.steps == 2


def test_a_refused_frame_takes_its_work_along(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    steps(trainer, 1)
    stage.decide(0, "refused", "its norm is 9, the usual one here is 0.1")
    until(trainer, lambda: trainer.weights.books[0].flight is None)
    totals = trainer.weights.books[0].totals
    assert (totals.refused, totals.discarded) == (2 * TOKENS, TOKENS) and honest(trainer)
    np.testing.assert_array_equal(local(trainer, 0), stage.published[0])


def refused(stage: Stage, how: str) -> str:
    """What the server says of a frame with one value that is none, however it finds it."""
    settings = settings_of(stage.spec, resolve(stage.spec))
    fragment = settings.layout.fragments[0]
    values = np.zeros(fragment.size, np.float32)
    if how == "looked at":
        values[3] = np.nan
        return inspect(values, fragment, Norms()) or ""
    body = bytearray(codecs.build({"kind": "fp32"}).encode(values))
    for plane in range(4):  # Our encoder refuses to write this.
        body[plane * values.size] = 0xFF
    header = replace(stage.frame(0).header, codec={"kind": "fp32"})
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(body))
    frame, history = open_frame(seal(header, [packed])), TermsHistory(settings)
    believed = BelievedClaim(header.steps, merged=0.0)
    return examine(frame, fragment, Norms(), history, believed)[0] or ""


@pytest.mark.parametrize("how", ["looked at", "decoded"])
def test_after_a_frame_that_was_not_finite_the_optimiser_starts_again_but_not_its_schedule(
    play, how
):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    stage.decide(0, "refused", refused(stage, how))
    until(trainer, lambda: trainer.weights.books[0].flight is None)
    state = trainer.weights.engine.snapshot().optimizer
    assert {int(v) for v in state.values() if v.ndim == 0} == {2}
    assert all(not v.any() for v in state.values() if v.ndim > 0)


def test_weights_that_are_not_finite_are_never_posted(play):
    stage, trainer = play()
    steps(trainer, 2)
    poisoned = {name: values * np.nan for name, values in trainer.weights.engine.params.items()}
    trainer.weights.engine.params = poisoned
    stage.tell({0: 0})
    until(trainer, lambda: trainer.weights.books[0].totals.refused > 0)
    assert stage.mailbox.frame(0) is None and trainer.drafts == [None, None]
    for number in range(2):
        np.testing.assert_array_equal(local(trainer, number), stage.published[number])
        assert trainer.weights.books[number].totals.refused == 2 * TOKENS
    assert honest(trainer)
    notes = [
        e.fields["why"] for e in read_events(stage.folder / "events.jsonl") if e.kind == "note"
    ]
    assert f"of region {trainer.task.region} has the value nan at step " in notes[-1]
    assert "lower the learning rate" in notes[-1]


def test_the_tensor_that_cannot_be_sent_is_named(play):
    stage, trainer = play()
    steps(trainer, 2)
    fragment = trainer.task.layout.fragments[0]
    piece = fragment.pieces[-1]
    whole = trainer.weights.engine.params[piece.tensor].at[piece.start].set(np.inf)
    trainer.weights.engine.params = {**trainer.weights.engine.params, piece.tensor: whole}
    stage.tell({0: 0})
    until(trainer, lambda: trainer.weights.books[0].totals.refused > 0)
    notes = [
        e.fields["why"] for e in read_events(stage.folder / "events.jsonl") if e.kind == "note"
    ]
    where = f"{piece.tensor} (rows {piece.start}:{piece.stop}) of region {trainer.task.region}"
    assert f"{where} has the value -inf at step 2, so fragment 0 was not sent" in notes[-1]


def test_a_sound_frame_in_flight_survives_what_went_bad_after_it(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    steps(trainer, 1)
    trainer.give_up("a test", {0, 1})
    merged = stage.merge(0)
    until(trainer, lambda: trainer.weights.books[0].version == 1)
    totals = trainer.weights.books[0].totals
    assert (totals.applied, totals.discarded) == (2 * TOKENS, TOKENS) and honest(trainer)
    assert merged.any()
    np.testing.assert_array_equal(local(trainer, 0), stage.published[0])


def test_a_full_disk_delays_a_post_and_loses_nothing(play, monkeypatch):
    stage, trainer = play()
    steps(trainer, 2)
    monkeypatch.setattr("diloco_cli.worker.trainer.loop.RETRY_SECONDS", 0.0)
    real, tries = stage.mailbox.post, []

    def full(fragment, frame):
        tries.append(fragment)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")
        real(fragment, frame)

    monkeypatch.setattr(trainer.mail.mailbox, "post", full)
    post(stage, trainer, 0)
    assert len(tries) == 3 and stage.frame(0).header.steps == 2 and honest(trainer)


def test_work_given_up_while_the_disk_was_full_is_not_posted_afterwards(play, monkeypatch):
    stage, trainer = play()
    steps(trainer, 2)
    tries = []

    def full(fragment, frame):
        tries.append(fragment)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.mail.mailbox, "post", full)
    stage.tell({0: 0})
    until(trainer, lambda: bool(tries))
    trainer.give_up("a test", {0, 1})
    assert trainer.drafts == [None, None] and trainer.weights.books[0].flight is None
    assert trainer.weights.books[0].totals.refused == 2 * TOKENS and honest(trainer)


# Waiting and ending


def test_with_overlap_0_no_step_is_made_until_a_newer_version_is_there(play):
    stage, trainer = play(overlap=0)
    steps(trainer, 2)
    post(stage, trainer, 1)
    assert trainer._waits_for() == "waiting for fragment 1 (overlap 0)"
    stage.move_on(1)  # Whoever is in it.
    until(trainer, lambda: trainer.weights.books[1].version == 1)
    assert trainer._waits_for() == ""


def test_after_the_end_everything_is_sent_and_then_reported_drained(play):
    stage, trainer = play()
    steps(trainer, 3)
    stage.tell({0: 0, 1: 0}, end=True)
    until(trainer, lambda: posted(trainer, 0) and posted(trainer, 1))
    assert "draining" in trainer._waits_for()
    for number in range(2):
        stage.merge(number)
    stage.tell(end=True, ended=17)
    until(trainer, lambda: [book.version for book in trainer.weights.books] == [1, 1])
    trainer._wait(trainer._waits_for())
    progress = stage.mailbox.progress()
    assert progress and progress.ended == 17 and not progress.training
    assert progress.tokens.applied == (3 * TOKENS,) * 2


def test_a_run_that_goes_on_after_its_end_is_trained_on_and_drained_again(play):
    stage, trainer = play()
    steps(trainer, 1)
    for number in range(2):
        post(stage, trainer, number)
        stage.merge(number)
    stage.tell(end=True, ended=17)
    until(trainer, trainer._is_drained)
    trainer.report()
    assert stage.mailbox.progress().ended == 17
    stage.tell()
    until(trainer, lambda: not trainer._waits_for())
    trainer.inner_step()
    trainer.report()
    assert stage.mailbox.progress().ended == 0
    stage.tell(end=True, ended=29)
    until(trainer, lambda: "draining" in trainer._waits_for())


def test_no_step_is_made_beyond_what_the_server_allows(play):
    stage, trainer = play()
    stage.tell(until=2.5 * TOKENS)
    until(trainer, lambda: trainer.inbox.news is not None)
    made = 0
    while not trainer._waits_for():
        trainer.inner_step()
        trainer.boundary()
        made += 1
    assert made == 3, "the last one may begin below it"
    assert trainer._waits_for().startswith("waiting for the token budget")
    trainer._wait(trainer._waits_for())
    assert stage.mailbox.progress().why.startswith("waiting for the token budget")
    assert trainer.averages.blocked < LOOK_SECONDS / 2, "the exchange does not hold it up"
    before = stamp(stage.mailbox.progress_file)
    trainer._wait(trainer._waits_for())
    assert stamp(stage.mailbox.progress_file) != before, "room comes with answers to reports alone"
    stage.tell({0: 0}, until=2.5 * TOKENS)
    until(trainer, lambda: posted(trainer, 0))
    stage.tell(until=4.0 * TOKENS)
    until(trainer, lambda: not trainer._waits_for())


def test_a_region_that_trained_its_part_of_the_budget_says_how_much_of_it_is_not_merged(play):
    stage, trainer = play()
    steps(trainer, 2)
    stage.tell({0: 0, 1: 0}, until=2.0 * TOKENS)
    until(trainer, lambda: posted(trainer, 0) and posted(trainer, 1))
    left = "what is left of it is for other regions"
    held = f"{2 * TOKENS:.0f} of the {2 * TOKENS:.0f} tokens trained here are not merged yet, and "
    assert trainer._waits_for() == f"waiting for the token budget: {held}{left}"
    for number in range(2):
        stage.merge(number)
    stage.tell(until=2.0 * TOKENS)
    until(trainer, lambda: [book.version for book in trainer.weights.books] == [1, 1])
    assert trainer._waits_for() == f"waiting for the token budget: {left}"


def test_crumbs_below_one_step_do_not_hold_the_end_up(play):
    stage, trainer = play(adopt="blend")
    steps(trainer, 1)
    stage.move_on(0)
    stage.move_on(1)
    until(trainer, lambda: [book.version for book in trainer.weights.books] == [1, 1])
    stage.tell(end=True)
    until(trainer, trainer._is_drained)
    assert honest(trainer)


def test_a_finished_run_is_measured_and_left_with_every_token_accounted_for(play):
    stage, trainer = play()
    steps(trainer, 2)
    stage.move_on(0)
    stage.tell(end=True, finished=True, evaluate=True)
    trainer.wakeup.wake()
    assert trainer.run() == 0
    progress = stage.mailbox.progress()
    assert progress and progress.heldout and progress.heldout.versions == (1, 0)
    assert 0 < progress.heldout.loss < 20
    assert progress.tokens.trained == progress.tokens.discarded == (2 * TOKENS,) * 2


def test_the_final_weights_are_waited_for(play):
    stage, trainer = play()
    stage.versions[0] = 1  # Published, but the image is not here yet.
    stage.tell(finished=True)
    until(trainer, lambda: trainer.inbox.news is not None)
    assert trainer._waits_for() == "waiting for the final weights"
    stage.publish(0)
    trainer.wakeup.wake()
    assert trainer.run() == 0


def test_held_out_loss_is_of_the_published_weights_not_of_ours(play):
    _, trainer = play()
    steps(trainer, 1)
    trainer.evaluate()
    first = trainer.evaluation.newest.loss
    steps(trainer, 5)
    trainer.evaluate()
    assert trainer.evaluation.newest.loss == first


def send_average(stage, change=0.0, versions=(1, 1)):
    """Leaves an average in the mailbox, as the agent does: the published weights, a bit off."""
    weights = {
        tensor.name: np.zeros(tensor.shape, np.float32)
        for tensor in models.build(stage.spec.model).tensors()
    }
    for fragment, values in zip(stage.layout.fragments, stage.published, strict=True):
        scatter(values + np.float32(change), fragment, weights)
    save_file(weights, stage.mailbox.average_file, {"versions": json.dumps(versions)})


def test_an_average_that_arrives_is_measured_once_beside_the_plain_weights(play):
    stage, trainer = play()
    steps(trainer, 1)
    stage.tell(evaluate=True, ema=True)
    until(trainer, lambda: trainer.evaluation.newest is not None)
    send_average(stage)
    until(trainer, lambda: trainer.evaluation.newest_ema is not None)
    said = stage.mailbox.progress()
    assert said.heldout_ema == HeldOut(versions=(1, 1), loss=said.heldout.loss)
    assert not stage.mailbox.average_file.exists()
    send_average(stage, 0.5, versions=(1, 0))
    until(trainer, lambda: not stage.mailbox.average_file.exists())
    assert stage.mailbox.progress().heldout_ema == said.heldout_ema, "it is of older weights"
    stage.mailbox.average_file.write_bytes(b"damaged")
    until(trainer, lambda: not stage.mailbox.average_file.exists())
    send_average(stage, 0.5, versions=(2, 1))
    until(trainer, lambda: trainer.evaluation.newest_ema.versions == (2, 1))
    assert stage.mailbox.progress().heldout_ema.loss != said.heldout.loss


def test_the_last_average_is_waited_for_and_its_absence_ends_no_run(play, monkeypatch):
    stage, trainer = play()
    steps(trainer, 1)
    stage.move_on(0)
    stage.tell(end=True, finished=True, evaluate=True, ema=True)
    trainer.wakeup.wake()
    sent = threading.Timer(0.2, send_average, (stage, 0.5, (1, 0)))
    sent.start()
    assert trainer.run() == 0
    said = stage.mailbox.progress()
    assert said.heldout.versions == said.heldout_ema.versions == (1, 0)
    monkeypatch.setattr("diloco_cli.worker.trainer.evaluation.AVERAGE_SECONDS", 0.2)
    trainer.evaluation.wait_for_average([2, 0], trainer.wakeup)
    assert trainer.evaluation.newest_ema == said.heldout_ema


def test_weights_write_a_few_words_only_where_somebody_asks_and_it_costs_no_training(
    play, monkeypatch
):
    stage, trainer = play()
    assert trainer.evaluation.sampler is None
    spec = trainer.task.spec
    asked = spec.model_copy(
        update={
            "evaluate": spec.evaluate.model_copy(update={"sample": 8}),
            "data": {**spec.data, "tokenizer": {"kind": "bytes"}},
        }
    )
    sampler = trainer.evaluation.sampler = sampler_of(replace(trainer.task, spec=asked))
    assert sampler is not None
    steps(trainer, 1)
    trainer.evaluate()
    said = stage.mailbox.progress().sample
    assert said.versions == (0, 0) and 0 < len(said.text) <= 8
    assert said.prompt.encode() in TEXT and len(said.prompt) == 17
    stage.move_on(0)
    until(trainer, lambda: trainer.weights.versions == [1, 0])
    trainer.evaluate()
    assert stage.mailbox.progress().sample == said, "the next one must wait"

    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr("diloco_cli.models.generate_flax.generate", full)
    sampler._rest_until = 0.0
    trainer.evaluate()
    assert trainer.evaluation.sampler is None and stage.mailbox.progress().sample == said


def test_a_held_out_loss_that_is_no_number_is_not_reported_and_not_measured_again(
    play, monkeypatch
):
    stage, trainer = play()
    steps(trainer, 1)
    monkeypatch.setattr(trainer.weights.engine, "evaluate", lambda *given: float("nan"))
    trainer.evaluate()
    assert stage.mailbox.progress().heldout is None
    assert not trainer.evaluation.is_due(trainer.weights.versions)


def test_a_region_told_to_be_slow_rests_between_its_steps(play, monkeypatch):
    stage, trainer = play()
    spec = trainer.task.spec
    slow = spec.model_copy(
        update={"regions": (spec.regions[0].model_copy(update={"speed": 0.25}),)}
    )
    trainer.pacing = pacing_of(replace(trainer.task, spec=slow), stage.mailbox)
    steps(trainer, 2)
    # Long beside all that comes after it, whatever else the machine does.
    monkeypatch.setattr(trainer.weights.engine, "wait", lambda: time.sleep(0.05))
    began = time.monotonic()
    trainer.inner_step()
    busy = time.monotonic() - began
    assert 4 * 0.05 <= trainer.pacing.due - began <= 4 * busy


def test_the_learning_rate_follows_the_run_and_not_the_region(play):
    """Told with the news; what was said before an amendment is about another budget."""
    stage, trainer = play()
    horizon = trainer.task.rate.horizon
    steps(trainer, 2)
    stage.tell(progress=0.75)
    until(trainer, lambda: trainer.inbox.news is not None)
    steps(trainer, 1)
    place = trainer.weights.engine.snapshot().place
    assert place == int(0.75 * horizon) + 1
    stage.tell(progress=0.9, terms=1)
    until(trainer, lambda: trainer.inbox.news.terms == 1)
    steps(trainer, 1)
    assert trainer.weights.engine.snapshot().place == place + 1
