"""Parts, connections and time-outs follow from what the link did, not from constants."""

from __future__ import annotations

import logging

import pytest

from diloco_cli.net.options import PART_BYTES, Options, Timeouts
from diloco_cli.net.transfer.throttle import Throttle
from diloco_cli.net.transfer.throughput import LEAST_PART_BYTES, Throughput
from diloco_cli.net.transfer.upload import missing

MEGABIT = 1e6 / 8
OPTIONS = Options(Timeouts(answer=10.0, slowest_bytes_per_second=100_000))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def gauge(clock):
    return Throughput("uploads", OPTIONS, now=clock)


def settle(gauge: Throughput, clock: Clock, rate: float, *, rounds: int = 20) -> None:
    """Moves parts over a link of this rate, with all the connections the gauge wants."""
    for _ in range(rounds):
        lanes = gauge.lanes(10**9)
        size = gauge.part(lanes)
        seconds = size * lanes / rate + 0.05
        clock.now += seconds
        gauge.moved(size, seconds, lanes=lanes)


def test_an_unknown_link_begins_with_one_small_part(gauge):
    assert (gauge.part(), gauge.lanes(10**9)) == (LEAST_PART_BYTES, 1)
    assert not gauge.short(2_000_000)
    assert gauge.seconds(1_000_000) == 20.0


@pytest.mark.parametrize("megabits", [10, 100, 1000])
def test_a_part_takes_about_half_a_second_on_any_link(gauge, clock, megabits):
    settle(gauge, clock, megabits * MEGABIT)
    lanes = gauge.lanes(10**9)
    assert 0.3 < gauge.part(lanes) * lanes / (megabits * MEGABIT) < 0.7


def test_parts_are_never_larger_than_allowed_nor_too_small_to_be_worth_it(gauge, clock):
    settle(gauge, clock, 1e10)
    assert gauge.part(1) == PART_BYTES
    gauge.rate = 1000.0
    assert gauge.part(1) == LEAST_PART_BYTES


def test_parts_grow_step_by_step(gauge):
    gauge.moved(gauge.part(), 0.001)
    assert gauge.part() == 4 * LEAST_PART_BYTES


def test_connections_that_live_short_get_shorter_parts(gauge, clock):
    settle(gauge, clock, 100 * MEGABIT)
    for _ in range(6):
        clock.now += 0.4
        gauge.broke()
    assert 0.05 <= gauge.aim <= 0.3
    clock.now += 3600
    assert gauge.aim == 0.5 and gauge.short(30_000_000)


def test_connections_that_break_together_broke_once(gauge, clock):
    settle(gauge, clock, 100 * MEGABIT)
    clock.now += 2.0
    gauge.broke()
    lifetime = gauge.lifetime
    for _ in range(3):
        gauge.broke()
    assert gauge.lifetime == lifetime


def test_a_body_that_is_long_on_a_fragile_link_travels_in_parts(gauge, clock):
    settle(gauge, clock, 10 * MEGABIT)
    assert gauge.short(5_000_000)
    clock.now += 2.0
    gauge.broke()
    assert not gauge.short(5_000_000) and gauge.short(100_000)


def test_a_link_that_became_slow_is_believed_after_a_few_time_outs(gauge, clock):
    settle(gauge, clock, 1e9)
    before = gauge.seconds(32_000_000)
    for _ in range(8):
        clock.now += before
        gauge.broke(slow=True)
    assert gauge.part() <= 2_000_000
    assert gauge.seconds(32_000_000) > before + 20


def test_time_outs_follow_from_the_rate(gauge, clock):
    settle(gauge, clock, 10 * MEGABIT, rounds=50)
    assert 10 + 3 * 25.6 < gauge.seconds(32_000_000) < 10 + 5.5 * 25.6
    assert gauge.seconds(32_000_000, lanes=2) > gauge.seconds(32_000_000)


def test_what_is_over_at_once_does_not_make_a_fast_link_look_slow(gauge, clock):
    settle(gauge, clock, 1000 * MEGABIT)
    rate = gauge.rate
    gauge.moved(300_000, 0.06)
    assert gauge.rate == rate


def test_a_near_server_gets_few_connections(gauge, clock):
    settle(gauge, clock, 1e9)
    assert gauge.lanes(10**9) == 4
    gauge.answered(0.001)
    assert gauge.lanes(10**9) == 2


def test_what_is_derived_is_logged_once(clock, caplog):
    caplog.set_level(logging.INFO)
    gauge = Throughput("uploads", OPTIONS, now=clock)
    for _ in range(3):
        gauge.moved(1_000_000, 0.8)
    (line,) = caplog.messages
    assert line.startswith("uploads: 1.25 MB/s") and "given up after" in line


def test_a_bucket_lets_pass_what_its_rate_allows(clock):
    bucket = Throttle(8e6, now=clock, wait=clock.wait)
    began = clock.now
    for _ in range(100):
        bucket.take(50_000)
    assert clock.now - began == pytest.approx(4.95)
    assert bucket.piece == 50_000
    with pytest.raises(ValueError, match="lets nothing pass"):
        Throttle(0)


def test_a_bucket_saves_nothing_up_while_nobody_sends(clock):
    bucket = Throttle(8e6, now=clock, wait=clock.wait)
    clock.now += 100
    bucket.take(1_000_000)
    bucket.take(1)
    assert clock.pauses == [pytest.approx(1.0)]


@pytest.mark.parametrize(
    "have, gaps",
    [
        ((), [(0, 10)]),
        (((0, 10),), []),
        (((2, 4), (6, 10)), [(0, 2), (4, 6)]),
        (((0, 3), (3, 5)), [(5, 10)]),
        (((0, 99),), []),
    ],
)
def test_what_is_missing_is_what_is_not_there(have, gaps):
    assert missing(have, 10) == gaps


def test_a_link_on_which_nothing_arrived_in_time_gets_more_of_it(gauge, clock):
    usual = gauge.seconds(250_000)
    for times in (2, 4, 8):
        clock.now += usual
        gauge.broke(slow=True)
        assert gauge.seconds(250_000) == pytest.approx(times * usual)
    for _ in range(20):
        clock.now += usual
        gauge.broke(slow=True)
    assert gauge.seconds(250_000) == pytest.approx(64 * usual)
