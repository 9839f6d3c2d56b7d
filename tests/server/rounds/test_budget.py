"""The budget is a limit: regions are told how far they may train, and the end comes in time."""

from __future__ import annotations

from typing import Any

from diloco_cli.core.guard import STRIKES
from diloco_cli.server.build_status import build_status, build_summary
from tests.server.harness import Bench, Region, in_a_loop, make_settings, make_spec, receipt_of

STEP_TOKENS = 32.0


class Budgeted(Bench):
    """Regions whose books are kept step by step, as a trainer keeps them."""

    def __init__(self, folder, *, budget: int = 9600, names=("iowa", "paris"), **changes: Any):
        spec = make_spec(names, budget={"tokens": budget}, **changes)
        super().__init__(folder, make_settings(spec))
        self.until: dict[str, float] = {}
        self.count = 0

    async def start(self, *names: str) -> None:
        for name in names or tuple(self.regions):
            joined = await self.join(name)
            assert joined.until is not None
            self.until[name] = joined.until
        for name in 3 * tuple(self.regions):
            await self.report(name)

    def train(self, name: str, steps: int) -> int:
        """Makes as many of these steps as the region may."""
        region = self.regions[name]
        for made in range(steps):
            if max(region.trained) >= self.until[name]:
                return made
            for fragment in range(len(region.trained)):
                region.trained[fragment] += STEP_TOKENS
                region.pending[fragment] += STEP_TOKENS
        return steps

    async def report(self, name: str, **said: Any):
        self.count += 1
        region = self.regions[name]
        steps = [held / STEP_TOKENS for held in region.pending]
        about = {"n": self.count, "until": self.until.get(name), "step_seconds": 0.5, **said}
        news = await self.beat(name, steps, **about)
        if news.until is not None:
            self.until[name] = news.until
        self.server.tick()
        return news

    async def contribute(self, name: str) -> None:
        """Sends all that is held of every fragment."""
        region = self.regions[name]
        for fragment, held in enumerate(list(region.pending)):
            if held:
                steps = held / STEP_TOKENS
                region.trained[fragment] -= held
                region.pending[fragment] -= held
                await self.send(name, fragment, region.frame(fragment, steps))

    @property
    def trained(self) -> float:
        return sum(max(region.trained) for region in self.regions.values())


@in_a_loop
async def test_together_regions_train_no_more_than_the_budget(tmp_path):
    bench = Budgeted(tmp_path, quorum=2)
    await bench.start()
    for _ in range(400):
        bench.clock.now += 1
        for name in bench.regions:
            bench.train(name, 3)
            await bench.report(name)
        if bench.state.ledger.end:
            break
    assert bench.state.ledger.end, "although nothing was merged yet"
    assert 9600 <= bench.trained <= 9600 + 2 * STEP_TOKENS


@in_a_loop
async def test_a_region_that_compiles_longer_does_not_make_the_other_overshoot(tmp_path):
    """One trains and merges alone, round after round, while the other's trainer starts."""
    bench = Budgeted(tmp_path, quorum=1)
    await bench.start()
    for _ in range(200):
        bench.clock.now += 2.5
        bench.train("iowa", 20)
        await bench.report("iowa")
        await bench.report("paris", step_seconds=0.0, training=False, why="compiling")
        if bench.state.ledger.end:
            break
        if bench.state.ledger.calls():
            await bench.contribute("iowa")
        bench.clock.now += 6.0
        await bench.settle()
    assert bench.state.ledger.end
    spoken = bench.state.ledger.applied(bench.settings.sizes) + bench.regions["iowa"].pending[0]
    assert 9600 - 2 * STEP_TOKENS <= spoken <= 9600 + STEP_TOKENS


@in_a_loop
async def test_a_region_that_came_back_with_work_ends_the_run_at_once(tmp_path):
    bench = Budgeted(tmp_path, quorum=1)
    await bench.start()
    assert bench.train("paris", 60) == 60
    bench.clock.now += 11  # Its lease is over, and its work unknown.
    made = 0
    for _ in range(3):
        made += bench.train("iowa", 85)
        await bench.report("iowa")
    assert made > 250 and not bench.state.ledger.end, "what paris had room for is free again"
    await bench.report("paris")
    assert bench.state.ledger.end
    assert bench.state.rooms.brought["paris"] == 60 * STEP_TOKENS
    for name in ("iowa", "paris"):
        await bench.contribute(name)
    bench.clock.now += 10
    await bench.settle()
    said = build_summary(bench.server).overshoot
    assert said == "105 % of the budget: paris was away with 1920 tokens"


