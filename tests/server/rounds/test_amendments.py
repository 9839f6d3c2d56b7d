"""Amendments on a server: journaled, in force at once, and every version by its own terms."""

from __future__ import annotations

import pytest

from diloco_cli.core.claims import PaceRecord
from diloco_cli.core.journal_records import RegionPaced
from diloco_cli.core.rounds import Accept
from diloco_cli.server.recovery.verify import replay
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.wire.messages import Amend
from tests.server.harness import Bench, close_server, in_a_loop, joined, make_spec
from tests.server.harness import kill_server as kill


async def begun(folder) -> Bench:
    bench = await joined(folder, make_spec(budget={"tokens": 1_300}))
    await bench.round(0)
    return bench


@in_a_loop
async def test_an_amendment_is_on_record_and_survives_a_restart(tmp_path):
    bench = await begun(tmp_path)
    answer = await bench.amend({"sync.quorum": 3, "outer.lr": 0.5}, why="slow")
    assert answer.terms == 1 and {it.key for it in answer.changes} == {"sync.quorum", "outer.lr"}
    assert bench.state.sync.quorum == 3 and bench.state.need == 3
    bench.restart()
    assert bench.state.sync.quorum == 3 and bench.state.spec.outer["lr"] == 0.5
    (amendment,) = bench.state.ledger.amendments
    assert (amendment.by, amendment.why, amendment.number) == ("admin", "slow", 1)
    assert amendment.time is not None


@in_a_loop
async def test_a_pace_is_forgotten_by_the_record_that_says_who_wanted_it(tmp_path):
    bench = await joined(tmp_path, make_spec(budget={"tokens": 13_000}, pace=None))
    await bench.round(0)
    bench.state.record(RegionPaced("paris", 2.0, bench.state.allowance_clock, 18.0))
    claimed = bench.state.ledger.slots[0].claims["paris"].claimed
    bench.clock.now += 100
    answer = await bench.amend(repace=("paris",), why="new machines", id="once")
    (change,) = answer.changes
    assert (change.key, change.before, change.when) == ("pace of paris", 2.0, "at once")
    assert (await bench.amend(repace=("paris",), id="once")).recorded
    paces, at = dict(bench.state.ledger.paces), bench.state.allowance_clock
    assert paces["paris"] == PaceRecord(at)
    assert bench.state.ledger.slots[0].claims["paris"].claimed == claimed, "and nothing else"
    bench.state.snapshot()
    await bench.round(0)
    bench.restart()
    assert bench.state.ledger.paces == paces
    (amendment,) = bench.state.ledger.amendments
    assert (amendment.by, amendment.repace) == ("admin", ("paris",))
    digests = bench.digests()
    await close_server(bench.server)
    assert [line.digest for line in replay(bench.settings, tmp_path / "server").lines] == digests


@in_a_loop
async def test_news_and_the_run_document_name_the_newest_terms(tmp_path):
    bench = await begun(tmp_path)
    before = await bench.beat("paris")
    await bench.amend({"sync.every": 8, "server.lease": 20.0})
    news = await bench.beat("paris")
    assert (before.terms, news.terms, news.every, news.lease_seconds) == (0, 1, 8, 20.0)
    assert news.n > before.n  # Whoever waits for news hears of it.


@in_a_loop
async def test_a_version_is_made_by_the_terms_its_round_was_closed_under(tmp_path):
    bench = await begun(tmp_path)
    await bench.call(0)
    for name in bench.regions:
        await bench.send(name, 0)
    bench.clock.now += 5
    bench.server.tick()  # Closed; the merge has not begun.
    assert bench.state.ledger.slots[0].phase == "closing"
    await bench.amend({"outer.lr": 0.05, "merge": {"kind": "mean"}})
    bench.restart()  # And is done by the next server.
    await bench.settle()
    assert bench.state.ledger.slots[0].version == 2
    assert [made.terms for made in bench.state.ledger.slots[0].made][-1] == 0
    await bench.join()
    await bench.round(0)
    assert [made.terms for made in bench.state.ledger.slots[0].made][-1] == 1
    digests = bench.digests()
    await close_server(bench.server)
    found = replay(bench.settings, tmp_path / "server")
    assert [line.digest for line in found.lines] == digests


@in_a_loop
async def test_frames_packed_under_earlier_terms_are_welcome(tmp_path):
    bench = await begun(tmp_path)
    await bench.call(0)
    await bench.amend({"wire.up": {"kind": "int8", "block": 512}})
    assert isinstance(await bench.send("paris", 0), Accept)  # Still with the first codec.
    ups = [codec.__class__.__name__ for codec in bench.state.history.up_codecs]
    assert len(ups) == 2


@in_a_loop
async def test_another_kind_of_outer_optimizer_begins_without_the_old_momentum(tmp_path):
    bench = await begun(tmp_path)
    await bench.amend({"outer": {"kind": "sgd", "lr": 1.0}})
    await bench.round(0)
    assert bench.state.weights.newest[0].state.momentum.size == 0
    await bench.amend({"outer": {"kind": "nesterov"}})
    await bench.round(0)
    assert bench.state.weights.newest[0].state.momentum.size == bench.settings.sizes[0]


