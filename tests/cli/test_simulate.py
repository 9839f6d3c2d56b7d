"""`diloco simulate`: presets and specs, as tables, JSON and pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco_cli.bench.published import PRESETS
from diloco_cli.bench.published.verdict import PublishedGoal, Verdict
from diloco_cli.cli.app import app
from diloco_cli.errors import SpecError
from diloco_cli.sim.sweep import parse_vary
from tests import ROOT

QUICK = str(ROOT / "pipelines" / "quickstart.yaml")
SHORT = ("--step", "0.1s", "--duration", "60s")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


def data(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def missed(seed: int = 0) -> Verdict:
    return Verdict(
        "made-up",
        "x",
        ("a", "b"),
        {"row": [1.0, 2.0]},
        {"row": [1.5, 2.0]},
        (PublishedGoal("g", 1, 2),),
    )


def test_a_preset_prints_ours_beside_the_published_and_its_goals():
    result = run("streaming-table4")
    assert result.exit_code == 0, result.output
    assert "13.3 (13.3)" in result.output
    assert "fitted" in result.output and "met" in result.output


def test_a_preset_as_json_has_columns_and_rows():
    found = data("streaming-table4")
    assert found["columns"] == ["50%", "80%", "90%", "95%", "99%"]
    assert all(len(row) == 5 for row in found["rows"].values())
    assert found["met"] is True


def test_a_goal_that_is_missed_is_an_exit_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PRESETS, "made-up", missed)
    result = run("made-up")
    assert result.exit_code == 1
    assert "missed" in result.output and "1 (1.5)" in result.output


def test_a_spec_is_simulated_for_every_combination():
    found = data(QUICK, *SHORT, "--vary", "regions=1,3", "--vary", "link=1,10Mbit")
    labels = ["regions=1 link=1Mbit", "regions=1 link=10Mbit"]
    labels += ["regions=3 link=1Mbit", "regions=3 link=10Mbit"]
    assert list(found["rows"]) == labels
    up = found["columns"].index("GB up")
    assert found["rows"][labels[3]][up] > 2 * found["rows"][labels[1]][up]
    assert set(found["synchronous"][labels[0]]) == {"rigid", "elastic"}


def test_keys_of_the_spec_can_be_varied_too():
    found = data(QUICK, *SHORT, "--vary", "sync.every=12,48")
    often, seldom = (found["outcomes"][f"sync.every={n}"]["versions"] for n in (12, 48))
    assert often > 2 * seldom


def test_what_was_played_can_be_played_again(tmp_path: Path):
    faults = tmp_path / "faults.json"
    first = data(QUICK, *SHORT, "--mtbf", "20s", "--record", str(faults))
    again = data(QUICK, *SHORT, "--trace", str(faults))
    assert first["outcomes"]["as given"]["faults"] > 0
    assert again["outcomes"] == first["outcomes"]


def test_pictures_are_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    for number, what in enumerate([(QUICK, *SHORT), ("streaming-table4",)]):
        file = tmp_path / f"{number}.png"
        assert run(*what, "--plot", str(file)).exit_code == 0
        assert file.read_bytes().startswith(b"\x89PNG")


def test_without_the_extra_a_picture_says_what_to_install(tmp_path: Path):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from diloco_cli.cli.app import main\n"
        f"main(['simulate', {QUICK!r}, '--step', '0.1s', '--duration', '9s', '--plot', 'x.png'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ended.returncode == 2
    assert "diloco-cli[plot]" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("streaming-table5",), "streaming-table4"),
        (("hetero", "--step", "1s"), "--step"),
        ((QUICK, "--vary", "colour=red"), "colour"),
        ((QUICK, "--vary", "regions=two"), "two"),
        (
            (
                QUICK,
                "--vary",
                "regions=" + ",".join("1" * 40),
                "--vary",
                "seed=" + ",".join("1" * 40),
            ),
            "1,600",
        ),
        ((QUICK, "--mtbf", "often"), "often"),
        ((QUICK, "--kind", "cut"), "cut"),
        ((QUICK, "--link", "rome=1Gbit"), "rome"),
        ((QUICK, "--trace", "/nonexistent.json"), "nonexistent"),
        (("nowhere.yaml",), "nowhere.yaml"),
        ((QUICK, "--flops", "1e308"), "1e+308 flop/s an inner step of left takes 2.52e-299 s"),
        ((QUICK, "--flops", "1e20"), "2.52e-11 s; between 1e-06 and"),
        ((QUICK, "--step", "1e11s"), "a step of 1e+11 s"),
        ((QUICK, "--step", "1e400s"), "'1e400s' is no time: it must be at most"),
        ((QUICK, "--mtbf", "1e400h"), "'1e400h'"),
        ((QUICK, "--server-mtbf", "infs"), "'infs' is no time: it must be a finite number"),
        ((QUICK, "--restart", "1e400h"), "'1e400h'"),
        ((QUICK, "--duration", "1e400s"), "'1e400s'"),
        ((QUICK, "--duration", "10000d"), "8.64e+08 s with steps of 0.063 s are 2.7e+10"),
        ((QUICK, "--mtbf", "1us"), "'1us'"),
        ((QUICK, "--mtbf", "0.000001s"), "--mtbf: with 1e-06 s between two failures"),
        ((QUICK, "--server-mtbf", "0.000001s"), "--server-mtbf: with 1e-06 s"),
        ((QUICK, "--vary", "flops=inf"), "'inf' is no number of flop/s"),
        ((QUICK, "--vary", "link=0"), "'0' is no rate: it must be above 0"),
    ],
)
def test_what_cannot_be_simulated_is_said(arguments: tuple[str, ...], said: str):
    result = run(*arguments)
    assert isinstance(result.exception, SpecError), result.output
    assert said in f"{result.exception.message} {result.exception.hint}"


def test_a_unit_after_the_last_value_counts_for_all():
    assert parse_vary(["link=0.5,1,2Gbit"]) == {"link": ["0.5Gbit", "1Gbit", "2Gbit"]}
    assert parse_vary(["link=100Mbit,1Gbit"]) == {"link": ["100Mbit", "1Gbit"]}
    assert parse_vary(["mtbf=1,6h"]) == {"mtbf": ["1h", "6h"]}


def test_simulating_and_planning_load_no_accelerator_stack():
    code = (
        "import sys\nfrom diloco_cli.cli.app import main\n"
        f"simulate = ['simulate', {QUICK!r}, '--step', '0.1s', '--duration', '9s']\n"
        f"for words in (simulate, ['plan', {QUICK!r}]):\n"
        "    try: main(words)\n"
        "    except SystemExit as ended: assert not ended.code, ended.code\n"
        "print(sorted({'jax', 'jaxlib', 'flax', 'optax', 'numba'} & set(sys.modules)))"
    )
    told = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert told.splitlines()[-1] == "[]"
