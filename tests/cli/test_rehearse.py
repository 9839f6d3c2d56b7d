"""A figure is printed with its limit, their ratio and its goal."""

import json

from typer.testing import CliRunner

from diloco_cli.cli.app import app

FIGURE = {
    "name": "inner",
    "value": 7600.0,
    "unit": "tokens/s",
    "reference": 8000.0,
    "ratio": 0.95,
    "goal": 0.93,
    "met": True,
}


def bench(monkeypatch, *options):
    asked = {}

    def measured(**how):
        asked.update(how)
        return [FIGURE]

    monkeypatch.setattr("diloco_cli.cli.measure.inner_figures", measured)
    result = CliRunner().invoke(app, ["bench", "inner", *options])
    assert result.exit_code == 0, result.output
    return result.stdout, asked


def test_json_is_one_document_with_the_figures(monkeypatch):
    printed, _ = bench(monkeypatch, "--format", "json")
    assert json.loads(printed) == {"figures": [FIGURE]}


def test_people_get_a_table_that_says_whether_the_goal_was_met(monkeypatch):
    printed, asked = bench(monkeypatch, "--windows", "3", "--seconds", "2")
    assert "0.950" in printed and "met" in printed
    assert asked == {"windows": 3, "seconds": 2.0}
