"""`diloco plan`: needs, expectation, what holds it up, and advice that can be taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from diloco_cli.assemble import fragment_sizes, load_run, resolve
from diloco_cli.bench.support.one_fragment_server import stage
from diloco_cli.cli.app import app
from diloco_cli.errors import SpecError
from diloco_cli.net.client import Client
from diloco_cli.net.options import Timeouts
from diloco_cli.net.transfer.throughput import PATIENCE
from diloco_cli.plan.advice import advised, followed, pasted
from diloco_cli.plan.needs import traffic
from diloco_cli.plan.plan import plan, unbroken
from diloco_cli.sim.measured import LINE_SHARE
from diloco_cli.sim.network import parse_link
from diloco_cli.sim.scenario import Recovery
from diloco_cli.sim.world import World, scenario_of
from diloco_cli.spec.schema import RunSpec
from tests import ROOT

QUICK = str(ROOT / "pipelines" / "quickstart.yaml")
GUIDE = ROOT / "docs" / "guides" / "plan-a-run.md"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def data(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def spec(**sync: Any) -> RunSpec:
    overrides = [f"sync.{key}={value}" for key, value in sync.items()]
    return load_run(QUICK, overrides).spec


def test_bytes_and_rates_follow_from_fragments_and_bits():
    found, size = data(QUICK, "--step", "1s"), resolve(spec()).layout.size
    traffic = found["traffic"]
    assert found["parameters"] == size
    assert traffic["cycle_up"] == pytest.approx(size * 2.95 / 8)
    assert traffic["need_up"] == pytest.approx(0.95 * size * 2.95 / 24 / LINE_SHARE.value)
    assert traffic["server_in"] == pytest.approx(2 * traffic["need_up"])
    per_day = found["expected"]["bytes_per_day"]["up"]
    assert per_day == pytest.approx(86400 / 24 * size * 2.95 / 8, rel=0.25)


def test_a_large_model_is_planned_without_being_allocated():
    found = data(QUICK, "--set", "model.layers=80", "--set", "model.width=16384", "--step", "9s")
    assert found["parameters"] > 100e9
    left = found["devices"][0]
    assert left["state"] == pytest.approx(12 * found["parameters"])
    assert left["gradients"] == pytest.approx(4 * found["parameters"])
    assert left["fits"] is None, "no device was named"


LARGE = (QUICK, "--set", "model={kind: decoder, size: 1b, vocabulary: 32768}", "--set")
INNER = "inner={batch: 8, sequence: 2048, compute: bfloat16, remat: block, loss_chunks: 8}"


def test_a_mesh_deals_out_what_a_device_needs():
    one, eight, groups = (
        data(*LARGE, INNER, "--set", f"regions=[{{name: a, mesh: {mesh}}}]")["devices"][0]
        for mesh in ("{}", "{fsdp: 4, tensor: 2}", "{data: 2, fsdp: 4}")
    )
    assert (one["devices"], eight["devices"], groups["devices"]) == (1, 8, 8)
    for part in ("state", "gradients"):
        assert eight[part] == pytest.approx(one[part] / 8)
        assert groups[part] == pytest.approx(one[part] / 4), "each group has a copy"
    assert eight["working"] < one["working"]


def test_what_does_not_fit_is_a_problem_with_a_remedy_that_does():
    asked = (*LARGE, "inner={batch: 8, sequence: 2048}", "--device", "80GB")
    found = data(*asked)
    verdict = found["devices"][0]
    assert not verdict["fits"] and "too large for 80GB: left, right need" in found["problems"][0]
    text = run(*asked).output
    assert "DOES NOT FIT" in text and "Nothing needs to change" not in text
    assert verdict["remedy"] == {"remat": "block"}, "one change is enough, and it is the mildest"
    changed = "inner={batch: 8, sequence: 2048, remat: block}"
    again = data(*LARGE, changed, "--device", "80GB")
    assert again["devices"][0]["fits"] and again["problems"] == []


def test_a_model_too_large_for_its_devices_needs_more_of_them():
    verdict = data(*LARGE, INNER, "--device", "v5e")["devices"][0]
    assert verdict["remedy"]["mesh"]["fsdp"] in (2, 4)
    hopeless = data(QUICK, "--set", "model.layers=2", "--device", "0.000001GB", "--step", "1s")
    assert hopeless["devices"][0]["remedy"] is None
    words = run(QUICK, "--set", "model.layers=2", "--device", "0.000001GB", "--step", "1s")
    assert "nothing we know of" in words.output


def test_a_named_device_says_how_fast_a_region_may_be():
    found = data(*LARGE, INNER, "--device", "h100")
    flops = 6 * 8 * 2048 * (found["parameters"] + 22 * 2048 * 2048)
    assert found["step_seconds"]["left"] == pytest.approx(flops / (0.4 * 989e12), rel=1e-3)
    too_fast = data(*LARGE, INNER, "--device", "h100", "--flops", "3.2e15")
    assert "cannot be that fast" in too_fast["problems"][0]


def test_a_device_that_nobody_knows_is_refused_with_those_that_are():
    result = run(QUICK, "--device", "h1000")
    assert isinstance(result.exception, SpecError) and "v5p" in (result.exception.hint or "")


@pytest.mark.parametrize("size", ["0GB", "-5GB", "infGB", "1e400GB", "80"])
def test_a_size_that_no_device_has_is_refused_for_its_number(size: str):
    result = run(QUICK, "--device", size)
    assert isinstance(result.exception, SpecError)
    assert f"{size!r} is no size of a device: it" in result.exception.message


@pytest.mark.parametrize("link", ["1bit", "2kbit", "20kbit/50ms", "1Mbit/2s"])
def test_a_line_is_not_said_to_carry_more_than_it_can(link: str):
    found = data(QUICK, "--link", link)
    day, rate = found["expected"]["bytes_per_day"], parse_link(link).rate
    for way in ("up", "down"):
        assert day[way] <= 86400 * rate * LINE_SHARE.value / 8
    slow = [words for words in found["problems"] if "not one version" in words]
    assert (day["down"] > 0.8 * day["up"] > 0) != bool(slow)


def test_short_steps_are_simulated_until_versions_come_of_them():
    """The server takes milliseconds for a version, and these steps take less."""
    found = data(QUICK, "--flops", "1e14")["expected"]
    assert found["bytes_per_day"]["down"] == pytest.approx(found["bytes_per_day"]["up"], rel=0.2)
    assert found["days_to_budget"] is not None and found["participation"] == 1.0


def test_what_takes_too_long_to_simulate_is_refused_by_the_time_that_a_plan_looks_at(tmp_path):
    """Twelve exchanges; `simulate` looks at a hundred unless it is told otherwise."""
    listed = [{"name": f"r{n}"} for n in range(20)] + [{"name": "slow", "speed": 0.01}]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(Path(QUICK).read_text()), "regions": listed}))
    words = ["--step", "1s", "--set", "sync.every=20000", "--set", "budget.tokens=1000000000"]
    found = run(str(file), *words).exception
    assert isinstance(found, SpecError) and found.message.startswith("2.4e+07 s with steps of 1 s")
    assert "sync.every" in str(found.hint) and "diloco simulate" in str(found.hint)


def test_round_trips_that_no_period_makes_up_for_are_no_error():
    words = run(QUICK, "--set", "sync.overlap=0", "--link", "1Gbit/1000s")
    assert words.exit_code == 0 and "no rate is enough" in words.output


def test_nothing_needs_to_change_is_not_said_beside_a_problem():
    """A quorum of failures that no key changes."""
    words = run(QUICK, "--step", "1s", "--mtbf", "60s", "--restart", "60s").output
    assert "Problems:" in words and "Nothing needs to change" not in words
    assert "Nothing needs to change" in run(QUICK, "--step", "1s").output


def test_what_holds_it_up_is_said_in_words():
    words = run(
        QUICK, "--step", "1s", "--link", "left=unlimited/1ms", "--link", "right=20kbit/50ms"
    )
    assert "the line of right has 20 kbit/s" in words.output
    assert "regions' own speed" in run(QUICK, "--step", "1s").output
    capped = run(QUICK, "--step", "1s", "--set", "wire.rate_limit=20kbit")
    assert "(wire.rate_limit) and needs" in capped.output
    slow = run(QUICK, "--step", "1s", "--mtbf", "60s", "--restart", "60s")
    assert "failures" in slow.output


@pytest.mark.parametrize("rate", ["60kbit", "45kbit", "30kbit"])
def test_advice_that_is_taken_makes_the_line_wide_enough(rate: str):
    asked, world = spec(), World(step=1.0, links=(f"{rate}/50ms",))
    scenario, _ = scenario_of(asked, fragment_sizes(asked), world)
    advice = advised(asked, scenario, 0.95)
    assert advice and all(one.why and one.price for one in advice)
    followed_spec = followed(asked, advice)
    taken, _ = scenario_of(followed_spec, fragment_sizes(followed_spec), world)
    needs, line = traffic(taken, 0.95), scenario.sites[0].link.rate / LINE_SHARE.value
    assert max(needs.need_up, needs.need_down) <= line * 1.001


def test_a_hopeless_line_is_called_so():
    asked = spec()
    scenario, _ = scenario_of(asked, fragment_sizes(asked), World(step=1.0, links=("1kbit/50ms",)))
    assert "too narrow" in advised(asked, scenario, 0.95)[-1].why


def test_lines_to_paste_are_yaml_of_a_spec_that_loads():
    asked = spec(overlap=0, quorum=2)
    scenario, _ = scenario_of(asked, fragment_sizes(asked), World(step=1.0, links=("60kbit/50ms",)))
    advice = advised(asked, scenario, 0.95)
    assert {"sync.overlap", "sync.quorum"} <= {one.key for one in advice}
    whole = asked.model_dump()
    for line in pasted(asked, advice):
        whole |= yaml.safe_load(line)
    assert RunSpec.model_validate(whole).sync.overlap == 2


def test_without_overlap_the_same_target_needs_a_wider_line():
    sizes, world = fragment_sizes(spec()), World(step=1.0)
    waits, goes_on = (
        traffic(scenario_of(spec(overlap=n), sizes, world)[0], 0.95).need_down for n in (0, 2)
    )
    assert waits > 5 * goes_on


def test_failures_cost_restarts_and_lost_work():
    recovery = Recovery(detect=1.0, restart=89.0, checkpoint=20.0)
    assert unbroken(World(mtbf=900.0, recovery=recovery)) == pytest.approx(0.9)
    assert unbroken(World()) == 1.0


def test_time_outs_are_those_the_run_will_use():
    found = plan(spec(), World(step=1.0, links=("1Mbit/50ms",)))
    outs = {one.name: one.seconds for one in found.time_outs}
    size, waits = int(found.needs.fragment_up), Timeouts()
    assert outs["connect"] == waits.connect
    assert outs["fragment up, at first"] == waits.transfer(size)
    assert outs["fragment up, then"] == pytest.approx(
        waits.answer + PATIENCE * size / (LINE_SHARE.value * 1e6 / 8)
    )
    assert outs["lease"] == 10.0


@pytest.mark.live
def test_a_probe_measures_the_way_to_a_real_server():
    with stage(400_000) as running:
        url = running.url
        result = run(QUICK, "--step", "1s", "--probe", url)
    assert result.exit_code == 0, result.output
    assert f"the way to {url} was measured" in result.output


@pytest.mark.live
def test_a_probe_takes_steps_from_the_regions_that_train_there(tmp_path: Path):
    file = tmp_path / "spec.yaml"
    regions = [{"name": "here"}, {"name": "there", "speed": 0.5}]
    file.write_text(yaml.safe_dump({**yaml.safe_load(Path(QUICK).read_text()), "regions": regions}))
    with stage(400_000) as running, Client(running.url) as client:
        running.join(client)
        nothing = {fate: [0] for fate in ("trained", "applied", "pending", "refused", "discarded")}
        report = {
            "stopping": False,
            "ended": 0,
            "epoch": running.epoch,
            "step": 9,
            "training": True,
            "fragments": [{"version": 0, "steps": 9}],
            "tokens": nothing,
            "tokens_per_second": 2048.0,
        }
        client.heartbeat("here", report)
        found = data(str(file), "--probe", running.url)
        given = data(str(file), "--probe", running.url, "--step", "1s")
    assert found["step_seconds"]["here"] == pytest.approx(8 * 64 / 2048)
    assert any("0.25 s in here" in words for words in found["assumptions"])
    assert any("in there: 6 × parameters" in words for words in found["assumptions"])
    assert given["step_seconds"] == {"here": 1.0, "there": 2.0}


def test_the_guide_plans_a_spec_that_loads(tmp_path: Path):
    text = GUIDE.read_text().partition("```yaml\n")[2].partition("```")[0]
    file = tmp_path / "twelve-billion.yaml"
    file.write_text(text)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("text")
    found = load_run(file).spec
    assert resolve(found).layout.size == pytest.approx(12e9, rel=0.05)
