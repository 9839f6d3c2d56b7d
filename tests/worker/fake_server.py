"""A server in this process: answers an agent from memory, as the real one would over a wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from diloco_cli.assemble import build_amended, spelled_out
from diloco_cli.errors import LinkError, SpecError
from diloco_cli.net.client import FencedError, Gone
from diloco_cli.net.options import DEFAULTS
from diloco_cli.net.transfer.throughput import Throughput
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Frame, Header, open_frame, pack
from diloco_cli.wire.messages import (
    Amendment,
    Answer,
    Heartbeat,
    Joined,
    Latest,
    Links,
    News,
    Run,
)
from diloco_cli.worker.agent.join import SharedSettings
from diloco_cli.worker.agent.trainer_settings import TrainerSettings
from diloco_cli.worker.mailbox import Mailbox

RUN = "run-1"
LAYOUT = "1" * 64
SPEC = "2" * 64
SIZE = 64
SHARED = SharedSettings({"sync": {"every": 8, "quorum": 1}, "seed": 0}, SPEC, LAYOUT)
OWN = spelled_out(
    RunSpec.model_validate(
        {
            "spec": 1,
            "name": "tiny",
            "budget": {"tokens": 1_000_000},
            "regions": [{"name": "paris"}, {"name": "tokyo"}],
        }
    )
)
"""The region's own file."""


def settings_in(mailbox: Mailbox, own: RunSpec = OWN) -> TrainerSettings:
    return TrainerSettings(mailbox, "paris", own, build_amended)


class Counter:
    """What all connections of one agent see; `away` makes every call fail."""

    def __init__(self, fragments: int = 2) -> None:
        self.weights = [[np.full(SIZE, number, np.float32)] for number in range(fragments)]
        self.merged: list[dict[str, str]] = [{} for _ in range(fragments)]
        self.run, self.was, self.high = RUN, (), 5
        self.away = False
        self.state = "training"
        self.fenced = False
        self.pruned = False
        self.lies = False
        self.no_average = ""
        self.n = 1
        self.flags: dict[str, Any] = {}
        self.amendments: list[Amendment] = []
        self.fates: dict[int, dict[str, str]] = {}
        self.join: Callable[[str, int], int] = lambda owner, boot: 1
        self.decide: Callable[[Frame], Answer] = lambda frame: Answer(fate="pending")
        self.keys: list[str | None] = []
        self.heartbeats: list[Heartbeat] = []
        self.submitted: list[Frame] = []
        self.asked: list[str] = []
        self.change = threading.Condition()

    def connect(self, *_: Any, run: str = "", **__: Any) -> Connection:
        return Connection(self, run)

    def publish(self, number: int) -> None:
        """Makes one more version of a fragment."""
        with self.change:
            versions = self.weights[number]
            versions.append(versions[-1] + np.float32(0.5))
            self.n += 1
            self.change.notify_all()

    def tell(self, **flags: Any) -> None:
        with self.change:
            self.flags.update(flags)
            self.n += 1
            self.change.notify_all()

    def amend(self, set: dict[str, Any], **changes: Any) -> int:
        """Changes settings of the run; gives the number of the terms."""
        with self.change:
            number = len(self.amendments) + 1
            made = {"number": number, "id": f"a{number}", "set": set, **changes}
            self.amendments.append(Amendment.model_validate(made))
            self.n += 1
            self.change.notify_all()
        return number

    def wait_for(self, happened: Callable[[], bool], seconds: float = 20.0) -> None:
        """Waits until the agent has done something; it says so with every request."""
        with self.change:
            deadline = time.monotonic() + seconds
            while not happened():
                assert time.monotonic() < deadline, f"it did not happen; asked: {self.asked[-9:]}"
                self.change.wait(0.05)

    def versions(self) -> list[int]:
        return [len(versions) - 1 for versions in self.weights]

    def news(self) -> dict[str, Any]:
        quiet = {"end": False, "finished": False, "stop": False, "evaluate": False}
        return {
            "n": self.n,
            "versions": self.versions(),
            "calls": {},
            "fates": self.fates,
            "lease_seconds": 1.0,
            "terms": len(self.amendments),
            **quiet,
            **self.flags,
        }

    def frame(self, number: int, version: int, kind: str) -> Frame:
        new = self.weights[number][version]
        values = new if kind == "whole" else new - self.weights[number][version - 1]
        header = Header(
            kind="whole" if kind == "whole" else "delta",
            run=RUN,
            layout=LAYOUT,
            fragment=number,
            size=SIZE,
            codec={"kind": "fp32"},
            base=version if kind == "whole" else version - 1,
            version=version,
            merged=self.merged[number],
            published="f" * 32 if self.lies and kind == "delta" else vector_digest(new),
        )
        return open_frame(pack(header, values))


