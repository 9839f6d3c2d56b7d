"""A server as a process, and regions that talk to it without training: a run within seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco_cli.net.client import Client
from diloco_cli.wire.messages import News
from tests import ROOT, SMALL_SERVER
from tests.server.harness import NAMES, Region, make_settings, make_spec

DEADLINE = 60.0


class PlayedRun:
    """The small run; `changes` are those of its spec."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._changes = folder, changes
        self.settings = make_settings(make_spec(**changes))
        self.url = ""
        self._regions: dict[str, Region] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._server: Client | None = None

    def start(self) -> None:
        """Starts the server, or the next one, and lets every region join."""
        with open(self.folder / "log", "ab") as log:
            child = self._child = subprocess.Popen(
                (sys.executable, *SMALL_SERVER, str(self.folder), json.dumps(self._changes)),
                stderr=log,
                stdout=log,
                cwd=ROOT,
            )
        deadline = time.monotonic() + DEADLINE
        while True:
            said = (self.folder / "log").read_text()
            assert child.poll() is None and time.monotonic() < deadline, said
            with suppress(OSError, ValueError):
                address = json.loads((self.folder / "server" / "address.json").read_bytes())
                if address["pid"] == child.pid:
                    self.url = address["url"]
                    break
            time.sleep(0.01)
        self._server = Client(self.url)
        run = self._server.run().run
        for name in NAMES:
            region = self._regions.setdefault(name, Region(name, self.settings, run))
            region.join_through(self._server)

    @property
    def pid(self) -> int:
        assert self._child
        return self._child.pid

    def kill(self) -> None:
        if self._server:
            self._server.close()
            self._server = None
        if self._child:
            self._child.kill()
            self._child.wait()

    def __enter__(self) -> PlayedRun:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def round(self, fragment: int, *, loss: float) -> None:
        """Plays one round that all regions answer, and then an evaluation."""
        server, iowa = self._server, self._regions["iowa"]
        assert server
        steps = [0.0] * len(self.settings.sizes)
        steps[fragment] = 12.0
        news = self._beat(server, steps, loss=loss)
        while fragment not in news.calls:
            news = server.calls("iowa", after=news.n, epoch=iowa.epoch) or news
        for name, region in self._regions.items():
            frame = region.frame(fragment)
            where = (fragment, name, region.versions[fragment], region.clock)
            server.submit(*where, frame, epoch=region.epoch)
        latest = server.latest(fragment, after=iowa.versions[fragment])
        assert latest is not None
        for name, region in self._regions.items():
            region.adopt(fragment, latest.version, latest.merged.get(name, ""))
        self._beat(server, 0.0, loss=loss, heldout={"versions": iowa.versions, "loss": loss})

    def _beat(self, server: Client, steps: Any, **said: Any) -> News:
        news = None
        for place, (name, region) in enumerate(self._regions.items()):
            speed = {"tokens_per_second": 1000.0 * (1 + place)}
            news = server.heartbeat(name, region.beat(steps, **speed, **said))
        assert news is not None
        return news
