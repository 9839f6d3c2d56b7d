"""A region with sharded checkpoints goes on from the newest that is whole, and no other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diloco_cli.core.unmerged_work import Work
from diloco_cli.errors import SpecError
from diloco_cli.observe.events import read_events
from diloco_cli.spec.load import SpecErrors, load_spec
from diloco_cli.spec.schema import RegionSpec
from diloco_cli.worker.engines.learning_rate import REWARM
from diloco_cli.worker.engines.orbax_folder import OrbaxFolder
from diloco_cli.worker.mailbox import FolderOwner
from tests import ROOT
from tests.worker.trainer.harness import Stage, again, honest, post, steps

RUN = "run-1"


@pytest.fixture
def region(tasks, tmp_path):
    """A stage whose region keeps sharded checkpoints, and its trainer."""
    task = tasks()
    chosen = {"name": "paris", "checkpoint": {"kind": "orbax", "every": "1h"}}
    spec = task.spec.model_copy(update={"regions": (RegionSpec.model_validate(chosen),)})
    stage = Stage(tmp_path, spec)
    return stage, stage.trainer(replace(task, spec=spec))


def saved(trainer) -> None:
    trainer._checkpoint()
    assert trainer.checkpoints.wait() == ""


def noted(stage) -> str:
    events = read_events(stage.folder / "events.jsonl")
    return " ".join(str(event.fields.get("why")) for event in events if event.kind == "note")


def test_it_goes_on_with_weights_averages_and_books(region):
    stage, trainer = region
    steps(trainer, 3)
    before = trainer.weights.engine.snapshot()
    held, cursor = trainer.weights.held(1), trainer.weights.cursor
    saved(trainer)
    revived = again(stage, trainer)
    after = revived.weights.engine.snapshot()
    assert not stage.mailbox.checkpoint.exists()
    np.testing.assert_array_equal(revived.weights.held(1), held)
    for name in before.params:  # Published − (published − local) rounds once more.
        np.testing.assert_allclose(after.params[name], before.params[name], atol=1e-7)
    for name in before.optimizer:
        np.testing.assert_array_equal(after.optimizer[name], before.optimizer[name])
    assert revived.weights.clock == 3 and revived.weights.cursor == cursor
    assert honest(revived) and "lost" not in noted(stage)
    revived.close()


def test_a_version_that_came_meanwhile_leaves_what_was_held(region):
    stage, trainer = region
    steps(trainer, 2)
    post(stage, trainer, 0)
    steps(trainer, 1)
    saved(trainer)
    after_the_post = trainer.weights.held(0) - stage.frame(0).values()
    stage.merge(0)
    stage.move_on(1)
    held = trainer.weights.held(1)
    revived = again(stage, trainer)
    assert revived.weights.versions == [1, 1]
    assert revived.weights.books[0].held == Work(2 * 16, 1)
    np.testing.assert_allclose(revived.weights.held(0), after_the_post, atol=1e-6)
    np.testing.assert_allclose(revived.weights.held(1), held, atol=1e-6)
    assert honest(revived)
    revived.close()


def test_what_cannot_be_read_is_not_believed_and_the_one_before_is(region):
    stage, trainer = region
    steps(trainer, 1)
    saved(trainer)
    steps(trainer, 1)
    saved(trainer)
    newest = stage.mailbox.checkpoints / RUN / "2"
    for file in (newest / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    revived = again(stage, trainer)
    assert revived.weights.clock == 1 and honest(revived)
    assert f"{newest} cannot be read" in noted(stage)
    steps(revived, 1)
    saved(revived)
    saved(revived)  # A step may be saved twice: what is between two steps changes too.
    last = again(stage, revived)
    assert last.weights.clock == 2
    last.close()


def test_averages_that_were_lost_are_said_and_the_rate_rises_again(region):
    stage, trainer = region
    trainer.close()
    stage.mailbox.write_identity(FolderOwner("owner", 2, RUN, high=10 * REWARM))
    revived = again(stage, trainer)
    assert f"rate rises again over {REWARM} steps" in noted(stage)
    rate, full = revived.task.rate, trainer.task.rate.lr
    assert rate.at(10 * REWARM) < full / 50
    assert rate.at(10 * REWARM + REWARM // 2) == pytest.approx(full / 2, rel=0.02)
    assert rate.at(11 * REWARM + 1) == pytest.approx(full)
    steps(revived, 1)
    assert revived.weights.stepper.place_now() == 10 * REWARM + 2, "one above what was decided"
    saved(revived)
    last = again(stage, revived)  # And a restart in the middle of the rise goes on with it.
    assert last.task.rate == rate and noted(stage).count("rises again") == 1
    last.close()


SAVES = """
import sys
import numpy as np
from pathlib import Path
from diloco_cli.worker.engines.orbax_folder import OrbaxFolder
folder = OrbaxFolder(Path(sys.argv[1]), keep=2)
for step in range(1, 1000):
    held = [np.full(1 << 22, step, np.float32) for _ in range(8)]
    folder.save({"step": step}, held, {}, {})
    folder.wait() if step == 1 else None
    print(step, flush=True)
    folder.wait()
