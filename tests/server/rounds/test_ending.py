"""A run ends when its budget is merged, drains what is held, and says goodbye."""

from __future__ import annotations

from diloco_cli.core.conductor import PATIENCE
from diloco_cli.core.rounds import Accept, Recorded, Returned
from diloco_cli.server.build_status import build_status, build_summary
from diloco_cli.server.rounds.leases import FAILED_STARTS
from tests.server.harness import NAMES, Bench, in_a_loop, joined, make_spec


async def ended(folder, *, quorum: int = 2) -> Bench:
    """A bench whose budget has just been reached."""
    bench = await joined(folder, make_spec(quorum=quorum, budget={"tokens": 500}))
    await bench.round(0)
    await bench.round(1)
    assert bench.state.ledger.end
    return bench


async def drain(bench: Bench, *names: str) -> None:
    for name in names or NAMES:
        await bench.beat(name, drained=True)
    await bench.settle()


@in_a_loop
async def test_the_budget_ends_the_run_and_the_drain_finishes_it(tmp_path):
    bench = await ended(tmp_path)
    assert bench.server.news("iowa").end and not bench.server.news("iowa").finished
    await drain(bench, "iowa", "paris")
    assert not bench.state.ledger.finished
    await drain(bench, "tokyo")
    assert bench.state.ledger.finished == "token budget reached"
    assert bench.state.phase == "finished"
    bench.restart()
    assert bench.state.phase == "finished"


@in_a_loop
async def test_held_work_is_called_for_and_one_region_is_a_quorum(tmp_path):
    bench = await ended(tmp_path)
    await drain(bench, "iowa", "tokyo")
    await bench.beat("paris", [0, 3])
    bench.server.tick()
    assert bench.state.ledger.calls() == {1: 1}
    bench.regions["paris"].pending = [0.0, 96.0]
    await bench.beat("paris", [0, 3])
    await bench.send("paris", 1)
    await bench.settle()
    assert bench.versions == [1, 2], "nobody else owes anything"
    assert bench.state.ledger.slots[1].members == ("paris",)


@in_a_loop
async def test_drain_rounds_leave_the_momentum_alone(tmp_path):
    bench = await ended(tmp_path)
    before = bench.state.weights.newest[0].state.momentum
    await drain(bench, "iowa", "tokyo")
    await bench.beat("paris", [3, 0])
    await bench.send("paris", 0)
    bench.server.tick()
    await bench.settle()
    assert bench.versions[0] == 2
    assert (bench.state.weights.newest[0].state.momentum == before).all()


@in_a_loop
async def test_an_open_round_without_quorum_closes_after_the_end(tmp_path):
    bench = await joined(tmp_path, make_spec(quorum=3, budget={"tokens": 576}))
    await bench.call(1)
    await bench.send("paris", 1)
    await bench.round(0)
    await bench.settle()
    assert bench.versions == [1, 0] and not bench.state.ledger.end
    bench.clock.now += 3
    for name in NAMES:
        await bench.beat(name)
    for name in ("iowa", "tokyo"):
        await bench.send(name, 1)
    await bench.settle()
    assert bench.state.ledger.end
    await bench.beat("iowa", [4, 0])
    bench.server.tick()
    await bench.send("iowa", 0)
    await bench.settle()
    bench.clock.now += 5
    await bench.settle()
    assert bench.versions == [2, 1], "one contribution is enough now"


@in_a_loop
async def test_a_region_that_died_is_given_two_leases_after_its_last_sign(tmp_path):
    bench = await ended(tmp_path)
    last = bench.clock.now
    bench.clock.now += 2
    await drain(bench, "iowa", "paris")
    bench.clock.now = last + 19.9
    await drain(bench, "iowa", "paris")
    assert not bench.state.ledger.finished
    bench.clock.now = last + 20.1
    await drain(bench, "iowa", "paris")
    assert bench.state.ledger.finished


@in_a_loop
async def test_a_region_whose_trainers_only_end_is_named_and_not_waited_for(tmp_path):
    bench = await ended(tmp_path)
    since = bench.clock.now
    await bench.beat("tokyo", training=False)
    for restarts in range(1, FAILED_STARTS + 1):
        why = "the trainer ended (exit code 7), restarting at once"
        await bench.beat("tokyo", restarts=restarts, training=False, why=why)
    await drain(bench, "iowa", "paris")
    for seconds, finished in (
        (19.0, ""),  # Its agent may be sending what it held.
        (21.0, "token budget reached; not waited for: tokyo"),
    ):
        bench.clock.now = since + seconds
        await bench.beat("tokyo", restarts=FAILED_STARTS, training=False)
        await drain(bench, "iowa", "paris")
        assert bench.state.ledger.finished == finished