@in_a_loop
async def test_a_region_that_is_stuck_holds_the_others_up_for_minutes_at_most(tmp_path):
    bench = Budgeted(tmp_path, quorum=1)
    await bench.start()
    assert bench.train("paris", 5) == 5, "then it hangs, and its agent goes on to speak for it"
    made, waited = 0, 0.0
    while not bench.state.ledger.end and waited < 400.0:
        bench.clock.now += 2.0
        waited += 2.0
        for name in bench.regions:
            await bench.report(name)
        made += bench.train("iowa", 5)
    assert bench.state.ledger.end and waited < 200.0, "a dozen leases"
    assert made > 280, "iowa trained what paris did not"


@in_a_loop
async def test_who_had_no_room_does_not_count_as_standing_still(tmp_path):
    bench = Budgeted(tmp_path, quorum=1)
    await bench.start()
    for _ in range(20):
        bench.clock.now += 2.0
        await bench.report("paris", until=0.0)
        await bench.report("iowa", until=500.0)
    leases, now = bench.state.leases, bench.clock.now
    assert leases.stands_still("iowa", now=now) and not leases.stands_still("paris", now=now)
    await bench.report("iowa", until=0.0)
    assert not leases.stands_still("iowa", now=now), "its room is gone for long: it may try again"
    for _ in range(10):
        bench.clock.now += 2.0
        await bench.report("iowa", until=500.0)
    assert leases.stands_still("iowa", now=bench.clock.now)
    bench.train("iowa", 1)
    await bench.report("iowa", until=500.0)
    assert not leases.stands_still("iowa", now=bench.clock.now)


@in_a_loop
async def test_a_region_in_quarantine_takes_no_room_from_the_others(tmp_path):
    """It trains on for nothing: with what it was promised the run would never end."""
    bench = Budgeted(tmp_path, quorum=1)
    await bench.start()
    region = bench.regions["paris"]
    for _ in range(STRIKES):
        receipt = receipt_of(region.frame(0, 1.0))
        await bench.server.submit(receipt, epoch=region.epoch, unfit="its norm is 1e9")
    assert bench.state.live() == {"iowa"}
    for _ in range(400):
        bench.clock.now += 1
        for name in ("paris", "iowa"):
            bench.train(name, 3)
            await bench.report(name)
        if bench.state.ledger.end:
            break
    assert bench.state.ledger.end
    assert bench.regions["iowa"].trained[0] >= 9600 - STEP_TOKENS


@in_a_loop
async def test_a_restarted_server_promises_nothing_before_it_has_heard_everybody(tmp_path):
    bench = Budgeted(tmp_path, quorum=1)
    await bench.start()
    bench.train("iowa", 10)
    await bench.report("iowa")
    await bench.report("paris")
    before = dict(bench.until)
    bench.restart()
    bench.train("iowa", 1000)
    news = await bench.report("iowa")
    assert news.until is not None and news.until < before["iowa"] + STEP_TOKENS
    assert bench.train("iowa", 1000) == 0, "what it was told stands, and no more"
    await bench.report("paris")
    await bench.report("iowa")
    assert bench.train("iowa", 1000) > 10
    bench.restart()
    bench.clock.now += 10.0  # Paris does not come back.
    await bench.report("iowa")
    assert bench.until["iowa"] >= 9600 - STEP_TOKENS


@in_a_loop
async def test_a_heartbeat_that_was_overtaken_is_a_sign_of_life_and_nothing_else(tmp_path):
    bench = Budgeted(tmp_path)
    await bench.start()
    bench.train("iowa", 10)
    old = bench.regions["iowa"].beat(10.0, n=98, until=bench.until["iowa"])
    bench.train("iowa", 10)
    await bench.server.heartbeat("iowa", bench.regions["iowa"].beat(20.0, n=99))
    bench.clock.now += 9
    await bench.server.heartbeat("iowa", old)
    lease = bench.state.leases.all["iowa"]
    assert lease.seen == bench.clock.now
    assert lease.heartbeat and lease.heartbeat.fragments[0].steps == 20.0


@in_a_loop
async def test_heartbeats_of_a_folder_put_back_to_an_older_copy_are_heard_at_once(tmp_path):
    """It is started under the number of the start before, and so has its epoch."""
    bench = Budgeted(tmp_path)
    await bench.start()
    await bench.server.heartbeat("iowa", bench.regions["iowa"].beat(20.0, n=5000))
    await bench.join("iowa")
    await bench.server.heartbeat("iowa", bench.regions["iowa"].beat(3.0, n=1))
    heard = bench.state.leases.all["iowa"].heartbeat
    assert heard and heard.fragments[0].steps == 3.0


