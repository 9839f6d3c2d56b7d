"""Regions join, are retired and return on a real server: on record, and as good as ever."""

from __future__ import annotations

import pytest

from diloco_cli.core.rounds import Accept, Fenced
from diloco_cli.server.build_status import build_status, build_summary
from diloco_cli.server.recovery.verify import replay
from diloco_cli.server.refusals import HttpRefusal
from tests.server.harness import (
    LEASE,
    Bench,
    Region,
    close_server,
    in_a_loop,
    make_settings,
    make_spec,
    receipt_of,
)

CERTS = {"certs": "certs", "admit": "credentialed", "members": 2}


def bench_of(folder, **server) -> Bench:
    return Bench(folder, make_settings(make_spec(server=server)))


def newcomer(bench: Bench, name: str = "oslo", **other) -> Region:
    bench.regions[name] = region = Region(name, bench.settings, bench.run, **other)
    return region


async def refused(bench: Bench, name: str) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as denied:
        await bench.join(name)
    return denied.value


def shown(bench: Bench) -> dict[str, str]:
    return {region.name: region.state for region in build_status(bench.server, "http://x").regions}


@in_a_loop
async def test_a_listed_name_that_never_joined_counts_nowhere(tmp_path):
    bench = bench_of(tmp_path)
    await bench.join("iowa", "paris")
    await bench.call(0, "iowa", "paris")
    for name in ("iowa", "paris"):
        await bench.send(name, 0)
    await bench.settle()
    assert bench.versions[0] == 1, "nobody waits for tokyo"
    assert shown(bench)["tokyo"] == "expected"
    goodputs = build_status(bench.server, "http://x").goodputs
    assert goodputs.participation == 1.0


@in_a_loop
async def test_fewer_live_regions_than_the_quorum_is_waiting(tmp_path):
    bench = bench_of(tmp_path)
    await bench.join("iowa", "paris")
    assert bench.state.phase == "training"
    await bench.amend(remove=["paris"])
    assert bench.state.phase == "waiting"
    assert "1 of 2 regions needed are here" in build_status(bench.server, "http://x").why


@in_a_loop
async def test_who_is_not_listed_is_told_how_it_could_join(tmp_path):
    bench = bench_of(tmp_path)
    newcomer(bench)
    denied = await refused(bench, "oslo")
    assert (denied.code, denied.status) == ("unknown-region", 409)
    assert denied.message == "This run has no region 'oslo'; it has iowa, paris, tokyo."
    assert denied.hint and "--add-region oslo" in denied.hint and "credentialed" in denied.hint
    await bench.amend(add=[{"name": "oslo"}])
    assert (await bench.join("oslo")).epoch == 1


@in_a_loop
async def test_whoever_has_a_credential_joins_under_its_own_name_and_contributes(tmp_path):
    bench = bench_of(tmp_path, **CERTS)
    await bench.join("iowa", "paris")
    await bench.round(0, "iowa", "paris")
    newcomer(bench)
    assert (await bench.join("oslo")).versions[0] == 1
    await bench.settle()
    await bench.round(0, "iowa", "paris", "oslo")
    assert bench.state.ledger.slots[0].members == ("iowa", "oslo", "paris")
    (status,) = [r for r in build_status(bench.server, "u").regions if r.name == "oslo"]
    assert status.member and not status.listed and status.contributing


@in_a_loop
async def test_there_may_be_no_more_unlisted_members_than_the_spec_says(tmp_path):
    bench = bench_of(tmp_path, **CERTS)
    for name in ("oslo", "bergen", "turku"):
        newcomer(bench, name)
    await bench.join("oslo", "bergen", "iowa")
    denied = await refused(bench, "turku")
    assert denied.code == "full" and "server.members" in (denied.hint or "")
    bench.server.membership.retire("bergen", "left for good")
    assert (await bench.join("turku")).epoch == 1


