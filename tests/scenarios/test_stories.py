"""What happens to a run when things go as they go."""

import pytest

from diloco_cli.core import unmerged_work
from diloco_cli.core.journal_records import FragmentCalled
from diloco_cli.core.members import Admitted, TurnedAway
from diloco_cli.core.rounds import Accept, Decision, Fenced, Foreign, Recorded, Returned
from tests.scenarios.harness import LEASE, Stage

NO_GRACE = {"kind": "none"}


def test_an_ordinary_round():
    stage = Stage("paris", "tokyo", quorum=2)
    stage.train(paris=10, tokyo=9)
    assert stage.slot.phase == "idle"  # The second fastest is not there yet.
    stage.train(tokyo=1)
    assert stage.ledger.calls() == {0: 0}
    stage.answer("paris", "tokyo")
    assert (stage.slot.version, stage.slot.members) == (1, ("paris", "tokyo"))
    stage.adopt("paris", "tokyo")
    assert all(region.book.held.steps == 0 for region in stage.regions.values())


def test_a_region_at_a_quarter_of_the_speed_still_contributes_and_its_share_says_so():
    stage = Stage("paris", "tokyo", quorum=1)
    stage.train(paris=8, tokyo=2)
    stage.train(paris=4, tokyo=1)
    stage.answer("paris", "tokyo")
    assert stage.slot.members == ("paris", "tokyo")
    assert stage.share == pytest.approx({"paris": 0.8, "tokyo": 0.2})


def test_when_the_quorum_is_lost_nothing_is_called_until_it_is_back():
    stage = Stage("paris", "tokyo", quorum=2)
    stage.wait(LEASE + 1, hearing=("paris",))
    stage.train(paris=50)
    assert stage.slot.phase == "idle"
    stage.train(tokyo=10)
    assert stage.slot.phase == "called"
    stage.answer("tokyo", "paris")
    assert stage.slot.applied == {"paris": 5000, "tokyo": 1000}  # The wait cost no work.


def test_a_dead_region_stops_nobody():
    stage = Stage("iowa", "paris", "tokyo", quorum=2)
    stage.train(paris=10, tokyo=10, iowa=10)
    stage.answer("paris", "tokyo")
    assert stage.slot.version == 0  # Grace: iowa is alive and may still answer.
    stage.wait(LEASE, hearing=("paris", "tokyo"))
    assert stage.slot.members == ("paris", "tokyo")


def test_nobody_waits_beyond_the_grace_for_a_region_that_lives_but_does_not_answer():
    stage = Stage("paris", "tokyo", quorum=1, grace={"kind": "fixed", "seconds": 5})
    stage.train(paris=10)
    stage.answer("paris")
    stage.wait(4, hearing=("paris", "tokyo"))
    assert stage.slot.version == 0
    stage.wait(1, hearing=("paris", "tokyo"))
    assert stage.slot.members == ("paris",)


def test_a_late_frame_waits_for_the_next_call_and_closes_nothing_by_itself():
    stage = Stage("paris", "tokyo", quorum=1, grace=NO_GRACE)
    stage.train(tokyo=2)
    stage.train(paris=10)
    assert stage.post("tokyo")  # Posted, but its packets travel for a while.
    stage.answer("paris")
    assert stage.slot.members == ("paris",)
    assert isinstance(stage.send("tokyo"), Accept)
    stage.wait(60, hearing=("paris", "tokyo"))
    assert stage.slot.version == 1
    stage.adopt("paris")
    stage.train(paris=10)
    assert stage.slot.members == ("tokyo",)  # Called at last: tokyo's frame is a member.


def test_the_server_restarts_in_the_middle_of_a_round():
    stage = Stage("paris", "tokyo", quorum=2)
    stage.train(paris=10, tokyo=10)
    stage.answer("paris")
    stage.restart_server()
    assert stage.ledger.calls() == {0: 0}
    assert stage.send("paris") == Recorded(Decision(10, "paris-10", "pending"))
    stage.answer("tokyo")
    assert stage.slot.members == ("paris", "tokyo")
    assert stage.slot.applied == {"paris": 1000, "tokyo": 1000}


def test_a_trainer_dies_after_posting_and_nothing_is_merged_twice_or_lost():
    stage = Stage("paris", quorum=1)
    region = stage.regions["paris"]
    stage.train(paris=4)
    region.saved = region.book
    stage.train(paris=6)
    stage.post("paris")
    stage.kill_trainer("paris")
    stage.train(paris=3)
    stage.send("paris")
    stage.adopt("paris")
    assert stage.slot.applied == {"paris": 1000} and region.book.held.steps == 3
    assert unmerged_work.account(region.book) == 0


def test_a_trainer_dies_after_its_frame_was_merged():
    stage = Stage("paris", quorum=1)
    stage.regions["paris"].saved = stage.regions["paris"].book
    stage.train(paris=10)
    stage.answer("paris")
    stage.kill_trainer("paris")
    assert isinstance(stage.send("paris"), Recorded)
    stage.adopt("paris")
    assert stage.regions["paris"].book.held.steps == 0


