from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from diloco_cli.system.wakeup import (
    Signals,
    Wakeup,
    stop_on_signals,
    wake_on_input,
    write_wakeup,
)


@pytest.fixture
def handlers():
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


def test_a_wakeup_is_reported_once_however_often_it_came():
    wakeup = Wakeup()
    assert not wakeup.wait(0.0) and not wakeup.clear()
    wakeup.wake()
    wakeup.wake()
    assert wakeup.wait(60.0) and wakeup.clear() and not wakeup.clear()


def test_the_first_reason_to_stop_stays():
    wakeup = Wakeup()
    wakeup.stop("one")
    wakeup.stop("two")
    assert wakeup.stop_reason == "one" and wakeup.clear()


def test_the_second_signal_is_another_matter(handlers):
    wakeup, later = Wakeup(), []
    stop_on_signals(wakeup, signal.SIGUSR1, second=later.append)
    signal.raise_signal(signal.SIGUSR1)
    assert wakeup.stop_reason == "told to stop by SIGUSR1" and not later
    signal.raise_signal(signal.SIGUSR1)
    assert later == [signal.SIGUSR1]


def test_a_signal_is_the_first_one_although_something_else_asked_to_stop_before(handlers):
    wakeup, later = Wakeup(), []
    stop_on_signals(wakeup, signal.SIGUSR1, second=later.append)
    wakeup.stop("the process that started this worker is gone")
    signal.raise_signal(signal.SIGUSR1)
    assert not later and wakeup.stop_reason == "the process that started this worker is gone"
    signal.raise_signal(signal.SIGUSR1)
    assert later == [signal.SIGUSR1]


def test_a_pipe_wakes_and_its_end_stops():
    wakeup = Wakeup()
    reader, writer = os.pipe()
    wake_on_input(wakeup, reader, at_end="the other side is gone")
    write_wakeup(writer, "mail")
    assert wakeup.wait(60.0) and not wakeup.stop_reason
    os.close(writer)
    while not wakeup.stop_reason:
        wakeup.clear()
        assert wakeup.wait(60.0)
    assert wakeup.stop_reason == "the other side is gone"
    os.close(reader)
    reader, writer = os.pipe()
    os.close(reader)
    write_wakeup(writer, "mail")  # Broken: no error.
    os.close(writer)


def test_a_command_counts_signals_and_wakes_for_each(handlers):
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert signals.count == 0 and signals.name == "" and not signals.impatient
        signal.raise_signal(signal.SIGTERM)
        signals.pause(600.0)
        assert (signals.count, signals.name, signals.exit_code) == (1, "SIGTERM", 143)
        signal.raise_signal(signal.SIGINT)
        signals.pause(600.0)
        assert signals.impatient and signals.name == "SIGTERM"
        signals.pause(0.0)
    assert signal.getsignal(signal.SIGTERM) is before


SERVICE = """
import os, signal, sys, time
from diloco_cli.system.wakeup import Wakeup, stop_service_on_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Whatever the tests were started with.
if sys.argv[1:]:
    os.open(sys.argv[1], os.O_RDWR)  # The first that a session opens becomes its terminal.
wakeup = Wakeup()
stop_service_on_signals(wakeup, second=os._exit)
print("ready", flush=True)
wakeup.wait(300)
print(wakeup.stop_reason or "woken", flush=True)
"""


@pytest.mark.parametrize("terminal, said", [(False, "woken"), (True, "told to stop by SIGHUP")])
def test_sighup_ends_a_service_only_where_a_terminal_was_closed(terminal, said):
    ours, theirs = os.openpty()
    try:
        service = subprocess.Popen(
            [sys.executable, "-c", SERVICE, *([os.ttyname(theirs)] if terminal else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert service.stdout and service.stdout.readline() == "ready\n"
        service.send_signal(signal.SIGHUP)
        assert service.communicate(timeout=300)[0].strip() == said
    finally:
        os.close(ours)
        os.close(theirs)


def test_what_nohup_has_started_outlives_its_terminal(handlers):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        wakeup = Wakeup()
        stop_on_signals(wakeup, signal.SIGTERM, signal.SIGHUP)
        with Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.count == 0
        signal.raise_signal(signal.SIGHUP)
        assert not wakeup.stop_reason
        signal.raise_signal(signal.SIGTERM)
        assert wakeup.stop_reason == "told to stop by SIGTERM"
    finally:
        signal.signal(signal.SIGHUP, before)