@in_a_loop
async def test_where_anybody_may_join_a_name_belongs_to_the_first(tmp_path):
    bench = bench_of(tmp_path, admit="open")
    newcomer(bench, key="mine")
    assert (await bench.join("oslo")).epoch == 1
    bench.clock.now += 2 * LEASE
    newcomer(bench, owner="another-disk", key="yours")
    denied = await refused(bench, "oslo")
    assert (denied.code, denied.status) == ("name-taken", 403)
    bench.restart()
    assert (await refused(bench, "oslo")).code == "name-taken", "the key is on record"
    bench.clock.now += 2 * LEASE
    newcomer(bench, owner="another-disk", key="mine")
    assert (await bench.join("oslo")).epoch == 2
    journal = (tmp_path / "server" / "journal").read_bytes()
    assert b'"mine"' not in journal, "only its digest is"


@in_a_loop
async def test_a_removed_region_is_fenced_and_told_who_when_and_why(tmp_path):
    bench = bench_of(tmp_path)
    await bench.join()
    await bench.call(0)
    await bench.send("tokyo", 0)  # Accepted: it is merged whatever becomes of tokyo.
    late = bench.regions["tokyo"].frame(1)
    await bench.amend(remove=["tokyo"], why="sold")
    with pytest.raises(HttpRefusal, match="no member any more") as fenced:
        await bench.beat("tokyo")
    assert fenced.value.status == 412
    assert isinstance(await bench.send("tokyo", 1, late), Fenced)
    bench.clock.now += LEASE
    denied = await refused(bench, "tokyo")
    assert (denied.code, denied.status) == ("retired", 403)
    assert "removed by admin on 2023-11-14" in denied.message and "sold" in denied.message
    assert "--add-region tokyo" in (denied.hint or "")
    for name in ("iowa", "paris"):
        await bench.beat(name)
        await bench.send(name, 0)
    await bench.settle()
    assert bench.state.ledger.slots[0].members == ("iowa", "paris", "tokyo")
    assert shown(bench)["tokyo"] == "retired"


@in_a_loop
async def test_a_region_removed_between_its_upload_and_the_decision_is_fenced(tmp_path):
    bench = bench_of(tmp_path)
    await bench.join()
    region = bench.regions["tokyo"]
    data = region.frame(0)
    bench.state.store.keep_payload(receipt_of(data).digest, data)
    await bench.amend(remove=["tokyo"])
    told = await bench.server.submit(receipt_of(data), epoch=region.epoch)
    assert isinstance(told, Fenced) and not bench.state.ledger.slots[0].waiting


@in_a_loop
async def test_a_silent_region_is_forgotten_and_let_in_again(tmp_path):
    bench = bench_of(tmp_path, forget="60s")
    await bench.join()
    await bench.round(0)
    for _ in range(6):
        bench.clock.now += 11
        for name in ("iowa", "paris"):
            await bench.beat(name)
        bench.server.tick()
    assert "tokyo" not in bench.state.ledger.members
    assert bench.state.ledger.retired["tokyo"].why.startswith("silent for")
    assert [fields["region"] for kind, fields in bench.noted if kind == "retired"] == ["tokyo"]
    with pytest.raises(HttpRefusal, match=r"retired on .*: silent for"):
        await bench.beat("tokyo")
    # Its folder goes on where it was: same owner, same boot, a new epoch.
    joined = await bench.join("tokyo")
    assert (joined.epoch, joined.high) == (2, bench.state.ledger.high("tokyo"))
    await bench.round(0)
    assert "tokyo" in bench.state.ledger.slots[0].members


@in_a_loop
async def test_silence_counts_on_over_restarts_of_the_server_but_not_while_it_is_down(tmp_path):
    bench = bench_of(tmp_path, forget="60s")
    await bench.join()
    await bench.round(0)
    for _ in range(3):
        bench.clock.now += 11
        await bench.round(0, "iowa", "paris")
    bench.restart()
    assert "tokyo" in bench.state.ledger.members
    bench.server.tick()
    assert "tokyo" in bench.state.ledger.members, "nobody is retired before a lease has passed"
    bench.clock.now += 11
    for name in ("iowa", "paris"):
        await bench.beat(name)
    bench.server.tick()
    assert "tokyo" not in bench.state.ledger.members
    assert set(bench.state.ledger.members) == {"iowa", "paris"}


