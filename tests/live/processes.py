"""Real servers and workers, as `diloco run` would start them, on one folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from diloco_cli.assemble import spelled_out
from diloco_cli.launch import Role
from diloco_cli.launch.roles import serve_role, work_role
from diloco_cli.launch.subprocesses import LocalLauncher, LocalProcess
from diloco_cli.net.client import Client
from diloco_cli.net.credentials import NOBODY
from diloco_cli.net.options import Options
from diloco_cli.observe.status import RegionStatus, Status
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.messages import TrainerProgress
from diloco_cli.worker.mailbox import Mailbox


class Live:
    """Real processes on one folder."""

    def __init__(self, folder: Path, regions: list[dict[str, Any]], **changes: Any) -> None:
        self.folder = folder
        spec = {
            "spec": 1,
            "name": "tiny",
            "budget": {"tokens": 10**9},
            "model": {"kind": "decoder", "layers": 1, "width": 16, "heads": 2},
            "data": {"kind": "python-source", "limit": 400_000},
            "inner": {"batch": 2, "sequence": 16, "schedule": {"kind": "constant"}},
            "regions": regions,
            "sync": {"fragments": 2, "every": 32},
            "server": {"lease": 3.0},
            "evaluate": {"batches": 2, "every": 50},
            **changes,
        }
        self.spec = spelled_out(RunSpec.model_validate(spec))
        self.file = write_resolved(self.spec, folder)
        self.launcher = LocalLauncher(folder / "logs")
        self.credentials = NOBODY
        self.started: list[LocalProcess] = []

    def start(self, role: Role) -> LocalProcess:
        process = self.launcher.start(role)
        self.started.append(process)
        return process

    def serve(self) -> LocalProcess:
        server = self.start(serve_role(self.file, self.folder))
        self.wait_for(lambda: self.address.get("pid") == server.pid, server)
        return server

    def work(self, region: str, folder: Path | None = None) -> LocalProcess:
        home = folder or self.folder
        return self.start(work_role(self.file, home, region, url=self.address["url"], cores=()))

    @property
    def address(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "server" / "address.json").read_text())
        return {}

    def status(self) -> Status:
        with Client(self.address["url"], Options(credentials=self.credentials)) as client:
            return client.status()

    def region(self, name: str) -> RegionStatus:
        return next(region for region in self.status().regions if region.name == name)

    def progress(self, region: str) -> TrainerProgress:
        return Mailbox(self.folder / "regions" / region).progress() or TrainerProgress.none(0)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def trainers(self) -> list[psutil.Process]:
        """The trainers of this run, found by the run folder in their arguments."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "trainer" in words and str(self.folder) in words:
                found.append(process)
        return found

    def wait_for(
        self, happened: Callable[[], bool], *alive: LocalProcess, seconds: float = 120.0
    ) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            for process in alive:
                assert process.exit_code() is None, process.last_words()
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.05)  # Other processes cannot wake us.

    def exit_code(self, process: LocalProcess, seconds: float = 60.0) -> int:
        self.wait_for(lambda: process.exit_code() is not None, seconds=seconds)
        code = process.exit_code()
        assert code is not None
        return code