@in_a_loop
async def test_a_region_whose_trainers_only_ended_and_that_left_is_not_waited_for_again(tmp_path):
    bench = await joined(tmp_path, make_spec(quorum=2, budget={"tokens": 384}))
    for restarts in range(FAILED_STARTS + 1):
        await bench.beat("tokyo", restarts=restarts, training=False)
    await bench.beat("tokyo", restarts=FAILED_STARTS, training=False, stopping=True)
    bench.clock.now += 100
    for fragment in range(2):
        await bench.round(fragment, "iowa", "paris")
    await bench.settle()
    bench.clock.now += 10
    for name in ("iowa", "paris"):
        await bench.beat(name)
    await bench.settle()
    assert bench.state.ledger.end
    await drain(bench, "iowa", "paris")
    assert bench.state.ledger.finished == "token budget reached; not waited for: tokyo"


@in_a_loop
async def test_a_region_whose_trainer_was_of_some_use_between_two_ends_is_waited_for(tmp_path):
    bench = await ended(tmp_path)
    bench.clock.now += 21
    for restarts in range(3 * FAILED_STARTS):
        if restarts % (FAILED_STARTS - 1) == 0:
            bench.regions["tokyo"].trained[0] += 1.0
        await bench.beat("tokyo", restarts=restarts, training=False)
        await drain(bench, "iowa", "paris")
    assert not bench.state.ledger.finished


@in_a_loop
async def test_a_partition_at_the_end_does_not_finish_the_run_at_once(tmp_path):
    bench = await joined(tmp_path, make_spec(budget={"tokens": 500}))
    await bench.round(0)
    await bench.call(1)
    for name in NAMES:
        await bench.send(name, 1)
    bench.clock.now += 60
    await bench.settle()
    assert bench.state.ledger.end and bench.state.live() == set()
    assert not bench.state.ledger.finished
    bench.clock.now += 19
    assert bench.server.tick()
    assert not bench.state.ledger.finished
    bench.clock.now += 2
    bench.server.tick()
    assert bench.state.ledger.finished


@in_a_loop
async def test_a_region_that_never_drains_is_given_up_after_a_long_time(tmp_path):
    bench = await ended(tmp_path)
    await drain(bench, "iowa", "paris")
    began = bench.clock.now
    while not bench.state.ledger.finished:
        bench.clock.now += 5
        for name in NAMES:
            await bench.beat(name, drained=name != "tokyo")
        bench.server.tick()
    assert bench.clock.now - began >= (PATIENCE - 1) * 10
    assert "tokyo gave nothing" in bench.state.ledger.finished


@in_a_loop
async def test_saying_drained_before_the_end_does_not_count(tmp_path):
    bench = await joined(tmp_path, make_spec(budget={"tokens": 500}))
    await bench.round(0)
    await bench.call(1)
    for name in NAMES:
        await bench.send(name, 1)
        await bench.beat(name, drained=True)
    await bench.settle()
    assert bench.state.ledger.end and not bench.state.ledger.finished


@in_a_loop
async def test_a_finished_run_still_gives_recorded_answers_first(tmp_path):
    bench = await ended(tmp_path)
    merged = bench.regions["iowa"].sent[0]
    await drain(bench)
    again = await bench.send("iowa", data=merged)
    assert isinstance(again, Recorded) and again.decision.fate == "merged"
    new = await bench.send("iowa")
    assert isinstance(new, Returned) and new.why == "the run is finished"


@in_a_loop
async def test_the_server_leaves_when_everyone_said_goodbye(tmp_path):
    bench = await ended(tmp_path)
    await drain(bench)
    for name in NAMES:
        assert not bench.server.done.is_set()
        await bench.beat(name, drained=True, stopping=True)
        bench.server.tick()
    assert bench.server.done.is_set()


@in_a_loop
async def test_the_server_leaves_when_nobody_is_there_any_more(tmp_path):
    bench = await ended(tmp_path)
    await drain(bench)
    bench.clock.now += 9.9
    bench.server.tick()
    assert not bench.server.done.is_set()
    bench.clock.now += 0.2
    bench.server.tick()
    assert bench.server.done.is_set()