"""


def test_a_save_that_is_killed_in_the_middle_is_never_taken_for_a_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout and process.stdout.readline() == "1\n"
        begun = _half_written(folder, process)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    left = [path for path in folder.iterdir() if not path.name.isdigit()]
    assert begun and left, "the save had ended before it could be killed"
    again = OrbaxFolder(folder, keep=2)
    newest = again.numbers()[0]
    assert (folder / str(newest)).is_dir()
    state = again.read(newest)
    assert state.notes["step"] == newest
    for values in state.held():
        np.testing.assert_array_equal(values, np.float32(newest))
    # It is no obstacle to the next one either, and its bytes do not stay for ever.
    again.save({"step": newest + 1}, [np.zeros(4, np.float32)], {}, {})
    again.wait()
    assert again.numbers()[0] == newest + 1
    assert [path for path in folder.iterdir() if not path.name.isdigit()] == []
    again.close()


def _half_written(folder: Path, process: subprocess.Popen[str]) -> bool:
    """Waits until a save after the first has written something; then its process is stopped."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if not path.name.isdigit() and any(path.rglob("*")):
                    os.kill(process.pid, signal.SIGSTOP)
                    if path.exists():
                        return True
                    os.kill(process.pid, signal.SIGCONT)
    return False


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ("{kind: orbax, to: 's3://bucket/run'}", "begins like the URL of a bucket (s3)"),
        ("{kind: orbax, to: 'gs://bucket'}", "begins like the URL of a bucket (gs)"),
        ("{kind: orbax, every: soon}", "is 'soon', which is no duration"),
        ("{kind: orbax, keep: 0}", "keep"),
        ("{kind: orbax}, trainer: {command: [train]}", "this region has a trainer of its own"),
    ],
)
def test_a_place_or_a_time_that_is_none_is_refused(tmp_path, checkpoint, words):
    file = tmp_path / "run.yaml"
    file.write_text(
        "spec: 1\nname: tiny\nbudget: {tokens: 1_000_000}\n"
        "model: {kind: decoder, layers: 1, width: 16, heads: 2}\ndata: {kind: python-source}\n"
        f"regions: [{{name: paris, checkpoint: {checkpoint}}}]\n"
    )
    with pytest.raises(SpecErrors) as found:
        load_spec(file)
    said = str(found.value)
    assert words in said and "checkpoint" in said


def test_a_host_that_sees_another_disk_is_told_before_anything_is_written(tmp_path):
    first = OrbaxFolder(tmp_path / "of host 0", keep=2)
    mark = first.mark
    OrbaxFolder(tmp_path / "of host 0", keep=2).find_mark(mark)
    with pytest.raises(SpecError, match="is not the one that host 0 sees") as raised:
        OrbaxFolder(tmp_path / "of host 1", keep=2).find_mark(mark)
    assert "a disk that all its hosts share" in (raised.value.hint or "")
