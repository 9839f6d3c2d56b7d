"""One puppet server for all network tests, on a free port, in a process of its own."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from diloco_cli.wire.error_bodies import error_body
from tests import ROOT


class Patience(threading.Event):
    """A stop event that never waits, and notes how long it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return self.is_set()


class Puppet:
    """A server under the test's control."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--interface", "asgi", "--http", "2", "--no-ws", "--no-log"]
        options += ["--workers-kill-timeout", "1"]  # Open connections would keep it waiting.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "granian",
                *options,
                "--port",
                str(self.port),
                "tests.net.scripted_server:app",
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        self.heard()

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(30)

    def will(
        self,
        key: str,
        status: int = 200,
        body: bytes | dict[str, Any] = b"",
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> Puppet:
        """Adds the next answer to this call."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        reply = [status, headers or {}, base64.b64encode(data).decode(), options]
        self._direct("POST", "/puppet/script", json.dumps({key: [reply]}).encode())
        return self

    def refuses(self, key: str, status: int, code: str, message: str, **beside: Any) -> Puppet:
        return self.will(key, status, error_body(code, message, "Do this.", **beside))

    def heard(self) -> list[dict[str, Any]]:
        """Returns what was asked since the last time, and forgets it and the script."""
        return json.loads(self._direct("GET", "/puppet/heard"))

    def _direct(self, method: str, path: str, body: bytes = b"") -> bytes:
        pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
        with httpx.Client(http1=False, http2=True, trust_env=False, verify=False) as client:
            answer = client.request(method, self.url + path, content=pieces)
            assert answer.http_version == "HTTP/2"
            return answer.content


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def stage() -> Iterator[Puppet]:
    puppet = Puppet(free_port())
    puppet.start()
    yield puppet
    puppet.stop()


@pytest.fixture
def puppet(stage: Puppet) -> Puppet:
    stage.heard()
    return stage


@pytest.fixture
def restarted() -> Iterator[Puppet]:
    """A puppet that a test may stop and start."""
    puppet = Puppet(free_port())
    puppet.start()
    yield puppet
    puppet.stop()


@pytest.fixture
def patience() -> Patience:
    return Patience()
