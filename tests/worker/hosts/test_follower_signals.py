"""`diloco work` on another host than the first hears signals as the first one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import yaml

from diloco_cli.launch.ports import free_addresses
from diloco_cli.worker.hosts.listener import HostListener, ending
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
