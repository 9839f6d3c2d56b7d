"""A process full of regions without trainers: each sends whenever it is called.

They speak through the product's own client, each over connections of its own, and wait, retry
and keep books as a region's courier does: one frame of a fragment in flight, the next one when
that is merged. They fetch no weights. What they send is drawn once and sealed anew for every
frame, so that drawing and quantising do not take the processor from the server.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.assemble import load_run, resolve, shared_digest
from diloco_cli.bench.support.random_region import FATES, pseudo_gradient
from diloco_cli.core.fragments import Fragment, Layout
from diloco_cli.errors import DilocoError, LinkError
from diloco_cli.net.client import Client
from diloco_cli.net.options import Options, Retry, Timeouts
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.chunks import in_chunks, squeeze
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import Header, open_frame, seal
from diloco_cli.wire.messages import News

BEAT_SECONDS = 5.0
WAIT_SECONDS = 3.0
PATIENCE = Timeouts(connect=30.0, answer=60.0)
"""Two cores carry 256 clients and their server: nobody gives up soon."""


@dataclass(frozen=True)
class Counting(Retry):
    """Retries like any client, and counts the reasons."""

    why: Counter[str] = field(default_factory=Counter)

    def pause(self, failures: int, *, retry_after: float = 0.0, chance: float) -> float:
        self.why["later" if retry_after else "broken"] += 1
        return super().pause(failures, retry_after=retry_after, chance=chance)


@dataclass
class Told:
    """What one client was told about one fragment."""

    last: str = ""
    """Digest of the last frame that was acknowledged."""
    tokens: float = 0.0
    """Of all that were acknowledged."""
    frames: int = 0


@dataclass
class Outcome:
    """What the clients of a process saw."""

    told: dict[tuple[str, int], Told] = field(default_factory=dict)
    uploads: list[tuple[float, float, int]] = field(default_factory=list)
    """Of each acknowledged one: when, after how many seconds from the first try, bytes."""
    retries: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    unmerged: int = 0
    """Acknowledged, and not reported as merged when the client gave up waiting."""
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Goods:
    """What all clients of a process share."""

    spec: RunSpec
    layout: Layout
    chunks: list[list[bytes]]
    """Of each fragment: compressed numbers."""


def be_clients(pipe: Connection, spec_file: Path, names: list[str], url: str) -> None:
    """Joins with these regions, says so, and on the word sends until the time that it names."""
    goods = _goods(load_run(spec_file).spec)
    clients = [LoadClient(goods, name, url) for name in names]
    pipe.send(None)
    until, limit = pipe.recv()
    threads = [threading.Thread(target=client.run, args=(until, limit)) for client in clients]
    began = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome = Outcome(cpu_seconds=time.process_time() - began)
    for client in clients:
        outcome.told |= {(client.name, f): told for f, told in enumerate(client.told)}
        outcome.uploads += client.uploads
        outcome.retries += client.retry.why
        outcome.refused += client.refused
        outcome.unmerged += len(client.flying)
    pipe.send(outcome)


def _goods(spec: RunSpec) -> Goods:
    layout, rng = resolve(spec).layout, np.random.default_rng(0)
    codec = codecs.build(dict(spec.wire.up))

    def compressed(fragment: Fragment) -> list[bytes]:
        values = pseudo_gradient(fragment, rng)
        return list(
            in_chunks(lambda _, span: squeeze(codec, values[span], spec.wire.zstd), values.size, 1)
        )

    return Goods(spec, layout, [compressed(each) for each in layout.fragments])


class LoadClient:
    def __init__(self, goods: Goods, name: str, url: str) -> None:
        self.goods, self.name, self.retry = goods, name, Counting()
        self.server = Client(url, Options(PATIENCE, self.retry, control_backend="pyreqwest"))
        self.run_id = self.server.run().run
        joined = self.server.join(
            name,
            owner=name,
            boot=1,
            spec_digest=shared_digest(goods.spec),
            layout_digest=goods.layout.digest,
        )
        self.epoch, self.clock = joined.epoch, 0
        count = len(goods.chunks)
        self.versions, self.prev = list(joined.versions), [""] * count
        self.told = [Told() for _ in range(count)]
        self.flying: dict[int, str] = {}
        """Fragments whose frame was made and is not merged yet, with its digest."""
        self.unsent: dict[int, tuple[bytes, Header]] = {}
        self.uploads: list[tuple[float, float, int]] = []
        self.refused: Counter[str] = Counter()

    def run(self, until: float, limit: float) -> None:
        """Sends until one moment; then waits until all is merged, or another moment."""
        with self.server:
            news, beaten, changed = None, 0.0, True
            while (now := time.monotonic()) < until or (self.flying and now < limit):
                try:
                    if news is None or changed or now > beaten + BEAT_SECONDS:
                        news, beaten = self._beat(), now
                    else:
                        after, epoch = news.n, self.epoch
                        news = (
                            self.server.calls(
                                self.name, after=after, epoch=epoch, wait=WAIT_SECONDS
                            )
                            or self._beat()
                        )
                    changed = self._adopt(news)
                    if now < until:
                        self._answer(news)
                    for fragment in list(self.unsent):
                        self._send(fragment)
                except LinkError as error:
                    self.retry.why[f"gave up: {str(error)[:60]}"] += 1
                except DilocoError as error:
                    self.refused[str(error)[:200]] += 1
                    return

    def _beat(self) -> News:
        # It trains on while a frame is in flight, so there is always enough for a call.
        every, nothing = float(self.goods.spec.sync.every), [0.0] * len(self.versions)
        report: dict[str, Any] = {
            **{"epoch": self.epoch, "step": self.clock, "training": True},
            **{"stopping": False, "ended": 0},
            "fragments": [{"version": version, "steps": every} for version in self.versions],
            "tokens": dict.fromkeys(FATES, nothing),
        }
        return self.server.heartbeat(self.name, report)

    def _adopt(self, news: News) -> bool:
        """Takes over what was published; says whether there is something to report."""
        changed = self.versions != list(news.versions)
        self.versions = list(news.versions)
        for fragment, decided in news.fates.items():
            if decided.fate == "merged" and decided.digest == self.flying.get(fragment):
                self.prev[fragment] = self.flying.pop(fragment)
        return changed

    def _answer(self, news: News) -> None:
        for fragment, version in news.calls.items():
            if fragment not in self.flying and version == self.versions[fragment]:
                frame, header = self._made(fragment)
                self.unsent[fragment] = frame, header
                self.flying[fragment] = open_frame(frame).digest

    def _made(self, fragment: int) -> tuple[bytes, Header]:
        self.clock += 1
        # Each frame has another number of tokens: a sum tells which of them are in it.
        steps = 1.0 + (self.clock * 7 + fragment) % 11
        inner = self.goods.spec.inner
        header = Header.contribution(
            run=self.run_id,
            layout=self.goods.layout.digest,
            fragment=fragment,
            size=self.goods.layout.fragments[fragment].size,
            codec=self.goods.spec.wire.up,
            base=self.versions[fragment],
            region=self.name,
            clock=self.clock,
            prev=self.prev[fragment],
            tokens=steps * inner.batch * inner.sequence,
            steps=steps,
        )
        return seal(header, self.goods.chunks[fragment]), header

    def _send(self, fragment: int) -> None:
        frame, about = self.unsent[fragment]
        began = time.monotonic()
        answer = self.server.submit(
            fragment, self.name, about.base, about.clock, frame, epoch=self.epoch
        )
        del self.unsent[fragment]
        if answer.fate not in ("pending", "merged"):
            self.refused[f"{answer.fate}: {answer.why[:200]}"] += 1
            del self.flying[fragment]
            return
        now, told = time.monotonic(), self.told[fragment]
        self.uploads.append((now, now - began, len(frame)))
        told.last, told.tokens = self.flying[fragment], told.tokens + about.tokens
        told.frames += 1
