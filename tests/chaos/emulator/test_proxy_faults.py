"""A link in a bad mood: cut, held, reset, made another; and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import psutil
import pytest

from diloco_cli.chaos.emulator.connection import AT_ONCE
from diloco_cli.chaos.emulator.proxy import emulated
from tests.chaos.emulator.far_server import PATIENCE, Guest, echo
from tests.chaos.emulator.link_client import (
    A_MOMENT,
    INSTANT,
    all_of,
    behind,
    call,
    exchange,
    silent,
    wait_until,
)


def test_a_cut_is_silence_and_healing_brings_what_was_on_the_way():
    with behind("100Mbit/10ms", echo) as (proxy, _), call(proxy) as end:
        exchange(end, b"before")
        proxy.cut()
        before = proxy.traffic()
        end.sendall(b"during")
        assert silent(end)
        assert proxy.traffic() == before
        proxy.heal()
        assert end.recv(100) == b"during"


def test_what_is_on_the_way_when_a_link_is_cut_has_the_rest_of_its_way_to_go():
    with behind("100Mbit/400ms", echo) as (proxy, _), call(proxy) as end:
        exchange(end, b"before")
        began = time.monotonic()
        end.sendall(b"x")
        wait_until(proxy, lambda traffic: traffic.up == len(b"beforex"))
        proxy.cut()
        on_the_way = time.monotonic() - began
        assert silent(end)
        healed = time.monotonic()
        proxy.heal()
        assert end.recv(1) == b"x"
        assert time.monotonic() - healed >= 0.4 - on_the_way


def test_who_calls_during_a_cut_is_heard_after_it():
    with behind("100Mbit/10ms", echo) as (proxy, _):
        proxy.cut()
        with call(proxy) as end:
            end.sendall(b"hello")
            assert silent(end)
            proxy.heal()
            assert end.recv(100) == b"hello"


def test_a_connection_may_break_during_a_cut_without_the_other_side_learning_of_it():
    with behind("100Mbit/10ms", echo) as (proxy, shore):
        with call(proxy) as end:
            exchange(end, b"hello")
            proxy.cut()
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        assert not shore.broken.wait(A_MOMENT)
        proxy.heal()
        assert shore.broken.wait(PATIENCE)


def test_a_machine_that_is_gone_refuses_callers_until_it_is_back():
    with behind("100Mbit/10ms", echo) as (proxy, _), call(proxy) as end:
        exchange(end, b"before")
        proxy.cut(refuse=True)
        with pytest.raises(ConnectionResetError):
            end.recv(1)
        with pytest.raises(ConnectionRefusedError):
            call(proxy)
        proxy.heal()
        with call(proxy) as again:
            assert exchange(again, b"after") == b"after"


def test_a_reset_breaks_every_connection_at_both_ends():
    with behind("100Mbit/10ms", echo) as (proxy, shore), call(proxy) as one, call(proxy) as two:
        exchange(one, b"a")
        exchange(two, b"b")
        assert proxy.reset_all() == 2
        for end in (one, two):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        assert shore.broken.wait(PATIENCE)
        assert proxy.traffic().open == 0
        with call(proxy) as three:
            assert exchange(three, b"c") == b"c"


def test_a_link_may_break_its_connections_again_and_again():
    with behind("100Mbit/10ms/reset=100ms", echo) as (proxy, _):
        for _ in range(3):
            with pytest.raises(ConnectionResetError), call(proxy) as end:
                end.recv(1)
        assert proxy.traffic().resets == 3


def test_an_outage_of_the_link_holds_everything_up():
    began = time.monotonic()
    with behind("100Mbit/0s/out=0s..300ms", echo) as (proxy, _), call(proxy) as end:
        proxy.cut()
        proxy.heal()  # Ends the cut, not the outage.
        assert exchange(end, b"hello") == b"hello"
        assert time.monotonic() - began >= 0.3


def test_a_link_can_be_made_another_while_in_use():
    with behind("100kbit/10ms", echo) as (proxy, _), call(proxy) as end:
        exchange(end, b"slow")
        proxy.shape("100Mbit/10ms")
        assert str(proxy.link) == "100Mbit/10ms"
        body = os.urandom(300_000)  # Half a minute each way on the first link.
        began = time.monotonic()
        assert exchange(end, body) == body
        assert time.monotonic() - began < len(body) * 8 / 1e5


def test_where_nobody_listens_callers_are_broken_off():
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        proxy = stack.enter_context(emulated(INSTANT, *taken.getsockname()))
        with pytest.raises(ConnectionResetError), call(proxy) as end:
            end.recv(1)
        wait_until(proxy, lambda traffic: traffic.open == 0)


def test_a_server_that_hangs_up_in_the_middle_reaches_the_sender():
    def rude(guest: Guest) -> None:
        guest.read()
        guest.end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)

    with behind("100Mbit/10ms", rude) as (proxy, _), call(proxy) as end:
        with pytest.raises(ConnectionError):
            while True:
                end.sendall(bytes(1 << 16))
        wait_until(proxy, lambda traffic: traffic.open == 0)


def test_a_sender_learns_that_a_server_which_had_said_all_is_gone():
    def leave(guest: Guest) -> None:
        guest.read()
        guest.end.shutdown(socket.SHUT_WR)
        guest.shore.awake.wait(PATIENCE)
        guest.end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)

    with behind("100Mbit/10ms", leave) as (proxy, shore), call(proxy) as end:
        end.sendall(b"hello")
        assert all_of(end) == b""
        shore.awake.set()
        with pytest.raises(ConnectionError):
            while True:
                end.sendall(bytes(1 << 16))
        wait_until(proxy, lambda traffic: traffic.open == 0)


def test_the_proxy_says_where_it_is():
    with emulated(INSTANT, "127.0.0.1", 9, scheme="https") as proxy:
        assert proxy.url == f"https://127.0.0.1:{proxy.port}"
        port = proxy.port
    with emulated(INSTANT, "127.0.0.1", 9, port=port) as proxy:
        assert proxy.port == port


def test_nothing_is_left_running_or_open():
    threads, files = set(threading.enumerate()), psutil.Process().num_fds()
    with behind("1Mbit/50ms", echo) as (proxy, _):
        ends = [call(proxy) for _ in range(5)]
        for end in ends:
            end.sendall(bytes(1000))
        wait_until(proxy, lambda traffic: traffic.up >= 1000)
        proxy.cut()
    for end in ends:
        end.close()
    proxy.close()
    # What an earlier test began may have ended meanwhile.
    assert set(threading.enumerate()) <= threads
    assert psutil.Process().num_fds() <= files
    with pytest.raises(RuntimeError, match="closed"):
        proxy.heal()


def test_a_link_that_breaks_by_itself_says_so():
    proxy = emulated(INSTANT, "127.0.0.1", 9)
    proxy._loop.call_soon_threadsafe(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        proxy.close()


def test_an_unknown_server_leaves_nothing_behind():
    files = psutil.Process().num_fds()
    with pytest.raises(socket.gaierror):
        emulated(INSTANT, "no.such.host.invalid", 9)
    assert psutil.Process().num_fds() == files
