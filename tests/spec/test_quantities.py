"""Numbers with units: what is wrong with one is said of the number before its unit."""

from __future__ import annotations

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.spec.quantities import (
    DELAY,
    DURATION,
    FLOPS,
    MEMORY,
    RATE,
    SIZE,
    SPAN,
    Quantity,
    rate_of,
    seconds_of,
)
from tests.spec.short_spec import GOOD, the_problem

EVERY = (DURATION, SPAN, RATE, DELAY, SIZE, MEMORY, FLOPS)


@pytest.mark.parametrize(
    ("quantity", "words", "value"),
    [
        (SPAN, "90", 90.0),
        (SPAN, "1.5 min", 90.0),
        (SPAN, "2e-3s", 0.002),
        (DURATION, "7d", 604800.0),
        (RATE, "1.5Gbit", 1.5e9),
        (DELAY, "0ms", 0.0),
        (SIZE, "4MB", 4e6),
        (MEMORY, "80gb", 80e9),
        (FLOPS, "4e13", 4e13),
    ],
)
def test_a_number_counts_in_its_unit(quantity: Quantity, words: str, value: float):
    assert quantity.read(words) == pytest.approx(value)


@pytest.mark.parametrize("quantity", EVERY, ids=lambda each: each.noun)
@pytest.mark.parametrize(
    ("number", "why"),
    [
        ("inf", "it must be a finite number"),
        ("-Infinity", "it must be a finite number"),
        ("nan", "it must be a finite number"),
        ("-5", "it must be "),
        ("1e400", "it must be at most"),
        ("9" * 400, "it must be at most"),
        ("1e-300", "it must be at least"),
    ],
)
def test_a_number_that_cannot_be_is_refused_in_every_unit(
    quantity: Quantity, number: str, why: str
):
    for unit in quantity.units:
        with pytest.raises(SpecError) as refused:
            quantity.read(f"{number}{unit}")
        assert f"{number}{unit}" in refused.value.message and why in refused.value.message
        assert refused.value.hint == quantity.hint


def test_zero_is_a_number_only_where_it_makes_sense():
    assert DELAY.read("0s") == 0.0
    for quantity in (DURATION, SPAN, RATE, MEMORY, FLOPS):
        with pytest.raises(SpecError, match="it must be above 0"):
            quantity.read("0")


def test_the_number_is_looked_at_before_the_unit():
    with pytest.raises(SpecError, match="it must be above 0"):
        RATE.read("-60ms")
    with pytest.raises(SpecError, match="its unit must be one of bit, kbit"):
        RATE.read("60ms")
    with pytest.raises(SpecError, match="'fast' is no rate\\."):
        RATE.read("fast")


def test_a_spec_reads_them_in_the_same_way():
    assert seconds_of("1e400d") is None and rate_of("infMbit") is None
    assert rate_of("1.5Gbit/s") == 1.5e9
    found = the_problem(GOOD, "server.forget=1e400d")
    assert "which is no duration (it must be at most 1e+12 s)" in found.message
    found = the_problem(GOOD, f"wire.rate_limit={'9' * 40}Mbit")
    assert "(it must be at most 1e+18 bit)" in found.message
    assert "Did you mean" not in (found.hint or "")
    found = the_problem(GOOD, "wire.rate_limit=0Mbit")
    assert "which is no rate (it must be above 0)" in found.message
