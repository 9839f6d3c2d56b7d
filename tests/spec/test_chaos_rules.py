"""What goes wrong on purpose has to be possible, and changes nothing about the run itself."""

from __future__ import annotations

import pytest

from diloco_cli.assemble import shared_digest
from diloco_cli.spec.resolved import resolved_yaml
from tests.spec.short_spec import GOOD, loaded, problems, the_problem

KILLS = "{kind: kill-trainer, per_hour: 324}"


def chaos(fault: str = KILLS, more: str = "") -> str:
    return GOOD + f"chaos: {{seconds: 100, {more} faults: [{fault}]}}\n"


@pytest.mark.parametrize(
    "fault",
    [
        KILLS,
        "{kind: kill-trainer, region: paris, per_hour: 2, shape: 0.7}",
        "{kind: kill-agent, at: 3}",
        "{kind: kill-region, every: 30, duration: 5}",
        "{kind: kill-server, every: 30, at: 10, duration: 6}",
        "{kind: pause, at: 0, duration: 1}",
        "{kind: slow, at: 0, duration: 1, factor: 4}",
        "{kind: leave, region: tokyo, at: 0, duration: 1}",
        "{kind: cut, at: 0, duration: 1}",
        "{kind: narrow, at: 0, duration: 1, link: 1Mbit/200ms}",
        "{kind: reset, at: 0}",
    ],
)
def test_everything_that_can_go_wrong_can_be_written_down(fault: str):
    spec = loaded(chaos(fault))
    assert spec.chaos and spec.chaos.faults[0].kind in fault
    assert loaded(resolved_yaml(spec)) == spec


@pytest.mark.parametrize(
    "fault, key, said",
    [
        ("{kind: kill-trainr, at: 1}", "chaos.faults.0.kind", "kill-trainer"),
        ("{kind: kill-trainer, region: rome, at: 1}", "chaos.faults.0.region", "'rome'"),
        ("{kind: kill-server, region: paris, at: 1}", "chaos.faults.0.region", "not a region"),
        ("{kind: kill-trainer}", "chaos.faults.0", "does not say when"),
        ("{kind: kill-trainer, at: 1, per_hour: 2}", "chaos.faults.0", "says when twice"),
        ("{kind: kill-trainer, at: 1, shape: 2}", "chaos.faults.0.shape", "no effect"),
        ("{kind: kill-trainer, per_hour: 0}", "chaos.faults.0.per_hour", "0 "),
        ("{kind: kill-trainer, per_hour: yes}", "chaos.faults.0.per_hour", "number"),
        ("{kind: kill-trainer, at: 100}", "chaos.faults.0.at", "chaos.seconds: 100"),
        ("{kind: kill-trainer, at: 1, duration: 2}", "chaos.faults.0.duration", "over at once"),
        ("{kind: pause, at: 1}", "chaos.faults.0", "how long"),
        ("{kind: slow, at: 1, duration: 2}", "chaos.faults.0", "needs a factor"),
        ("{kind: cut, at: 1, duration: 2, factor: 3}", "chaos.faults.0.factor", "belongs to slow"),
        ("{kind: narrow, at: 1, duration: 2}", "chaos.faults.0", "needs a link"),
        (
            "{kind: narrow, at: 1, duration: 2, link: 5mbit/1s}",
            "chaos.faults.0.link",
            "'5mbit/1s', which is no link",
        ),
        ("{kind: reset, at: 1, when: 3}", "chaos.faults.0.when", "no such key"),
    ],
)
def test_what_cannot_go_wrong_is_refused_at_its_key(fault: str, key: str, said: str):
    found = the_problem(chaos(fault))
    assert found.key == key and said in f"{found.message} {found.hint}"


@pytest.mark.parametrize(
    "more, key",
    [
        ("link: 10,", "chaos.link"),
        ("link: fast/50ms,", "chaos.link"),
        ("link: 10Mbit/fast,", "chaos.link"),
        ("link: 10Mbit/50ms/colour=red,", "chaos.link"),
        ("links: {rome: 1Mbit/50ms},", "chaos.links.rome"),
        ("links: {paris: 1},", "chaos.links.paris"),
        ("step_seconds: 0,", "chaos.step_seconds"),
        ("seed: -1,", "chaos.seed"),
    ],
)
def test_links_and_pace_have_to_make_sense(more: str, key: str):
    assert the_problem(chaos(more=more)).key == key


@pytest.mark.parametrize(
    "link", ["10Mbit/50ms", "1.5Gbit/s/2s", "unlimited", "1Mbit", "1Mbit/50ms/queue=1s/reset=2s"]
)
def test_links_are_written_as_everywhere_else(link: str):
    assert problems(chaos(more=f"link: {link}, links: {{paris: {link}}},")) == []


def test_a_run_is_the_same_run_with_and_without_chaos():
    calm, rough = loaded(GOOD), loaded(chaos(more="step_seconds: 0.5,"))
    assert shared_digest(calm) == shared_digest(rough)
    assert "chaos" not in resolved_yaml(calm)
