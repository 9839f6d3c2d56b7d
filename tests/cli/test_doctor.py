"""`diloco doctor`: one line per check, a fix for each that fails, an exit code for scripts."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from diloco_cli.assemble import load_run
from diloco_cli.bench.support.one_fragment_server import stage
from diloco_cli.cli.app import app
from diloco_cli.errors import SpecError
from diloco_cli.plan.plan import plan
from diloco_cli.run.doctor import host
from diloco_cli.run.doctor import server as reach
from diloco_cli.sim.world import World
from tests import ROOT

QUICK = str(ROOT / "pipelines" / "quickstart.yaml")


def run(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(app, ["doctor", *arguments, "--format", "json"])
    found = json.loads(result.stdout)
    assert found["ok"] == (result.exit_code == 0)
    return result.exit_code, {check["name"]: check for check in found["checks"]}


def test_this_host_is_ready_for_the_quickstart(tmp_path: Path):
    code, checks = run(QUICK, "--dir", str(tmp_path / "not" / "yet"))
    assert code == 0, checks
    names = {
        "versions",
        "cores",
        "open files",
        "inodes",
        "disk",
        "memory",
        "devices",
        "port",
        "data",
    }
    assert set(checks) == names


def test_a_model_that_cannot_fit_fails_with_a_fix():
    code, checks = run(
        QUICK, "--set", "model.layers=80", "--set", "model.width=16384", "--step", "9s"
    )
    assert code == 1
    for name in ("disk", "memory"):
        assert checks[name]["state"] == "fail" and checks[name]["fix"]


def found(count: int, memory: float | None = None) -> host.FoundDevices:
    return host.FoundDevices(count, "gpu", "NVIDIA H100 80GB HBM3", memory)


@pytest.mark.parametrize(
    "region, devices, state, said",
    [
        ("big", found(8, 80e9), "ok", "8 asked for by big"),
        ("big", found(4, 80e9), "fail", "4 of kind NVIDIA H100 80GB HBM3, 8 asked for by big"),
        ("small", found(4, 80e9), "warn", "80.0 GB needed on each: 3 will stand idle"),
        ("big", found(8, 1e6), "fail", "of 1.0 MB needed on each"),
        (None, found(4, 80e9), "fail", "8 asked for by big"),
    ],
)
def test_devices_are_counted_and_filled(monkeypatch, region, devices, state, said):
    regions = "regions=[{name: small}, {name: big, devices: 8}]"
    spec = load_run(QUICK, [regions, "inner={batch: 8, sequence: 64}"]).spec
    monkeypatch.setattr(host, "_ask_jax", lambda: devices)
    checks = host.against(plan(spec, World(step=1.0)), Path("runs"), serves=False, region=region)
    (check,) = [each for each in checks if each.name == "devices"]
    assert check.state == state and said in check.said
    assert check.fix or state == "ok"


def test_a_region_that_is_not_there_is_named():
    result = CliRunner().invoke(app, ["doctor", QUICK, "--region", "lefft"])
    assert isinstance(result.exception, SpecError) and "left" in (result.exception.hint or "")


def test_a_port_that_is_taken_is_noticed():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        code, checks = run(QUICK, "--set", f"server.listen=127.0.0.1:{port}")
    assert code == 1
    assert "listens there already" in checks["port"]["said"]


def test_a_server_that_is_not_there_is_said_in_one_line():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        result = CliRunner().invoke(app, ["doctor", "--server", url])
    assert result.exit_code == 1
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and "reachable" in failed[0]
    assert "fix:" in result.stdout


class _Old(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def old_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Old)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_somebody_who_speaks_no_http2_is_noticed(old_server: str):
    code, checks = run("--server", old_server)
    assert code == 1
    assert checks["reachable"]["state"] == "ok"
    assert checks["HTTP/2"]["state"] == "fail"


def test_a_proxy_that_falls_back_to_http1_is_noticed():
    old = httpx.Response(200, extensions={"http_version": b"HTTP/1.1"})
    assert reach._protocol(old).state == "fail"
    assert (
        reach._protocol(httpx.Response(200, extensions={"http_version": b"HTTP/2"})).state == "ok"
    )


@pytest.mark.live
def test_a_real_server_is_looked_at_step_by_step():
    with stage(400_000) as running:
        code, checks = run("--server", running.url)
        assert code == 0, checks
        assert list(checks)[-6:] == ["reachable", "TLS", "HTTP/2", "clock", "wire", "link"]
        code, checks = run(QUICK, "--server", running.url)
    assert code == 1
    assert "another spec and layout" in checks["spec"]["said"]
    assert "port" not in checks  # The server does not run here.
