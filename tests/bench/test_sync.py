"""A small synchronisation is measured with a real server and real regions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from diloco_cli.assemble import resolve
from diloco_cli.bench.sync import parameters_of, regions_of, sync_spec
from diloco_cli.errors import SpecError


def test_every_figure_has_its_limit_and_nobody_is_left_behind():
    command = "bench sync --params 200k --regions 1,2 --rounds 1 --warm 1 --format json"
    done = subprocess.run(
        [sys.executable, "-m", "diloco_cli", *command.split()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    figures = {each["name"]: each for each in json.loads(done.stdout)["figures"]}
    for regions in (1, 2):
        name = f"0.2 M × {regions} regions"
        up, down = figures[f"{name}, up"], figures[f"{name}, down"]
        assert 0.3 < up["value"] < 0.5 and 0.3 < down["value"] < 0.5
        assert figures[f"{name}, CPU of all"]["value"] > 0
        assert figures[f"{name}, server's peak memory"]["value"] > 50
    assert figures["server's peak memory, 2 regions / 1"]["goal"] == 1.1


@pytest.mark.parametrize("text, count", [("10M", 10**7), ("250k", 250_000), ("1_000_000", 10**6)])
def test_parameters_are_written_as_people_do(text, count):
    assert parameters_of(text) == count
    assert resolve(sync_spec(count, 2)).layout.size == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize("text", ["", "M", "10", "ten", "nanM", "infM", "1e12M", "-5M"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(SpecError, match="--params"):
        parameters_of(text)


@pytest.mark.parametrize("text", ["", "0", "2,", "four", "65", "-1"])
def test_what_is_no_number_of_regions_is_refused(text):
    assert regions_of("2,8") == [2, 8]
    with pytest.raises(SpecError, match="--regions"):
        regions_of(text)
