"""Work that is thrown away again and again shows, warns, and ends a run that it is all there is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_cli.merge.optimizers import Nesterov
from diloco_cli.observe.metrics import warnings
from diloco_cli.server.build_status import build_status, build_summary
from diloco_cli.server.rounds.divergence import HOPELESS
from tests.server.harness import NAMES, Bench, in_a_loop, joined, make_settings


async def overflowing(folder: Path) -> Bench:
    """A run whose outer step is never finite, as of huge weights; no spec may ask for it."""
    bench = Bench(folder, replace(make_settings(), outer=Nesterov(lr=1e39, warmup=0)))
    await bench.join()
    return bench


def thrown(times: int, **said) -> dict[str, Any]:
    about = {"tokens": 32.0 * times, "step": 7, "seconds": 4.5, "published": False, "why": "NaN"}
    return {"divergence": {"times": times, **about, **said}}


async def say(bench: Bench, times: int, *names: str, **said) -> None:
    for name in names:
        await bench.beat(name, **thrown(times, **said))
    bench.server.tick()


def counts(bench: Bench) -> dict[str, Any]:
    return {f"{of} {region}": each for (of, region), each in bench.state.failed_rounds.items()}


def seen(bench: Bench):
    status = build_status(bench.server, "http://h:1")
    return status, {region.name: region for region in status.regions}


@in_a_loop
async def test_a_region_that_throws_its_work_away_is_named_and_does_not_contribute(tmp_path):
    bench = await joined(tmp_path)
    await bench.round(0)
    for name in NAMES:
        await bench.beat(name)
    assert {region.state for region in seen(bench)[1].values()} == {"contributing"}
    await say(bench, 2, "iowa")
    assert seen(bench)[1]["iowa"].state == "contributing", "it may pass"
    await say(bench, 3, "iowa")
    status, regions = seen(bench)
    assert regions["iowa"].state == "diverging" and not regions["iowa"].contributing
    assert regions["paris"].state == "contributing"
    alarm = warnings(status)[0]
    assert alarm.startswith("all work of iowa is thrown away, 3 times in a row since step 7")
    assert "96 tokens so far: NaN" in alarm and "diloco amend" in alarm
    assert "thrown away" in regions["iowa"].why
    await say(bench, 4, "iowa")
    told = [fields["region"] for kind, fields in bench.noted if kind == "diverging"]
    assert told == ["iowa"], "once"
    bench.clock.now += 11
    assert seen(bench)[1]["iowa"].state == "away"
    assert not [alarm for alarm in warnings(seen(bench)[0]) if "thrown" in alarm]


@in_a_loop
async def test_a_run_whose_every_region_works_for_nothing_is_stopped_and_says_what_is_sound(
    tmp_path,
):
    bench = await joined(tmp_path)
    for name in NAMES:
        await bench.beat(name)
    await bench.beat(bench.server.evaluator() or "", heldout={"versions": [0, 0], "loss": 5.5})
    await bench.round(0)
    await bench.beat(bench.server.evaluator() or "", heldout={"versions": [1, 0], "loss": 5e9})
    await say(bench, HOPELESS - 1, *NAMES, published=True)
    assert seen(bench)[0].state == "training"
    await say(bench, HOPELESS, *NAMES, published=True)
    status, summary = seen(bench)[0], build_summary(bench.server)
    assert status.state == summary.state == "stopped"
    assert status.hopeless == summary.hopeless == summary.why
    assert f"the work of all 3 regions is thrown away, {HOPELESS} times" in summary.why
    assert "published weights themselves are spoiled" in summary.why
    assert "outer step 0 (versions 0, 0 of the fragments), held-out loss 5.5" in summary.why
    assert bench.server.news("iowa").stop, "regions are told"


@pytest.mark.parametrize("other", ["sound", "away", "starting", "left"])
@in_a_loop
async def test_no_region_can_end_the_run_of_another(tmp_path, other):
    bench = await joined(tmp_path)
    if other == "away":
        await say(bench, HOPELESS, "tokyo")
        bench.clock.now += 11
    elif other == "sound":
        await bench.beat("tokyo")
    elif other == "starting":
        await bench.beat("tokyo", **thrown(HOPELESS), training=False)
    else:
        await bench.beat("tokyo", **thrown(HOPELESS), stopping=True)
    await say(bench, 2**40, "iowa", "paris")
    assert not bench.state.stopping and seen(bench)[0].state == "training"
    await bench.beat("tokyo", **thrown(HOPELESS))
    bench.server.tick()
    assert bench.state.stopping, "the last one was all that held it up"


@in_a_loop
async def test_who_has_not_come_yet_may_do_better(tmp_path):
    bench = Bench(tmp_path, make_settings())
    await bench.join("iowa", "paris")
    await say(bench, HOPELESS, "iowa", "paris")
    assert not bench.state.stopping


@in_a_loop
async def test_rounds_whose_outer_step_is_not_finite_count_for_their_members(tmp_path):
    bench = await overflowing(tmp_path)
    await bench.round(0, "iowa", "paris")
    assert bench.state.ledger.outer_steps == 0
    assert [(of, each.times) for of, each in sorted(counts(bench).items())] == [
        ("0 iowa", 1),
        ("0 paris", 1),
        ("None iowa", 1),
        ("None paris", 1),
    ]
    for _ in range(2):
        await bench.beat("tokyo")
        await bench.round(0, "iowa", "paris")
    status, regions = seen(bench)
    assert (regions["iowa"].state, regions["tokyo"].state) == ("diverging", "training")
    assert "all work of iowa, paris is thrown away, 3 times in a row" in warnings(status)[0]
    assert "merged, it makes weights that are not finite" in warnings(status)[0]
    for _ in range(HOPELESS):
        await bench.beat("tokyo")
        await bench.round(0, "iowa", "paris")
    assert not bench.state.stopping, "tokyo was in none of them"
    await bench.amend({"outer.lr": 0.5})
    await bench.round(0)
    assert bench.state.ledger.outer_steps == 1 and bench.state.failed_rounds == {}
    assert "thrown" not in " ".join(warnings(seen(bench)[0]))


@dataclass(frozen=True)
class Stuck(Nesterov):
    """Never makes a finite step of a tensor of this size."""

    size: int = 0

    def step(self, theta, momentum, merged, *, drain):
        weights, kept = super().step(theta, momentum, merged, drain=drain)
        return (weights * np.inf if theta.size == self.size else weights), kept


@in_a_loop
async def test_a_fragment_that_never_moves_shows_while_others_do_and_ends_nothing(tmp_path):
    settings = make_settings()
    size = settings.layout.fragments[0].pieces[0].size
    bench = Bench(tmp_path, replace(settings, outer=Stuck(size=size)))
    await bench.join()
    for number in range(HOPELESS + 1):
        await bench.round(0)
        await bench.round(1)
        shown = {region.state for region in seen(bench)[1].values()}
        assert shown == {"diverging" if number >= 2 else "contributing"}
    assert bench.versions == [0, HOPELESS + 1] and not bench.state.stopping
    await bench.amend({"outer.lr": 0.5})
    await bench.round(0)
    assert {region.state for region in seen(bench)[1].values()} == {"contributing"}


@in_a_loop
async def test_a_run_none_of_whose_rounds_comes_to_anything_is_stopped(tmp_path):
    bench = await overflowing(tmp_path)
    for _ in range(HOPELESS):
        assert not bench.state.stopping
        await bench.round(0)
    assert "20 times in a row at least" in bench.state.hopeless


@in_a_loop
async def test_a_loss_beyond_that_of_the_first_weights_is_an_explosion(tmp_path):
    bench = await joined(tmp_path)
    for name in NAMES:
        await bench.beat(name, loss=54.0)
    assert not any(region.exploded for region in seen(bench)[1].values()), "nothing to compare with"
    await bench.beat(bench.server.evaluator() or "", heldout={"versions": [0, 0], "loss": 5.5})
    await bench.beat("iowa", loss=56.0)
    status, regions = seen(bench)
    assert regions["iowa"].state == "diverging" and regions["paris"].state == "training"
    assert warnings(status)[0].startswith("the training loss of iowa has exploded: 56, ")
    await bench.beat("iowa", loss=56.0, training=False)
    assert not seen(bench)[1]["iowa"].exploded, "that was an earlier trainer's"