@in_a_loop
async def test_a_region_that_is_there_is_not_retired_for_having_sent_nothing(tmp_path):
    bench = bench_of(tmp_path, forget="60s")
    await bench.join()
    await bench.round(0)
    for _ in range(5):
        bench.clock.now += 9
        await bench.beat("tokyo")
        await bench.round(0, "iowa", "paris")
    bench.restart()
    bench.server.tick()
    bench.clock.now += 9
    assert "tokyo" in bench.state.ledger.members
    await bench.beat("tokyo")
    bench.clock.now += 9
    bench.server.tick()
    assert "tokyo" in bench.state.ledger.members, "it was heard"


@in_a_loop
async def test_what_a_retired_region_held_is_given_up_and_pending_again_when_it_returns(tmp_path):
    bench = bench_of(tmp_path)
    await bench.join()
    await bench.round(0)
    await bench.call(0)
    await bench.send("tokyo", 0)  # 192 tokens, accepted.
    tokyo = bench.regions["tokyo"]
    tokyo.trained[0] += 96
    tokyo.pending[0] += 96
    await bench.beat("tokyo", 3.0)
    size, whole = bench.settings.sizes[0], sum(bench.settings.sizes)

    def tokens():
        return build_status(bench.server, "u").tokens

    before = tokens()
    assert before.given_up == 0
    bench.server.membership.retire("tokyo", "silent for 7 days")
    after = tokens()
    assert after.given_up == pytest.approx(96 * size / whole)
    assert after.discarded - before.discarded == pytest.approx(after.given_up)
    assert before.pending - after.pending == pytest.approx(after.given_up)
    assert build_summary(bench.server).balanced
    bench.restart()
    bench.clock.now += LEASE
    await bench.join()
    await bench.beat("tokyo", 3.0)
    assert tokens().given_up == 0 and tokens().pending == pytest.approx(before.pending)
    assert build_summary(bench.server).balanced


@in_a_loop
async def test_a_name_that_cannot_be_one_joins_nowhere(tmp_path):
    bench = bench_of(tmp_path, admit="open")
    newcomer(bench, "(others)", owner="disk")
    assert (await refused(bench, "(others)")).code == "bad-request"


@in_a_loop
async def test_of_a_forgotten_name_no_version_speaks_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco_cli.core.ledger.MOST_RETIRED", 0)
    bench = bench_of(tmp_path)
    await bench.join()
    await bench.round(0)
    assert set(bench.state.weights.newest[0].merged) == {"iowa", "paris", "tokyo"}
    bench.server.membership.retire("tokyo", "left for good")
    assert set(bench.state.weights.newest[0].merged) == {"iowa", "paris"}
    await bench.round(0, "iowa", "paris")
    assert set(bench.state.weights.newest[0].merged) == {"iowa", "paris"}
    applied = bench.state.ledger.applied(bench.settings.sizes)
    before = bench.state.ledger.snapshot()
    bench.restart()
    assert set(bench.state.weights.newest[0].merged) == {"iowa", "paris"}
    assert bench.state.ledger.snapshot() == before
    assert bench.state.ledger.applied(bench.settings.sizes) == applied
    for name in ("iowa", "paris"):
        bench.clock.now += LEASE
        await bench.join(name)
        await bench.beat(name)
    assert build_summary(bench.server).balanced


@in_a_loop
async def test_a_region_nobody_declared_can_be_removed(tmp_path):
    bench = bench_of(tmp_path, **CERTS)
    newcomer(bench)
    await bench.join("iowa", "oslo")
    answer = await bench.amend(remove=["oslo"], dry_run=True)
    assert [(it.key, it.when) for it in answer.changes] == [("regions.oslo", "at once")]
    await bench.amend(remove=["oslo"])
    bench.clock.now += LEASE
    assert (await refused(bench, "oslo")).code == "retired"
    with pytest.raises(HttpRefusal, match="is not in the run"):
        await bench.amend(remove=["oslo"])
    await bench.amend(add=[{"name": "oslo"}])
    assert shown(bench)["oslo"] == "expected"
    assert (await bench.join("oslo")).epoch == 2


@in_a_loop
async def test_a_region_joins_once_in_half_a_lease(tmp_path):
    bench = bench_of(tmp_path)
    await bench.join("paris")
    region = bench.regions["paris"]
    records = bench.state.store.journal.last
    region.boot = 2
    denied = await refused(bench, "paris")
    assert denied.code == "too-soon" and denied.beside["retry_seconds"] == pytest.approx(LEASE / 2)
    assert bench.state.store.journal.last == records
    region.boot = 1
    assert (await bench.join("paris")).epoch == 1, "a retry is no new join"
    region.boot = 2
    bench.clock.now += LEASE / 2
    assert (await bench.join("paris")).epoch == 2


