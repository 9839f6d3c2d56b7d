"""One run from its seed: everything is put together here, and taken apart again."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from diloco_cli.core.journal_records import LanesDealt, RegionRetired, VersionPublished
from tests.verify.dst.audit import Audit, Violation
from tests.verify.dst.disk import Disk
from tests.verify.dst.host import Deaths, Host
from tests.verify.dst.loop import BEGIN, Life, Loop, Stuck
from tests.verify.dst.network import Lost, Network, Weather
from tests.verify.dst.seeded_run import UNLISTED, Blow, Setting, Wish, drawn, initial, settings_of
from tests.verify.dst.worker import Worker

PATIENCE = 1500.0
"""Virtual seconds after the last fault in which the run must finish."""
MOST_EVENTS = 150_000

MEMORY = Path("/dev/shm")
"""Files here cost no disk; without it the usual place for temporary files is used."""


@dataclass
class Outcome:
    seed: int
    root: str = "/dev/null"
    steps: list[tuple[float, str, dict[str, object]]] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)
    problem: str = ""
    seconds: float = 0.0
    """Virtual ones."""
    events: int = 0

    @property
    def trace(self) -> list[str]:
        """Everything that happened, a line each."""
        lines = []
        for at, kind, about in self.steps:
            told = " ".join(f"{key}={value}" for key, value in about.items())
            lines.append(f"{at:9.3f} {kind:9} {told.replace(self.root, '')}")
        return lines


def play(seed: int, setting: Setting | None = None) -> Outcome:
    """Plays the run of a seed to its end, or to the first promise that breaks."""
    outcome = Outcome(seed)
    parent = MEMORY if MEMORY.is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="diloco-dst-", dir=parent))
    outcome.root = str(root)
    try:
        Play(setting or drawn(seed), root, outcome).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return outcome


def setting_is_calm(setting: Setting) -> bool:
    """Says whether nothing goes wrong and nothing changes."""
    return not (setting.blows or setting.faults_end or setting.wishes)


class Play:
    def __init__(self, setting: Setting, root: Path, outcome: Outcome) -> None:
        self.setting, self.outcome = setting, outcome
        self.rng = Random(f"play {setting.seed}")
        self.loop = Loop(
            self._chance("loop"),
            shuffled=setting.shuffled,
            interrupted=setting.interrupted,
            most_events=MOST_EVENTS,
        )
        self.loop.slow, self.loop.sluggish = setting.slow, setting.sluggish
        self.settings = settings_of(setting.spec)
        self.audit = Audit(self.settings, initial, self.trace, self.loop.time)
        self.disk = Disk(root, self._chance("disk"), self.loop, self.trace)
        host = Host(self.loop, self.disk, self._chance("host"), self.settings, self.trace, initial)
        host.deaths = setting.deaths
        host.on_open, host.on_reply = self.audit.opened, self.audit.replied
        self.host = host
        self.network = Network(self.loop, self._chance("network"), host, setting.weather)
        self.workers = [self._worker(name, name) for name in setting.speeds]
        self.audit.on_problem = self._stop

    def _chance(self, what: str) -> Random:
        return Random(f"{what} {self.setting.seed}")

    def _worker(self, region: str, name: str) -> Worker:
        return Worker(
            self.loop,
            self.network,
            self.settings,
            self.audit,
            self._chance(name),
            region=region,
            name=name,
            speed=self.setting.speeds[region],
            in_parts=self.setting.in_parts,
            poisoned=self.setting.poisoned,
        )

    def trace(self, kind: str, /, **about: object) -> None:
        self.outcome.steps.append((self.loop.time() - BEGIN, kind, about))

    # The run

    def run(self) -> None:
        outcome = self.outcome
        with _without_collecting(), self.disk.watched(), self.host.in_place():
            try:
                self.loop.run_until_complete(self._run())
                self._reopen()
                self.audit.closing(
                    self.disk.root,
                    books=self._books_must_balance(),
                    calm=setting_is_calm(self.setting),
                )
            except (Violation, Stuck) as error:
                outcome.problem = f"{type(error).__name__}: {error}"
            except Exception as error:
                outcome.problem = "".join(traceback.format_exception(error))
            if problem := self.audit.problem or self.host.problem:
                lines = traceback.format_exception(problem)
                plain = isinstance(problem, Violation)
                outcome.problem = f"Violation: {problem}" if plain else "".join(lines)
            elif self.loop.complaints and not outcome.problem:
                outcome.problem = "\n".join(self.loop.complaints)
            if outcome.problem.startswith("Stuck"):
                outcome.problem += f"; {self._standing()}"
            self._end()
        outcome.seconds, outcome.events = self.loop.time() - BEGIN, self.loop.events
        outcome.problem = outcome.problem.replace(str(self.disk.root), "")
        for count in (self.host.count, self.disk.count, self.network.count):
            outcome.count.update(count)
        outcome.count["versions"] = sum(
            isinstance(record, VersionPublished) for record in self.audit.records
        )
        kinds = Counter(type(record) for record in self.audit.records)
        outcome.count["retired"], outcome.count["lanes moved"] = (
            kinds[RegionRetired],
            kinds[LanesDealt],
        )
        outcome.count["joined unlisted"] = len(self.audit.ledger.regions.keys() & set(UNLISTED))
        outcome.count["excused"] = len(self.audit.silence.excused)
        outcome.count["acknowledged"] = len(self.audit.acknowledged)
        outcome.count["fenced"] = sum(worker.count["fenced"] for worker in self.workers)

    async def _run(self) -> None:
        setting, loop = self.setting, self.loop
        loop.call_later(0.0, self.host.start)
        for worker in self.workers:
            loop.call_later(setting.starts[worker.region], worker.start)
        for blow in setting.blows:
            loop.call_later(blow.at, self._strike, blow)
        for wish in setting.wishes:
            loop.call_later(wish.at, lambda wish=wish: loop.create_task(self._amend(wish)))
        loop.call_later(setting.faults_end, self._calm)
        people = [loop.create_task(each()) for each in (self._watch, self._supervise)]
        try:
            async with asyncio.timeout(setting.faults_end + PATIENCE):
                await self.host.over
        except TimeoutError:
            raise Stuck(f"not finished after {loop.time() - BEGIN:.0f} s") from None
        finally:
            for person in people:
                person.cancel()

    async def _watch(self) -> None:
        """Somebody looks how the run is, now and then."""
        for path in itertools.cycle(("/v1/status", "/metrics", "/v1/weights", "/healthz")):
            await asyncio.sleep(self.rng.uniform(1.0, 12.0))
            with suppress(Lost):
                await self.network.ask("person", "GET", path, {})

    async def _supervise(self) -> None:
        """Whoever has left a finished run is started again once it is opened again."""
        while True:
            await asyncio.sleep(5.0)
            coordinator = self.host.coordinator
            if coordinator is None or coordinator.state.ledger.finished:
                continue
            for worker in self.workers:
                if worker.done:
                    worker.done = False
                    worker.die()
                    worker.start()

    async def _amend(self, wish: Wish) -> None:
        """An operator asks until there is an answer; two of them may ask at once."""
        asked: dict[str, Any] = {"id": wish.id, "set": wish.set, "sure": True}
        if wish.remove:
            self.audit.retired.add(wish.remove)
            asked["remove"] = [wish.remove]
        if wish.add:
            asked["add"] = [{"name": wish.add}]
        headers = {"diloco-wire": "1", "content-type": "application/json"}
        while not self.host.over.done():
            with suppress(Lost):
                body = json.dumps(asked).encode()
                reply = await self.network.ask(
                    "operator", "POST", "/v1/amendments", headers, body, seconds=3.0
                )
                if reply.status in (200, 201):
                    self.outcome.count["amended"] += reply.status == 201
                    self.outcome.count["removed"] += bool(wish.remove)
                    self._let_in(wish.add)
                    return
                if reply.status == 422 and (wish.add or wish.remove):
                    return  # It has never joined, or was not removed yet.
                if reply.status == 422:
                    raise Violation(f"{wish} was refused: {reply.body!r}")
            await asyncio.sleep(self.rng.uniform(0.2, 2.0))

    def _let_in(self, region: str) -> None:
        for worker in self.workers:
            if worker.region == region and worker.dismissed:
                worker.dismissed = False
                worker.start()

    def _stop(self) -> None:
        if not self.host.over.done():
            self.host.over.set_result(None)

    def _calm(self) -> None:
        """The faults are over; the run must end now."""
        self.trace("calm")
        self.network.weather = Weather(delay=self.setting.weather.delay)
        self.host.deaths = Deaths()
        self.disk.full, self.disk.failing = False, 0.0
        for worker in self.workers:
            worker.poisoned = 0.0
            if worker.trainer:
                worker.trainer.poisoned = 0.0
            worker.start()

    def _reopen(self) -> None:
        """Starts the server of a finished run once more: it must stand where it stood."""
        if self.audit.problem:
            return
        self.disk.full, self.disk.failing = False, 0.0
        life = Life("reopened")
        self.host.life = life

        async def reopened() -> None:
            coordinator = self.host._open(self.settings, self.disk.root / "server", initial)
            coordinator.state.store.close()

        self.loop.run_until_complete(life.task(self.loop, reopened()))

    def _books_must_balance(self) -> bool:
        return not self.audit.spoiled

    def _standing(self) -> str:
        coordinator = self.host.coordinator
        if coordinator is None:
            return "no server"
        slots = coordinator.state.ledger.slots
        told = [f"{s.phase} v{s.version} {sorted(s.waiting)} {sorted(s.closing)}" for s in slots]
        return f"{coordinator.state.phase}; rounds: {told}; {coordinator.state.waiting}"

    def _end(self) -> None:
        for worker in self.workers:
            worker.die()
        if self.host.life:
            self.host.drop_app()
            self.host.life.end()
        self.disk.let_go()
        with suppress(Exception):
            self.loop.close()

    # What goes wrong

    def _strike(self, blow: Blow) -> None:
        self.trace("blow", what=blow.kind, region=blow.region)
        self.outcome.count[blow.kind] += 1
        if blow.region:
            candidates = [worker for worker in self.workers if worker.region == blow.region]
            self._strike_worker(self.rng.choice(candidates), blow)
        elif blow.kind in ("kill", "power"):
            self.host.crash(power=blow.kind == "power")
        elif blow.kind == "term":
            self.host.stop()
        elif blow.kind == "clock":
            self.host.skew += self.rng.choice((-3600.0, -5.0, 5.0, 86400.0))
        else:
            self._strike_disk(blow)

    def _strike_disk(self, blow: Blow) -> None:
        if blow.kind == "full":
            self.disk.full = True
        else:
            self.disk.failing = 0.3
        if blow.kind == "sick":  # A disk that fails, and then its machine.
            after = blow.length + self.rng.uniform(0.2, 5.0)
            self.loop.call_later(after, partial(self.host.crash, power=True))

        def over() -> None:
            self.disk.full, self.disk.failing = False, 0.0

        self.loop.call_later(blow.length, over)

    def _strike_worker(self, worker: Worker, blow: Blow) -> None:
        if worker.done or worker.left or worker.dismissed:
            return
        if blow.kind == "retire":
            worker.retire()
            return
        again = self.rng.uniform(0.5, 12.0)
        if blow.kind == "pause":
            if worker.life:
                worker.life.paused_until = self.loop.time() + blow.length
        elif blow.kind == "cut":
            self.network.parted[worker.name] = self.loop.time() + blow.length
        elif blow.kind == "copy":
            worker.backup = worker.folder.copied()
        elif blow.kind == "rival":
            self.audit.spoiled.add(blow.region)
            rival = self._worker(blow.region, f"{blow.region}-rival{len(self.workers)}")
            self.workers.append(rival)
            rival.start()
        elif blow.kind == "stop":
            self.loop.create_task(self._ask_to_stop())
        else:
            self._stop_worker(worker, blow.kind)
            self.loop.call_later(again, worker.start)

    async def _ask_to_stop(self) -> None:
        with suppress(Exception):
            await self.network.ask("person", "POST", "/v1/stop", {"diloco-wire": "1"})

    def _stop_worker(self, worker: Worker, kind: str) -> None:
        self.audit.restless.add(worker.region)
        worker.die()
        if kind == "leave":
            worker.left = True
        elif kind == "restore" and worker.backup:
            self.audit.spoiled.add(worker.region)
            worker.folder = worker.backup.copied()
        elif kind == "lose":
            self.audit.spoiled.add(worker.region)
            worker.renamed += 1
            worker.folder = type(worker.folder)(f"{worker.name}.{worker.renamed}")


@contextmanager
def _without_collecting() -> Iterator[None]:
    """What is thrown away must not act when the collector happens to come by."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
