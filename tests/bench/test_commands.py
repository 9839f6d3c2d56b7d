"""A figure is printed with its limit, their ratio and its goal."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco_cli.bench import inner
from diloco_cli.bench.commands import show
from diloco_cli.bench.figure import Figure
from diloco_cli.cli.app import app
from diloco_cli.cli.spec import Format
from diloco_cli.errors import RunFailed

FIGURE = Figure("inner", 7600.0, "tokens/s", 8000.0, 0.93)
PLAIN = {
    "name": "inner",
    "value": 7600.0,
    "unit": "tokens/s",
    "reference": 8000.0,
    "ratio": 0.95,
    "goal": 0.93,
    "met": True,
}
KEYS = set(PLAIN)


def figures(*arguments: str) -> list[dict]:
    result = CliRunner().invoke(app, ["bench", *arguments, "--format", "json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["figures"]


def test_the_light_commands_are_started_for_real():
    found = figures("start", "--times", "1")
    assert [figure["name"] for figure in found] == ["diloco --help", "diloco validate"]
    for figure in found:
        assert set(figure) >= KEYS
        assert figure["value"] > 0 and figure["reference"] > 0
        assert figure["met"] == (figure["value"] <= figure["goal"])


def test_json_is_one_document_with_the_figures(capsys):
    show([FIGURE], Format.json)
    assert json.loads(capsys.readouterr().out) == {"figures": [PLAIN]}


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, ["7,600", "8,000", "0.95", "≥ 0.93", "met"]),
        ({"value": 7200.0}, ["0.9", "missed"]),
        ({"value": 0.31, "goal": 0.4, "lower": True}, ["0.31", "≤ 0.4"]),
    ],
)
def test_people_get_a_table_that_says_whether_the_goal_was_met(capsys, change, said):
    show([replace(FIGURE, **change)], Format.text)
    printed = capsys.readouterr().out
    assert all(words in printed for words in said)


def test_a_goal_bounds_the_ratio_or_the_value_from_below_or_above():
    def met(value: float, goal: float | None, **how: Any) -> bool | None:
        return Figure("any", value, "s", 10.0, goal, **how).met

    assert met(6.0, 0.5) is True and met(4.0, 0.5) is False
    assert met(6.0, 0.5, lower=True) is False and met(4.0, 0.5, lower=True) is True
    assert met(3.2, 3.3, goal_of="value", lower=True) is True
    assert met(3.4, 3.3, goal_of="value", lower=True) is False
    assert met(3.4, None) is None


@pytest.mark.live
@pytest.mark.parametrize("hosts", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_a_worker_is_measured_beside_a_bare_loop(hosts):
    asked = ["bench", "inner", "--windows", "1", "--seconds", "2", "--format", "json"]
    result = CliRunner().invoke(app, [*asked, "--hosts", hosts])
    if isinstance(result.exception, RunFailed):
        # On a busy machine a single window may be unbelievable; then it is not believed.
        assert "the two are not comparable" in result.exception.message
        return
    (figure,) = json.loads(result.stdout)["figures"]
    assert set(figure) >= KEYS and figure["unit"] == "tokens/s"
    assert figure["value"] > 0 and figure["ratio"] == pytest.approx(
        figure["value"] / figure["reference"], rel=0.01
    )


def test_a_figure_is_the_pair_with_the_median_ratio():
    found = inner.figure([(95, 100), (45, 50), (99, 100), (10, 100)])
    assert (found.value, found.reference, found.ratio) == (45, 50, 0.9)
    assert not found.met and inner.figure([(95, 100)]).met


def test_a_machine_that_changes_its_speed_does_not_change_the_ratio():
    assert inner.figure([(90, 100), (45, 50), (180, 200)]).ratio == 0.9


def test_a_worker_faster_than_its_own_limit_is_not_believed():
    with pytest.raises(RunFailed, match=r"1\.45 times as fast"):
        inner.figure([(145, 100)])


def test_both_sides_prepare_their_process_the_same_way(monkeypatch):
    """The bare loop once lacked a setting of the trainer: the limit was a third too low."""
    import diloco_cli.worker.trainer.built_in_trainer as trainer
    import diloco_cli.worker.trainer.task as task

    class Enough(Exception):
        pass

    def set_up(cores):
        raise Enough(list(cores))

    monkeypatch.setattr(task, "set_up", set_up)
    monkeypatch.setattr(trainer, "set_up", set_up)
    spec = inner._spec(1)
    with pytest.raises(Enough, match="1"):
        inner._loop(None, spec, 1, 0, "")  # pyright: ignore[reportArgumentType]
    with pytest.raises(Enough, match="1"):
        trainer.train(spec, "bench", inner.Path("nowhere"), cores=[1])