@in_a_loop
async def test_a_stop_tells_the_regions_and_can_be_taken_up_again(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(0)
    await bench.send("paris")
    bench.server.stop("a test")
    assert bench.server.news("iowa").stop and bench.state.phase == "stopped"
    assert isinstance(await bench.send("tokyo"), Accept)
    await bench.settle()
    assert not bench.server.done.is_set()
    for name in NAMES:
        await bench.beat(name, stopping=True)
    bench.server.tick()
    assert bench.server.done.is_set() and bench.versions == [0, 0]
    assert build_summary(bench.server).state == "stopped"
    bench.restart()
    assert bench.state.phase == "training"
    await bench.send("iowa")
    await bench.settle()
    assert bench.versions == [1, 0]


@in_a_loop
async def test_a_server_that_stops_alone_lets_its_regions_train_on(tmp_path):
    bench = await joined(tmp_path)
    bench.server.stop("a test", everyone=False)
    assert not bench.server.news("iowa").stop and bench.state.phase == "stopped"
    bench.server.tick()
    assert bench.server.done.is_set()


@in_a_loop
async def test_a_region_that_said_goodbye_makes_room_at_once(tmp_path):
    bench = await joined(tmp_path)
    left = bench.state.leases.lease_left
    assert left("paris", now=bench.clock.now) > 0
    await bench.beat("paris", stopping=True)
    assert left("paris", now=bench.clock.now) == 0


@in_a_loop
async def test_a_stop_waits_one_lease_for_regions_that_do_not_answer(tmp_path):
    bench = await joined(tmp_path)
    bench.server.stop("a test")
    bench.clock.now += 9.5
    await bench.beat("iowa")
    bench.server.tick()
    assert not bench.server.done.is_set()
    bench.clock.now += 0.5
    bench.server.tick()
    assert bench.server.done.is_set()


@in_a_loop
async def test_every_token_of_a_drained_run_has_one_fate(tmp_path):
    bench = await ended(tmp_path)
    await drain(bench)
    summary = build_summary(bench.server)
    tokens = summary.tokens
    assert tokens
    assert summary.state == "finished" and summary.balanced is True
    assert tokens.trained == tokens.applied == 3 * 32 * 6
    assert tokens.pending == tokens.refused == tokens.discarded == 0


@in_a_loop
async def test_what_never_arrived_counts_as_discarded_in_the_end(tmp_path):
    bench = await ended(tmp_path)
    tokyo = bench.regions["tokyo"]
    tokyo.trained = [each + 64 for each in tokyo.trained]
    tokyo.pending = [64.0, 64.0]
    await bench.beat("tokyo")
    await drain(bench, "iowa", "paris")
    assert build_status(bench.server, "").tokens.pending == 64
    bench.clock.now += 21
    bench.server.tick()
    summary = build_summary(bench.server)
    assert summary.tokens and summary.tokens.discarded == 64 and summary.tokens.pending == 0
    assert summary.balanced is True


@in_a_loop
async def test_books_that_do_not_add_up_are_not_called_balanced(tmp_path):
    bench = await ended(tmp_path)
    bench.regions["paris"].trained[1] -= 32
    await drain(bench)
    assert build_summary(bench.server).balanced is False


@in_a_loop
async def test_work_merged_twice_is_not_called_balanced(tmp_path):
    bench = await ended(tmp_path)
    await drain(bench)
    bench.state.totals.account("paris").merged[0] += 192
    bench.state.totals.account("paris").applied[0] += 192
    bench.state.ledger.slots[0].applied["paris"] += 192
    assert build_summary(bench.server).balanced is False


@in_a_loop
async def test_a_region_that_lost_its_disk_begins_new_books(tmp_path):
    bench = await joined(tmp_path, make_spec(budget={"tokens": 800}))
    await bench.round(0)
    await bench.round(1)
    for name in NAMES:
        await bench.beat(name)
    from tests.server.harness import Region

    fresh = Region("paris", bench.settings, bench.run, owner="new-disk")
    fresh.clock = bench.regions["paris"].clock
    fresh.versions, fresh.prev = [1, 1], bench.regions["paris"].prev
    bench.regions["paris"] = fresh
    bench.clock.now += 11
    await bench.join()
    await bench.round(0)
    await bench.round(1)
    await drain(bench)
    summary = build_summary(bench.server)
    assert summary.state == "finished" and summary.balanced is True
    assert summary.tokens and summary.tokens.trained == summary.tokens.applied == 6 * 192


@in_a_loop
async def test_a_finished_run_is_served_for_members_that_have_not_heard_of_it(tmp_path):
    bench = await ended(tmp_path)
    bench.server.late_leases = 30
    await drain(bench, *NAMES)
    while not bench.state.ledger.finished:
        bench.clock.now += 1
        bench.server.tick()
    bench.clock.now += 25  # Nobody said goodbye, and all are silent.
    bench.server.tick()
    assert not bench.server.done.is_set()
    bench.clock.now += 300
    bench.server.tick()
    assert bench.server.done.is_set()
