"""A link takes its time: bytes come out in order, never early, never faster than the line."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.errors import SpecError
from diloco_cli.sim.network import Lane, Link, parse_link, parse_rate, parse_seconds

MEGABIT = Link(rate=8e6, delay=0.1)
"""A megabyte a second, a tenth of a second away."""


def arrivals(lane: Lane, *sends: tuple[float, int]) -> list[float]:
    times = []
    for now, size in sends:
        lane = lane.send(size, now=now)
        times.append(lane.last)
    return times


def test_bytes_need_the_line_and_then_the_way():
    assert arrivals(Lane(MEGABIT), (5.0, 500_000)) == [pytest.approx(5.6)]


def test_bytes_wait_behind_those_before_them():
    sends = (0.0, 1_000_000), (0.5, 1_000_000), (3.0, 1_000_000)
    assert arrivals(Lane(MEGABIT), *sends) == pytest.approx([1.1, 2.1, 4.1])


def test_an_empty_message_takes_the_way_only():
    assert arrivals(Lane(MEGABIT), (0.0, 0)) == [0.1]


def test_a_link_without_a_rate_only_delays():
    assert arrivals(Lane(Link(delay=0.1)), (0.0, 10**12), (0.0, 10**12)) == [0.1, 0.1]


def test_the_queue_has_room_again_when_the_line_has_caught_up():
    lane = Lane(MEGABIT).send(600_000, now=0.0)
    assert lane.opens() == pytest.approx(0.5)


def test_on_a_link_that_got_faster_nothing_overtakes():
    slow = Lane(Link(rate=8e6, delay=2.0)).send(1, now=0.0)
    fast = slow.over(Link(rate=8e9)).send(1, now=0.001)
    assert fast.last == slow.last
    assert fast.send(1, now=5.0).last == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("now", "out"),
    [
        (0.0, 0.6),  # before the outage
        (0.7, 3.3),  # half of the line's work before it, half after
        (0.95, 3.55),  # caught on the line
        (1.5, 3.6),  # given to a link that is out
        (3.0, 3.6),
    ],
)
def test_while_a_link_is_out_its_clock_stands_still(now: float, out: float):
    link = Link(rate=8e6, delay=0.1, outages=((1.0, 3.0), (9.0, 10.0)))
    assert arrivals(Lane(link), (now, 500_000)) == [pytest.approx(out)]


def test_one_transfer_may_outlast_several_outages():
    link = Link(rate=8e6, outages=((1.0, 2.0), (3.0, 5.0)))
    assert arrivals(Lane(link), (0.0, 4_000_000)) == [pytest.approx(7.0)]


steps = st.lists(st.tuples(st.floats(0, 2), st.integers(0, 10**7)), min_size=1, max_size=20)
outages = st.lists(st.floats(0.01, 50), max_size=6, unique=True).map(
    lambda edges: tuple(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
)


@given(steps, outages, st.floats(1e3, 1e10), st.floats(0, 1))
def test_no_moment_carries_more_than_the_rate(
    steps: list[tuple[float, int]],
    outages: tuple[tuple[float, float], ...],
    rate: float,
    delay: float,
):
    """Whatever was sent when, and however the link was out."""
    link = Link(rate=rate, delay=delay, outages=outages)
    lane, now, sent = Lane(link), 0.0, 0
    for pause, size in steps:
        now += pause
        sent += size
        earlier, lane = lane, lane.send(size, now=now)
        assert lane.last >= max(earlier.last, now + delay + size * 8 / rate - 1e-6)
        assert lane.last >= sent * 8 / rate + delay - 1e-6


def test_a_connection_may_fill_the_line_and_the_queue_but_no_more():
    assert Link(rate=8e6, delay=0.1, queue=0.1).capacity == 300_000
    assert Link(rate=8e6, delay=0.1, window=50_000).capacity == 50_000
    assert 0 < Link(delay=0.1).capacity < 1 << 30


def test_resets_come_at_regular_times():
    link = Link(reset_every=2.0)
    assert [link.next_reset(now=now) for now in (0.0, 1.9, 2.0)] == [2.0, 2.0, 4.0]
    assert Link().next_reset(now=0.0) is None


@given(st.floats(1e-3, 1e3), st.floats(0, 1e6))
def test_the_next_reset_is_always_ahead(every: float, now: float):
    following = Link(reset_every=every).next_reset(now=now)
    assert following is not None and now < following <= now + every * (1 + 1e-6) + 1e-6


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("10Mbit/50ms", Link(rate=10e6, delay=0.025)),
        ("1Gbit/50ms", Link(rate=1e9, delay=0.025)),
        (" 1.5 Gbit/s / 80 ms ", Link(rate=1.5e9, delay=0.04)),
        ("100Mbps", Link(rate=100e6)),
        ("unlimited/1s", Link(delay=0.5)),
        ("1Gbit/50ms/window=3MB", Link(rate=1e9, delay=0.025, window=3_000_000)),
        ("10Mbit/50ms/reset=2s/queue=0s", Link(10e6, 0.025, queue=0.0, reset_every=2.0)),
        ("10Mbit/reset=2s", Link(rate=10e6, reset_every=2.0)),
        ("10Mbit/0s/out=1s..2s/out=5s..6s", Link(10e6, outages=((1.0, 2.0), (5.0, 6.0)))),
    ],
)
def test_a_link_is_said_in_words(words: str, link: Link):
    assert parse_link(words) == link
    assert parse_link(str(link)) == link


@given(st.integers(1, 10**12), st.integers(0, 10**7), st.integers(1, 10**10))
def test_what_it_says_of_itself_is_what_it_is(rate: int, microseconds: int, window: int):
    link = Link(rate=float(rate), delay=microseconds / 2e6, window=window, reset_every=rate / 7)
    again = parse_link(str(link))
    assert again.rate == pytest.approx(link.rate)
    assert again.delay == pytest.approx(link.delay)
    assert again.window == window
    assert again.reset_every == pytest.approx(link.reset_every)


def test_words_are_short():
    assert str(Link(rate=10e6, delay=0.025)) == "10Mbit/50ms"
    assert str(Link()) == "unlimited/0s"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("10MB/50ms", "'10MB' is no rate"),
        ("fast", "'fast' is no rate"),
        ("10Mbit/50", "'50' is no time"),
        ("10Mbit/50ms/loss=1%", "'loss=1%'"),
        ("10Mbit/50ms/80ms", "'80ms'"),
        ("0Mbit/50ms", "it must be above 0"),
        ("10Mbit/50ms/reset=0s", "no connection would live"),
        ("10Mbit/50ms/out=5s..1s", "overlap"),
        ("10Mbit/50ms/window=0B", "nothing could be sent"),
        ("-1Mbit", "is no rate"),
        ("", "is no rate"),
    ],
)
def test_words_that_mean_nothing_are_refused_with_an_example(words: str, told: str):
    with pytest.raises(SpecError) as refused:
        parse_link(words)
    assert told in refused.value.message
    assert "10Mbit/50ms" in (refused.value.hint or "")


@pytest.mark.parametrize(
    "options", [{"rate": math.nan}, {"delay": -0.1}, {"delay": math.inf}, {"queue": math.nan}]
)
def test_impossible_links_cannot_be_made(options: dict[str, Any]):
    with pytest.raises(ValueError, match=r"rate|delay"):
        Link(**options)


def test_rates_and_times_can_be_read_alone():
    assert parse_rate("2Gbit") == 2e9
    assert parse_seconds("200us") == pytest.approx(2e-4)
