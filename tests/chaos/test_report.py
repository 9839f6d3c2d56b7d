"""The record of a storm says what it cost, and claims nothing that was not seen."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.chaos.inflict import InflictedFault, LinkBytes
from diloco_cli.chaos.report import Span, aftermath, fault_free_rate
from diloco_cli.observe.events import Event
from diloco_cli.observe.status import Status
from diloco_cli.sim.faults import Fault
from diloco_cli.spec.schema import RunSpec
from tests.observe.documents import make_status

BEGAN = 5000.0


def spec(**chaos: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "spec": 1,
            "name": "rough",
            "budget": {"tokens": 10**9},
            "inner": {"batch": 4, "sequence": 64},
            "regions": [{"name": "paris"}, {"name": "tokyo", "speed": 0.5}],
            "chaos": {"seconds": 100, "step_seconds": 0.25, **chaos},
        }
    )


def status(trained: float, applied: float, pending: float) -> Status:
    tokens = {"trained": trained, "applied": applied, "pending": pending}
    regions = [{"name": str(share), "blocked": share} for share in (0.01, None, 0.03)]
    return make_status(tokens=tokens, loss={"heldout": 2.5}, regions=regions)


def event(at: float, kind: str, **fields: Any) -> Event:
    return Event(kind, "somebody", BEGAN + at, 0.0, fields)


def struck(at: float, kind: str = "kill-trainer", skipped: str = "") -> InflictedFault:
    return InflictedFault(Fault(at, kind, "paris"), at, BEGAN + at, skipped)  # pyright: ignore


def record(
    events: list[Event], faults: list[InflictedFault] | None = None, rate: float | None = 1536.0
) -> Any:
    span = Span(BEGAN, 100.0, status(10_000, 6_000, 4_000), status(150_000, 130_000, 20_000))
    return aftermath(spec(), span, faults or [], events, rate=rate)


def test_the_pace_says_what_a_run_without_faults_would_train():
    assert fault_free_rate(spec()) == 256 / 0.25 * 1.5
    assert fault_free_rate(spec(step_seconds=None)) is None


def test_work_from_before_the_storm_is_not_counted_and_pending_work_neither():
    found = record([])
    assert found["tokens"] == {
        "trained": 140_000,
        "applied": 120_000,  # 4,000 of what was applied were trained before.
        "pending": 20_000,
        "fault_free": 153_600,
    }
    assert found["goodput"]["tokens"] == pytest.approx(120_000 / 153_600)
    assert found["goodput"]["time"] == pytest.approx(140_000 / 153_600)
    assert found["blocked"] == pytest.approx(0.02)


def test_what_links_carried_is_on_record_by_region():
    span = Span(BEGAN, 100.0, status(0, 0, 0), status(1, 1, 0), {"paris": LinkBytes(900, 400)})
    found = aftermath(spec(), span, [], [], rate=None)
    assert found.get("links") == {"paris": {"up": 900, "down": 400}}


def test_without_a_rate_to_compare_with_no_goodput_is_claimed():
    found = record([], rate=None)
    assert (found["goodput"]["tokens"], found["tokens"]["fault_free"]) == (None, None)


def test_rounds_of_the_storm_alone_make_the_participation():
    rounds = [(-5, ["paris"]), (10, ["paris", "tokyo"]), (20, ["tokyo"]), (101, ["paris"])]
    events = [event(at, "published", members=who, tokens=1.0) for at, who in rounds]
    assert record(events)["goodput"]["participation"] == pytest.approx(0.75)
    assert record([])["goodput"]["participation"] is None


def test_the_curve_pairs_losses_with_the_tokens_applied_by_then():
    events = [
        event(-1, "evaluated", loss=9.0),
        event(1, "published", members=["paris"], tokens=7_000.0),
        event(2, "evaluated", loss=3.0),
        event(3, "published", members=["paris"], tokens=9_000.0),
        event(4, "evaluated", loss=2.5),
    ]
    assert record(events)["loss"]["curve"] == [[1_000.0, 3.0, 2.0], [3_000.0, 2.5, 4.0]]


PARTS = {"import": 0.8, "compile": 0.5, "restore": 0.2, "total": 1.5}


def test_a_recovery_lasts_from_the_kill_to_the_next_finished_step():
    events = [
        event(10.1, "trainer-died", region="paris", code=-9),
        event(11.0, "first-step", region="tokyo", **PARTS),
        event(11.9, "first-step", region="paris", **PARTS),
    ]
    found = record(events, [struck(10.0)])
    parts = {"detect": 0.1, "start": 0.8, "compile": 0.5, "fetch": 0.2, "total": 1.9}
    assert found["faults"][0]["recovery"] == pytest.approx(parts)
    assert found["recovery"]["count"] == 1 and found["recovery"]["p95"] == pytest.approx(1.9)
    assert found["recovery"]["parts"]["start"] == {"p50": 0.8, "p95": 0.8}


def test_only_those_who_died_and_could_come_back_in_peace_have_a_recovery():
    events = [event(30.0, "first-step", region="paris", **PARTS)]
    faults = [struck(10.0), struck(12.0), struck(12.5, "reset"), struck(13.0, skipped="nobody")]
    found = record(events, faults)
    assert ["recovery" in fault for fault in found["faults"]] == [False, True, False, False]
    assert found["faults"][1]["recovery"] == pytest.approx(
        {"start": 0.8, "compile": 0.5, "fetch": 0.2, "total": 18.0}
    )