def test_a_region_that_missed_a_version_still_learns_that_it_was_merged():
    stage = Stage("paris", "tokyo", quorum=1, grace=NO_GRACE)
    stage.train(paris=10)
    stage.answer("paris")
    stage.train(tokyo=2)
    stage.adopt("tokyo")
    stage.train(tokyo=10)
    stage.answer("tokyo")
    assert stage.slot.members == ("tokyo",) and stage.slot.version == 2
    stage.adopt("paris")
    assert stage.regions["paris"].book.held.steps == 0


def test_a_second_worker_for_a_region_stands_by_until_the_first_is_gone():
    stage = Stage("paris", quorum=1)
    turned_away = stage.join("paris", owner="other disk", boot=1)
    assert isinstance(turned_away, TurnedAway) and turned_away.code == "held"
    stage.wait(LEASE)
    assert stage.join("paris", owner="other disk", boot=1) == Admitted(2, new=True)


def test_the_first_worker_comes_back_and_is_fenced_and_then_stands_by_itself():
    stage = Stage("paris", quorum=1)
    stage.train(paris=10)
    stage.post("paris")
    stage.wait(LEASE)
    stage.join("paris", owner="other disk", boot=1)
    assert isinstance(stage.send("paris"), Fenced)
    again = stage.join("paris", owner="disk of paris", boot=1)
    assert isinstance(again, TurnedAway) and again.code == "held"


def test_an_old_copy_of_a_disk_never_merges_its_work_again():
    stage = Stage("paris", quorum=1)
    stage.train(paris=10)
    region = stage.regions["paris"]
    copy = region.book  # The backup holds the ten steps, and no frame.
    stage.answer("paris")
    region.book, region.clock = copy, stage.ledger.high("paris") + 1
    stage.record(FragmentCalled(0, 1))
    stage.post("paris")
    assert isinstance(stage.send("paris"), Foreign)
    stage.adopt("paris")
    assert region.book.held.steps == 0 and stage.slot.applied == {"paris": 1000}


@pytest.mark.parametrize("adopt", ["rebase", "replace", "blend"])
def test_age_returns_work_only_under_replace_and_blend(adopt):
    stage = Stage("paris", "tokyo", quorum=1, adopt=adopt, staleness=1, grace=NO_GRACE)
    stage.train(tokyo=2)
    stage.train(paris=10)
    stage.post("tokyo")
    for _ in range(2):
        stage.answer("paris")
        stage.adopt("paris")
        stage.train(paris=10)
    answer = stage.send("tokyo")
    if adopt == "rebase":
        assert isinstance(answer, Accept)
    else:
        assert answer == Returned("2 versions behind, 1 allowed")


def test_a_region_back_after_a_long_partition_keeps_its_work_but_does_not_outvote():
    stage = Stage("paris", "tokyo", quorum=1, staleness=2)
    stage.train(tokyo=3000)  # Cut off: it trained on its own for days.
    stage.train(paris=10)
    stage.answer("tokyo", "paris")
    assert stage.slot.applied == {"paris": 1000, "tokyo": 300_000}
    assert stage.share["tokyo"] == pytest.approx(0.75)  # As if it had stopped after 30 steps.


def test_the_end_drains_whatever_is_held_without_asking_for_a_quorum():
    stage = Stage("paris", "tokyo", quorum=2, budget=2000)
    stage.train(paris=10, tokyo=10)
    stage.post("paris")
    stage.train(paris=3)
    stage.send("paris")
    stage.answer("tokyo")
    assert stage.ledger.end
    stage.adopt("paris", "tokyo")
    assert stage.ledger.calls() == {0: 1}  # For three steps of one region.
    stage.answer("paris")
    assert stage.slot.applied == {"paris": 1300, "tokyo": 1000}
    stage.adopt("paris", "tokyo")
    assert stage.drained() == {"paris", "tokyo"} and not stage.slot.waiting


def test_the_end_does_not_wait_for_a_region_that_died_with_the_quorum():
    stage = Stage("paris", "tokyo", quorum=2, budget=2000)
    stage.train(paris=10, tokyo=10)
    stage.answer("paris", "tokyo")
    stage.adopt("paris")
    stage.regions["paris"].book = unmerged_work.step(stage.regions["paris"].book, 100)
    stage.wait(LEASE + 1, hearing=("paris",))
    stage.answer("paris")
    assert stage.slot.applied == {"paris": 1100, "tokyo": 1000}


def test_with_overlap_0_and_everybody_needed_the_run_is_synchronous():
    stage = Stage("paris", "tokyo", quorum=2, overlap=0)
    paris, tokyo = stage.regions["paris"], stage.regions["tokyo"]
    stage.train(paris=10, tokyo=4)
    assert stage.slot.phase == "idle"
    stage.train(tokyo=6)
    stage.answer("paris")
    assert unmerged_work.waits_for([paris.book], stage.ledger.calls()) == 0
    stage.answer("tokyo")
    stage.adopt("paris", "tokyo")
    assert (
        unmerged_work.waits_for([paris.book], {})
        is unmerged_work.waits_for([tokyo.book], {})
        is None
    )
