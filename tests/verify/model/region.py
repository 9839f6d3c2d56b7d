"""A region of the model: its folder, its agent, its trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from diloco_cli.core import pace
from diloco_cli.core.unmerged_work import Totals
from tests.verify.model.audit import Audit
from tests.verify.model.server import Server
from tests.verify.model.symbols import (
    Beat,
    Chain,
    Fenced,
    Folder,
    Frame,
    Image,
    ReportedTokens,
    Welcome,
)
from tests.verify.model.trainer import Trainer
from tests.verify.model.virtual_time import Clockwork, Process

RETRY = 6.0
"""Seconds after which an unanswered request is sent again."""


class Site:
    """One folder and the processes that work on it; two sites of one region are rivals."""

    def __init__(self, world: Clockwork, audit: Audit, server: Server, region: str, owner: str):
        self.world, self.audit, self.server, self.region = world, audit, server, region
        self.folder, self.first_owner = Folder(owner), owner
        self.backup: Folder | None = None
        self.renamed = 0
        self.cut_until = 0.0
        self.left = False
        self.dismissed = False
        """Told that it was removed; it leaves, and is started again when it is added."""
        self.done = False
        self.beat: Beat | None = None
        """What the trainer said last."""
        self.agent = Agent(world, self)
        self.trainer = Trainer(world, self)

    @property
    def cut(self) -> bool:
        return self.world.now < self.cut_until

    def new_owner(self) -> None:
        self.renamed += 1
        self.folder.owner = f"{self.folder.owner.split('+')[0]}+{self.renamed}"
        self.folder.boot = 1


class Agent(Process):
    """Holds the lease and moves the mail; knows nothing of training."""

    kind = "agent"

    def __init__(self, world: Clockwork, site: Site) -> None:
        super().__init__(world)
        self.site = site
        self.epoch = 0

    # Life

    def start(self) -> None:
        site = self.site
        if site.trainer.up:
            site.trainer.die()  # The folder's lock has one holder.
        self.up = True
        self.epoch = 0
        self.beats = self.told_at = 0
        self.attempt = 0
        self.high = -1
        self.asked: dict[tuple[str, int], float] = {}
        self.acknowledged: set[str] = set()
        self.newest = -1
        site.beat = None
        folder = site.folder
        self.durable(lambda: setattr(folder, "boot", folder.boot + 1))
        self._join()
        self._rounds()

    def start_trainer(self) -> None:
        if not self.site.trainer.up and self.epoch and not self.site.done:
            self.site.trainer.start(self.high)

    def _request(self, call: Callable[..., None], *args: Any, then: Callable[[Any], None]) -> None:
        """Asks the server; either way may fail, and a dead agent hears no answer."""
        life = self.life

        def reply(answer: Any) -> None:
            if self.life == life and not self.site.cut:
                self.world.transmit(self.site.region, partial(then, answer), self)

        def ask() -> None:
            if self.site.server.up and not self.site.cut:
                call(*args, reply)

        self.world.transmit(self.site.region, ask)

    # Joining

    def _join(self) -> None:
        if self.epoch:
            return
        self.attempt += 1
        folder, server = self.site.folder, self.site.server
        self._request(
            server.join,
            self.site.region,
            folder.owner,
            folder.boot,
            then=partial(self._joined, self.attempt),
        )
        self.later(RETRY, self._join)

    def _joined(self, attempt: int, answer: Any) -> None:
        if self.epoch or attempt != self.attempt:
            return
        if isinstance(answer, Welcome):
            self.epoch, self.high = answer.epoch, answer.high
            # What was accepted or merged before is asked for again, and answered from the record.
            self.acknowledged.clear()
            for f, (_, fate) in list(self.site.folder.fate.items()):
                if fate == "merged":
                    del self.site.folder.fate[f]
            self._news(answer.epoch, answer.news)
            self.later(self.world.rng.uniform(0.1, 2), self.start_trainer)
            return
        code, finished = answer
        self.site.audit.turned_away(self.site, code)
        if finished:
            self.site.done = True
        elif code == "retired":
            self.site.dismissed = True
            self.site.trainer.die()
            self.die()
        elif code == "older-copy":
            self.durable(self.site.new_owner)

    def _fenced(self, epoch: int) -> None:
        """Stands by: stops training and asks again, which waits while the other one lives."""
        if epoch != self.epoch:
            return
        self.site.audit.fenced(self.site)
        self.epoch = 0
        self.site.trainer.die()
        self._join()

    # Mail

    def _rounds(self) -> None:
        if self.epoch:
            self._heartbeat()
            self.move_mail()
        self.later(1.0, self._rounds)

    def _heartbeat(self) -> None:
        site = self.site
        self.beats += 1
        fragments = self.world.setting.sync.fragments
        silent = Beat(
            (pace.Report(-1, 0.0),) * fragments,
            (False,) * fragments,
            0,
            0.0,
            ReportedTokens.of([Totals()] * fragments, [0.0] * fragments),
        )
        told = site.folder.calls.until if site.folder.calls else None
        beat = replace(site.beat or silent, until=told)
        self._request(
            site.server.heartbeat,
            site.region,
            site.folder.owner,
            self.epoch,
            self.beats,
            beat,
            then=partial(self._news, self.epoch, beat=self.beats),
        )

    def _news(self, epoch: int, news: Any, beat: int = 0) -> None:
        if isinstance(news, Fenced):
            self._fenced(epoch)
            return
        folder = self.site.folder
        known, until = folder.calls, news.until
        if beat < self.told_at or until is None:
            until = known.until if known else None  # Of an answer that was overtaken.
        else:
            self.told_at = beat
        if news.n < self.newest or (known and news.n < known.n):
            if known is None:
                return
            news = known  # Overtaken on the way by newer news.
        news = replace(news, until=until)
        self.newest = news.n
        if news.lanes and news.lanes != folder.lanes:
            self.durable(lambda: setattr(folder, "lanes", news.lanes))
        if news != folder.calls:
            self.durable(lambda: setattr(folder, "calls", news))
        for f, (digest, fate) in news.fates.items():
            self._fate(f, digest, fate)
        if self.site.done and not news.finished and "finished is heard again" not in self.world.off:
            # The run was opened again after this folder's trainer had left.
            self.site.done = False
            self.site.trainer.die()
            self.later(self.world.rng.uniform(0.5, 4), self.start_trainer)
        if news.terms > folder.terms:
            self.durable(lambda: setattr(folder, "terms", news.terms))
            self.site.trainer.leaving = True
        self.move_mail()

    def _fate(self, f: int, digest: str, fate: str) -> None:
        folder, frame = self.site.folder, self.site.folder.outbox.get(f)
        if frame is None or frame.digest != digest:
            return
        if fate == "pending":
            self.acknowledged.add(digest)
            if "outbox kept" in self.world.off:
                del folder.outbox[f]
        elif folder.fate.get(f) != (digest, fate):
            self.site.audit.decided(frame, fate)
            self.durable(lambda: folder.fate.__setitem__(f, (digest, fate)))

    def move_mail(self) -> None:
        if not self.epoch:
            return
        folder, news = self.site.folder, self.site.folder.calls
        for f in range(self.world.setting.sync.fragments):
            frame = folder.outbox.get(f)
            if frame and frame.digest not in self.acknowledged:
                decided = folder.fate.get(f, ("", ""))[0] == frame.digest
                if not decided and self._turn("put", f):
                    self._put(f, frame)
            image = folder.image.get(f)
            held = image.version if image else -1
            if news and held < news.versions[f] and self._turn("get", f):
                whole = self.world.chance(0.2)
                self._request(
                    self.site.server.get,
                    self.site.region,
                    f,
                    held,
                    whole,
                    then=partial(self._got, f),
                )

    def _turn(self, what: str, f: int) -> bool:
        if self.world.now < self.asked.get((what, f), -RETRY) + RETRY:
            return False
        self.asked[what, f] = self.world.now
        return True

    def _put(self, f: int, frame: Frame) -> None:
        def answered(answer: Any) -> None:
            if isinstance(answer, Fenced):
                self._fenced(epoch)
                return
            self.asked.pop(("put", f), None)
            self._fate(f, frame.digest, answer)

        epoch = self.epoch
        owner = self.site.folder.owner
        self._request(self.site.server.put, owner, epoch, frame, then=answered)

    def _got(self, f: int, chain: Chain) -> None:
        folder = self.site.folder
        self.asked.pop(("get", f), None)
        image = folder.image.get(f)
        if image and chain.version <= image.version:
            return
        if chain.base is None:
            value = chain.values[0]
        elif image and image.version == chain.base:
            value = image.value
            for link in chain.values:
                value += link
        else:
            return
        new = Image(chain.version, chain.merged, value)
        self.site.audit.received(f, new)
        self.durable(lambda: folder.image.__setitem__(f, new))
