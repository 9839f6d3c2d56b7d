"""An event loop whose time, order and threads come from a seed.

Time jumps to the next timer when nothing is ready. Work for a thread runs at a moment the
seed chooses and answers at another one; some of it is interrupted at its disk calls, as a
real thread is while it waits for the disk. Only one thread ever runs: the loop hands the
turn over and takes it back, so a run is the same every time.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any

BEGIN = 1000.0


class Crashed(BaseException):
    """Thrown into what a dead process was about to do."""


class Life:
    """One process, from its start to its death; what it left in the loop dies with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused_until = 0.0
        self.context = contextvars.copy_context()
        self.context.run(LIFE.set, self)
        self.tasks: list[asyncio.Task[Any]] = []
        self.jobs: list[Job] = []
        self.asleep: list[asyncio.Handle] = []

    def task(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Task:
        return loop.create_task(work, context=self.context)

    def end(self) -> None:
        """Kills it: nothing of it runs any more, not even what it meant to do at the end."""
        if self.dead:
            return
        self.dead = True
        for job in self.jobs:
            job.end()
        running = asyncio._get_running_loop()
        for task in self.tasks:
            if not task.done():
                task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
                asyncio._set_running_loop(task.get_loop())  # It may be a thread that dies here.
                with suppress(BaseException):
                    self.context.copy().run(task.get_coro().close)  # pyright: ignore
        asyncio._set_running_loop(running)


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class Stuck(Exception):
    """Nothing is left to happen, or far too much has."""


class Loop(asyncio.BaseEventLoop):
    def __init__(
        self, rng: Random, *, shuffled: bool, interrupted: float, most_events: int
    ) -> None:
        super().__init__()
        self.rng, self.shuffled, self.interrupted = rng, shuffled, interrupted
        self.slow = 0.0
        """Seconds that work in a thread may take."""
        self.sluggish = 0.02
        """Share of the work that takes so long."""
        self.events, self._most = 0, most_events
        self._at = BEGIN
        self._lanes: dict[Executor, deque[Job]] = {}
        """What waits for an executor with a single thread; the first is being done."""
        self.job: Job | None = None
        self.complaints: list[str] = []
        self.set_exception_handler(self._complain)
        self.set_task_factory(_registered)

    def time(self) -> float:
        return self._at

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        retrieved = "never retrieved" not in context.get("message", "")
        if error is not None and not isinstance(error, Crashed) and retrieved:
            self.complaints.append(f"{context.get('message')}: {error!r}")

    # Order

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # pyright: ignore
        while timers and (timers[0]._cancelled or timers[0]._when <= self._at or not ready):
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if timer._cancelled:
                self._timer_cancelled_count -= 1  # pyright: ignore
                continue
            self._at = max(self._at, timer._when)
            ready.append(timer)
        self.events += 1
        if not ready or self.events > self._most:
            raise Stuck("nothing is left to happen" if not ready else f"{self.events} events")
        place = self.rng.randrange(len(ready)) if self.shuffled and len(ready) > 1 else 0
        handle = ready[place]
        del ready[place]
        if handle._cancelled:
            return
        life = handle._context.get(LIFE)
        if life is None or not life.dead:
            if life and life.paused_until > self._at:
                self._sleep(life, handle)
            else:
                handle._run()

    def _sleep(self, life: Life, handle: asyncio.Handle) -> None:
        """A stopped process does nothing; everything waits for it, in order."""
        if not life.asleep:
            self.call_at(life.paused_until, self._wake, life, context=contextvars.Context())
        life.asleep.append(handle)

    def _wake(self, life: Life) -> None:
        asleep, life.asleep = life.asleep, []
        self._ready.extendleft(reversed(asleep))  # pyright: ignore

    def _process_events(self, event_list: Any) -> None: ...
    def _write_to_self(self) -> None: ...

    # Threads

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        life = LIFE.get()
        if life is None or life.dead:
            raise Crashed
        done = self.create_future()
        job = Job(self, life, done, lambda: func(*args))
        alone = isinstance(executor, ThreadPoolExecutor) and executor._max_workers == 1
        if alone:
            job.lane = self._lanes.setdefault(executor, deque())
            job.lane.append(job)
        if job.lane is None or len(job.lane) == 1:
            self.call_later(self.pause(), job.begin)
        return done

    def pause(self) -> float:
        """How long the disk or a thread takes: mostly nothing to speak of."""
        kind = self.rng.random()
        if kind < 0.5:
            return 0.0
        return (
            self.rng.expovariate(1 / 0.02)
            if kind < 1 - self.sluggish
            else self.rng.uniform(0, self.slow)
        )

    def disk_step(self) -> None:
        """Called by the disk before every call: a thread may be interrupted here."""
        job = self.job
        if job and job.thread is threading.current_thread() and self.rng.random() < 0.5:
            job.wait_for_turn(self.pause())


class Job:
    """Work for a thread."""

    def __init__(self, loop: Loop, life: Life, done: asyncio.Future, work: Callable[[], Any]):
        self.loop, self.life, self.done, self.work = loop, life, done, work
        self.lane: deque[Job] | None = None
        self.thread: threading.Thread | None = None
        self.context = contextvars.copy_context()
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self.result: tuple[Any, BaseException | None] | None = None

    def begin(self) -> None:
        self.life.jobs.append(self)
        if self.loop.rng.random() < self.loop.interrupted:
            self.thread = threading.Thread(target=self._in_thread, daemon=True)
            self.thread.start()
            self._go_on()
        else:
            self._work()
            self._finish()

    def _work(self) -> None:
        try:
            self.result = self.work(), None
        except BaseException as error:
            self.result = None, error

    def _in_thread(self) -> None:
        self._mine.acquire()
        self.context.run(self._work)
        self._theirs.release()

    def wait_for_turn(self, seconds: float) -> None:
        """In the thread: lets the loop go on, and goes on itself after a while."""
        self.loop.call_later(seconds, self._go_on, context=self.life.context)
        self._theirs.release()
        self._mine.acquire()

    def _go_on(self) -> None:
        self.loop.job, before = self, self.loop.job
        self._mine.release()
        self._theirs.acquire()
        self.loop.job = before
        if self.result is not None:
            self._finish()

    def _finish(self) -> None:
        self.life.jobs.remove(self)
        if self.life.dead:
            return
        if self.lane:
            self.lane.popleft()
            if self.lane:
                following = self.lane[0]
                self.loop.call_later(self.loop.pause(), following.begin, context=self.life.context)
        self.loop.call_later(self.loop.pause(), self._answer, context=self.life.context)

    def _answer(self) -> None:
        assert self.result is not None
        value, error = self.result
        if self.done.done():
            return
        if error is None:
            self.done.set_result(value)
        elif isinstance(error, Crashed):
            return
        else:
            self.done.set_exception(error)

    def end(self) -> None:
        """The process is dead: its next disk call throws, which ends the thread."""
        if self.thread and self.result is None and self.thread is not threading.current_thread():
            self._mine.release()
            self._theirs.acquire()


def _registered(loop: Any, coro: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coro, loop=loop, **options)
    life = LIFE.get() if options.get("context") is None else options["context"].get(LIFE)
    if life is not None:
        life.tasks.append(task)
        if len(life.tasks) > 256:
            life.tasks = [each for each in life.tasks if not each.done()]
    return task
