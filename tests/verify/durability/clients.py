"""A region as a process that sends as fast as it may.

    python -m tests.verify.durability.clients URL REGION LOG CHANGES

It goes on through whatever happens to the server and says in LOG, one JSON object a line,
what it was told. It sends the next frame of a fragment only once the last one is merged, so
the frames of a region and fragment are a sequence, and what the server counts as applied is
the sum over a beginning of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from diloco_cli.errors import DilocoError
from diloco_cli.net.client import Client
from diloco_cli.net.options import ONCE, Options, Timeouts
from diloco_cli.wire.frame import open_frame
from tests.server.harness import Region, make_settings, make_spec

PAUSE = 0.01


class Load:
    def __init__(self, url: str, region: Any, log: Path) -> None:
        self.url, self.region = url, region
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.flying: dict[int, bytes] = {}
        self.acknowledged: set[str] = set()
        self.said: set[str] = set()
        """Answered on this connection: asked again once after every death of the server."""

    def say(self, what: str, **fields: Any) -> None:
        line = {"what": what, "at": time.monotonic(), **fields}
        os.write(self.log, json.dumps(line).encode() + b"\n")

    def run(self) -> None:
        while os.getppid() != 1:  # Whoever started it is still there.
            try:
                with self._connected() as server:
                    self.said = set()
                    if not self.region.run:
                        self._join(server)
                    while True:
                        self._turn(server)
            except DilocoError as error:
                if error.exit_code != 4:
                    self.say("refusal", why=str(error))
                # The server is dead or not yet back: once more, but leave it the processor.
                time.sleep(PAUSE)

    def _connected(self) -> Client:
        options = Options(Timeouts(connect=1.0, answer=10.0), ONCE)
        return Client(self.url, options, run=self.region.run)

    def _join(self, server: Client) -> None:
        run = server.run().run
        self.region.join_through(server)
        self.region.run = run

    def _turn(self, server: Client) -> None:
        region = self.region
        free = [0.0 if f in self.flying else 12.0 for f in range(len(region.versions))]
        news = server.heartbeat(region.name, region.beat(free))
        for fragment, version in enumerate(news.versions):
            if version > region.versions[fragment]:
                self._adopt(server, fragment)
        for fragment in news.calls:
            if fragment not in self.flying:
                steps = 1.0 + (region.clock * 7 + fragment) % 11
                frame = self.flying[fragment] = region.frame(fragment, steps)
                about = open_frame(frame)
                tokens = about.header.tokens
                self.say("sent", fragment=fragment, digest=about.digest, tokens=tokens)
        asked = [f for f, frame in self.flying.items() if open_frame(frame).digest not in self.said]
        for fragment in asked:
            self._send(server, fragment)
        if not asked:
            time.sleep(PAUSE)  # Rounds close when they close; leave the server the processor.

    def _send(self, server: Client, fragment: int) -> None:
        frame = self.flying[fragment]
        about = open_frame(frame)
        base, clock, region = about.header.base, about.header.clock, self.region
        answer = server.submit(fragment, region.name, base, clock, frame, epoch=region.epoch)
        self.said.add(about.digest)
        if answer.fate not in ("pending", "merged"):
            self.say("wrong", why=f"{fragment} {base}-{clock}: {answer}")
        elif about.digest not in self.acknowledged:
            self.acknowledged.add(about.digest)
            fresh = not answer.recorded
            self.say("acknowledged", fragment=fragment, digest=about.digest, fresh=fresh)
        elif not answer.recorded:
            self.say("wrong", why=f"{fragment} {base}-{clock} was acknowledged and forgotten")

    def _adopt(self, server: Client, fragment: int) -> None:
        latest = server.latest(fragment)
        assert latest is not None
        merged = latest.merged.get(self.region.name, "")
        before = self.region.prev[fragment]
        self.region.adopt(fragment, latest.version, merged)
        if merged != before:
            del self.flying[fragment]


def main() -> None:
    url, name, log, changes = sys.argv[1:]
    settings = make_settings(make_spec(**json.loads(changes)))
    load = Load(url, Region(name, settings, ""), Path(log))
    try:
        load.run()
    except BaseException as error:
        load.say("wrong", why=repr(error))
        raise


if __name__ == "__main__":
    main()
