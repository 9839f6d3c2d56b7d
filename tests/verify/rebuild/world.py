"""One seeded run: training, posts, merges; servers lost and set back; deaths; late copies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from tests.verify.rebuild.region import Folder, ModelIdentity, Trainer
from tests.verify.rebuild.rules import Broken, Died, Rules
from tests.verify.rebuild.server import FRAGMENTS, Copy, ModelFrame, Server, rebuild

MOST_REBUILDS = 4


class Region:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.trainer: Trainer | None = None
        self.folder = Folder(ModelIdentity(f"{name}/0", world.server.run))
        self.join()

    @property
    def behind(self) -> bool:
        """Its folder is of a run that the server's continues."""
        return self.folder.identity.run != self.world.server.run

    def join(self) -> None:
        high = self.world.server.join(self.name, self.folder.identity.owner)
        self.folder.identity = replace(self.folder.identity, high=high)

    def lose_disk(self) -> None:
        self.trainer = None
        self.folder = Folder(ModelIdentity(self.world.owner(self.name), self.world.server.run))
        self.join()

    def go_over(self) -> None:
        """The agent's part: stop the trainer, then the folder is of the new run."""
        server, identity = self.world.server, self.folder.identity
        if identity.run not in server.ledger.continues:
            raise Broken(f"{self.name}: {identity.run} is not of this line")
        if self.trainer and self.world.rng.random() < 0.7:
            self.trainer.save()
        self.trainer = None
        self.world.point()
        known = {*identity.was, identity.run}
        was = tuple(run for run in server.ledger.continues if run in known)
        self.folder.identity = ModelIdentity(self.world.owner(self.name), server.run, was)
        self.world.point()

    def fetch(self) -> None:
        for fragment in range(FRAGMENTS):
            self.folder.images[fragment] = self.world.server.image(fragment)
            self.world.point()

    def start(self) -> None:
        world = self.world
        images = self.folder.images
        if any(image is None or image.run != self.folder.identity.run for image in images):
            if self.behind:
                return  # The server of this run is gone.
            self.fetch()
        if not self.behind:
            self.join()  # An agent does so before it starts a trainer.
        self.trainer = Trainer(self.name, self.folder, world.rules, world.alpha, world.point)
        if self.trainer.realigned:
            world.stats["realigned"] += 1

    def put(self) -> None:
        world = self.world
        for fragment, frame in enumerate(self.folder.outbox):
            if frame is None:
                continue
            if world.rules.own_frames and frame.run in self.folder.identity.was:
                continue
            world.copies.append(frame)
            fate = world.server.put(frame)
            if fate in ("void", "ahead"):
                raise Broken(f"{self.name}: its frame is {fate}")
            if fate == "foreign" and not world.wiped[self.name]:
                raise Broken(f"{self.name}: its frame is foreign")
            if self.trainer and fate in ("foreign", "returned"):
                self.trainer.answered(fragment, frame.receipt.digest, fate)


class World:
    def __init__(self, seed: int, rules: Rules | None = None) -> None:
        self.rng, self.rules = random.Random(seed), rules or Rules()
        rng = self.rng
        self.alpha = rng.choice((1.0, 1.0, 0.0))
        self.deaths = rng.choice((0.0, 0.03, 0.15))
        self.wipes = rng.choice((0.0, 0.0, 0.004))
        self.stats: Counter[str] = Counter()
        self.wiped: Counter[str] = Counter()
        self.names = 0
        self.copies: list[ModelFrame] = []
        self.backup: Copy | None = None
        self.server = Server("run-1", self.rules, self.alpha)
        self.regions = [Region(self, name) for name in "abcd"[: rng.randint(1, 4)]]

    def name(self) -> int:
        self.names += 1
        return self.names

    def owner(self, region: str) -> str:
        return f"{region}/{self.name()}"

    def point(self) -> None:
        """A process may die here."""
        if self.rng.random() < self.deaths:
            self.stats["deaths"] += 1
            raise Died

    def go(self) -> Counter[str]:
        for _ in range(self.rng.randint(150, 500)):
            region = self.rng.choice(self.regions)
            try:
                self._act(region)
            except Died:
                region.trainer = None
            if self.rng.random() < 0.015:
                self._lose_server()
            if self.copies and self.rng.random() < 0.15:
                self.server.put(self.rng.choice(self.copies[-12:]))  # It comes late.
            self._check()
        self._drain()
        self.stats["runs"] += 1
        return self.stats

    def _act(self, region: Region) -> None:
        rng, what = self.rng, self.rng.random()
        if what < self.wipes:
            self.wiped[region.name] += 1
            return region.lose_disk()
        if region.behind and what < 0.4:
            return region.go_over()
        trainer = region.trainer
        if trainer is None:
            return region.start()
        fragment = rng.randrange(FRAGMENTS)
        if what < 0.5:
            trainer.step(self.name())
        elif what < 0.62:
            trainer.post(fragment, self.name())
            self.point()
        elif what < 0.68:
            trainer.save()
            self.point()
        elif what < 0.72:
            region.trainer = None
        elif region.behind:
            return  # Nobody answers any more.
        elif what < 0.8:
            region.put()
        elif what < 0.9:
            region.fetch()
            for each in range(FRAGMENTS):
                trainer.adopt(each)
        else:
            self.server.merge(fragment, rng)
        return

    def _lose_server(self) -> None:
        rng = self.rng
        if rng.random() < 0.4:
            self.backup = self.server.copy()
            return
        if self.stats["rebuilt"] >= MOST_REBUILDS:
            return
        kind = rng.choice(("regions", "copy", "both"))
        copy = self.backup if kind != "regions" else None
        if copy is None and kind != "regions":
            return
        given = rng.sample(self.regions, rng.randint(1, len(self.regions)))
        images = {} if kind == "copy" else {it.name: it.folder.images for it in given}
        versions = sum(slot.version for slot in self.server.ledger.slots)
        run = f"run-{self.stats['rebuilt'] + 2}"
        new = rebuild(self.server, run, images, copy)
        if new is None:
            return
        self.backup = None
        self.stats["rebuilt"] += 1
        self.stats["lost versions"] += versions - sum(s.version for s in new.ledger.slots)
        self.server = new

    def _check(self) -> None:
        for region in self.regions:
            if region.trainer and not region.behind:
                region.trainer.check(self.server)

    def _drain(self) -> None:
        """Everybody realigns and hands over what it holds."""
        for _ in range(60):
            for region in self.regions:
                for _ in range(200):
                    try:
                        if region.behind:
                            region.go_over()
                        if region.trainer is None:
                            region.start()
                        break
                    except Died:
                        region.trainer = None
                trainer = region.trainer
                assert trainer is not None
                for fragment in range(FRAGMENTS):
                    region.folder.images[fragment] = self.server.image(fragment)
                    trainer.adopt(fragment)
                    trainer.post(fragment, self.name())
                region.put()
            for fragment in range(FRAGMENTS):
                self.server.merge(fragment, self.rng)
            self._check()
            if all(not any(it.trainer.held) for it in self.regions if it.trainer):
                break
        else:
            raise Broken("what is held is never merged")
        self._check_accounts()

    def _check_accounts(self) -> None:
        for region in self.regions:
            trainer = region.trainer
            if trainer is None or self.wiped[region.name]:
                continue
            owner = region.folder.identity.owner
            for fragment, book in enumerate(trainer.books):
                there = self.server.applied[owner, fragment]
                if book.flight is None and book.totals.applied != there:
                    raise Broken(
                        f"{region.name}: {book.totals.applied:g} steps are merged by its own "
                        f"books, {there} by the server's"
                    )
