"""One region of several lies: what does it cost the held-out loss?

Real training steps, frames, checks, journal and merges; regions take turns in one process
instead of running side by side, so a run is the same every time, and what differs between
two runs is the lie alone. The limit is the same run without the liar.

    python -m tests.verify.poison.lying_region            every lie, eight regions
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from diloco_cli.assemble import resolve, settings_of
from diloco_cli.core import unmerged_work
from diloco_cli.core.rounds import Accept, Refused
from diloco_cli.server.intake.intake import Intake
from diloco_cli.server.intake.partial import UploadAddress
from diloco_cli.server.recovery.start import open_coordinator
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import Header, open_frame, pack, seal
from diloco_cli.wire.messages import WIRE_VERSION, Heartbeat, Join
from diloco_cli.worker.mailbox import Fate, Image
from diloco_cli.worker.trainer.checkpoints.resume import ResumePoint
from diloco_cli.worker.trainer.mail import IncomingImage
from diloco_cli.worker.trainer.task import Task, prepare, set_up
from diloco_cli.worker.trainer.weights_and_books import TrainedWeights

LIAR = "r0"
Lie = Callable[[Header, np.ndarray, dict[str, Any]], bytes]


def make_spec(regions: int, rounds: int, *, agreement: float = 0.0, **merge: Any) -> RunSpec:
    names = [f"r{number}" for number in range(regions)]
    per_round = regions * 8 * 4 * 32
    return RunSpec.model_validate(
        {
            "spec": 1,
            "name": "poison",
            "budget": {"tokens": rounds * per_round},
            "model": {"kind": "decoder", "layers": 1, "width": 32, "heads": 2},
            "data": {"kind": "python-source"},
            "inner": {"batch": 4, "sequence": 32, "schedule": {"kind": "constant"}},
            "regions": [{"name": name} for name in names],
            "sync": {
                "fragments": 2,
                "every": 8,
                "overlap": 1,
                "grace": {"kind": "fixed", "seconds": 5.0},
            },
            "server": {"lease": 1e5, "guard": {"agreement": agreement}},
            # Whole steps: otherwise those without the liar are shorter until it is in quarantine.
            "outer": {"kind": "nesterov", "proportional": False},
            "wire": {"up": {"kind": "fp32"}},
            **({"merge": merge} if merge else {}),
        }
    )


def honest(header: Header, values: np.ndarray, memory: dict[str, Any]) -> bytes:
    return pack(header, values)


def not_a_number(header: Header, values: np.ndarray, memory: dict[str, Any]) -> bytes:
    codec = codecs.build(header.codec)
    body = bytearray(codec.encode(values))
    for plane in range(4):  # Our encoder refuses to write this.
        body[plane * values.size] = 0xFF
    return seal(header, [zstandard.ZstdCompressor(write_checksum=True).compress(bytes(body))])


def a_thousandfold(header: Header, values: np.ndarray, memory: dict[str, Any]) -> bytes:
    return pack(header, 1000 * values)


def turned_round(header: Header, values: np.ndarray, memory: dict[str, Any]) -> bytes:
    return pack(header, -values)


def random(header: Header, values: np.ndarray, memory: dict[str, Any]) -> bytes:
    noise = np.random.default_rng(header.clock).normal(size=values.size)
    scale = np.linalg.norm(values) / np.linalg.norm(noise)
    return pack(header, (scale * noise).astype(np.float32))


def the_same_again(header: Header, values: np.ndarray, memory: dict[str, Any]) -> bytes:
    """Sends its first work of each fragment under new names for ever."""
    return pack(header, memory.setdefault(f"first {header.fragment}", values.copy()))


def the_same_bytes(header: Header, values: np.ndarray, memory: dict[str, Any]) -> bytes:
    """Sends recorded bytes again, as somebody on the way would."""
    return memory.setdefault(f"bytes {header.fragment}", pack(header, values))


def as_many_tokens_as_a_frame_can_say(
    header: Header, values: np.ndarray, memory: dict[str, Any]
) -> bytes:
    return pack(replace(header, tokens=9e15), values)


def a_few_times_the_tokens(header: Header, values: np.ndarray, memory: dict[str, Any]) -> bytes:
    return pack(replace(header, tokens=7 * header.tokens), -values)


LIES: dict[str, Lie] = {
    "nan": not_a_number,
    "x1000": a_thousandfold,
    "sign-flip": turned_round,
    "random": random,
    "stale work": the_same_again,
    "stale bytes": the_same_bytes,
    "tokens 9e15": as_many_tokens_as_a_frame_can_say,
    "tokens x7, sign-flip": a_few_times_the_tokens,
}


@dataclass
class Region:
    own: TrainedWeights
    lie: Lie
    epoch: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    sent: dict[int, bytes] = field(default_factory=dict)


class Rehearsal:
    """A server without sockets and regions that train in turns."""

    def __init__(self, folder: Path, spec: RunSpec, tasks: dict[str, Task], lie: Lie | None):
        self.spec, self.now, self.loss = spec, 0.0, float("nan")
        parts = resolve(spec)
        settings = settings_of(spec, parts)
        weights = parts.model.init(spec.seed)
        self.server: Coordinator = open_coordinator(
            settings, folder, lambda: weights, clock=lambda: self.now
        )
        self.state, self.intake = self.server.state, Intake(self.server)
        self.regions = {
            name: Region(self._holdings(task), lie if lie and name == LIAR else honest)
            for name, task in tasks.items()
            if lie or name != LIAR
        }

    def _holdings(self, task: Task) -> TrainedWeights:
        newest = [one.state.published for one in self.state.weights.newest]
        book, _ = unmerged_work.start(None, None, task.alpha)
        standing = ResumePoint(
            books=[replace(book, version=0) for _ in newest],
            anchors=list(newest),
            params=task.model.init(task.spec.seed),
            opt_state=None,
            cursor=None,
            clock=0,
            resumed=False,
        )
        return TrainedWeights(task, standing, run=self.state.store.run)

    async def run(self, rounds: int) -> float:
        """Plays so many rounds of every fragment; gives the held-out loss of the weights."""
        for name, region in self.regions.items():
            settings = self.state.settings
            joined = await self.server.join(
                name,
                Join(
                    owner=name,
                    boot=1,
                    spec_digest=settings.spec_digest,
                    layout_digest=settings.layout.digest,
                    wire=WIRE_VERSION,
                ),
            )
            region.epoch = joined.epoch
        half = self.spec.sync.every // self.spec.sync.fragments
        for turn in range(rounds * self.spec.sync.fragments):
            for region in self.regions.values():
                for _ in range(half):
                    region.own.train()
            await self._round(turn % self.spec.sync.fragments)
        return self._heldout()

    async def _round(self, fragment: int) -> None:
        for name, region in self.regions.items():
            await self.server.heartbeat(name, self._beat(region))
        self.server.tick()
        for name, region in self.regions.items():
            if region.own.may_answer(fragment, self.state.ledger.slots[fragment].version):
                await self._post(name, region, fragment)
        for _ in range(2):
            self.server.tick()
            await self.server.publisher.settled()
            self.now += 10.0  # Whoever is not waited for has had its grace.
        newest = self.state.weights.newest[fragment]
        for name, region in self.regions.items():
            self._hear(name, region, fragment)
            self._adopt(name, region, fragment, newest)

    async def _post(self, name: str, region: Region, fragment: int) -> None:
        values = region.own.held(fragment)
        header, _ = region.own.post(fragment)
        data = region.lie(header, values, region.memory)
        frame = open_frame(data)
        region.own.written(fragment, header.clock, frame.digest)
        region.sent[fragment] = data
        said = frame.header
        address = UploadAddress(fragment, name, said.base, said.clock, region.epoch)
        answer = await self.intake.take(address, _pieces(data), length=len(data))
        if isinstance(answer, Refused):
            region.own.answered(fragment, Fate(frame.digest, "refused", answer.why))
        elif not isinstance(answer, Accept):
            region.own.answered(fragment, Fate(frame.digest, "foreign", "not accepted"))

    def _hear(self, name: str, region: Region, fragment: int) -> None:
        """What became of a frame after it was accepted."""
        known = self.state.ledger.slots[fragment].decided.get(name)
        if known and known.fate == "refused":
            region.own.answered(fragment, Fate(known.digest, "refused", known.why))

    def _adopt(self, name: str, region: Region, fragment: int, newest: Any) -> None:
        if newest.number <= region.own.books[fragment].version:
            return
        merged = newest.merged.get(name, "")
        sent = open_frame(region.sent[fragment]) if fragment in region.sent else None
        ours = sent.values() if sent and sent.digest == merged else None
        image = Image(newest.number, newest.merged, newest.digest, newest.state.published)
        region.own.adopt(fragment, IncomingImage(image, merged, image.weights, ours))

    def _beat(self, region: Region) -> Heartbeat:
        own = region.own
        return Heartbeat.model_validate(
            {
                "epoch": region.epoch,
                "step": own.clock,
                "training": True,
                "stopping": False,
                "ended": 0,
                "fragments": [
                    {"version": book.version, "steps": max(0.0, book.fresh.steps)}
                    for book in own.books
                ],
                "tokens": own.tokens(),
            }
        )

    def _heldout(self) -> float:
        region = self.regions["r1"]
        for fragment, newest in enumerate(self.state.weights.newest):
            assert np.isfinite(newest.state.theta).all(), "never a non-finite weight"
            self._adopt("r1", region, fragment, newest)
        return region.own.stepper.evaluate(region.own.published(), region.own.stream.heldout(16))


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


def make_tasks(spec: RunSpec) -> dict[str, Task]:
    """The regions' tasks; all share one compiled step."""
    tasks = {region.name: prepare(spec, region.name) for region in spec.regions}
    step = tasks[LIAR].step
    return {name: replace(task, step=step) for name, task in tasks.items()}


