"""Steps are traced for whoever asks, while the training goes on."""

from __future__ import annotations

from diloco_cli.worker.mailbox import ProfileAnswer, ProfileRequest
from tests.worker.trainer.harness import steps, until


def asked(stage, trainer, folder, count=2):
    stage.mailbox.ask_for_profile(ProfileRequest("one", count, str(folder)))
    until(trainer, lambda: not stage.mailbox.profile_file.exists())


def test_a_trainer_that_leaves_writes_the_steps_it_made(play, tmp_path):
    stage, trainer = play()
    steps(trainer, 1)
    asked(stage, trainer, tmp_path / "trace", count=5)
    steps(trainer, 1)
    assert stage.mailbox.profile_answer() is None
    trainer.close()
    assert stage.mailbox.profile_answer() == ProfileAnswer("one", 1)
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


def test_a_request_waits_for_the_first_step_and_is_taken_once(play, tmp_path):
    stage, trainer = play()
    stage.mailbox.ask_for_profile(ProfileRequest("one", 1, str(tmp_path / "trace")))
    trainer.wakeup.wake()
    trainer.boundary()
    assert stage.mailbox.profile_file.exists()
    steps(trainer, 3)
    assert stage.mailbox.profile_answer() == ProfileAnswer("one", 1)
    assert not stage.mailbox.profile_file.exists()
    assert len(list((tmp_path / "trace").rglob("*.xplane.pb"))) == 1


def test_a_file_in_the_place_of_the_folder_costs_the_trace_alone(play, tmp_path):
    stage, trainer = play()
    steps(trainer, 1)
    (tmp_path / "trace").write_text("in the way")
    asked(stage, trainer, tmp_path / "trace")
    assert "File exists" in stage.mailbox.profile_answer().error
    steps(trainer, 1)
    assert trainer.weights.clock == 2
