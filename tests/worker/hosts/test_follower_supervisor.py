"""`diloco work` on another host than the first: the signals it hears, the log it keeps."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from diloco_cli.assemble import spelled_out
from diloco_cli.launch.ports import free_addresses
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.process_log import MOST_BYTES
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.worker.hosts.connection import ConnectionClosed, HostConnection
from diloco_cli.worker.hosts.follower_supervisor import FollowerSupervisor
from diloco_cli.worker.hosts.listener import HostHello, HostListener, ending
from diloco_cli.worker.hosts.secret import VARIABLE, take_secret
from diloco_cli.worker.hosts.which_host import HostPlace
from tests.worker.hosts.test_refused_hosts import KNOWN, SPEC


@pytest.fixture
def hears_sighup():
    """Whatever the tests were started with: what is ignored stays so in all that we start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_sighup_without_a_terminal_only_wakes_another_host_as_it_does_the_first(
    tmp_path, monkeypatch, hears_sighup
):
    coordinator = free_addresses(1)[0]
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(SPEC))
    words = ["work", "pair.yaml", "--region", "paris", "--host", "1", "--coordinator", coordinator]
    with subprocess.Popen(
        [sys.executable, "-m", "diloco_cli", *words, "--wait", "300"],
        env={**os.environ, VARIABLE: KNOWN},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Without a terminal.
    ) as worker:
        assert worker.stderr is not None
        assert "waiting for host 0" in worker.stderr.readline()
        worker.send_signal(signal.SIGHUP)
        monkeypatch.setenv(VARIABLE, KNOWN)
        secret = take_secret("pair", "paris", token="", folder=tmp_path)
        place = HostPlace(0, 2, coordinator)
        over = ending(None)
        listener = HostListener(place, secret, lambda _, host: host.send(over), wait=60.0)
        try:
            said = worker.stderr.read()
            assert worker.wait() == 0 and "host 0 says that the run is over" in said, said
        finally:
            listener.close()


FOLLOWER = """
import os, pathlib, sys, threading
os.write(2, b"x" * (17 << 20))
older = pathlib.Path({older!r})
while not older.exists():
    threading.Event().wait(0.05)
"""


def test_the_log_of_a_follower_is_kept_small_while_it_runs(tmp_path):
    place, spec = HostPlace(0, 2, free_addresses(1)[0]), spelled_out(RunSpec.model_validate(SPEC))
    log = tmp_path / "follower.log"
    other = FollowerSupervisor(
        spec, "paris", replace(place, host=1), b"secret", Wakeup(), log, cores=None
    )
    older = tmp_path / "follower.log.1"
    other._argv = [sys.executable, "-S", "-c", FOLLOWER.format(older=str(older))]
    answers = iter([{"generation": "1"}, ending(None)])

    def answer(hello: HostHello, host: HostConnection) -> None:
        host.send(next(answers))
        with contextlib.suppress(ConnectionClosed):
            host.receive()  # How its follower ended.

    listener = HostListener(place, b"secret", answer, wait=60.0)
    try:
        assert other.run(wait=60.0) == 0
    finally:
        listener.close()
        other.kill()
    assert older.stat().st_size == MOST_BYTES and log.stat().st_size < MOST_BYTES