class Connection:
    """One of the agent's connections: the calls of `net.client.Server`."""

    def __init__(self, counter: Counter, run: str) -> None:
        self.counter, self.run_id = counter, run or counter.run
        self.up, self.down = Throughput("uploads", DEFAULTS), Throughput("downloads", DEFAULTS)
        self.up.rate = 2e6

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _heard(self, what: str) -> None:
        with self.counter.change:
            self.counter.asked.append(what)
            self.counter.change.notify_all()
        if self.counter.away:
            raise LinkError("nobody answers")
        if self.counter.run != self.run_id and what != "run":
            raise SpecError(f"This server runs {self.counter.run}, the request is for another.")
        if self.counter.fenced and what in ("heartbeat", "calls", "submit"):
            raise FencedError("epoch 1 is over")

    def run(self) -> Run:
        self._heard("run")
        return Run(
            run=self.counter.run,
            was=self.counter.was,
            name="tiny",
            state=self.counter.state,
            spec_digest=SPEC,
            layout_digest=LAYOUT,
            wire=2,
            fragments=(SIZE,) * len(self.counter.weights),
            lease_seconds=1.0,
            settings={"sync": {"every": 8, "quorum": 1}, "seed": 0},
            digests=("4" * 64, SPEC),
            amendments=tuple(self.counter.amendments),
        )

    def join(
        self, region: str, *, owner: str, boot: int, key: str | None = None, **_: Any
    ) -> Joined:
        self._heard("join")
        self.counter.keys.append(key)
        epoch = self.counter.join(owner, boot)
        return Joined.model_validate(
            {**self.counter.news(), "epoch": epoch, "high": self.counter.high}
        )

    def heartbeat(self, region: str, report: Heartbeat) -> News:
        self.counter.heartbeats.append(report)
        self._heard("heartbeat")
        return News.model_validate(self.counter.news())

    def calls(self, region: str, *, after: int, epoch: int) -> News | None:
        self._heard("calls")
        with self.counter.change:
            self.counter.change.wait_for(
                lambda: self.counter.n > after or self.counter.away or self.counter.fenced, 0.2
            )
            return News.model_validate(self.counter.news()) if self.counter.n > after else None

    def submit(
        self, fragment: int, region: str, base: int, clock: int, frame: Any, *, epoch: int
    ) -> Answer:
        self._heard("submit")
        opened = open_frame(frame.read_bytes())
        answer = self.counter.decide(opened)
        with self.counter.change:
            if answer.fate == "pending":
                known = {"digest": opened.digest, "fate": "pending", "why": ""}
                self.counter.fates = {**self.counter.fates, fragment: known}
            self.counter.submitted.append(opened)
            self.counter.change.notify_all()
        return answer

    def whole(self, fragment: int, version: int) -> Frame:
        self._heard(f"whole {fragment} {version}")
        if self.counter.pruned and version < self.counter.versions()[fragment]:
            raise Gone("pruned")
        self.down.moved(4 * SIZE, 0.1)
        return self.counter.frame(fragment, version, "whole")

    def chain(self, fragment: int, version: int, since: int) -> list[Frame] | None:
        self._heard(f"chain {fragment} {since} {version}")
        if self.counter.pruned:
            return None
        frames = range(since + 1, version + 1)
        return [self.counter.frame(fragment, number, "delta") for number in frames]

    def weights(self, out: Any, *, ema: bool = False) -> dict[str, str]:
        self._heard("average" if ema else "weights")
        if self.counter.no_average:
            raise SpecError(self.counter.no_average)
        out.write_bytes(b"the average")
        return {}

    def latest(self, fragment: int, *, after: int = -1, wait: float = 0) -> Latest:
        self._heard(f"latest {fragment}")
        version = self.counter.versions()[fragment]
        return Latest(
            fragment=fragment,
            version=version,
            members=(),
            merged={},
            published=vector_digest(self.counter.weights[fragment][-1]),
            links=Links(whole=""),
        )
