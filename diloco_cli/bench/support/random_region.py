"""A region without a trainer: posts random pseudo-gradients and follows the versions.

For measuring synchronisation alone. It speaks to the server through the worker's own client
and holds the published weights as a worker does, deltas added up and their digest checked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from diloco_cli.assemble import load_run, resolve, shared_digest
from diloco_cli.core.fragments import Fragment, Layout
from diloco_cli.errors import RunFailed
from diloco_cli.net.client import Client
from diloco_cli.net.options import Options
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.frame import Header, pack
from diloco_cli.wire.messages import News
from diloco_cli.worker.agent.published_weights import add_up, bring_up
from diloco_cli.worker.mailbox import Image

LARGE = 500_000_000
"""Parameters from which a region does not hold as many random numbers, for want of memory."""

FATES = ("trained", "applied", "pending", "refused", "discarded")


@dataclass(frozen=True)
class Spent:
    """What some rounds took of one region."""

    cpu_seconds: float
    bytes_up: int
    bytes_down: int


def be_region(pipe: Connection, spec_file: Path, name: str, url: str) -> None:
    """Plays a region: does as many rounds as the pipe says, until it says 0."""
    spec = load_run(spec_file).spec
    with Client(url, Options(control_backend="pyreqwest")) as server:  # As a worker has it.
        region = RandomRegion(spec, name, server)
        pipe.send(None)
        while rounds := pipe.recv():
            began, up, down = time.process_time(), region.bytes_up, region.bytes_down
            for _ in range(rounds):
                region.synchronise()
            spent = time.process_time() - began
            pipe.send(Spent(spent, region.bytes_up - up, region.bytes_down - down))


class RandomRegion:
    def __init__(self, spec: RunSpec, name: str, server: Client) -> None:
        self.spec, self.name, self.server = spec, name, server
        self.layout: Layout = resolve(spec).layout
        self.run = server.run().run
        seed = [region.name for region in spec.regions].index(name)
        rng = np.random.default_rng(seed)
        self.deltas = _pseudo_gradients(self.layout, rng)
        joined = server.join(
            name,
            owner=name,
            boot=1,
            spec_digest=shared_digest(spec),
            layout_digest=self.layout.digest,
        )
        self.epoch, self.news = joined.epoch, News.model_validate(dict(joined), extra="ignore")
        self.images: list[Image] = [
            bring_up(server, number, None, 0)[0] for number in range(len(self.deltas))
        ]
        self.clock = self.bytes_up = self.bytes_down = 0

    def synchronise(self) -> None:
        """Answers one call for every fragment, and takes over what is made of the answers."""
        self._until_called()
        self.clock += 1
        for fragment in self.layout.fragments:
            self._post(fragment)
        for fragment in self.layout.fragments:
            self._follow(fragment)

    def _until_called(self) -> None:
        """Reports a full period of steps and waits until every fragment is called for."""
        nothing = [0.0] * len(self.images)
        self.news = self.server.heartbeat(
            self.name,
            {
                **{"epoch": self.epoch, "step": self.clock, "training": True},
                **{"stopping": False, "ended": 0},
                "fragments": [
                    {"version": image.version, "steps": float(self.spec.sync.every)}
                    for image in self.images
                ],
                "tokens": dict.fromkeys(FATES, nothing),
            },
        )
        while any(self.news.calls.get(n) != i.version for n, i in enumerate(self.images)):
            self._listen()

    def _listen(self) -> None:
        """Waits for what is new, as a worker does."""
        news = self.server.calls(self.name, after=self.news.n, epoch=self.epoch)
        self.news = news or self.news

    def _post(self, fragment: Fragment) -> None:
        number, inner, every = fragment.number, self.spec.inner, self.spec.sync.every
        image = self.images[number]
        header = Header.contribution(
            run=self.run,
            layout=self.layout.digest,
            fragment=number,
            size=fragment.size,
            codec=self.spec.wire.up,
            base=image.version,
            region=self.name,
            clock=self.clock,
            prev=image.merged.get(self.name, ""),
            tokens=float(every * inner.batch * inner.sequence),
            steps=float(every),
        )
        frame = pack(header, self.deltas[number], level=self.spec.wire.zstd)
        answer = self.server.submit(
            number, self.name, image.version, self.clock, frame, epoch=self.epoch
        )
        if answer.fate not in ("pending", "merged"):
            raise RunFailed(f"A contribution of {self.name} was {answer.fate}: {answer.why}")
        self.bytes_up += len(frame)

    def _follow(self, fragment: Fragment) -> None:
        number, have = fragment.number, self.images[fragment.number]
        while self.news.versions[number] <= have.version:
            self._listen()
        chain = self.server.chain(number, self.news.versions[number], have.version)
        image = add_up(have, chain) if chain else None
        if chain is None or image is None:
            raise RunFailed(f"{self.name} could not follow fragment {number} by its deltas.")
        self.bytes_down += sum(frame.data.nbytes for frame in chain)
        self.images[number] = image


def _pseudo_gradients(layout: Layout, rng: np.random.Generator) -> list[np.ndarray]:
    """One for each fragment; of a large model they are the same numbers."""
    if layout.size < LARGE:
        return [pseudo_gradient(each, rng) for each in layout.fragments]
    largest = max(layout.fragments, key=lambda fragment: fragment.size)
    values = pseudo_gradient(largest, rng)
    return [values[: fragment.size] for fragment in layout.fragments]


def pseudo_gradient(fragment: Fragment, rng: np.random.Generator) -> np.ndarray:
    """Gaussian numbers, each tensor on a scale of its own, as training makes them."""
    values = rng.standard_normal(fragment.size, np.float32)
    for piece in fragment.pieces:
        values[piece.span] *= np.float32(10 ** rng.uniform(-3.5, -2.5))
    return values
