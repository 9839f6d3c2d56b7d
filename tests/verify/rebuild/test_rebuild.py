"""Servers lost and set back, regions that die while they realign: nothing is merged twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.verify.rebuild.explore import explore
from tests.verify.rebuild.rules import NAMES, Rules


def test_no_promise_is_broken():
    total, broken = explore(range(60))
    assert broken == {}
    assert total["rebuilt"] > 60 and total["realigned"] > 100 and total["deaths"] > 100
    assert total["lost versions"] > 20


@pytest.mark.parametrize("name", NAMES)
def test_each_rule_is_missed(name):
    rules = replace(Rules(), **{name: False})
    broken = (explore(range(seed, seed + 1), rules)[1] for seed in range(300))
    assert any(broken), f"nothing is noticed without the rule {name}"
