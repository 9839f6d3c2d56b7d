"""A simulation is the live core on a virtual clock: what it says must add up."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from types import CodeType
from typing import Any

import pytest

from diloco_cli.core import ledger, pace, rounds, unmerged_work
from diloco_cli.sim.faults import Fault, Law, drawn
from diloco_cli.sim.network import Link
from diloco_cli.sim.outcome import SimulationOutcome
from diloco_cli.sim.scenario import Recovery, RegionSite, Scenario, ServerSite, even
from diloco_cli.sim.simulator import Simulation, simulate
from diloco_cli.spec.schema import SyncSpec


def scenario(
    regions: int = 4,
    *,
    seconds: float = 600.0,
    faults: Iterable[Fault] = (),
    link: Link | None = None,
    steps: tuple[float, ...] = (1.0,),
    jitter: float = 0.0,
    sync: dict[str, Any] | None = None,
    **more: Any,
) -> Scenario:
    link = link or Link(1e9, 0.025)
    return Scenario(
        "test",
        tuple(
            RegionSite(f"r{n}", steps[n % len(steps)], 1000.0, link, jitter) for n in range(regions)
        ),
        even(100e6, 4),
        SyncSpec(**{"fragments": 4, "every": 12, **(sync or {})}),
        seconds,
        faults=tuple(faults),
        **more,
    )


def names(regions: int) -> list[str]:
    return [f"r{n}" for n in range(regions)]


def every_kind(seconds: float) -> list[Fault]:
    killed = drawn(Law(150.0), names(4), until=seconds, seed=1)
    gone = drawn(Law(400.0), names(4), until=seconds, seed=2, kind="kill-region")
    others = [
        Fault(80.0, "cut", "r1", 60.0),
        Fault(200.0, "slow", "r2", 100.0, 3.0),
        Fault(300.0, "kill-server", duration=25.0),
        Fault(310.0, "pause", "r0", 5.0),
        Fault(330.0, "pause", "r0", 50.0),
        Fault(350.0, "leave", "r3", 30.0),
        Fault(400.0, "kill-agent", "r1"),
        Fault(410.0, "narrow", "r1", 30.0, link="10Mbit/200ms"),
        Fault(415.0, "reset", "r1"),
    ]
    return [*killed, *gone, *others]


def test_the_live_core_decides():
    """Not a likeness of it: the very functions that the server and the trainers call."""
    ran: set[CodeType] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            ran.add(frame.f_code)

    sys.setprofile(note)
    try:
        simulate(scenario(seconds=120.0, sync={"overlap": 0}))
    finally:
        sys.setprofile(None)
    decides = [
        *(rounds.admit, rounds.called, rounds.joined, rounds.decide),
        *(pace.due, pace.grace, pace.usual_answer, pace.stepped, pace.answered, pace.met),
        *(pace.published, ledger.Ledger.apply, ledger.Ledger.region_record),
        *(
            unmerged_work.may_answer,
            unmerged_work.post,
            unmerged_work.settle,
            unmerged_work.waits_for,
        ),
    ]
    assert [each.__qualname__ for each in decides if each.__code__ not in ran] == []


def test_the_seed_decides_everything():
    def play(seed: int) -> SimulationOutcome:
        faults = drawn(Law(100.0), names(4), until=600.0, seed=seed)
        return simulate(scenario(faults=faults, jitter=0.1, seed=seed))

    assert play(5) == play(5)
    assert play(5) != play(6)


def test_without_a_fault_nothing_is_lost_and_everybody_takes_part():
    one = simulate(scenario())
    assert one.goodput_time == pytest.approx(1.0)
    assert one.uptime == one.participation == 1.0
    assert one.goodput_tokens > 0.95
    # Twelve steps are reported at once, and an answer comes a step after its call.
    assert one.pace == pytest.approx(12 / 13, abs=0.03)
    assert one.staleness == 0


def test_regions_out_of_step_stay_in_one_round_over_quick_lines():
    """Answers come when the step under way ends, so some take a whole step more than others."""
    wide = Link(1e12, 0.0)
    sync = {"fragments": 24, "every": 24}
    played = replace(
        scenario(seconds=1200.0, link=wide, jitter=0.05, sync=sync), sizes=even(1e8, 24)
    )
    one = simulate(played)
    assert one.participation > 0.97 and one.pace < 1.1


def test_over_lines_on_which_an_answer_takes_periods_regions_meet_again_after_a_cut():
    """Answers that come late must not close each round before the others can give theirs."""
    sync = {"fragments": 1, "every": 12}
    cut = Fault(1000.0, "cut", "r1", 120.0)
    slow = scenario(seconds=4000.0, link=Link(1e7, 0.05), jitter=0.1, faults=[cut], sync=sync)
    assert simulate(replace(slow, sizes=even(100e6, 1))).participation > 0.95


def test_bytes_are_the_fragments_that_travelled_at_the_measured_bits():
    one = simulate(scenario(up_bits=2.0, down_bits=4.0))
    posted = one.versions * 4
    assert one.bytes_down == one.versions * 4 * 25e6 * 4 / 8
    assert posted * 25e6 * 2 / 8 <= one.bytes_up <= (posted + 16) * 25e6 * 2 / 8


def test_bytes_that_a_line_has_not_carried_yet_are_not_counted():
    """The first frame takes longer than the whole run, and a share of it has passed."""
    narrow = scenario(regions=2, seconds=600.0, link=Link(rate=1e4, delay=0.0))
    one = simulate(narrow)
    assert 0.9 * 2 * 600 * 1e4 / 8 < one.bytes_up <= 2 * 600 * 1e4 / 8 and one.versions == 0
    shared = replace(narrow, server=replace(narrow.server, link=Link(rate=5e3)))
    assert simulate(shared).bytes_up <= 600 * 5e3 / 8


@pytest.mark.parametrize("adopt", ["rebase", "replace", "blend"])
def test_every_token_has_a_fate_whatever_happens(adopt: str):
    play = Simulation(scenario(faults=every_kind(600.0), sync={"adopt": adopt, "quorum": 2}))
    one = play.run()
    assert one.faults > 15
    for region in play.regions.values():
        for number in range(4):
            assert unmerged_work.account(region.book(number)) == pytest.approx(0.0, abs=1e-6)
    sizes = play.scenario.sizes
    assert play.server.ledger.applied(sizes) == pytest.approx(one.tokens)
    trained = sum(region.steps * 1000.0 for region in play.regions.values())
    assert 0 < one.tokens <= trained


def test_failures_cost_what_the_closed_form_says():
    recovery = Recovery(detect=2.0, restart=18.0, checkpoint=1e-9)
    law, seconds = Law(100.0), 10_000.0
    faults = drawn(law, names(4), until=seconds, seed=0)
    seldom = {"every": 400, "fragments": 4}
    one = simulate(scenario(seconds=seconds, faults=faults, recovery=recovery, sync=seldom))
    # Half a step is lost with each.
    assert one.goodput_time == pytest.approx(1 / (1 + 20.5 / 100.0), abs=0.02)


def test_what_was_trained_since_the_checkpoint_is_lost():
    faults = drawn(Law(100.0), names(4), until=2000.0, seed=0)
    kept, lost = (
        simulate(
            scenario(seconds=2000.0, faults=faults, recovery=Recovery(checkpoint=checkpoint))
        ).goodput_time
        for checkpoint in (5.0, math.inf)
    )
    assert kept > lost + 0.01


@pytest.mark.parametrize(("anew", "down"), [(False, 20.0), (True, 32.0)])
def test_a_kill_on_the_way_back_costs_what_it_is_said_to(anew: bool, down: float):
    recovery = Recovery(detect=2.0, restart=18.0, checkpoint=1e-9, anew=anew)
    twice = [Fault(100.0, "kill-trainer", "r0"), Fault(112.0, "kill-trainer", "r0")]
    found = simulate(scenario(regions=1, seconds=400.0, faults=twice, recovery=recovery))
    assert found.goodput_time == pytest.approx(1 - down / 400.0, abs=0.005)


def test_one_dead_region_stops_nobody_but_the_job_that_needs_it():
    fault = [Fault(100.0, "kill-region", "r0", 400.0)]
    free = simulate(scenario(faults=fault))
    bound = simulate(scenario(faults=fault, sync={"quorum": 4}))
    assert free.uptime == 1.0
    assert free.pace > 0.75
    assert bound.versions < 0.6 * free.versions


def test_a_host_that_was_lost_fetches_the_weights_again():
    trainer, region = (
        simulate(scenario(faults=[Fault(100.0, kind, "r0", 10.0)])).bytes_down
        for kind in ("kill-trainer", "kill-region")
    )
    assert region > trainer + 100e6 * 25 / 8 * 0.9


def test_training_goes_on_while_the_server_is_away():
    down = simulate(scenario(faults=[Fault(200.0, "kill-server", duration=150.0)]))
    assert down.goodput_time == pytest.approx(1.0)
    quiet = [point[0] for point in down.timeline]
    longest = max(b - a for a, b in itertools.pairwise(quiet))
    assert 150.0 <= longest < 175.0
    assert down.goodput_tokens > 0.95  # What was trained meanwhile is merged afterwards.


def test_a_server_that_returns_takes_nobody_for_dead():
    play = Simulation(scenario(faults=[Fault(100.0, "kill-server", duration=60.0)]))
    play.agenda.run(160.0, lambda: False)
    assert play.server.live() == set(names(4))


def test_a_merge_that_died_with_the_server_is_done_again_once():
    server = ServerSite(merge_values=25e6)  # Four contributions take four seconds.
    faults = [Fault(14.0 + n, "kill-server", duration=0.5) for n in range(0, 400, 7)]
    play = Simulation(scenario(faults=faults, server=server))
    one = play.run()
    assert one.versions > 20
    assert all(members > 0 for _, _, members in one.timeline)


def test_a_region_that_is_cut_off_gives_its_work_later():
    one = simulate(scenario(faults=[Fault(200.0, "cut", "r0", 150.0)]))
    assert one.goodput_time == pytest.approx(1.0)
    assert one.participation < 0.97
    assert one.goodput_tokens > 0.95


def test_a_straggler_makes_fewer_steps():
    slow = simulate(scenario(faults=[Fault(0.0, "slow", "r0", 600.0, 2.0)]))
    assert slow.goodput_tokens == pytest.approx(7 / 8, abs=0.04)


def test_a_narrow_line_delays_rounds_but_never_the_training():
    narrow = simulate(scenario(link=Link(20e6, 0.025)))
    assert narrow.utilisation == pytest.approx(1.0)
    assert narrow.pace < 0.8


def test_without_overlap_the_training_waits_for_the_line():
    wide, narrow = (
        simulate(scenario(link=Link(rate, 0.025), sync={"overlap": 0})).utilisation
        for rate in (1e10, 1e8)
    )
    assert wide > 0.8 > narrow


def test_the_servers_own_line_is_shared():
    one = simulate(scenario(8, server=ServerSite(Link(60e6))))
    assert one.pace < 0.8


def test_a_budget_ends_it_early():
    assert simulate(scenario(budget=500_000.0)).seconds < 200.0


def outcome(*faults: Fault, **more: Any) -> SimulationOutcome:
    return simulate(scenario(2, faults=faults, **more))


def test_a_pause_and_a_leave_cost_their_time_and_nothing_else():
    calm = outcome()
    for kind in ("pause", "leave"):
        rough = outcome(Fault(100.0, kind, "r0", 60.0))  # pyright: ignore[reportArgumentType]
        assert rough.faults == 1 and calm.goodput_time - rough.goodput_time == pytest.approx(
            60 / 600 / 2, rel=0.1
        )


def test_a_killed_agent_and_broken_connections_cost_nothing():
    faults = [Fault(100.0, "kill-agent", "r0"), Fault(200.0, "reset", "r1")]
    assert outcome(*faults).goodput_tokens == outcome().goodput_tokens


def test_a_narrow_link_holds_its_region_up_while_it_lasts():
    def productive(*faults: Fault) -> float:
        return outcome(*faults, sync={"overlap": 0}).goodput_time

    narrow = [Fault(at, "narrow", "r0", 100.0, link="20Mbit/50ms") for at in (100.0, 300.0)]
    assert productive(*narrow) < productive(narrow[0]) < productive()
