"""The server is what its journal says: nothing else decides, and replaying changes nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    MemberDropped,
    Record,
    RegionJoined,
    RoundClosed,
    RunEnded,
    RunFinished,
    VersionPublished,
    WeightsEvaluated,
    decode_all,
    encode,
)
from diloco_cli.core.ledger import Evaluation, Ledger
from diloco_cli.core.members import Admitted, RegionOwner, TurnedAway, admit_worker
from diloco_cli.core.rounds import Decision, Fate, Receipt, RegionRecord


def receipt(region: str = "paris", digest: str = "x", **changes) -> Receipt:
    sent = {"base": 0, "clock": 10, "prev": "", "tokens": 100, "steps": 4, "bytes": 50, **changes}
    return Receipt(region=region, fragment=0, digest=digest, **sent)


def joined(region: str = "paris", epoch: int = 1) -> RegionJoined:
    return RegionJoined(region, "disk", boot=epoch, epoch=epoch)


def decided(fate: Fate = "pending", **changes) -> FrameDecided:
    return FrameDecided(receipt(**changes), fate)


def closed(*members: str, drain: bool = False) -> RoundClosed:
    return RoundClosed(0, 0, members, drain)


def published(version: int = 1) -> VersionPublished:
    return VersionPublished(0, version, f"w{version}")


def dropped(region: str = "paris", fate: Fate = "returned") -> MemberDropped:
    return MemberDropped(0, region, fate, "unreadable")


CALLED = FragmentCalled(0, 0)
END = RunEnded("budget reached")
FINISHED = RunFinished("all merged")


def after(*records: Record, fragments: int = 1) -> Ledger:
    return Ledger.folded(fragments, enumerate(records, 1))


def test_an_empty_journal_knows_nobody():
    nobody = RegionRecord(epoch=0, version=0, merged="", known=None, finished=False)
    assert after().region_record("paris", 0) == nobody
    assert after().high("paris") == -1


def test_an_accepted_frame_waits_for_its_round():
    ledger = after(joined(), decided())
    assert list(ledger.slots[0].waiting) == ["paris"]
    assert ledger.region_record("paris", 0).known == Decision(10, "x", "pending")
    assert ledger.bytes_up == 50


def test_a_published_round_merges_its_members_and_nobody_else():
    ledger = after(
        decided(), decided(region="tokyo", digest="y"), CALLED, closed("paris"), published()
    )
    slot = ledger.slots[0]
    assert (slot.version, slot.phase, slot.members) == (1, "idle", ("paris",))
    assert slot.merged == {"paris": "x"} and slot.applied == {"paris": 100}
    assert slot.decided["paris"].fate == "merged" and slot.decided["tokyo"].fate == "pending"
    assert list(slot.waiting) == ["tokyo"] and ledger.outer_steps == 1


def test_the_merged_map_is_cumulative():
    records: list[Record] = [decided(), CALLED, closed("paris"), published()]
    records += [decided(region="tokyo", digest="y", base=1), CALLED, closed("tokyo"), published(2)]
    slot = after(*records).slots[0]
    assert slot.merged == {"paris": "x", "tokyo": "y"} and slot.members == ("tokyo",)


def test_frames_that_come_while_a_round_closes_wait_for_the_next():
    records = [decided(), CALLED, closed("paris"), decided(region="tokyo", digest="y")]
    slot = after(*records).slots[0]
    assert (list(slot.closing), list(slot.waiting), slot.phase) == (["paris"], ["tokyo"], "closing")


def test_a_dropped_member_gets_its_answer_and_is_never_merged():
    slot = after(decided(), CALLED, closed("paris"), dropped(fate="refused")).slots[0]
    assert slot.decided["paris"] == Decision(10, "x", "refused", "unreadable")
    assert (slot.phase, slot.version, slot.merged) == ("idle", 0, {})


def test_a_round_that_lost_one_member_still_publishes_the_others():
    records = [decided(), decided(region="tokyo", digest="y"), CALLED, closed("paris", "tokyo")]
    slot = after(*records, dropped("paris"), published()).slots[0]
    assert slot.merged == {"tokyo": "y"} and slot.applied == {"tokyo": 100}


def test_refused_and_returned_frames_are_remembered_and_counted():
    ledger = after(decided("refused"), decided("returned", digest="y", clock=11))
    assert ledger.slots[0].decided["paris"] == Decision(11, "y", "returned")
    assert ledger.refused == {"paris": 2} and not ledger.slots[0].waiting
    assert ledger.bytes_up == 0


def test_a_later_refusal_does_not_unmerge_what_was_merged():
    records = [decided(), CALLED, closed("paris"), published(), decided("refused", digest="y")]
    assert after(*records).region_record("paris", 0).merged == "x"


def test_a_new_disk_starts_above_every_clock_ever_decided():
    other = FrameDecided(replace(receipt(clock=99), fragment=1), "returned")
    ledger = after(decided(), other, fragments=2)
    assert ledger.high("paris") == 99 and ledger.high("tokyo") == -1


def test_calls_are_the_versions_that_are_asked_for():
    assert after(CALLED, fragments=2).calls() == {0: 0}
    assert after(decided(), CALLED, closed("paris")).calls() == {}


def test_a_finished_run_calls_nobody_though_a_round_was_left_open():
    assert after(CALLED, END).calls() == {0: 0}
    assert after(CALLED, END, FINISHED).calls() == {}


@pytest.mark.parametrize(
    "record, counts",
    [(CALLED, True), (END, True), (FINISHED, True), (joined(), False), (decided(), False)],
)
def test_only_what_regions_wait_for_moves_the_number_they_wait_after(record, counts):
    assert after(joined("tokyo"), record).news == (2 if counts else 0)


def test_kinds_of_a_later_version_are_notes_and_change_nothing():
    numbered = list(decode_all([{"kind": "remark", "text": "hello"}, encode(CALLED)]))
    assert numbered == [(2, CALLED)]


def test_applied_tokens_are_averaged_over_fragments_by_size():
    ledger = after(decided(), CALLED, closed("paris"), published(), fragments=2)
    assert ledger.applied([30, 10]) == pytest.approx(75)


def test_evaluations_are_kept_in_order():
    heard = WeightsEvaluated((1,), 2.5, "paris", time=7.0)
    kept = Evaluation((1,), 2.5, "paris")
    assert after(heard, heard).evaluations == [kept, kept]


# Who may speak for a region


def test_the_first_worker_is_welcome():
    assert admit_worker(None, "disk", 1, lease_left=0) == Admitted(1, new=True)


def test_a_repeated_join_gets_the_same_epoch_again():
    assert admit_worker(RegionOwner("disk", 4, 9), "disk", 4, lease_left=5) == Admitted(
        9, new=False
    )


def test_a_restarted_worker_takes_over_from_itself_at_once():
    assert admit_worker(RegionOwner("disk", 4, 9), "disk", 5, lease_left=5) == Admitted(
        10, new=True
    )


def test_a_rival_waits_while_the_lease_lives_and_then_takes_over():
    member = RegionOwner("disk", 4, 9)
    answer = admit_worker(member, "other", 1, lease_left=5)
    assert isinstance(answer, TurnedAway) and answer.code == "held" and "5 more" in answer.why
    assert admit_worker(member, "other", 1, lease_left=0) == Admitted(10, new=True)


@pytest.mark.parametrize("lease_left", [0, 5])
def test_an_older_copy_of_the_folder_may_not_speak(lease_left):
    answer = admit_worker(RegionOwner("disk", 4, 9), "disk", 3, lease_left=lease_left)
    assert isinstance(answer, TurnedAway) and answer.code == "older-copy"


asks = st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 4), st.sampled_from([0.0, 5.0]))


@given(asks=st.lists(asks, max_size=12))
def test_an_epoch_belongs_to_one_start_of_one_folder_for_ever(asks):
    ledger, owners = Ledger.empty(1), {}
    for owner, boot, left in asks:
        answer = admit_worker(ledger.regions.get("paris"), owner, boot, lease_left=left)
        if isinstance(answer, Admitted):
            assert owners.setdefault(answer.epoch, (owner, boot)) == (owner, boot)
            ledger.apply(1, RegionJoined("paris", owner, boot, answer.epoch))


@given(cut=st.integers(0, 9))
def test_a_server_that_dies_anywhere_stands_where_the_journal_ends(cut):
    records: list[Record] = [joined(), decided(), CALLED, decided(region="tokyo", digest="y")]
    records += [closed("paris"), published(), CALLED, END, FINISHED]
    ledger = after(*records[:cut])
    for number, record in enumerate(records[cut:], cut + 1):
        ledger.apply(number, record)
    assert ledger == after(*records)