def play(spec: RunSpec, tasks: dict[str, Task], rounds: int, lie: Lie | None) -> Rehearsal:
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = Rehearsal(Path(folder) / "server", spec, tasks, lie)
        rehearsal.loss = asyncio.run(rehearsal.run(rounds))
        return rehearsal


def main() -> None:
    parser = argparse.ArgumentParser(description="One region of several lies.")
    parser.add_argument("--regions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--merge", default="")
    parser.add_argument("--agreement", type=float, default=0.25)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    set_up(None)
    rule = {"kind": asked.merge} if asked.merge else {}
    spec = make_spec(asked.regions, asked.rounds, agreement=asked.agreement, **rule)
    tasks = make_tasks(spec)
    without = play(spec, tasks, asked.rounds, None).loss
    print(json.dumps({"lie": "none: the liar is away", "loss": round(without, 4)}), flush=True)
    worst = 0.0
    for name, lie in LIES.items():
        if asked.only and name not in asked.only.split(","):
            continue
        done = play(spec, tasks, asked.rounds, lie)
        change = done.loss / without - 1
        worst = max(worst, change)
        told = {
            "lie": name,
            "loss": round(done.loss, 4),
            "change": f"{100 * change:+.2f} %",
            "refused": done.state.ledger.refused.get(LIAR, 0),
            "others refused": sum(n for r, n in done.state.ledger.refused.items() if r != LIAR),
            "quarantined": LIAR in done.state.ledger.quarantined(),
        }
        print(json.dumps(told), flush=True)
    sys.exit(worst > 0.01)


if __name__ == "__main__":
    main()
