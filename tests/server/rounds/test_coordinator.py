"""The server calls, gathers, merges and publishes; it keeps every answer it gave."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from diloco_cli.core.guard import ENOUGH, PAROLE, STRIKES
from diloco_cli.core.rounds import Accept, Fenced, Foreign, Receipt, Recorded, Refused, Returned
from diloco_cli.server.build_status import build_status
from diloco_cli.server.refusals import HttpRefusal
from tests.server.harness import (
    NAMES,
    Bench,
    Region,
    in_a_loop,
    joined,
    make_spec,
    receipt_of,
)


@in_a_loop
async def test_nothing_is_called_before_a_quorum_reports_enough_work(tmp_path):
    bench = await joined(tmp_path)
    await bench.beat("paris", 100)
    bench.server.tick()
    assert bench.state.ledger.calls() == {}
    await bench.beat("tokyo", 100)
    bench.server.tick()
    assert bench.state.ledger.calls() == {0: 0, 1: 0}


@in_a_loop
async def test_a_quorum_gives_the_third_region_its_grace_and_no_more(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(0)
    await bench.send("paris")
    assert bench.server.tick() and bench.versions == [0, 0]
    await bench.send("tokyo")
    wake = bench.server.tick()
    assert wake == bench.clock.now + 5.0
    bench.clock.now += 4.9
    await bench.settle()
    assert bench.versions == [0, 0]
    bench.clock.now += 0.1
    await bench.settle()
    assert bench.versions == [1, 0]
    assert bench.state.ledger.slots[0].members == ("paris", "tokyo")


@in_a_loop
async def test_the_round_closes_at_once_when_everyone_is_in(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(1)
    for name in ("tokyo", "iowa", "paris"):
        await bench.send(name, 1)
    await bench.settle()
    assert bench.versions == [0, 1]


@in_a_loop
async def test_nobody_waits_for_a_region_whose_lease_ran_out(tmp_path):
    bench = await joined(tmp_path, make_spec(grace={"kind": "fixed", "seconds": 1000.0}))
    await bench.call(0)
    bench.clock.now += 6
    await bench.send("paris")
    await bench.send("tokyo")
    assert bench.server.tick() == bench.clock.now + 4
    bench.clock.now += 4
    await bench.settle()
    assert bench.versions == [1, 0]
    assert ("lapsed", {"region": "iowa", "silent_seconds": 10.0}) in bench.noted


@in_a_loop
async def test_a_late_frame_waits_for_the_next_round_and_does_not_close_it(tmp_path):
    bench = await joined(tmp_path, make_spec(quorum=1))
    await bench.call(0)
    late = bench.regions["iowa"].frame(0)
    await bench.send("paris")
    bench.clock.now += 5
    await bench.settle()
    assert bench.versions == [1, 0]
    assert isinstance(await bench.send("iowa", data=late), Accept)
    bench.clock.now += 5
    await bench.settle()
    assert bench.versions == [1, 0], "it was never called"
    await bench.call(0, "paris")
    bench.clock.now += 9
    await bench.settle()
    assert bench.state.ledger.slots[0].members == ("iowa",)


@in_a_loop
async def test_a_heartbeat_revives_a_lease_of_the_same_epoch(tmp_path):
    bench = Bench(tmp_path)
    await bench.join("paris")
    bench.clock.now += 11
    bench.server.tick()
    assert bench.state.live() == set()
    await bench.beat("paris")
    assert bench.state.live() == {"paris"}
    assert ("revived", {"region": "paris", "silent_seconds": 11.0}) in bench.noted


@in_a_loop
async def test_a_region_with_other_bits_than_were_published_is_told(tmp_path):
    bench = Bench(tmp_path)
    await bench.join("paris")
    true = {n: one.digest for n, one in enumerate(bench.state.weights.newest)}

    def holds(version: int, digest: str) -> dict:
        right = {"version": 0, "digest": true[1]}
        return {0: {"version": version, "digest": digest}, 1: right}

    assert (await bench.beat("paris", images=holds(0, true[0]))).mend == {}
    assert (await bench.beat("paris", images=holds(0, "f" * 32))).mend == {0: "f" * 32}
    # Of another version than the newest nothing is known here, and it will be replaced anyway.
    assert (await bench.beat("paris", images=holds(9, "f" * 32))).mend == {}
    assert (await bench.beat("paris", images={7: {"version": 0, "digest": "f" * 32}})).mend == {}
    assert build_status(bench.server, "").regions[1].mended == 0
    await bench.beat("paris", mended=2)
    assert build_status(bench.server, "").regions[1].mended == 2


async def spoil(bench: Bench, name: str, times: int) -> None:
    """Lets a region send work that is found unfit."""
    for _ in range(times):
        data = bench.regions[name].frame(0)
        receipt = receipt_of(data)
        await bench.server.submit(receipt, epoch=bench.regions[name].epoch, unfit="its norm is 1e9")


@in_a_loop
async def test_a_region_whose_work_is_unfit_again_and_again_is_kept_out_and_said_so(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(0)
    await spoil(bench, "tokyo", STRIKES - 1)
    assert bench.state.live() == {"iowa", "paris", "tokyo"}
    await spoil(bench, "tokyo", 1)
    bench.restart()  # It is on record.
    for name in NAMES:
        await bench.beat(name)
    assert bench.state.live() == {"iowa", "paris"}
    tokyo = build_status(bench.server, "").regions[2]
    assert tokyo.quarantined and tokyo.alive
    assert "in quarantine after 3 unfit" in tokyo.why and "its norm is 1e9" in tokyo.why
    # The round closes without it as soon as the others are in, before the window of grace ends.
    await bench.send("iowa")
    await bench.send("paris")
    await bench.settle()
    assert bench.state.ledger.slots[0].members == ("iowa", "paris")


@in_a_loop
async def test_a_region_that_was_repaired_is_let_in_again(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(0)
    await spoil(bench, "tokyo", STRIKES)
    answers = [await bench.send("tokyo") for _ in range(PAROLE)]
    early = [answer for answer in answers[:-1] if isinstance(answer, Refused)]
    assert len(early) == PAROLE - 1 and isinstance(answers[-1], Accept)
    assert "in quarantine" in early[0].why
    assert bench.state.live() == {"iowa", "paris", "tokyo"}


@in_a_loop
async def test_quarantine_does_not_keep_a_region_from_being_called(tmp_path):
    """Otherwise its sound work could never end it, and a quorum of all would wait for ever."""
    bench = await joined(tmp_path, make_spec(("iowa", "paris"), quorum=2))
    await spoil(bench, "paris", STRIKES)
    assert bench.state.live() == {"iowa"}
    await bench.call(0)
    assert bench.state.ledger.calls() == {0: 0}


@in_a_loop
async def test_usual_norms_survive_a_restart(tmp_path):
    bench = await joined(tmp_path)
    for length in range(1, ENOUGH + 1):
        bench.clock.now += 1
        await bench.call(0)
        data = bench.regions["paris"].frame(0)
        bench.state.store.keep_payload(receipt_of(data).digest, data)
        await bench.server.submit(
            receipt_of(data), epoch=bench.regions["paris"].epoch, norm=float(length)
        )
        await bench.send("iowa")
        await bench.send("tokyo")
        await bench.settle()
    before = bench.state.ledger.slots[0].norms
    bench.restart()
    assert bench.state.ledger.slots[0].norms == before and before.usual == (ENOUGH + 1) / 2


def test_larger_batches_than_the_spec_says_count_no_more(tmp_path):
    settings = Bench(tmp_path).settings
    inner = settings.spec.inner_of("paris")
    per_step = inner.batch * inner.sequence
    claim = Receipt("paris", 0, 0, 1, "0" * 64, "", 6.0 * per_step, 6.0, 100)
    assert settings.weight(replace(claim, tokens=7 * claim.tokens)) == settings.weight(claim)
    assert settings.weight(replace(claim, tokens=claim.tokens / 2)) == settings.weight(claim) / 4


@in_a_loop
async def test_a_retry_gets_the_recorded_answer_whatever_happened_since(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(0)
    frame = bench.regions["paris"].frame(0)
    assert isinstance(await bench.send("paris", data=frame), Accept)
    again = await bench.send("paris", data=frame)
    assert isinstance(again, Recorded) and again.decision.fate == "pending"
    await bench.send("tokyo")
    await bench.send("iowa")
    await bench.settle()
    again = await bench.send("paris", data=frame)
    assert isinstance(again, Recorded) and again.decision.fate == "merged"
    bench.restart()
    again = await bench.send("paris", data=frame)
    assert isinstance(again, Recorded) and again.decision.fate == "merged"


@in_a_loop
async def test_only_the_newest_epoch_may_speak(tmp_path):
    bench = Bench(tmp_path)
    await bench.join("paris")
    first = bench.regions["paris"]
    early = first.frame(0)
    bench.regions["paris"] = second = Region("paris", bench.settings, bench.run)
    second.boot = 2
    bench.clock.now += 5
    assert (await bench.join("paris")).epoch == 2
    with pytest.raises(HttpRefusal, match="Epoch 1 of paris is over: 2 is current"):
        await bench.server.heartbeat("paris", first.beat())
    bench.regions["paris"] = first
    assert isinstance(await bench.send("paris", data=early), Fenced)
    bench.restart()
    assert isinstance(await bench.send("paris", data=early), Fenced), "epochs are durable"


@in_a_loop
async def test_a_second_worker_waits_while_the_first_one_lives(tmp_path):
    bench = Bench(tmp_path)
    await bench.join("paris")
    rival = Region("paris", bench.settings, bench.run, owner="another-disk")
    bench.clock.now += 4
    with pytest.raises(HttpRefusal) as denied:
        await bench.server.join("paris", rival.join)
    assert denied.value.code == "held" and denied.value.beside == {"retry_seconds": 6.0}
    bench.clock.now += 6
    assert (await bench.server.join("paris", rival.join)).epoch == 2


@in_a_loop
async def test_a_lost_reply_to_a_join_fences_nobody(tmp_path):
    bench = Bench(tmp_path)
    assert (await bench.join("paris")).epoch == 1
    assert (await bench.join("paris")).epoch == 1
    bench.restart()
    assert (await bench.join("paris")).epoch == 1


@in_a_loop
async def test_an_older_copy_of_a_folder_is_told_so(tmp_path):
    bench = Bench(tmp_path)
    bench.regions["paris"].boot = 5
    await bench.join("paris")
    bench.regions["paris"].boot = 4
    with pytest.raises(HttpRefusal) as denied:
        await bench.join("paris")
    assert denied.value.code == "older-copy"


@in_a_loop
@pytest.mark.parametrize(
    "change, code",
    [
        ({"spec_digest": "0" * 64}, "other-spec"),
        ({"layout_digest": "0" * 64}, "other-spec"),
        ({"wire": 9}, "other-wire"),
    ],
)
async def test_a_worker_of_another_run_cannot_join(tmp_path, change, code):
    bench = Bench(tmp_path)
    asked = bench.regions["paris"].join.model_copy(update=change)
    with pytest.raises(HttpRefusal) as denied:
        await bench.server.join("paris", asked)
    assert denied.value.code == code


@in_a_loop
async def test_a_region_the_spec_does_not_list_cannot_join(tmp_path):
    bench = Bench(tmp_path)
    with pytest.raises(HttpRefusal, match="it has iowa, paris, tokyo"):
        await bench.server.join("atlantis", bench.regions["paris"].join)


@in_a_loop
async def test_work_that_does_not_follow_the_last_merged_frame_is_foreign(tmp_path):
    bench = await joined(tmp_path)
    await bench.round(0)
    forgetful = bench.regions["paris"].frame(0, prev="")
    answer = await bench.send("paris", data=forgetful)
    assert isinstance(answer, Foreign) and "it follows frame none" in answer.why
    assert not any(
        record.fate == "pending" for record in bench.state.ledger.slots[0].decided.values()
    )


@in_a_loop
async def test_only_one_frame_of_a_region_and_fragment_waits(tmp_path):
    bench = await joined(tmp_path)
    await bench.send("paris")
    answer = await bench.send("paris")
    assert isinstance(answer, Foreign) and "still waiting" in answer.why


@in_a_loop
async def test_under_replace_old_work_is_returned_and_the_answer_kept(tmp_path):
    bench = await joined(tmp_path, make_spec(adopt="replace", staleness=1, quorum=1))
    old = bench.regions["iowa"].frame(0)
    await bench.round(0, "paris")
    await bench.round(0, "paris")
    answer = await bench.send("iowa", data=old)
    assert isinstance(answer, Returned) and "2 versions behind, 1 allowed" in answer.why
    bench.restart()
    again = await bench.send("iowa", data=old)
    assert isinstance(again, Recorded) and again.decision.fate == "returned"


@in_a_loop
async def test_unfit_content_is_refused_and_the_answer_kept(tmp_path):
    bench = await joined(tmp_path)
    frame = bench.regions["paris"].frame(0)
    answer = await bench.server.submit(receipt_of(frame), epoch=1, unfit="w1 is not finite")
    assert isinstance(answer, Refused)
    bench.restart()
    again = await bench.server.submit(receipt_of(frame), epoch=1)
    assert isinstance(again, Recorded) and again.decision.why == "w1 is not finite"
    fate = bench.server.news("paris").fates[0]
    assert (fate.fate, fate.why) == ("refused", "w1 is not finite")


@in_a_loop
async def test_a_worker_that_has_seen_more_than_the_server_is_told_so(tmp_path):
    bench = await joined(tmp_path)
    bench.regions["paris"].versions[1] = 3
    with pytest.raises(HttpRefusal) as denied:
        await bench.beat("paris")
    assert denied.value.code == "server-behind"
    assert "version 3 of fragment 1, but 0 is the newest" in denied.value.message


@in_a_loop
async def test_the_region_that_evaluates_is_a_fresh_one(tmp_path):
    bench = await joined(tmp_path)
    assert bench.server.evaluator() == "iowa", "nobody trains yet, so the first by name"
    await bench.beat("tokyo", training=True, step=5)
    assert bench.server.evaluator() == "tokyo", "iowa may fetch weights for minutes"
    for name in NAMES:
        await bench.beat(name, training=True, step=5)
    assert bench.server.evaluator() == "tokyo", "whoever began goes on"
    for _ in range(6):
        await bench.round(0, "iowa", "paris")
    old = [progress.model_dump() for progress in bench.regions["tokyo"].beat().fragments]
    await bench.beat(
        "tokyo", training=True, step=6, fragments=[{**each, "version": 0} for each in old]
    )
    for name in ("iowa", "paris"):
        await bench.beat(name, training=True, step=9)
    assert bench.server.evaluator() == "iowa", "tokyo is six versions behind"


@in_a_loop
async def test_exactly_one_live_region_evaluates(tmp_path):
    bench = Bench(tmp_path)
    await bench.join("tokyo", "paris")
    asked = {name: bench.server.news(name).evaluate for name in NAMES}
    assert asked == {"iowa": False, "paris": True, "tokyo": False}
    bench.clock.now += 6
    await bench.beat("tokyo")
    bench.clock.now += 6
    assert bench.server.news("tokyo").evaluate, "paris is silent"


@in_a_loop
async def test_a_sample_is_told_once_and_only_by_the_region_that_evaluates(tmp_path):
    bench = await joined(tmp_path, make_spec(evaluate={"region": "iowa"}))
    told: list[dict[str, Any]] = []
    bench.state.note = lambda kind, **fields: told.append({"kind": kind, **fields})
    sample = {"versions": (0, 0), "prompt": "def ", "text": "main():"}
    for name in ("paris", "iowa", "iowa"):
        await bench.beat(name, sample=sample)
    [said] = [each for each in told if each["kind"] == "sampled"]
    assert (said["region"], said["text"], said["tokens"]) == ("iowa", "main():", 0.0)
    with pytest.raises(ValidationError):
        await bench.beat("iowa", sample={**sample, "text": "x" * 1001})


@in_a_loop
async def test_an_evaluation_is_recorded_once_for_each_clock(tmp_path):
    bench = await joined(tmp_path)
    for loss in (3.5, 3.6):
        await bench.beat("iowa", heldout={"versions": (0, 0), "loss": loss})
    assert [each.loss for each in bench.state.ledger.evaluations] == [3.5]
    bench.restart()
    assert [each.loss for each in bench.state.ledger.evaluations] == [3.5]


@in_a_loop
async def test_news_are_numbered_by_the_journal_and_survive_a_restart(tmp_path):
    bench = await joined(tmp_path)
    await bench.call(0)
    before = bench.server.news("paris")
    assert before.n == bench.state.store.journal.last and before.calls == {0: 0}
    bench.restart()
    assert bench.server.news("paris") == before


@in_a_loop
async def test_a_waiting_region_hears_of_a_call_when_it_is_durable(tmp_path):
    bench = await joined(tmp_path)
    after = bench.server.news("iowa").n
    waiting = asyncio.create_task(bench.server.wait_news("iowa", epoch=1, after=after, wait=20.0))
    await bench.call(0)
    news = await waiting
    assert news is not None and news.calls == {0: 0}
    nothing = await bench.server.wait_news("iowa", epoch=1, after=news.n, wait=0.01)
    assert nothing is None


@in_a_loop
async def test_a_round_closed_while_the_last_one_is_tidied_up_is_published_once(tmp_path):
    bench = await joined(tmp_path)
    merging = []
    next_round, rival, real = asyncio.Event(), asyncio.Event(), bench.server.publisher._in_thread

    async def slow(work):
        merging.append(work)
        if len(merging) == 3:  # Compute, publish; now tidy up.
            next_round.set()
            with suppress(TimeoutError):  # A second task would begin to merge meanwhile.
                await asyncio.wait_for(rival.wait(), 0.5)
        elif len(merging) == 4:
            rival.set()
            await asyncio.sleep(0.2)  # And this one would find its round unpublished.
        return await real(work)

    bench.server.publisher._in_thread = slow
    for version in range(2):
        await bench.call(0)
        for name in NAMES:
            await bench.send(name)
        bench.server.tick()
        if version == 0:
            await asyncio.wait_for(next_round.wait(), 20)
            newest = bench.state.weights.newest[0]
            for name, region in bench.regions.items():
                region.adopt(0, newest.number, newest.merged[name])
    await bench.settle()
    assert bench.versions[0] == 2 and bench.state.failure is None
