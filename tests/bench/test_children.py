"""A measurement that is ended takes everything away that it began."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# A busy machine may take ten times as long as an idle one.
pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]


@pytest.fixture
def heard():
    """Signals end what is started here, also where tests run under nohup or in the background."""
    own = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize(
    ("what", "processes"),
    # Python's own watch over them, the server, and the other end of raw TLS, or the regions.
    [(("link",), 3), (("sync", "--params", "100k", "--regions", "2"), 4)],
)
def test_a_signal_leaves_no_process_and_no_folder(heard, tmp_path: Path, what, processes, ending):
    measuring = subprocess.Popen(
        [sys.executable, "-m", "diloco_cli", "bench", *what],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    family: list[psutil.Process] = []
    deadline = time.monotonic() + 600
    while not (list(tmp_path.glob("diloco-*/server/address.json")) and len(family) >= processes):
        assert measuring.poll() is None and time.monotonic() < deadline
        family = psutil.Process(measuring.pid).children(recursive=True)
        time.sleep(0.01)
    os.killpg(measuring.pid, ending)  # As a terminal and `timeout` do it.
    _, said = measuring.communicate(timeout=300)
    assert measuring.returncode == 128 + ending
    assert "Traceback" not in said
    _, left = psutil.wait_procs(family, timeout=100)
    assert left == [] and list(tmp_path.iterdir()) == []
