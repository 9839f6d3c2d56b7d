"""A region's worker: joins, reports, sends, fetches, trains, as long as its process lives."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any

from diloco_cli.server.settings import ServerSettings
from diloco_cli.wire import messages
from diloco_cli.wire.error_bodies import parse_error
from diloco_cli.wire.frame import open_frame, read_chain
from diloco_cli.wire.messages import (
    EPOCH_HEADER,
    PARTS_HEADER,
    RUN_HEADER,
    WIRE_HEADER,
    WIRE_VERSION,
    Answer,
    Join,
    Joined,
    Latest,
    News,
    Run,
    check_value,
    parse,
)
from diloco_cli.worker.agent.published_weights import add_up, unpack
from tests.verify.dst.audit import Audit, Violation
from tests.verify.dst.loop import Life, Loop
from tests.verify.dst.network import Lost, Network, Reply
from tests.verify.dst.text import ORDER
from tests.verify.dst.trainer import Folder, Trainer

NO_ANSWER = (400, 408, 413, 500, 503, 507)
"""Statuses that decide nothing."""


class Fenced(Exception):
    """Another worker speaks for the region."""


class Worker:
    """One folder and the process that works on it; two of them for one region are rivals."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        settings: ServerSettings,
        audit: Audit,
        rng: Random,
        **about: Any,
    ) -> None:
        self.loop, self.network, self.settings, self.audit, self.rng = (
            loop,
            network,
            settings,
            audit,
            rng,
        )
        self.region: str = about["region"]
        self.name: str = about["name"]
        self.speed: float = about["speed"]
        self.in_parts: float = about["in_parts"]
        self.poisoned: float = about["poisoned"]
        self.folder = Folder(self.name)
        self.backup: Folder | None = None
        self.life: Life | None = None
        self.done = self.left = self.retiring = False
        self.dismissed = False
        """Told that it was removed; started again when it is added."""
        self.trainer: Trainer | None = None
        self.count: Counter[str] = Counter()
        self.renamed = self.beats = 0

    # Life

    def start(self) -> None:
        if (self.life and not self.life.dead) or self.done or self.left or self.dismissed:
            return
        self.life = Life(self.name)
        self.folder.boot += 1
        self.audit.trace("worker", who=self.name, boot=self.folder.boot)
        self.life.task(self.loop, self._run()).add_done_callback(self._ended)

    def die(self) -> None:
        if self.life:
            self.life.end()
        self.trainer = None

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.audit.broken(error)

    async def _run(self) -> None:
        about = await self._about()
        self.run = about.run
        while not self.done:
            joined = await self._join()
            if joined is None:
                self._leave_dismissed()
                return
            self.epoch, self.news = joined.epoch, joined
            trainer = Trainer(
                self.settings, self.region, self.run, self.folder, self.audit, self.rng
            )
            trainer.poisoned, trainer.retiring = self.poisoned, self.retiring
            trainer.start(joined.high)
            self.trainer = trainer
            self._acked: dict[int, str] = {}
            self._bell = asyncio.Event()
            self._take(joined)
            duties = (self._beat, self._listen, self._upload, self._download, self._train)
            tasks = [asyncio.create_task(duty()) for duty in duties]
            over, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            await asyncio.wait(tasks)
            for task in over:
                error = task.exception()
                if error is not None and not isinstance(error, Fenced):
                    raise error
            if any(task.exception() for task in over):
                self.count["fenced"] += 1
                self.audit.trace("fenced", who=self.name)
                continue
            await self._goodbye()
            if self.retiring and not self.news.finished:
                self.left = True
                self.audit.retired.add(self.region)
                return
            if not self.news.finished:
                self._come_back()
                return
            self.done = True
            self.audit.finished(self)

    def retire(self) -> None:
        """Leaves for good, once what it holds is merged."""
        self.retiring = True
        if self.trainer:
            self.trainer.retiring = True

    def _leave_dismissed(self) -> None:
        self.dismissed = True
        self.audit.trace("dismissed", who=self.name)
        self.die()

    def _come_back(self) -> None:
        """Everybody was asked to stop; somebody starts the run again."""

        def again() -> None:
            self.die()
            self.start()

        again_at = self.rng.uniform(1.0, 8.0)
        self.loop.call_later(again_at, again, context=self.network.host.outside)

    async def _goodbye(self) -> None:
        while True:
            try:
                await self._heartbeat(stopping=True)
                return
            except Lost:
                await asyncio.sleep(1.0)
            except Fenced:
                return

    # Calls

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        seconds: float = 5.0,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        about = {WIRE_HEADER: str(WIRE_VERSION), **(headers or {})}
        if run := getattr(self, "run", ""):
            about[RUN_HEADER] = run
        reply = await self.network.ask(self.name, method, path, about, body, seconds=seconds)
        if reply.status == 412:
            raise Fenced
        if reply.status in NO_ANSWER:
            await asyncio.sleep(0.5)
            raise Lost(f"{reply.status} {reply.body[:200]!r}")
        return reply

    async def _until_answered(self, method: str, path: str, body: bytes = b"") -> Reply:
        while True:
            try:
                return await self._ask(method, path, body)
            except Lost:
                await asyncio.sleep(self.rng.uniform(0.1, 1.5))

    async def _about(self) -> Run:
        return parse(Run, (await self._until_answered("GET", messages.RUN)).body)

    async def _join(self) -> Joined | None:
        """The answer to a join; None if the region was removed from the run."""
        while True:
            asked = Join(
                owner=self.folder.owner,
                boot=self.folder.boot,
                spec_digest=self.settings.spec_digest,
                layout_digest=self.settings.layout.digest,
                order=ORDER,
                key=f"key-of-{self.region}",
            )
            reply = await self._until_answered(
                "POST", messages.join_path(self.region), asked.body()
            )
            if reply.status == 200:
                return parse(Joined, reply.body)
            found = parse_error(reply.body)
            code = found[0].code if found else ""
            if code == "retired":
                return None
            if code == "older-copy":
                self.renamed += 1
                self.folder.owner, self.folder.boot = f"{self.name}.{self.renamed}", 1
            elif code not in ("held", "too-soon"):
                raise Violation(f"{self.name} may not join: {reply.body!r}")
            await asyncio.sleep(self.rng.uniform(0.3, 2.0))

    def _take(self, news: News) -> None:
        if news.n < self.news.n:
            news = self.news.model_copy(update={"until": news.until})
        if news.until is None:
            news = news.model_copy(update={"until": self.news.until})
        self.news = news
        for f, decided in news.fates.items():
            self._decided(f, decided.digest, decided.fate)
        self._bell.set()

    def _decided(self, f: int, digest: str, fate: str) -> None:
        assert self.trainer is not None
        frame = self.trainer.frames.get(f)
        if frame is None or frame.digest != digest:
            return
        self._acked[f] = digest
        if fate in ("returned", "refused", "foreign"):
            self.trainer.fates[f] = digest, fate

    async def _heartbeat(self, *, stopping: bool = False) -> News:
        assert self.trainer is not None
        self.beats += 1
        said = {
            **self.trainer.report(self.news),
            "epoch": self.epoch,
            "training": True,
            "stopping": stopping,
            "retiring": self.retiring,
            "step_seconds": self.speed,
            "until": self.news.until,
            "n": self.beats,
        }
        if self.news.evaluate and self.rng.random() < 0.1:
            versions = [book.version for book in self.trainer.books]
            if min(versions) >= 0:
                said["heldout"] = {"versions": versions, "loss": 1.0}
        path = messages.heartbeat_path(self.region)
        reply = await self._ask("POST", path, json.dumps(said).encode(), seconds=3.0)
        if reply.status != 200:
            raise Violation(f"{self.name}: heartbeat answered {reply.status} {reply.body!r}")
        return parse(News, reply.body)

    # Duties

    async def _beat(self) -> None:
        while True:
            with suppress(Lost):
                self._take(await self._heartbeat())
            await asyncio.sleep(self.news.lease_seconds / 4)

    async def _listen(self) -> None:
        while True:
            try:
                path = messages.calls_path(
                    self.region, after=self.news.n, epoch=self.epoch, wait=10.0
                )
                reply = await self._ask("GET", path, seconds=13.0)
                if reply.status == 200:
                    self._take(parse(News, reply.body))
            except Lost:
                await asyncio.sleep(0.5)

    async def _upload(self) -> None:
        while True:
            try:
                for f, data in sorted(self.folder.outbox.items()):
                    if self._acked.get(f) != data[-32:].hex():
                        await self._send(f, data)
            except Lost:
                await asyncio.sleep(self.rng.uniform(0.1, 1.0))
                continue
            self._bell.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(4.0):
                    await self._bell.wait()

    async def _send(self, f: int, data: bytes) -> None:
        frame = open_frame(data)
        path = messages.contribution_path(f, self.region, frame.header.base, frame.header.clock)
        epoch = {EPOCH_HEADER: str(self.epoch)}
        if self.rng.random() < self.in_parts:
            await self._send_parts(path, data, frame.digest, epoch)
            whole = {**epoch, PARTS_HEADER: frame.digest}
            reply = await self._ask("PUT", path, headers=whole)
        else:
            reply = await self._ask("PUT", path, data, headers=epoch)
        if reply.status in (200, 201):
            answer = parse(Answer, reply.body)
            self._decided(f, frame.digest, answer.fate)
            return
        error, beside = parse_error(reply.body) or (None, {})
        if "fate" in beside:
            self._decided(f, frame.digest, beside["fate"])
        elif error and error.code in ("incomplete", "conflict"):
            await asyncio.sleep(0.2)
        else:
            raise Violation(f"{self.name}: {path} answered {reply.status} {reply.body!r}")

    async def _send_parts(self, path: str, data: bytes, digest: str, epoch: dict) -> None:
        have = await self._ask("GET", messages.parts_path(path, frame=digest), headers=epoch)
        there = {tuple(each) for each in json.loads(have.body)["have"]}
        ends = [0, len(data) // 3, 2 * len(data) // 3, len(data)]
        for start, stop in pairwise(ends):
            if any(begin <= start and stop <= end for begin, end in there):
                continue
            part = data[start:stop]
            target = messages.part_path(
                path, start, size=len(data), frame=digest, digest=check_value(zlib.crc32(part))
            )
            await self._ask("PUT", target, part, headers=epoch)

    async def _download(self) -> None:
        while True:
            try:
                for f, version in enumerate(self.news.versions):
                    have = self.folder.image.get(f)
                    if have is None or have.version < version:
                        await self._fetch(f, version)
            except Lost:
                await asyncio.sleep(self.rng.uniform(0.1, 1.0))
                continue
            await asyncio.sleep(self.rng.uniform(0.2, 0.8))

    async def _fetch(self, f: int, version: int) -> None:
        have, image = self.folder.image.get(f), None
        size = self.settings.sizes[f]
        if have is not None and self.rng.random() < 0.8:
            path = messages.version_path(f, version, since=have.version)
            reply = await self._ask("GET", path)
            if reply.status == 200:
                image = add_up(have, read_chain(reply.body, size=size))
                if image is None:
                    raise Violation(f"deltas {have.version}..{version} of {f} do not add up")
        if image is None:
            reply = await self._ask("GET", messages.version_path(f, version))
            if reply.status == 410:
                reply = await self._ask("GET", messages.fragment_path(f, after=-1, wait=0))
                latest = parse(Latest, reply.body)
                path = messages.version_path(f, latest.version)
                reply = await self._ask("GET", path)
            if reply.status != 200:
                return
            image = unpack(open_frame(reply.body, size=size))
        if self.folder.image.get(f) is None or self.folder.image[f].version < image.version:
            self.audit.received(f, image)
            self.folder.image[f] = image

    async def _train(self) -> None:
        trainer, since = self.trainer, 0
        assert trainer is not None
        while not trainer.boundary(self.news) and not self.news.stop:
            since += 1
            if since >= 5 and self.rng.random() < 0.3:
                trainer.save()
                since = 0
            if any(self._acked.get(f) != frame.digest for f, frame in trainer.frames.items()):
                self._bell.set()
            await asyncio.sleep(self.speed)
        trainer.save()
