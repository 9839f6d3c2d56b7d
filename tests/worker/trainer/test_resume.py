"""Where a restarted trainer stands: the outbox beats the checkpoint, the image decides last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diloco_cli.core.lanes import Cursor
from diloco_cli.core.unmerged_work import Totals, Work
from diloco_cli.errors import StoreError
from diloco_cli.system import failpoints
from diloco_cli.worker.mailbox import FolderOwner
from diloco_cli.worker.trainer.checkpoints import checkpoint
from tests.worker.trainer.harness import again, honest, local, post, save, steps, until

TOKENS = 2 * 16


def test_without_a_checkpoint_the_outbox_speaks(play):
    stage, trainer = play()
    steps(trainer, 3)
    post(stage, trainer, 0)
    frame = stage.frame(0)
    revived = again(stage, trainer)
    np.testing.assert_allclose(revived.weights.held(0), frame.values(), atol=1e-6)
    assert revived.weights.books[0].flight.digest == frame.digest
    assert revived.weights.clock == 3 and revived.weights.cursor == Cursor.of(frame.header.cursor)
    assert revived.weights.books[1].held == Work()  # Never posted, never saved: never counted.
    assert honest(revived)


def test_a_frame_newer_than_the_checkpoint_beats_it(play):
    stage, trainer = play()
    steps(trainer, 2)
    save(trainer)
    steps(trainer, 2)
    post(stage, trainer, 0)
    held = trainer.weights.held(1)
    revived = again(stage, trainer)
    assert revived.weights.books[0].held.steps == 4 and revived.weights.books[1].held.steps == 2
    assert not np.array_equal(revived.weights.held(1), held)
    assert revived.weights.cursor == Cursor.of(stage.frame(0).header.cursor)
    assert honest(revived)


def test_a_frame_merged_while_the_trainer_was_down_leaves_held(play):
    stage, trainer = play()
    steps(trainer, 2)
    save(trainer)
    steps(trainer, 2)
    post(stage, trainer, 0)
    stage.merge(0)
    revived = again(stage, trainer)
    book = revived.weights.books[0]
    assert book.held == Work() and book.flight is None and book.totals.applied == 4 * TOKENS
    np.testing.assert_allclose(local(revived, 0), stage.published[0], atol=1e-6)
    assert honest(revived)


def test_a_checkpoint_that_knows_the_frame_keeps_what_came_after_it(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    steps(trainer, 2)
    held = trainer.weights.held(0)
    save(trainer)
    frame = stage.frame(0)
    stage.merge(0)
    revived = again(stage, trainer)
    assert revived.weights.books[0].held == Work(2 * TOKENS, 2)
    np.testing.assert_allclose(revived.weights.held(0), held - frame.values(), atol=1e-6)
    assert honest(revived)


def test_a_post_that_never_became_durable_is_work_still_held(play):
    stage, trainer = play()
    steps(trainer, 2)
    trainer.weights.post(0)  # Booked, but the process dies before the frame is written.
    save(trainer)
    revived = again(stage, trainer)
    book = revived.weights.books[0]
    assert book.flight is None and book.held.steps == 2 and honest(revived)
    post(stage, revived, 0)
    assert stage.frame(0).header.clock > 2


def test_a_settled_frame_is_not_taken_for_one_in_flight(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    stage.merge(0)
    until(trainer, lambda: trainer.weights.books[0].version == 1)
    steps(trainer, 1)
    save(trainer)
    revived = again(stage, trainer)
    assert revived.weights.books[0].flight is None
    assert revived.weights.books[0].held == Work(TOKENS, 1) and honest(revived)


def test_a_restart_goes_on_as_if_nothing_had_been(play):
    stage, trainer = play()
    steps(trainer, 3)
    save(trainer)
    revived = again(stage, trainer)
    assert revived.weights.books == trainer.weights.books
    loss, wanted = revived.weights.train(), trainer.weights.train()
    assert float(loss) == float(wanted)
    for number in range(2):
        np.testing.assert_array_equal(local(revived, number), local(trainer, number))


def test_an_image_mended_while_the_trainer_was_down_is_no_work(play):
    stage, trainer = play()
    steps(trainer, 2)
    held = trainer.weights.held(0)
    save(trainer)
    stage.published[0] = stage.published[0] + np.float32(0.25)
    stage.publish(0)
    revived = again(stage, trainer)
    np.testing.assert_allclose(revived.weights.held(0), held, atol=1e-6)
    np.testing.assert_allclose(local(revived, 0), stage.published[0] - held, atol=1e-6)


def test_a_server_older_than_the_checkpoint_is_refused(play):
    stage, trainer = play()
    stage.move_on(0)
    until(trainer, lambda: trainer.weights.books[0].version == 1)
    save(trainer)
    stage.versions[0] = 0
    stage.publish(0)
    with pytest.raises(StoreError, match="adopted version 1 of fragment 0"):
        again(stage, trainer)


def test_a_checkpoint_of_another_run_is_refused(play):
    stage, trainer = play()
    save(trainer)
    stage.mailbox.write_identity(FolderOwner("owner", 2, "run-2"))
    with pytest.raises(StoreError, match="is of run run-1, not run-2"):
        again(stage, trainer)


def test_a_damaged_outbox_is_named(play):
    stage, trainer = play()
    steps(trainer, 1)
    post(stage, trainer, 0)
    path = stage.mailbox.outbox_file(0)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"outbox/0\.frame is damaged"):
        again(stage, trainer)


def test_a_folder_under_a_new_name_begins_its_books_with_what_it_still_holds(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    stage.merge(0)
    until(trainer, lambda: trainer.weights.books[0].totals.applied > 0)
    steps(trainer, 3)
    save(trainer)
    before = trainer.weights.books
    assert before[0].totals.applied == 2 * TOKENS and before[1].pending == 5 * TOKENS
    identity = stage.mailbox.identity()
    stage.mailbox.write_identity(FolderOwner("another name", 1, identity.run))
    revived = again(stage, trainer)
    for old, new in zip(before, revived.weights.books, strict=True):
        assert new.pending == old.pending
        assert new.totals == Totals(trained=old.pending), "the old account has the rest"
    assert honest(revived)
    # Once, and before anything is posted under the new name.
    assert checkpoint.load(stage.mailbox.checkpoint).meta["owner"] == "another name"
    steps(revived, 1)
    save(revived)
    trained = [book.totals.trained for book in revived.weights.books]
    assert [book.totals.trained for book in again(stage, revived).weights.books] == trained


def test_a_renamed_folder_without_a_checkpoint_begins_its_books_with_what_it_posted(play):
    """Otherwise its frames say for ever that something of its is merged, and are refused."""
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    stage.merge(0)
    until(trainer, lambda: trainer.weights.books[0].totals.applied > 0)
    steps(trainer, 1)
    post(stage, trainer, 0)
    stage.mailbox.checkpoint.unlink(missing_ok=True)
    identity = stage.mailbox.identity()
    stage.mailbox.write_identity(FolderOwner("another name", 1, identity.run, renamed=True))
    revived = again(stage, trainer)
    assert revived.weights.books[0].totals == Totals(trained=TOKENS)
    assert checkpoint.load(stage.mailbox.checkpoint).meta["owner"] == "another name"


def test_a_folder_of_another_region_keeps_its_optimiser_and_drops_what_was_not_merged(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    stage.merge(0)
    until(trainer, lambda: trainer.weights.books[0].totals.applied > 0)
    steps(trainer, 3)
    save(trainer)
    held = [book.pending for book in trainer.weights.books]
    assert all(held)
    saved = checkpoint.load(stage.mailbox.checkpoint)
    moved = replace(saved, meta={**saved.meta, "region": "oslo", "owner": "oslo's"})
    checkpoint.save(stage.mailbox.checkpoint, moved)
    for number in range(2):
        stage.mailbox.outbox_file(number).unlink(missing_ok=True)
    revived = again(stage, trainer)
    for tokens, book in zip(held, revived.weights.books, strict=True):
        assert book.pending == 0 and book.totals == Totals(trained=tokens, discarded=tokens)
    assert revived.weights.clock == trainer.weights.clock, "the schedule goes on"
    for number, published in enumerate(stage.published):
        assert np.array_equal(local(revived, number), published)
    assert honest(revived)
    assert checkpoint.load(stage.mailbox.checkpoint).meta["region"] == "paris"


# In a run that continues the one of the checkpoint


def rebuild(stage, versions: list[int], merged: list[dict[str, str]]) -> None:
    """The server was rebuilt: the agent has made the folder one of the new run."""
    stage.versions, stage.merged = versions, merged
    identity = FolderOwner("another owner", 1, "run-2", high=50, was=("run-1",))
    stage.mailbox.write_identity(identity)
    for number in range(len(versions)):
        stage.publish(number)


def test_what_is_held_goes_on_in_a_rebuilt_run_and_is_realigned_once(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    stage.merge(0)
    until(trainer, lambda: trainer.weights.versions[0] == 1)
    first = stage.frame(0).digest
    steps(trainer, 1)
    post(stage, trainer, 0)
    steps(trainer, 1)
    held = [trainer.weights.held(number) for number in range(2)]
    save(trainer)
    rebuild(stage, [1, 0], [{"paris": first}, {}])
    revived = again(stage, trainer)
    book = revived.weights.books[0]
    assert book.flight is None and book.held == Work(2 * TOKENS, 2) and book.prev == first
    assert book.totals == Totals(trained=2 * TOKENS) and revived.weights.clock == 51
    for number in range(2):
        np.testing.assert_allclose(revived.weights.held(number), held[number], atol=1e-6)
    assert checkpoint.load(stage.mailbox.checkpoint).meta["run"] == "run-2"
    later = again(stage, revived)
    assert later.weights.books == revived.weights.books and honest(later)


def test_a_region_counts_what_a_server_that_was_set_back_has_lost(play):
    stage, trainer = play()
    steps(trainer, 2)
    post(stage, trainer, 0)
    stage.merge(0)
    until(trainer, lambda: trainer.weights.versions[0] == 1)
    steps(trainer, 1)
    save(trainer)
    stage.published[0] = stage.published[0] + np.float32(0.5)
    rebuild(stage, [0, 0], [{}, {}])
    revived = again(stage, trainer)
    book = revived.weights.books[0]
    assert book.version == 0 and book.held == Work(TOKENS, 1) and book.prev == ""
    assert book.totals == Totals(trained=3 * TOKENS, discarded=2 * TOKENS) and honest(revived)
    np.testing.assert_allclose(
        local(revived, 0), stage.published[0] - revived.weights.held(0), atol=1e-6
    )


@pytest.mark.parametrize("point", ["realign.stood", "realign.saved"])
def test_a_trainer_that_dies_while_it_realigns_stands_there_with_the_next_start(play, point):
    stage, trainer = play()
    steps(trainer, 3)
    save(trainer)
    rebuild(stage, [0, 0], [{}, {}])
    failpoints.arm(f"{point}=error:EIO")
    try:
        with pytest.raises(OSError):
            again(stage, trainer)
    finally:
        failpoints.disarm()
    saved = checkpoint.load(stage.mailbox.checkpoint).meta["run"]
    assert saved == ("run-1" if point == "realign.stood" else "run-2")
    revived = stage.trainer()
    try:
        assert [book.held for book in revived.weights.books] == [Work(3 * TOKENS, 3)] * 2
        assert honest(revived)
    finally:
        revived.close()
