"""Some seconds of `make fuzz`: no input does worse than a refusal, none is taken for another."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from .hunt import ENGINES, TARGETS, hunt
from .seeds import SEEDS
from .targets import TARGETS as FUNCTIONS

RUNS = {"hypothesis": 700, "atheris": 4000}


@pytest.mark.parametrize("target", TARGETS)
def test_honest_bytes_are_taken(target):
    """Or else the refusals below would prove nothing."""
    found = [FUNCTIONS[target](data) for data in SEEDS[target]()]
    assert set(found) <= {"taken", "chain"}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in /proc")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("engine", ENGINES)
def test_bad_bytes_are_refused_within_64_mebibytes(engine, target, tmp_path, capfd):
    if engine == "atheris" and not importlib.util.find_spec("atheris"):
        pytest.skip("atheris is not installed; `make fuzz` does that")
    assert hunt(engine, target, 0, RUNS[engine], tmp_path), capfd.readouterr().out
