"""A trainer reads the lanes it is given, and gives up only what a checkpoint holds."""

from __future__ import annotations

import errno
import json

import pytest

from diloco_cli.core.lanes import Cursor
from diloco_cli.worker.trainer.checkpoints import checkpoint
from tests.worker.trainer.harness import again, post, save, steps, until


@pytest.fixture
def begin(play, monkeypatch):
    """A trainer on a stage that has not granted anything yet; it saves only what it must."""
    for name in ("SHORTEST", "LONGEST"):
        monkeypatch.setattr(checkpoint, name, 1000.0)

    def started(*lanes: int):
        stage, trainer = play()
        stage.mailbox.lanes_file.unlink()
        trainer.inbox._seen.clear()
        if lanes:
            stage.grant(lanes)
            until(trainer, lambda: trainer.weights.cursor.lanes.keys() == set(lanes))
        return stage, trainer

    return started


def reading(stage):
    """What the trainer has last told its agent."""
    return stage.mailbox.progress().reading


def events(stage, kind: str) -> list[dict]:
    lines = (stage.folder / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


def test_a_trainer_without_lanes_waits_and_says_why(begin):
    stage, trainer = begin()
    assert "which lanes of the text" in trainer._waits_for()
    stage.grant([])
    until(trainer, lambda: trainer.inbox.lanes is not None)
    assert "others read all 64" in trainer._waits_for()
    stage.grant([5], grant=3, at=40)
    until(trainer, lambda: bool(trainer.weights.cursor.lanes))
    assert trainer._waits_for() == "" and trainer.weights.cursor.lanes == {5: (3, 40)}
    assert reading(stage).lanes == {5: (3, 40)}


def test_lanes_of_another_text_are_not_read(begin):
    stage, trainer = begin()
    told = stage.mailbox.lanes_file
    stage.grant([1, 2])
    told.write_text(told.read_text().replace(stage.order.digest, "f" * 32))
    until(trainer, lambda: trainer.inbox.lanes is not None)
    assert not trainer.weights.cursor.lanes
    assert "another than the server knows of" in trainer._waits_for()
    trainer.report()
    assert reading(stage).order.digest == stage.order.digest and reading(stage).lanes == {}


def test_a_frame_says_how_far_the_region_has_read_in_which_lanes(begin):
    stage, trainer = begin(3, 7)
    steps(trainer, 3)  # Two windows each.
    post(stage, trainer, 0)
    cursor = Cursor.of(stage.frame(0).header.cursor)
    assert (cursor.order, cursor.count) == (stage.order.digest, 64)
    assert cursor.lanes == {3: (1, 3), 7: (1, 3)} and not cursor.released


def test_what_is_asked_for_is_reported_once_a_checkpoint_holds_its_work(begin, monkeypatch):
    stage, trainer = begin(3, 7)
    steps(trainer, 3)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", full_disk)
        stage.grant([3, 7], 7)
        until(trainer, lambda: 7 not in trainer.weights.cursor.lanes)
        until(trainer, lambda: not trainer.checkpoints.busy)
    trainer.report()
    assert reading(stage).lanes.keys() == {3} and reading(stage).released == {}
    steps(trainer, 1)  # It goes on meanwhile with what it keeps.
    trainer._checkpoint()
    until(trainer, lambda: reading(stage).released == {7: (1, 3)})
    assert checkpoint.load(stage.mailbox.checkpoint).cursor.released == {7: (1, 3)}
    assert reading(stage).lanes == {3: (1, 5)}
    followed = events(stage, "lanes-followed")[-1]
    assert followed["released"] == {"7": [1, 3]} and followed["taken"] == {}


def full_disk(*_):
    raise OSError(errno.ENOSPC, "no room")


def test_before_the_first_step_is_compiled_a_release_is_reported_at_once(begin):
    """A compiler may take minutes, in which nobody else could read the lane."""
    stage, trainer = begin(3, 7)
    stage.grant([3, 7], 7)
    trainer.inbox.look(trainer.mail)
    trainer.boundary()
    assert reading(stage).released == {7: (1, 0)} and reading(stage).lanes == {3: (1, 0)}


def test_a_lane_that_was_given_up_is_not_read_again_after_a_restart(begin):
    stage, trainer = begin(3, 7)
    steps(trainer, 2)
    stage.grant([3, 7], 7)
    until(trainer, lambda: reading(stage).released == {7: (1, 2)})
    revived = again(stage, trainer)
    revived.boundary()
    assert revived.weights.cursor.lanes == {3: (1, 2)}
    assert reading(stage).released == {7: (1, 2)}, "the server may not have heard it"


def test_a_frame_posted_after_a_release_remembers_it_without_a_checkpoint(begin, monkeypatch):
    stage, trainer = begin(3, 7)
    steps(trainer, 2)
    save(trainer)
    steps(trainer, 1)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", full_disk)
        stage.grant([3, 7], 7)
        until(trainer, lambda: 7 not in trainer.weights.cursor.lanes)
        post(stage, trainer, 0)
    revived = again(stage, trainer)
    revived.boundary()
    assert revived.weights.cursor.lanes.keys() == {3}
    assert revived.weights.cursor.released == {7: (1, 3)}


def test_a_lane_that_went_to_another_is_given_up_and_comes_back_under_a_new_grant(begin):
    stage, trainer = begin(3, 7)
    steps(trainer, 2)
    stage.grant([3])
    until(trainer, lambda: trainer.weights.cursor.lanes.keys() == {3})
    assert trainer.weights.cursor.released == {7: (1, 2)}
    stage.grant([3, 7], grant=8, at=30)
    until(trainer, lambda: trainer.weights.cursor.lanes == {3: (8, 30), 7: (8, 30)})
    assert trainer.weights.cursor.released == {}


def test_an_empty_disk_begins_after_the_windows_whose_work_was_accepted(begin):
    stage, trainer = begin(3)
    stage.grant([3], grant=1, at=17)
    until(trainer, lambda: trainer.weights.cursor.lanes == {3: (1, 17)})


def test_another_text_is_read_from_its_beginning(begin):
    stage, trainer = begin(3, 7)
    steps(trainer, 2)
    save(trainer)
    text = stage.folder / "more.txt"
    text.write_bytes(b"and another one. " * 4000)
    data = {**stage.spec.data, "files": [*stage.spec.data["files"], str(text)]}
    stage.spec = stage.spec.model_copy(update={"data": data})
    trainer.close()
    revived = stage.trainer()
    revived.boundary()
    stage.read()
    assert not revived.weights.cursor.lanes and not revived.weights.cursor.released
    revived.report()
    assert reading(stage).order.tokens > trainer.lanes.order.tokens
    stage.grant([3], grant=5)
    until(revived, lambda: revived.weights.cursor.lanes == {3: (5, 0)})
