"""A server behind an emulated link: what passes, how soon, and how much of it at a time."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time

import pytest

from diloco_cli.chaos.emulator.proxy import Proxy, emulated
from diloco_cli.sim.network import Lane, Link, parse_link
from tests.chaos.emulator.far_server import PATIENCE, Shore, count, echo, pour, sleepy
from tests.chaos.emulator.link_client import (
    A_MOMENT,
    all_of,
    behind,
    call,
    exchange,
    sending,
    wait_until,
)


@pytest.mark.parametrize("link", ["unlimited", "200Mbit/5ms", "200Mbit/5ms/window=20kB"])
def test_bytes_pass_unchanged_and_in_order(link: str):
    body = os.urandom(500_000)
    with behind(link, echo) as (proxy, _), call(proxy) as end:
        assert exchange(end, body) == body
        told = proxy.traffic()
    assert told.up == told.up_arrived == told.down == told.down_arrived == len(body)
    assert (told.connections, told.open, told.resets) == (1, 1, 0)


def test_the_end_of_one_side_is_not_the_end_of_the_other():
    with behind("100Mbit/5ms", count) as (proxy, _), call(proxy) as end:
        end.sendall(bytes(12_345))
        end.shutdown(socket.SHUT_WR)
        assert all_of(end) == b"12345"
        end.close()
        wait_until(proxy, lambda traffic: traffic.open == 0)


def modelled(link: Link, size: int) -> float:
    """Seconds for a handshake, an upload and a one-line answer."""
    return link.round_trip + Lane(link).send(size, now=0.0).last + link.delay


def upload(proxy: Proxy, size: int) -> float:
    began = time.monotonic()
    with call(proxy) as end:
        end.sendall(bytes(size))
        end.shutdown(socket.SHUT_WR)
        assert all_of(end) == str(size).encode()
    return time.monotonic() - began


@pytest.mark.parametrize("words", ["40Mbit/20ms", "400Mbit/40ms"])
def test_an_upload_takes_as_long_as_the_model_says(words: str):
    link, ratios = parse_link(words), []
    size = int(link.rate / 8 * 0.4)
    with behind(link, count) as (proxy, _):
        for _ in range(5):  # A busy machine may be late a few times; never early.
            ratios.append(upload(proxy, size) / modelled(link, size))
            if ratios[-1] < 1.1:
                break
    assert min(ratios) > 0.99
    assert min(ratios) < 1.5


def test_a_download_takes_as_long_as_the_line_back_needs():
    with (
        Shore(pour(500_000)) as shore,
        emulated("unlimited", "127.0.0.1", shore.port, back="20Mbit/20ms") as proxy,
    ):
        began = time.monotonic()
        with call(proxy) as end:
            assert len(all_of(end)) == 500_000
        assert time.monotonic() - began >= 500_000 * 8 / 20e6


def test_a_window_holds_one_connection_back():
    link = parse_link("400Mbit/100ms/window=100kB")
    with behind(link, count) as (proxy, _):
        assert upload(proxy, 500_000) > 500_000 / 100_000 * link.round_trip


def test_no_round_trip_is_shorter_than_the_link():
    with behind("1Gbit/60ms", echo) as (proxy, _):
        began = time.monotonic()
        with call(proxy) as end:
            exchange(end, b"a")
            assert time.monotonic() - began >= 0.120  # The handshake is a round trip too.
            for _ in range(3):
                began = time.monotonic()
                exchange(end, b"a")
                assert time.monotonic() - began >= 0.060


def test_connections_share_the_line_in_turns():
    link = parse_link("40Mbit/10ms")
    with behind(link, count) as (proxy, _):
        began = time.monotonic()
        senders = [threading.Thread(target=upload, args=(proxy, 500_000)) for _ in range(4)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(PATIENCE)
        assert time.monotonic() - began >= modelled(link, 2_000_000)


def test_bulk_delays_a_heartbeat_by_no_more_than_the_queues():
    link = parse_link("20Mbit/20ms")
    with behind(link, echo) as (proxy, _), contextlib.ExitStack() as stack:
        heart = stack.enter_context(call(proxy))
        exchange(heart, b"!")
        for _ in range(4):
            bulk = stack.enter_context(call(proxy))
            stack.enter_context(sending(bulk, 2_000_000))
        wait_until(proxy, lambda traffic: traffic.down > link.capacity)
        passed = []
        for _ in range(4):  # A busy machine may be late to tell.
            before = proxy.up_bytes
            exchange(heart, b"!")
            passed.append(proxy.up_bytes - before)
        proxy.reset_all()
    # It waits in two queues, there and back; bulk goes on meanwhile, at the line's rate.
    assert 0 < min(passed) < 3 * link.capacity


def test_bulk_of_all_connections_comes_forward_together():
    each = 400_000
    with behind("20Mbit/20ms", count) as (proxy, _), contextlib.ExitStack() as stack:
        ends = [stack.enter_context(call(proxy)) for _ in range(4)]
        wait_until(proxy, lambda traffic: traffic.open == 4)
        proxy.cut()  # So that all of them are ready when it heals.
        for end in ends:
            stack.enter_context(sending(end, each, last=True))
        proxy.heal()
        first, _, _ = select.select(ends, [], [], PATIENCE)
        assert all_of(first[0]) == str(each).encode()
        assert proxy.traffic().up_arrived > 4 * each * 0.8


def test_a_receiver_that_stalls_fills_its_own_window_and_nothing_else():
    link, size = parse_link("200Mbit/10ms"), 12_000_000
    with behind(link, sleepy) as (proxy, shore), call(proxy) as bulk, call(proxy) as other:
        with sending(bulk, size):
            wait_until(proxy, lambda traffic: traffic.up - traffic.up_arrived == link.capacity)
            assert exchange(other, b"!hello") == b"!hello"
            told = proxy.traffic()
            assert told.up - told.up_arrived == link.capacity
            assert told.up < size
            shore.awake.set()
        bulk.shutdown(socket.SHUT_WR)
        assert all_of(bulk) == str(size).encode()


def test_a_sender_feels_a_slow_link_instead_of_the_link_growing():
    link = parse_link("1Mbit/20ms")
    with behind(link, count) as (proxy, _), call(proxy) as end:
        end.settimeout(A_MOMENT)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 10_000_000:
                sent += end.send(bytes(1 << 16))
        told = proxy.traffic()
        assert told.up - told.up_arrived <= link.capacity
        assert sent < 2_000_000
