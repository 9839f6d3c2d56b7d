"""A loop of somebody else's as a region: joined in this process, with the test as its agent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diloco_cli import Region
from diloco_cli.core import unmerged_work
from diloco_cli.errors import LinkError, SpecError
from diloco_cli.region import NumpyWeights, Outer, Transposed
from diloco_cli.spec.resolved import resolved_yaml
from diloco_cli.spec.schema import RunSpec
from diloco_cli.worker.mailbox import AgentReady
from tests.region.linear_loop import BATCH, Momentum, batch, first, heldout, loss_and_slopes
from tests.worker.trainer.harness import Stage, tiny_spec


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    file = Region.describe(NumpyWeights(first()), tmp_path / "init.safetensors")
    data = tiny_spec(tmp_path).model_dump(exclude_unset=True)
    data["model"] = {"kind": "tensors", "file": str(file)}
    data["regions"] = [{"name": "paris", "trainer": {"attach": True}}]
    found = Stage(tmp_path, RunSpec.model_validate(data))
    found.mailbox.write_spec(resolved_yaml(found.spec))
    found.tell()
    with found.mailbox.locked():
        found.mailbox.write_ready(AgentReady(os.getpid(), 0))
        yield found


def region(stage: Stage) -> Region:
    return Region(stage.mailbox.spec_file, "paris", stage.folder)


def train(outer: Outer, arrays, optimizer, steps: int) -> None:
    for _ in range(steps):
        assert outer.go_on()
        at = outer.cursor.get("at", 0)
        loss, slopes = loss_and_slopes(arrays, *batch(at))
        optimizer.step(slopes)
        outer.stepped(tokens=BATCH, loss=loss, cursor={"at": at + 1})


def until(outer: Outer, happened) -> None:
    for _ in range(2000):
        outer._loop.wakeup.wake()
        assert outer.go_on()
        if happened():
            return
        outer._loop.wakeup.wait(0.01)
    raise AssertionError("it did not happen")


def balanced(outer: Outer) -> bool:
    return all(abs(unmerged_work.account(book)) < 1e-6 for book in outer._loop.weights.books)


def test_calls_are_answered_and_versions_adopted_in_the_loops_own_arrays(stage):
    arrays = first()
    arrays["w"] += 5.0  # Joining sets them to what the run has.
    optimizer = Momentum(arrays)
    with region(stage).join(NumpyWeights(arrays), optimizer=optimizer) as outer:
        assert not arrays["w"].any() and outer.cursor == {} and not outer.resumed
        train(outer, arrays, optimizer, 5)
        trained = {name: values.copy() for name, values in arrays.items()}
        stage.tell({0: 0, 1: 0})
        book = outer._loop.weights.books
        until(outer, lambda: all(each.flight and each.flight.digest for each in book))
        frame = stage.frame(0)
        assert (frame.header.tokens, frame.header.steps) == (5 * BATCH, 5)
        assert frame.header.cursor["own"] == {"at": 5}

        # Merged to the bit: nothing is held any more, and the weights are the published ones.
        stage.merge(0)
        stage.move_on(1)
        stage.tell()
        until(outer, lambda: outer.versions == [1, 1])
        vector = outer._loop.weights.engine.read(stage.layout.fragments[0])
        np.testing.assert_allclose(vector, stage.published[0], atol=2e-2)
        # Moved on by others: our work stays on top of theirs.
        for piece in stage.layout.fragments[1].pieces:
            rows = slice(piece.start, piece.stop)
            moved = arrays[piece.tensor][rows] - trained[piece.tensor][rows]
            np.testing.assert_allclose(moved, 0.125, atol=1e-6)
        assert balanced(outer)


def test_a_loop_goes_on_from_its_checkpoint_to_the_bit(stage):
    def run(joins: list[int]) -> tuple[dict, dict]:
        arrays, optimizer = first(), Momentum(first())
        for number, steps in enumerate(joins):
            arrays = first()
            optimizer = Momentum(arrays)
            with region(stage).join(NumpyWeights(arrays), optimizer=optimizer) as outer:
                assert outer.resumed == (number > 0)
                train(outer, arrays, optimizer, steps)
        return arrays, optimizer.speed

    once = run([9])
    stage.mailbox.checkpoint.unlink()
    twice = run([4, 5])
    for before, after in zip(once, twice, strict=True):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name])


def test_the_held_out_loss_is_that_of_the_published_weights_and_ours_stay(stage):
    arrays = first()
    optimizer = Momentum(arrays)
    with region(stage).join(
        NumpyWeights(arrays), optimizer=optimizer, evaluate=lambda: heldout(arrays)
    ) as outer:
        train(outer, arrays, optimizer, 5)
        before = {name: values.copy() for name, values in arrays.items()}
        stage.tell(evaluate=True)
        until(outer, lambda: outer._loop.evaluation.newest is not None)
        newest = outer._loop.evaluation.newest
        assert newest and newest.loss == pytest.approx(heldout(first()))
        assert all((arrays[name] == before[name]).all() for name in before)


def test_the_end_of_the_run_ends_the_loop_and_what_is_not_merged_is_given_up(stage):
    arrays = first()
    optimizer = Momentum(arrays)
    with region(stage).join(NumpyWeights(arrays), optimizer=optimizer) as outer:
        train(outer, arrays, optimizer, 3)
        stage.tell(end=True, finished=True)
        outer._loop.wakeup.wake()
        assert not outer.go_on() and not outer.go_on()
        with pytest.raises(SpecError, match=r"after go_on\(\) had said no"):
            outer.stepped(tokens=1)
    progress = stage.mailbox.progress()
    assert progress and progress.why == "stopped: the run is finished"
    assert progress.tokens.discarded[0] == 3 * BATCH
    assert stage.mailbox.trainer_lock_holder() is None


def test_names_and_axes_map_to_one_layout(stage):
    theirs = {"fc.weight": np.zeros((3, 6), np.float32), "fc.bias": np.zeros(3, np.float32)}
    names = {"w": Transposed("fc.weight"), "b": "fc.bias"}
    with region(stage).join(NumpyWeights(theirs, names=names)) as outer:
        assert outer.go_on()
        engine, [fragment, other] = outer._loop.weights.engine, stage.layout.fragments
        values = np.arange(fragment.size, dtype=np.float32)
        engine.write(fragment, values)
        engine.write(other, -np.arange(other.size, dtype=np.float32))
        np.testing.assert_array_equal(engine.read(fragment), values)
    ours = first()
    again = NumpyWeights(ours)
    for piece in fragment.pieces:
        again.write(piece, values[piece.span].reshape(piece.shape))
        rows = slice(piece.start, piece.stop)
        if piece.tensor == "w":
            np.testing.assert_array_equal(ours["w"][rows], theirs["fc.weight"].T[rows])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"w": np.zeros((3, 6), np.float32)}, r"w has the shape \[3, 6\], the model's \[6, 3\]"),
        ({"w": np.zeros((6, 4), np.float32)}, r"w has the shape \[6, 4\], the model's \[6, 3\]"),
        ({"extra": np.zeros(2, np.float32)}, r"extra \[2\] is no tensor of the model"),
        ({"b": None}, r"b \[3\] is missing"),
    ],
)
def test_other_weights_than_the_runs_are_refused_and_nothing_is_touched(stage, spoil, message):
    arrays = {name: values for name, values in {**first(), **spoil}.items() if values is not None}
    with (
        pytest.raises(SpecError, match=message) as refused,
        region(stage).join(NumpyWeights(arrays)),
    ):
        pass
    assert "Region.describe" in (refused.value.hint or "")
    assert not stage.mailbox.checkpoint.exists()


def test_weights_that_are_too_narrow_are_refused():
    with pytest.raises(SpecError, match="w is float16") as refused:
        NumpyWeights({"w": np.zeros(4, np.float16)})
    assert "master=" in (refused.value.hint or "")


class _Wrong(NumpyWeights):
    def read(self, piece):
        return super().read(piece).astype(np.float64)


def test_rows_of_another_form_are_refused_by_name(stage):
    with (
        pytest.raises(SpecError, match=r"give float64\[.*\] for rows .* of"),
        region(stage).join(_Wrong(first())) as outer,
    ):
        outer._loop.weights.engine.read(stage.layout.fragments[0])


def test_what_the_loop_says_of_its_steps_is_reported(stage):
    with region(stage).join(NumpyWeights(first())) as outer:
        for norm in (3.0, 2.0, np.float32(1.0)):
            assert outer.go_on()
            outer.stepped(tokens=1, loss=norm, learning_rate=0.25, gradient_norm=norm)
    said = stage.mailbox.progress()
    assert said is not None
    assert (said.step, said.learning_rate, said.gradient_norm) == (3, 0.25, 2.0)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tokens": 33}, r"A step of 33 tokens was made; inner.batch × inner.sequence is 32"),
        ({"tokens": 0}, "A step of 0 tokens"),
        ({"tokens": 1, "cursor": {"order": np.arange(3)}}, "not plain data"),
        ({"tokens": 1, "cursor": {"order": "x" * 300_000}}, "at most 262144 are allowed"),
    ],
)
def test_what_cannot_be_counted_is_refused(stage, said, message):
    with region(stage).join(NumpyWeights(first())) as outer:
        assert outer.go_on()
        with pytest.raises(SpecError, match=message):
            outer.stepped(**said)


def test_a_program_that_no_worker_started_is_told_how_to_begin(monkeypatch, tmp_path):
    monkeypatch.delenv("DILOCO_FOLDER", raising=False)
    with pytest.raises(SpecError, match="DILOCO_FOLDER is not set") as refused:
        Region.here()
    assert "trainer.command" in (refused.value.hint or "")
    with (
        pytest.raises(LinkError, match=r"No worker is ready for paris in .* after 0 s"),
        Region("run.yaml", "paris", tmp_path).join(NumpyWeights(first()), wait=0),
    ):
        pass


def test_under_a_worker_a_mistake_is_a_sentence_and_an_exit_code(stage, monkeypatch, capsys):
    monkeypatch.setenv("DILOCO_FOLDER", str(stage.folder))
    monkeypatch.setenv("DILOCO_REGION", "paris")
    with pytest.raises(SystemExit) as ended, Region.here().join(NumpyWeights({"w": first()["w"]})):
        pass
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: The weights of this trainer are not those of the run's model:")
    assert "b [3] is missing" in said and "hint: Map names" in said
