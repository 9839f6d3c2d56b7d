"""Figures are pure folds; what is unknown is left out rather than shown as zero."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diloco_cli.observe.events import Event
from diloco_cli.observe.last_known import last_known
from diloco_cli.observe.metrics import (
    Effort,
    bits_per_parameter,
    goodput,
    goodputs,
    overshoot,
    quantile,
    recoveries,
    seconds_left,
    staleness,
    thrown_away,
    warnings,
)
from diloco_cli.observe.prometheus import METRICS, prometheus_text
from diloco_cli.observe.status import Status
from tests import ROOT
from tests.observe.documents import make_status

STATUS = make_status(
    state="training",
    outer_steps=12,
    tokens={"applied": 400, "pending": 50},
    loss={"heldout": None, "train": 3.25},
    wire={"bits_per_parameter_up": 3.2, "bytes_up": 9},
    goodput=0.8,
    regions=[
        {"name": "paris", "alive": True, "step": 7},
        {"name": 'odd"name', "share": 0.25},
    ],
)


def samples(status):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(prometheus_text(status))
        for sample in family.samples
    }


def test_bits_and_goodput_are_unknown_before_anything_moved():
    assert bits_per_parameter(0, 0) is None and goodput(0, 0) is None
    assert bits_per_parameter(400, 1000) == pytest.approx(3.2)
    assert goodput(90, 100) == pytest.approx(0.9)


def test_staleness_is_that_of_the_furthest_fragment_and_never_negative():
    assert staleness([5, 5, 5], [5, 3, 6]) == 2
    assert staleness([], []) == 0


def test_time_left_follows_the_recent_rate_and_is_unknown_while_nothing_is_applied():
    assert seconds_left([(0, 0), (10, 100)], 400) == pytest.approx(30)
    assert seconds_left([(0, 100), (10, 100)], 400) is None
    assert seconds_left([(0, 0)], 400) is None
    assert seconds_left([(0, 0), (10, 500)], 400) is None


def test_prometheus_shows_what_is_known_and_leaves_out_what_is_not():
    found = samples(STATUS)
    assert found["diloco_tokens", "applied"] == 400
    assert found["diloco_state", "training"] == 1 and found["diloco_state", "finished"] == 0
    assert found["diloco_region_alive", "paris"] == 1
    assert found["diloco_region_share_ratio", 'odd"name'] == 0.25
    assert ("diloco_loss_heldout",) not in found
    assert ("diloco_region_loss", "paris") not in found


def test_each_held_out_loss_has_the_outer_steps_of_what_was_measured():
    losses = {"heldout": 5.698, "heldout_at": 0, "ema": 2.9, "ema_at": 5}
    found = samples(make_status(loss=losses))
    for name, loss, steps in (("heldout", 5.698, 0), ("heldout_ema", 2.9, 5)):
        assert found[f"diloco_loss_{name}",] == loss
        assert found[f"diloco_loss_{name}_outer_steps",] == steps


def test_a_run_without_regions_is_still_valid_prometheus_text():
    assert samples(make_status(state="stopped"))["diloco_state", "waiting"] == 0


def test_every_metric_shown_is_listed():
    assert {name for name, *_ in samples(STATUS)} <= set(METRICS)


def test_the_run_log_alone_tells_the_last_known_state():
    def at(kind, **fields):
        return Event(kind, "server", 5.0, 1.0, fields)

    log = [
        at("server-started", url="http://127.0.0.1:1"),
        at("joined", region="paris"),
        at("joined", region="tokyo"),
        at("evaluated", loss=5.5, versions=[0, 0]),
        at("accepted", region="paris", bytes=300),
        at("accepted", region="tokyo", bytes=200),
        at("published", fragment=0, version=1, tokens=4096.0),
        at("evaluated", loss=2.5, versions=[1, 0]),
        at("evaluated-ema", loss=2.25, versions=[1, 0]),
        at("lapsed", region="tokyo"),
        at("left", region="paris"),
        at("lapsed", region="paris"),
        at("run-stopped", why="asked"),
    ]
    known = last_known(log)
    assert known.state == "stopped" and known.outer_steps == 1
    assert known.loss.plain() == {
        **{"heldout": 2.5, "first": 5.5, "best": 2.5},
        **{"heldout_at": 1, "first_at": 0, "best_at": 1, "ema": 2.25, "ema_at": 1},
    }
    assert known.tokens["applied"] == 4096 and known.wire["bytes_up"] == 500
    assert known.regions == {"paris": "left", "tokyo": "lapsed"}


def test_the_log_of_a_restarted_server_counts_on():
    def at(kind, seconds, **fields):
        return Event(kind, "server", 5.0, seconds, fields)

    log = [
        at("server-started", 0.0, recovered=0),
        at("published", 9.0, fragment=0, version=1),
        at("server-started", 0.5, recovered=2),
        at("published", 3.0, fragment=0, version=3),
    ]
    known = last_known(log)
    assert known.outer_steps == 3, "one was published but not noted before the crash"
    assert known.wall_seconds == 12.0


def test_a_log_whose_beginning_is_not_kept_still_tells_the_state():
    def at(kind, **fields):
        return Event(kind, "server", 5.0, 1.0, fields)

    known = last_known(
        [
            at("accepted", region="paris", bytes=300),
            at("published", fragment=0, version=7000),
            at("published", fragment=1, version=7001),
            at("published", cut=["members"]),
        ]
    )
    assert known.state == "training" and known.regions == {"paris": "joined"}
    assert known.outer_steps == 14001


def test_the_metrics_of_a_run_are_what_they_were():
    golden = ROOT / "tests" / "golden"
    status = Status.read((golden / "status-training.json").read_bytes())
    assert prometheus_text(status) == (golden / "metrics-training.txt").read_text()


@pytest.mark.parametrize("share, value", [(0.5, 50), (0.95, 95), (1.0, 100), (0.001, 1)])
def test_a_quantile_is_a_value_that_was_seen(share: float, value: float):
    assert quantile([float(n) for n in range(100, 0, -1)], share) == value
    assert quantile([], share) is None


def test_parts_of_a_recovery_that_were_not_seen_are_not_counted():
    found = recoveries([{"total": 2.0, "start": 0.5}, {"total": 4.0, "start": 1.5, "fetch": 1.0}])
    assert (found["count"], found["p50"], found["p95"], found["max"]) == (2, 2.0, 4.0, 4.0)
    assert found["parts"]["start"] == {"p50": 0.5, "p95": 1.5}
    assert found["parts"]["fetch"] == {"p50": 1.0, "p95": 1.0}
    assert found["parts"]["detect"] == {"p50": None, "p95": None}


def test_more_than_the_budget_is_said_with_its_reason():
    def words(applied, **away):
        return overshoot(applied, 100_000.0, step=1000.0, away=away, lowered=False)

    assert words(102_000.0, iowa=41_000.0) == "", "two steps of everybody are within the rules"
    assert words(150_000.0) == "150 % of the budget"
    told = words(141_000.0, iowa=41_000.0, lima=12.0, paris=50_000.0)
    assert told == (
        "141 % of the budget: paris was away with 50.0k tokens, iowa was away with 41.0k tokens"
    )
    lowered = overshoot(3e5, 1e5, step=1000.0, away={}, lowered=True)
    assert lowered == "300 % of the budget: it was lowered below what was trained"


def test_claims_that_do_not_count_are_a_warning_with_the_command_that_helps():
    words = "claims 3.9 × its pace on record; counted at 1.25 ×"
    status = make_status(regions=[{"name": "paris", "overclaim": words, "unbalanced": True}])
    assert warnings(status) == [
        f"paris {words} (diloco amend --repace paris lets it be learnt anew)",
        "paris reports tokens that contradict what is merged",
    ]


def test_figures_that_no_machine_has_break_nothing():
    slow = Effort(worked=1.0, trained=1.0, useful=1.0, applied=1e9, pace=5e-324)
    assert goodputs([slow], elapsed=1.0, contributions=1, chances=1).tokens == 1.0
    long = Effort(worked=1e308, trained=1e-9, useful=1e9, applied=1.0, pace=1.0)
    assert goodputs([long], elapsed=1.0, contributions=1, chances=1).time is None


# Work that is thrown away


def diverging(name, **changes):
    said = {"times": 7, "tokens": 448.0, "step": 96, "seconds": 63.0, "published": False}
    divergence = {**said, "why": "the loss was not finite 5 times in a row", **changes}
    return {"name": name, "alive": True, "training": True, "step": 99, "divergence": divergence}


def test_one_alarm_names_all_whose_work_is_thrown_away():
    regions = [diverging(name) for name in ("a", "b", "c", "d", "e")]
    alarm = warnings(make_status(state="training", regions=regions))[0]
    assert alarm == (
        "all work of a, b, c and 2 more is thrown away, 7 times in a row since step 96 "
        "(1 min 3 s ago), 2240 tokens so far: the loss was not finite 5 times in a row; "
        "look at the data, or lower inner.optimizer.lr or outer.lr with `diloco amend`"
    )


def test_weights_that_nobody_can_train_on_are_spoiled_and_those_of_a_single_region_are_not():
    spoiled, sound = diverging("a", published=True), {**diverging("b"), "divergence": None}
    for regions, words in (
        ([spoiled], "the published weights are spoiled"),
        ([spoiled, sound], "look at the data"),
    ):
        assert words in warnings(make_status(state="training", regions=regions))[0]


def test_a_run_that_is_over_warns_of_nothing_that_was_thrown_away():
    assert warnings(make_status(state="stopped", regions=[diverging("a")])) == []


def test_a_heldout_loss_far_above_the_first_one_is_an_alarm():
    for heldout, first, warned in (
        *((57.1, 5.7, True), (56.9, 5.7, False), (1e9, -2.0, False)),
        *((4.2, 0.4, False), (15.1, 0.4, True)),  # Another region's text may be harder by far.
    ):
        losses = {"heldout": heldout, "heldout_at": 4, "first": first, "first_at": 0}
        found = warnings(make_status(state="training", loss=losses))
        assert [alarm for alarm in found if "held-out loss has exploded" in alarm] == found
        assert bool(found) is warned


def test_much_work_that_was_thrown_away_is_said_and_a_little_is_not():
    def said(**tokens):
        return thrown_away(make_status(tokens=tokens).tokens)

    assert said(trained=1000.0, refused=99.0) == said(refused=9.0) == ""
    assert said(trained=1000.0, discarded=500.0, given_up=500.0) == ""
    assert said(trained=1000.0, refused=60.0, discarded=40.0) == (
        "100 tokens thrown away (10% of all)"
    )