@in_a_loop
async def test_only_the_region_that_was_told_to_evaluate_is_heard(tmp_path):
    bench = bench_of(tmp_path)
    await bench.join()
    await bench.round(0)
    told = [name for name in bench.regions if (await bench.beat(name)).evaluate]
    assert told == ["iowa"]
    await bench.beat("paris", heldout={"versions": [1, 0], "loss": 1.0})
    assert not bench.state.ledger.evaluations
    await bench.beat("iowa", heldout={"versions": [1, 0], "loss": 3.0}, stopping=True)
    assert [each.loss for each in bench.state.ledger.evaluations] == [3.0]
    await bench.beat("iowa", heldout={"versions": [0, 0], "loss": 3.0})
    assert len(bench.state.ledger.evaluations) == 1, "older weights are no news"


@in_a_loop
async def test_a_run_with_joins_and_retirements_replays_to_the_same_bits(tmp_path):
    bench = bench_of(tmp_path, **CERTS)
    await bench.join("iowa", "paris")
    await bench.round(0, "iowa", "paris")
    newcomer(bench)
    await bench.join("oslo")
    await bench.settle()
    await bench.round(0, "iowa", "oslo")
    await bench.call(1, "iowa", "oslo")
    assert isinstance(await bench.send("oslo", 1), Accept)
    await bench.amend(remove=["oslo"])
    bench.state.snapshot()
    bench.restart()
    await bench.join("iowa", "paris")
    await bench.round(1, "iowa", "paris")
    digests = bench.digests()
    before = bench.state.ledger.snapshot()
    await close_server(bench.server)
    found = replay(bench.settings, tmp_path / "server")
    assert [line.digest for line in found.lines] == digests
    bench.server = bench._open()
    assert bench.state.ledger.snapshot() == before


@in_a_loop
async def test_a_region_that_leaves_goes_along_with_the_next_call_and_is_retired(tmp_path):
    bench = bench_of(tmp_path)
    await bench.join("iowa", "paris")
    held = [3.0, 0.0]
    await bench.beat("iowa", held, retiring=True)
    await bench.beat("paris", 2.0)
    bench.server.tick()
    assert not bench.state.ledger.calls(), "paris is not ready, and iowa calls nobody for crumbs"
    await bench.beat("paris", [6.0, 6.0])
    bench.server.tick()
    assert 0 in bench.state.ledger.calls(), "iowa counts for the quorum with what it has"
    assert 1 not in bench.state.ledger.calls(), "of this fragment it has nothing"
    for name in ("iowa", "paris"):
        await bench.send(name, 0)
    await bench.settle()
    assert bench.state.ledger.slots[0].members == ("iowa", "paris")
    await bench.beat("iowa", drained=True, retiring=True, stopping=True)
    assert bench.state.ledger.members == ("paris",)
    assert bench.state.ledger.retired["iowa"].why == "left for good"
    await bench.beat("paris")
    assert build_summary(bench.server).balanced
    bench.clock.now += LEASE
    assert (await bench.join("iowa")).epoch == 2, "and may come back"


@in_a_loop
async def test_the_last_region_may_leave(tmp_path):
    bench = Bench(tmp_path, make_settings(make_spec(quorum=1)))
    await bench.join("iowa")
    await bench.beat("iowa", [3.0, 0.0], retiring=True)
    bench.server.tick()
    assert list(bench.state.ledger.calls()) == [0], "there is nobody to wait for"


@in_a_loop
async def test_a_round_does_not_wait_for_what_a_leaving_region_does_not_have(tmp_path):
    bench = bench_of(tmp_path)
    await bench.join()
    await bench.call(0, "paris", "tokyo")
    await bench.beat("iowa", 0.0, retiring=True)  # Nothing held, nothing pending.
    for name in ("paris", "tokyo"):
        await bench.send(name, 0)
    bench.server.tick()
    assert bench.state.ledger.slots[0].phase == "closing"
