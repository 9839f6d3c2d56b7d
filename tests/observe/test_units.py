"""Figures read the same everywhere, and the unknown is never a zero."""

import pytest

from diloco_cli.observe.units import amount, bytes_, percent, seconds


@pytest.mark.parametrize(
    "value, text",
    [(None, "–"), (0, "0"), (950, "950"), (9999, "9999"), (12_345, "12.3k"), (4e6, "4.00M")],
)
def test_amounts(value, text):
    assert amount(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(None, "–"), (8.4, "8 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (90_000, "1 d 1 h")],
)
def test_times(value, text):
    assert seconds(value) == text


def test_sizes_and_shares():
    assert [bytes_(512), bytes_(3200), bytes_(1.5e9)] == ["512 B", "3.2 kB", "1.5 GB"]
    assert percent(0.755) == "76%" and percent(float("nan")) == "–"
