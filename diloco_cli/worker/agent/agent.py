"""`diloco work`: a region's agent holds the lease, moves the mail, keeps the trainer running.

    who am I ──▶ which run is this ──▶ join ──▶ images ──▶ trainer ──▶ leave
                                        ▲                    │ died: again, after a pause
                                        └──── fenced ◀───────┘ (a stand-by while another lives)

    a trainer that outlived its last agent ──▶ taken over at once, and goes on meanwhile

It never imports JAX, so it outlives whatever happens to the training, and a trainer that
dies is back as fast as JAX can start. Everything it knows is in the region's folder.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.net.client import Client, FencedError
from diloco_cli.net.credentials import NOBODY, Credentials
from diloco_cli.net.options import DEFAULTS, ONCE, Options, Retry
from diloco_cli.observe.events import EventLog
from diloco_cli.spec.resolved import FILE as RESOLVED
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system import logs
from diloco_cli.system.process_end import exit_in_words
from diloco_cli.system.wakeup import Wakeup, exit_at_once, stop_on_signals, wake_on_input
from diloco_cli.wire.messages import Joined, TrainerProgress
from diloco_cli.worker.agent.join import RegionJoin, SharedSettings
from diloco_cli.worker.agent.sync_threads import Idle, Reporting, SyncThreads
from diloco_cli.worker.agent.trainer_process import InheritedTrainer, TrainerProcess, take_over
from diloco_cli.worker.handover import HandoverRecord
from diloco_cli.worker.mailbox import Mailbox

__all__ = ["Agent", "SharedSettings", "work"]

log = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
LOCK_SECONDS = 5.0
STOP_SECONDS = 45.0
"""For a trainer to finish its step and its checkpoint."""
KILL_SECONDS = 5.0
FINISH_SECONDS = 180.0
"""For a trainer to adopt and measure the final weights."""
DRAIN_SECONDS = 10.0
HEALTHY_SECONDS = 60.0
LONGEST_PAUSE = 30.0
TELL_SECONDS = 60.0
"""Between two lines that say how far the region is."""
MOST_LETTERS = 600
"""Of a reason that is passed on; a heartbeat has room for a thousand."""
PERMANENT: dict[int, type[DilocoError]] = {2: SpecError, 5: StoreError}
"""A trainer that ends with one of these would only do so again."""


def work(
    spec: RunSpec,
    region: str,
    folder: Path,
    server_url: str,
    *,
    terms: SharedSettings,
    cores: Sequence[int] | None = None,
    with_parent: bool = False,
    wait: float = WAIT_SECONDS,
    credentials: Credentials = NOBODY,
) -> int:
    """Runs one region until the run is finished or stopped.

    `wait` is how long a server that does not answer is waited for at the start; later it
    may be away for any time. With `with_parent` the end of our standard input means that
    whoever started us is gone.
    """
    wakeup = Wakeup()
    mailbox = Mailbox(folder / "regions" / region)
    mailbox.prepare()
    with mailbox.locked(seconds=LOCK_SECONDS):
        mailbox.clear_agent_drafts()
        # Where the server listens, and how it keeps things, may be said on its own host only.
        spec_file = write_resolved(spec, folder, apart="server")
        argv = _argv(region, cores, spec_file)
        options = Options(rate_limit=spec.wire.bits_per_second, credentials=credentials)
        agent = Agent(region, folder, server_url, terms, wakeup, argv=argv, options=options)

        def at_once(number: int) -> None:
            agent.kill_trainer()
            exit_at_once(number)

        stop_on_signals(wakeup, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, second=at_once)
        if with_parent:
            wake_on_input(wakeup, 0, at_end="the process that started this worker is gone")
        gc.freeze()  # What is there by now stays: looking through it again and again is no use.
        return agent.run(wait=wait)


def _argv(region: str, cores: Sequence[int] | None, spec_file: Path) -> list[str]:
    own = [sys.executable, "-m", "diloco_cli", "trainer", str(spec_file)]
    own += ["--region", region, "--dir", str(spec_file.parent)]
    own += logs.options()
    return own + (["--cores", ",".join(map(str, cores))] if cores else [])


class Agent:
    def __init__(
        self,
        region: str,
        folder: Path,
        url: str,
        terms: SharedSettings,
        wakeup: Wakeup,
        *,
        argv: Sequence[str],
        options: Options = DEFAULTS,
    ) -> None:
        self.region, self.terms, self.wakeup, self.argv = region, terms, wakeup, argv
        self.mailbox = Mailbox(folder / "regions" / region)
        self.mailbox.prepare()
        self.log = folder / "logs" / f"{region}.trainer.log"
        self.events = EventLog(folder / "events.jsonl", region)
        self.options, self.connect = options, partial(Client, url)
        self.trainer: TrainerProcess | InheritedTrainer | None = None
        self._sync: SyncThreads | None = None
        self.restarts = 0
        self._failures, self._since, self._restart_at = 0, 0.0, 0.0
        self._finished_at: float | None = None
        self._told_at: float | None = None

    def run(self, *, wait: float) -> int:
        """Joins and serves, as often as it is fenced; says the exit code."""
        join = RegionJoin(self.mailbox, self.region, self.terms, self.wakeup)
        join.boot()
        self._adopt_trainer()
        try:
            return self._run(join, wait=float("inf") if self.trainer else wait)
        finally:
            self._stop_trainer()
            self.mailbox.remove_fifos()

    def _run(self, join: RegionJoin, *, wait: float) -> int:
        with self.connect(replace(self.options, retry=ONCE)) as server:
            about = join.ask(server.run, wait=wait)
            if about is None:
                return 0
            join.check(about)
            self.connect = partial(self.connect, run=about.run)
            # Once it was there it may be away for any time.
            while (joined := join.join(server, about.run, wait=wait)) is not None:
                wait = float("inf")
                if joined.high > self._own_clock(len(joined.versions)):
                    self._stop_trainer()  # Another folder spoke for us meanwhile: begin anew.
                try:
                    return self._serve(joined)
                except FencedError as error:
                    log.info(f"another worker speaks for {self.region} now: {error.message}")
                    self._stop_trainer()
        return 0

    def _adopt_trainer(self) -> None:
        """Takes over a trainer whose agent was killed, before it gives us up."""
        identity = self.mailbox.identity()
        if identity is None:
            return
        record = HandoverRecord.of(self.argv, self.log.parent.parent / RESOLVED, identity)
        self.trainer = take_over(
            self.mailbox, record, self.log, on_output=self._heard, on_end=self.wakeup.wake
        )
        if self.trainer:
            self._since = time.monotonic()
            progress, pid = self.mailbox.progress(), self.trainer.pid
            step = progress.step if progress else None
            self.events.note("trainer-adopted", region=self.region, pid=pid, step=step)
            log.info(f"took over the trainer {pid} at step {step}")

    def _own_clock(self, fragments: int) -> int:
        """The newest clock that this folder has put on a frame."""
        frames = []
        with contextlib.suppress(DilocoError):  # Then whoever trains here is started anew.
            frames = [self.mailbox.frame(number) for number in range(fragments)]
        return max((frame.header.clock for frame in frames if frame), default=-1)

    # While we hold the lease

    def _serve(self, joined: Joined) -> int:
        sync = SyncThreads(
            self.mailbox,
            self.region,
            joined,
            connect=self.connect,
            options=self.options,
            events=self.events,
            on_mail=self._wake_trainer,
            on_change=self.wakeup.wake,
        )
        self._sync = sync
        log.info(f"joined as epoch {joined.epoch}, versions {list(joined.versions)}")
        if self.trainer:
            self._heard(b"posted progress")
        else:
            self._idle(sync, "fetching the published weights")
        sync.start()
        try:
            return self._supervise(sync)
        finally:
            sync.close()
            sync.wait(KILL_SECONDS)

    def _supervise(self, sync: SyncThreads) -> int:
        self._failures = 0
        self._restart_at = 0.0
        while True:
            if sync.trouble:
                raise sync.trouble
            if self.wakeup.stop_reason or sync.news.stop:
                return self._leave(sync, self.wakeup.stop_reason or "the run was stopped")
            if sync.up_to_date.is_set():
                if self.trainer is None and time.monotonic() >= self._restart_at:
                    self._start_trainer(sync)
                elif self.trainer and self.trainer.code is not None:
                    code = self._note_end(sync, self.trainer.code)
                    if code == 0 and sync.news.finished:
                        return self._leave(sync, "the run is finished")
                    continue  # The next one may be due already.
            if sync.news.finished and self._is_late():
                return self._leave(sync, "the run is finished")
            self._say_how_it_goes(sync)
            self._pause(self._until_next_start())

    def _say_how_it_goes(self, sync: SyncThreads) -> None:
        """Says a line when training begins, and one every minute from then on."""
        reporting = self.trainer and isinstance(sync.trainer, Reporting)
        now, progress = time.monotonic(), self.mailbox.progress() if reporting else None
        if progress is None or (self._told_at is None and not progress.training):
            return
        if self._told_at is None or now - self._told_at >= TELL_SECONDS:
            first, self._told_at = self._told_at is None, now
            log.info(f"training begins: {how_far(progress)}" if first else how_far(progress))

    def _until_next_start(self) -> float:
        """How long to sleep; a wake-up ends it for everything but a pause that is over."""
        left = self._restart_at - time.monotonic()
        return left if self.trainer is None and 0 < left < 1 else 1.0

    def _is_late(self) -> bool:
        """Says whether a trainer had its time to adopt and measure the final weights."""
        self._finished_at = self._finished_at or time.monotonic()
        return time.monotonic() - self._finished_at > FINISH_SECONDS

    def _heard(self, words: bytes) -> None:
        if (sync := self._sync) is None:
            return
        if self.trainer is None or self.trainer.code is None:  # Its end is told by us.
            sync.trainer = Reporting()
        sync.wake(words)

    def _start_trainer(self, sync: SyncThreads) -> None:
        self._idle(sync, "starting the trainer")
        self._since = time.monotonic()
        self._told_at = None
        self.trainer = TrainerProcess(
            self.argv, self.log, on_output=self._heard, on_end=self.wakeup.wake
        )
        pid, restarts = self.trainer.pid, self.restarts
        self.events.note("trainer-started", region=self.region, pid=pid, restarts=restarts)

    def _note_end(self, sync: SyncThreads, code: int) -> int:
        """Takes note of a trainer's end and says how it ended; raises what a restart cannot fix."""
        assert self.trainer is not None
        end, pid = self.trainer.last_words(), self.trainer.pid
        words, hint = end.message[:MOST_LETTERS], (end.hint or "")[:MOST_LETTERS] or None
        progressed = self._has_progressed(sync)
        self.trainer = None
        why = "" if code == 0 else f"{exit_in_words(code)}{f': {words}' if words else ''}"
        if code == 0:
            self.events.note("trainer-exited", region=self.region, pid=pid)
        else:
            self.events.note("trainer-died", region=self.region, pid=pid, code=code, why=why)
        if code in PERMANENT:
            # The others need not wait for us, and the server's status shows the reason.
            self._idle(sync, words or why)
            self._say_goodbye(sync)
            raise PERMANENT[code](words or f"The trainer ended with exit code {code}.", hint=hint)
        if code == 0 and sync.news.finished:
            return code
        self._failures = 1 if progressed else self._failures + 1
        self.restarts += 1
        delay = pause_before(self._failures)
        self._restart_at = time.monotonic() + delay
        restart = f"restarting in {delay:g} s" if delay else "restarting at once"
        ended = f"the trainer ended ({why or 'by itself'}), {restart}"
        self._idle(sync, ended)
        log.info(ended)
        return code

    def _has_progressed(self, sync: SyncThreads) -> bool:
        """Says whether the trainer was any good: it trained, or at least stayed for long."""
        progress = self.mailbox.progress() if isinstance(sync.trainer, Reporting) else None
        trained = progress is not None and progress.training
        return trained or time.monotonic() - self._since > HEALTHY_SECONDS

    def _idle(self, sync: SyncThreads, why: str) -> None:
        sync.trainer, sync.restarts = Idle(why), self.restarts
        sync.wake()

    def _leave(self, sync: SyncThreads, why: str) -> int:
        """Stops the trainer, hands over what it has posted, says goodbye."""
        log.info(f"leaving: {why}")
        self._stop_trainer()
        self._idle(sync, why)
        deadline = time.monotonic() + DRAIN_SECONDS
        while sync.unsent() and time.monotonic() < deadline and not sync.trouble:
            if sync.away:
                log.info("the server is out of reach; what is posted is sent at the next start")
                break
            self._pause(0.1)
        self._say_goodbye(sync)
        return 0

    def _say_goodbye(self, sync: SyncThreads) -> None:
        report = sync.report(stopping=True)
        sync.close()
        sync.wait(KILL_SECONDS)  # A heartbeat after the goodbye would revive the region.
        try:
            with self.connect(replace(self.options, retry=Retry(tries=2))) as server:
                server.heartbeat(self.region, report)
        except DilocoError as error:
            log.info(f"left without a goodbye: {error.message}")

    def _pause(self, seconds: float) -> None:
        if self.wakeup.wait(seconds):
            self.wakeup.clear()

    def _wake_trainer(self) -> None:
        if trainer := self.trainer:
            trainer.wake()

    def _stop_trainer(self) -> None:
        if trainer := self.trainer:
            trainer.stop()
            deadline = time.monotonic() + STOP_SECONDS
            while trainer.code is None and time.monotonic() < deadline:
                self._pause(0.5)
            trainer.kill()
            trainer.wait(KILL_SECONDS)
            self.trainer = None

    def kill_trainer(self) -> None:
        """Ends the trainer at once; may be called from a signal handler."""
        if trainer := self.trainer:
            trainer.kill()


def pause_before(failures: int) -> float:
    """Seconds to wait before the next start, after so many in a row that came to nothing.

    The first is made up for at once: whatever killed the trainer need not be its own fault.
    """
    return 0.0 if failures <= 1 else min(LONGEST_PAUSE, 0.5 * 2 ** min(failures - 2, 10))


def how_far(progress: TrainerProgress) -> str:
    """Says in one line what a trainer reports of itself."""
    loss, speed = progress.loss, progress.tokens_per_second
    return ", ".join(
        (
            f"step {progress.step}",
            f"loss {loss:.3f}" if loss is not None else "no loss yet",
            f"{speed:.0f} tokens/s" if speed else "no pace yet",
            f"versions {[fragment.version for fragment in progress.fragments]}",
            progress.why or "training",
        )
    )
