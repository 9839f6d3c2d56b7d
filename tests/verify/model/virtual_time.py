"""Virtual time, a bad network, and the moments at which a process may die."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection

from tests.verify.model.seeded_run import FAR, Setting

Action = Callable[[], None]
STALLED = 300.0
"""Without faults, something must be merged within this time."""
PATIENCE = 5000.0
"""A run must end this long after its last fault."""


class Violation(Exception):
    """A promise of the protocol was broken; `kind` is its letter."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"({kind}) {what}")
        self.kind = kind


class Crash(Exception):
    """Ends a process at this very line: what it has written stays, what it knew is gone."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.kind)
        self.process = process


class Process:
    kind = ""

    def __init__(self, world: Clockwork) -> None:
        self.world = world
        self.up = False
        self.life = 0
        self.paused_until = 0.0

    def later(self, delay: float, action: Action) -> None:
        """Does something later, if this life of the process lasts so long."""
        self.world.schedule(delay, action, self)

    def durable(self, write: Action) -> None:
        """Writes a file; death may come just before or just after."""
        self.world.crash_point(self)
        write()
        self.world.crash_point(self)

    def die(self) -> None:
        self.up = False
        self.life += 1


class Clockwork:
    def __init__(self, setting: Setting, off: Collection[str] = ()) -> None:
        self.setting = setting
        self.off = frozenset(off)
        """Rules of the shells that are switched off."""
        self.rng = random.Random(f"run {setting.seed}")
        self.now = 0.0
        self.skew = 0.0
        """Of the server's wall clock."""
        self.points = 0
        self.tokens = 0
        self.poisoned: set[int] = set()
        self.on_crash: Callable[[Process], None] = Process.die
        self._queue: list[tuple[float, int, Action, Process | None, int]] = []
        self._number = 0

    @property
    def faulty(self) -> bool:
        return self.now < self.setting.quiet

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def schedule(self, delay: float, action: Action, process: Process | None = None) -> None:
        self._number += 1
        life = process.life if process else 0
        heapq.heappush(self._queue, (self.now + delay, self._number, action, process, life))

    def transmit(self, region: str, action: Action, process: Process | None = None) -> None:
        """Sends a message: late, out of order, perhaps never, perhaps twice."""
        setting = self.setting
        if self.faulty and self.chance(setting.loss):
            return
        mean = FAR if region in setting.far else setting.delay
        copies = 2 if self.faulty and self.chance(setting.twice) else 1
        for _ in range(copies):
            delay = self.rng.expovariate(1 / mean)
            if self.rng.random() < 0.03:
                delay *= 8  # A heavy tail: some messages arrive when all is different.
            self.schedule(delay, action, process)

    def crash_point(self, process: Process) -> None:
        self.points += 1
        # Trainers write less often than the others and should die as often.
        crash = self.setting.crash * (4 if process.kind == "trainer" else 1)
        if self.points == self.setting.crash_at or (self.faulty and self.chance(crash)):
            raise Crash(process)

    def new_token(self) -> int:
        self.tokens += 1
        if self.faulty and self.chance(self.setting.poison):
            self.poisoned.add(self.tokens)
        return self.tokens

    def run(self, over: Callable[[], bool], progress: Callable[[], object]) -> None:
        """Lets events happen until the run is over, which must not take for ever."""
        seen, since = progress(), self.now
        while not over():
            for _ in range(32):
                if self._queue:
                    self._next()
            if (now := progress()) != seen or self.faulty:
                seen, since = now, self.now
            if self.now - since > STALLED or self.now > self.setting.quiet + PATIENCE:
                raise Violation("e", f"the run is stuck at {self.now:.0f}")

    def _next(self) -> None:
        self.now, _, action, process, life = heapq.heappop(self._queue)
        if process is not None:
            if process.life != life:
                return
            if process.paused_until > self.now:
                self.schedule(process.paused_until - self.now, action, process)
                return
        try:
            action()
        except Crash as crash:
            self.on_crash(crash.process)
