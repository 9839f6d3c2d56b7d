"""The status document tells people what they would otherwise have to guess."""

from __future__ import annotations

import pytest

from diloco_cli.server.build_status import build_status, build_summary
from diloco_cli.server.rounds.state import UPLOAD_TROUBLE_SECONDS
from diloco_cli.system.files import DiskFull
from tests.server.harness import NAMES, Bench, in_a_loop, joined, make_spec

FULL = DiskFull("x needs 67 free bytes and has 3.", hint="Free some space.")


def words(bench: Bench) -> dict[str, str]:
    regions = build_status(bench.server, "http://h:1").regions
    return {region.name: region.state for region in regions}


@in_a_loop
async def test_a_full_disk_is_trouble_until_something_is_written(tmp_path):
    bench = await joined(tmp_path)
    bench.state.disk_full("upload", FULL)
    bench.server.tick()
    told = build_status(bench.server, "http://h:1")
    assert told.trouble == "x needs 67 free bytes and has 3. Free some space."
    assert [fields["why"] for kind, fields in bench.noted if kind == "note"] == [told.trouble]
    await bench.call(0)
    await bench.send("iowa")
    assert build_status(bench.server, "http://h:1").trouble == ""


@in_a_loop
async def test_trouble_of_a_sender_who_is_gone_is_forgotten(tmp_path):
    bench = Bench(tmp_path)
    bench.state.disk_full("upload", FULL)
    bench.clock.now += UPLOAD_TROUBLE_SECONDS - 1
    assert bench.state.trouble
    bench.clock.now += 2
    assert not bench.state.trouble
    bench.state.disk_full("version", FULL)
    bench.clock.now += 1000
    assert bench.state.trouble, "a version that cannot be stored is tried for ever"


@in_a_loop
async def test_who_said_goodbye_has_left_and_who_is_silent_is_away(tmp_path):
    bench = await joined(tmp_path)
    for name in NAMES:
        await bench.beat(name, 1.0)
    await bench.beat("paris", stopping=True, why="SIGTERM received")
    assert words(bench) == {"iowa": "training", "paris": "left", "tokyo": "training"}
    bench.clock.now += 11
    assert words(bench) == {"iowa": "away", "paris": "left", "tokyo": "away"}


@in_a_loop
async def test_a_finished_run_names_who_was_not_waited_for(tmp_path):
    bench = await joined(tmp_path, make_spec(budget={"tokens": 500}))
    await bench.round(0)
    await bench.round(1)
    await bench.beat("tokyo", stopping=True)
    left_at = bench.clock.now
    for wait, over in ((9.9, False), (10.1, True)):
        bench.clock.now = left_at + wait
        for name in ("iowa", "paris"):
            await bench.beat(name, drained=True)
        await bench.settle()
        assert bool(bench.state.ledger.finished) is over
    assert build_summary(bench.server).why == ("token budget reached; not waited for: tokyo")
    applied = [region.applied or 0.0 for region in build_summary(bench.server).regions.values()]
    assert sum(applied) == build_status(bench.server, "").tokens.applied > 0


@in_a_loop
async def test_the_regions_of_a_finished_run_are_done(tmp_path):
    bench = await joined(tmp_path, make_spec(budget={"tokens": 500}))
    await bench.round(0)
    await bench.round(1)
    for name in NAMES:
        await bench.beat(name, drained=True)
    await bench.settle()
    assert "done" not in words(bench).values(), "they may still measure the final weights"
    bench.restart()
    assert set(words(bench).values()) == {"done"}
    assert {region.why for region in build_status(bench.server, "").regions} == {""}


@in_a_loop
async def test_goodputs_count_what_was_kept_against_the_time_that_passed(tmp_path):
    bench = await joined(tmp_path)
    await bench.round(0)
    await bench.round(1, "iowa", "paris")
    bench.clock.now = 1100.0
    # Each fragment applied 192 tokens of iowa and paris, and tokyo's are in one of the two.
    for name, lost in (("iowa", 0.0), ("paris", 192.0), ("tokyo", 0.0)):
        await bench.beat(name, worked=50.0, lost=lost, pace=6.4)
    told = build_status(bench.server, "http://h:1")
    assert told.goodputs.participation == 5 / 6
    assert told.goodputs.time == (50 + 25 + 50) / (3 * 100)
    applied = told.tokens.applied
    assert told.goodputs.tokens == pytest.approx(applied / (3 * 6.4 * 100))
    assert [region.lost for region in told.regions] == [0.0, 192.0, 0.0]
    assert build_summary(bench.server).goodputs == told.goodputs
    assert build_summary(bench.server).regions["paris"].lost == 192.0


@in_a_loop
async def test_an_outage_of_the_server_costs_goodput_and_a_rest_of_the_run_does_not(tmp_path):
    bench = await joined(tmp_path)
    await bench.round(0)
    await bench.beat("iowa", worked=30.0)

    async def elapsed_after(away: float) -> float:
        bench.clock.now += away
        bench.restart()
        await bench.join()
        await bench.beat("iowa", worked=30.0)
        bench.clock.now += 10.0
        found = build_status(bench.server, "http://h:1").goodputs.time
        assert found is not None
        return 30.0 / 3 / found

    began = 1000.0
    assert await elapsed_after(60.0) == pytest.approx(bench.clock.now - began)
    await bench.round(1)  # The journal remembers the outage.
    assert await elapsed_after(20.0) == pytest.approx(bench.clock.now - began)
    assert await elapsed_after(50_000.0) < 200.0


def why(bench: Bench, name: str) -> str:
    regions = {region.name: region for region in build_status(bench.server, "").regions}
    return regions[name].why


@in_a_loop
async def test_a_slow_line_is_said_with_its_rate_its_frame_and_the_time_it_takes(tmp_path):
    bench = await joined(tmp_path)
    await bench.round(0)
    said = {"training": True, "why": "training", "step_seconds": 0.5}
    said |= {"link_down": 2.0, "link_up": 1e6}
    await bench.beat("iowa", **said)
    told = why(bench, "iowa")
    assert told.startswith("slow line: 2 B/s down, a frame of ") and " up" not in told
    assert " takes " in told and " are due every " in told
    await bench.beat("paris", **(said | {"link_down": 1e6}))
    assert "slow" not in why(bench, "paris")


@in_a_loop
async def test_a_region_whose_credential_is_no_good_is_not_only_silent(tmp_path):
    bench = await joined(tmp_path)
    await bench.beat("iowa", 1.0)
    bench.state.credential_trouble = lambda name: f"that of {name} is revoked"
    assert "revoked" not in why(bench, "iowa"), "it is still there"
    bench.clock.now += 11
    assert why(bench, "iowa") == "silent for 11 s: that of iowa is revoked"


@in_a_loop
async def test_a_full_disk_is_in_the_servers_log_once(tmp_path, caplog):
    caplog.set_level("INFO")
    bench = await joined(tmp_path)
    for _ in range(3):
        bench.state.disk_full("upload", FULL)
    bench.state.disk_has_room("upload")
    told = [message for message in caplog.messages if "free bytes" in message or "room" in message]
    assert len(told) == 2