@in_a_loop
async def test_the_same_request_again_is_answered_and_not_made_again(tmp_path):
    bench = await begun(tmp_path)
    await bench.amend({"sync.quorum": 3}, id="once", after=0)
    again = await bench.amend({"sync.quorum": 3}, id="once", after=0)
    assert again.recorded and again.terms == 1
    assert bench.state.ledger.terms == 1


@in_a_loop
async def test_the_second_of_two_operators_is_shown_what_the_first_changed(tmp_path):
    bench = await begun(tmp_path)
    await bench.amend({"sync.quorum": 3}, after=0)
    with pytest.raises(HttpRefusal, match=r"terms 1 .* sync\.quorum") as refused:
        await bench.amend({"outer.lr": 0.1}, after=0)
    assert refused.value.code == "terms-changed" and refused.value.beside == {"terms": 1}


@in_a_loop
async def test_every_fault_is_named_at_its_key_and_nothing_is_recorded(tmp_path):
    bench = await begun(tmp_path)
    with pytest.raises(HttpRefusal) as refused:
        await bench.amend({"model.width": 8, "seed": 3})
    faults = refused.value.beside["faults"]
    assert [fault["key"] for fault in faults] == ["model.width", "seed"]
    assert "start: {weights" in faults[0]["hint"]
    with pytest.raises(HttpRefusal, match=r"sync\.quorum: is 9") as refused:
        await bench.amend({"sync.quorum": 9})
    assert refused.value.status == 422
    assert bench.state.ledger.terms == 0


@in_a_loop
async def test_a_dry_run_says_what_would_change_and_when(tmp_path):
    bench = await begun(tmp_path)
    answer = await bench.amend({"outer.lr": 0.5, "sync.quorum": 1}, dry_run=True)
    found = {it.key: (it.before, it.after, it.when) for it in answer.changes}
    assert found["outer.lr"] == (0.4, 0.5, "with the next version of each fragment")
    assert found["sync.quorum"][2] == "at once"
    assert bench.state.ledger.terms == 0


@in_a_loop
async def test_what_is_so_already_is_no_amendment(tmp_path):
    bench = await begun(tmp_path)
    answer = await bench.amend({"sync.quorum": 2})
    assert answer.terms == 0 and answer.changes == ()
    assert bench.state.ledger.terms == 0


async def ended(bench: Bench) -> None:
    while not bench.state.ledger.end:
        await bench.round(0)
        await bench.round(1)
    for name in bench.regions:
        await bench.beat(name, drained=True)
    await bench.settle()


@in_a_loop
async def test_a_larger_budget_opens_a_finished_run_again(tmp_path):
    bench = await begun(tmp_path)
    await ended(bench)
    assert bench.state.phase == "finished"
    answer = await bench.amend({"budget.tokens": 6_000})
    assert answer.reopens
    assert not bench.state.ledger.end and bench.state.phase == "training"
    news = await bench.beat("paris")
    assert not news.end and not news.finished
    before = bench.versions
    await bench.round(0)
    assert bench.versions[0] == before[0] + 1
    bench.restart()
    assert bench.state.phase == "training"


@in_a_loop
async def test_a_change_of_anything_else_leaves_a_finished_run_finished(tmp_path):
    bench = await begun(tmp_path)
    await ended(bench)
    answer = await bench.amend({"sync.quorum": 1})
    assert not answer.reopens and bench.state.phase == "finished"


@in_a_loop
async def test_work_that_comes_after_the_end_has_its_answer_on_record(tmp_path):
    bench = await begun(tmp_path)
    await ended(bench)
    late = bench.regions["paris"].frame(0)
    await bench.send("paris", 0, late)
    await bench.amend({"budget.tokens": 6_000})
    again = await bench.send("paris", 0, late)
    # Accepted now, it could be merged although its region has given it up.
    assert type(again).__name__ == "Recorded"


@in_a_loop
async def test_a_budget_that_is_used_up_already_wants_to_be_confirmed(tmp_path):
    bench = await begun(tmp_path)
    await bench.round(1)
    with pytest.raises(HttpRefusal, match="would end") as refused:
        await bench.amend({"budget.tokens": 432})
    assert refused.value.code == "unconfirmed"
    answer = await bench.amend({"budget.tokens": 432}, sure=True)
    assert answer.ends and answer.terms == 1
    bench.server.tick()
    assert bench.state.ledger.end


@in_a_loop
async def test_a_shorter_lease_holds_once_the_region_was_told(tmp_path):
    bench = await begun(tmp_path)
    await bench.beat("paris")
    await bench.beat("tokyo")
    await bench.amend({"server.lease": 2.0})
    bench.clock.now += 5  # Within the lease that paris was told last.
    assert "paris" in bench.state.live()
    await bench.beat("paris")
    bench.clock.now += 3
    assert "paris" not in bench.state.live()
    assert "tokyo" in bench.state.live()


@in_a_loop
async def test_an_amendment_that_was_not_durable_is_not_in_force_after_a_crash(tmp_path):
    bench = await begun(tmp_path)
    await bench.server.publisher.settled()
    asked = Amend(id="lost", set={"sync.quorum": 3})
    judged = bench.server.amend(asked, by="admin")
    judged.send(None)  # Up to the wait for the disk, and no further.
    judged.close()
    kill(bench.server)
    bench.server = bench._open()
    assert bench.state.ledger.terms in (0, 1)
    answer = await bench.amend({"sync.quorum": 3}, id="lost")
    assert bench.state.ledger.terms == 1 and answer.terms == 1