@in_a_loop
async def test_drained_after_an_earlier_end_does_not_count(tmp_path):
    bench = Budgeted(tmp_path, quorum=1)
    await bench.start()
    while not bench.state.ledger.end:
        bench.train("iowa", 30)
        bench.clock.now += 1
        await bench.report("iowa")
        await bench.report("paris")
    first = bench.state.ledger.ended
    # Iowa dies, and with it all that was spoken for; it begins anew from an empty disk.
    bench.regions["iowa"] = Region("iowa", bench.settings, bench.run, owner="another-disk")
    bench.clock.now += 30
    await bench.start("iowa")
    for name in ("iowa", "paris"):
        await bench.report(name, ended=first)
    assert not bench.state.ledger.end and not bench.state.ledger.finished, "the run goes on"
    assert [kind for kind, _ in bench.noted].count("run-resumed") == 1
    while not bench.state.ledger.end:
        bench.train("iowa", 30)
        bench.clock.now += 1
        await bench.report("iowa")
        await bench.report("paris")
    assert bench.state.ledger.ended > first
    for name in ("iowa", "paris"):
        await bench.report(name, ended=first)
    await bench.settle()
    assert not bench.state.ledger.finished
    bench.restart()
    assert bench.state.ledger.ended > first and bench.state.leases.end == bench.state.ledger.ended


@in_a_loop
async def test_work_that_is_reported_and_never_comes_does_not_end_the_run_again_and_again(tmp_path):
    bench = Budgeted(tmp_path, quorum=1)
    await bench.start()
    iowa = bench.regions["iowa"]
    iowa.trained = iowa.pending = [9600.0, 9600.0]
    ends = 0
    for _ in range(20):
        bench.clock.now += 1
        await bench.report("iowa", ended=bench.state.ledger.ended)
        await bench.report("paris", ended=bench.state.ledger.ended)
        ends += bool(bench.state.ledger.end)
    assert ends == 1
    assert not bench.state.ledger.finished


@in_a_loop
async def test_the_status_says_how_far_a_region_may_train(tmp_path):
    bench = Budgeted(tmp_path)
    await bench.start()
    await bench.report("iowa")
    region = build_status(bench.server, "").regions[0]
    assert region.until == bench.until["iowa"]


@in_a_loop
async def test_the_news_say_how_far_the_run_is_whoever_trained_it(tmp_path):
    """Learning rates follow it: it must not fall when a round is merged."""
    bench = Budgeted(tmp_path, quorum=2)
    await bench.start()
    seen = []
    for _ in range(30):
        bench.clock.now += 3
        for name, steps in (("iowa", 4), ("paris", 1)):
            bench.train(name, steps)
            seen.append((await bench.report(name)).progress)
            if bench.state.ledger.calls():
                await bench.contribute("iowa")
                await bench.contribute("paris")
        await bench.settle()
    assert bench.state.ledger.outer_steps > 2
    assert seen == sorted(seen), "it went back"
    assert abs(seen[-1] - bench.trained / 9600) < 6 * STEP_TOKENS / 9600


@in_a_loop
async def test_of_a_region_that_is_gone_only_what_it_sent_is_progress(tmp_path):
    bench = Budgeted(tmp_path, quorum=2)
    await bench.start()
    bench.train("iowa", 6)
    bench.clock.now += 3
    await bench.report("iowa")
    await bench.contribute("iowa")  # It waits for the other's.
    bench.train("iowa", 9)
    bench.clock.now += 3
    await bench.report("iowa")
    held = (await bench.report("paris")).progress
    assert held == round(15 * STEP_TOKENS / 9600, 4)
    bench.clock.now += 11
    assert (await bench.report("paris")).progress == round(6 * STEP_TOKENS / 9600, 4)


@in_a_loop
async def test_a_boast_of_work_that_nobody_can_have_done_is_no_progress(tmp_path):
    bench = Budgeted(tmp_path, budget=10_000_000, quorum=2)
    await bench.start()
    boast = bench.regions["iowa"]
    boast.trained = [1e9] * len(boast.trained)
    boast.pending = [1e9] * len(boast.pending)
    bench.clock.now += 3
    await bench.report("iowa")
    bench.clock.now += 3
    told = (await bench.report("paris")).progress
    assert told is not None and told < 0.05
