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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.net.client import Client, FencedError
from diloco_cli.net.credentials import NOBODY, Credentials
from diloco_cli.net.options import DEFAULTS, ONCE, Options, Retry
from diloco_cli.observe.events import EventLog
from diloco_cli.spec.resolved import FILE as RESOLVED
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system import logs
from diloco_cli.system.wakeup import Wakeup, exit_at_once, stop_on_signals, wake_on_input
from diloco_cli.wire.messages import Joined
from diloco_cli.worker.agent.join import RegionJoin, SharedSettings
from diloco_cli.worker.agent.sync_threads import SyncThreads
from diloco_cli.worker.agent.trainer_process import TrainerProcess, how_it_ended
from diloco_cli.worker.handover import InheritedTrainer, adopt, papers
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
        self._courier: SyncThreads | None = None
        self.restarts = 0
        self._failures, self._since, self._again_at = 0, 0.0, 0.0
        self._finished_at: float | None = None
        self._told_at: float | None = None

    def run(self, *, wait: float) -> int:
        """Joins and serves, as often as it is fenced; says the exit code."""
        door = RegionJoin(self.mailbox, self.region, self.terms, self.wakeup)
        door.boot()
        self._adopt_trainer()
        try:
            return self._run(door, wait=float("inf") if self.trainer else wait)
        finally:
            self._stop_trainer()
            self.mailbox.remove_fifos()

    def _run(self, door: RegionJoin, *, wait: float) -> int:
        with self.connect(replace(self.options, retry=ONCE)) as server:
            about = door.ask(server.run, wait=wait)
            if about is None:
                return 0
            door.check(about)
            self.connect = partial(self.connect, run=about.run)
            # Once it was there it may be away for any time.
            while (joined := door.join(server, about.run, wait=wait)) is not None:
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
        wanted = papers(self.argv, self.log.parent.parent / RESOLVED, identity)
        self.trainer = adopt(
            self.mailbox, wanted, self.log, heard=self._heard, ended=self.wakeup.wake
        )
        if self.trainer:
            self._since = time.monotonic()
            step = (self.mailbox.progress() or {}).get("step")
            about = {"pid": self.trainer.pid, "step": step}
            self.events.note("trainer-adopted", region=self.region, **about)
            log.info(f"took over the trainer {self.trainer.pid} at step {step}")

    def _own_clock(self, fragments: int) -> int:
        """The newest clock that this folder has put on a frame."""
        frames = []
        with contextlib.suppress(DilocoError):  # Then whoever trains here is started anew.
            frames = [self.mailbox.frame(number) for number in range(fragments)]
        return max((frame.header.clock for frame in frames if frame), default=-1)

    # While we hold the lease

    def _serve(self, joined: Joined) -> int:
        courier = SyncThreads(
            self.mailbox,
            self.region,
            joined,
            connect=self.connect,
            options=self.options,
            events=self.events,
            on_mail=self._ring_trainer,
            on_change=self.wakeup.wake,
        )
        self._courier = courier
        log.info(f"joined as epoch {joined.epoch}, versions {list(joined.versions)}")
        if self.trainer:
            self._heard(b"posted progress")
        else:
            self._tell(courier, "fetching the published weights")
        courier.start()
        try:
            return self._supervise(courier)
        finally:
            courier.close()
            courier.wait(KILL_SECONDS)

    def _supervise(self, courier: SyncThreads) -> int:
        self._failures = 0
        self._again_at = 0.0
        while True:
            if courier.trouble:
                raise courier.trouble
            if self.wakeup.stop_reason or courier.news.stop:
                return self._leave(courier, self.wakeup.stop_reason or "the run was stopped")
            if courier.up_to_date.is_set():
                if self.trainer is None and time.monotonic() >= self._again_at:
                    self._start_trainer(courier)
                elif self.trainer and self.trainer.code is not None:
                    code = self._buried(courier, self.trainer.code)
                    if code == 0 and courier.news.finished:
                        return self._leave(courier, "the run is finished")
                    continue  # The next one may be due already.
            if courier.news.finished and self._is_late():
                return self._leave(courier, "the run is finished")
            self._say_how_it_goes(courier)
            self._pause(self._until_next_start())

    def _say_how_it_goes(self, courier: SyncThreads) -> None:
        """Says a line when training begins, and one every minute from then on."""
        spoken = self.trainer and courier.state["training"] is None
        now, said = time.monotonic(), self.mailbox.progress() if spoken else None
        if not said or (self._told_at is None and not said.get("training")):
            return
        if self._told_at is None or now - self._told_at >= TELL_SECONDS:
            first, self._told_at = self._told_at is None, now
            log.info(f"training begins: {how_far(said)}" if first else how_far(said))

    def _until_next_start(self) -> float:
        """How long to sleep; a wake-up ends it for everything but a pause that is over."""
        left = self._again_at - time.monotonic()
        return left if self.trainer is None and 0 < left < 1 else 1.0

    def _is_late(self) -> bool:
        """Says whether a trainer had its time to adopt and measure the final weights."""
        self._finished_at = self._finished_at or time.monotonic()
        return time.monotonic() - self._finished_at > FINISH_SECONDS

    def _heard(self, words: bytes) -> None:
        if (courier := self._courier) is None:
            return
        if self.trainer is None or self.trainer.code is None:  # Its end is told by us.
            courier.state.update(training=None, why=None)
        courier.heard(words)

    def _start_trainer(self, courier: SyncThreads) -> None:
        self._tell(courier, "starting the trainer")
        self._since = time.monotonic()
        self._told_at = None
        self.trainer = TrainerProcess(
            self.argv, self.log, heard=self._heard, ended=self.wakeup.wake
        )
        about = {"pid": self.trainer.pid, "restarts": self.restarts}
        self.events.note("trainer-started", region=self.region, **about)

    def _buried(self, courier: SyncThreads, code: int) -> int:
        """Takes note of a trainer's end and says how it ended; raises what cannot be mended."""
        assert self.trainer is not None
        words, hint = self.trainer.last_words()
        about = {"region": self.region, "pid": self.trainer.pid}
        progressed = self._has_progressed(courier)
        self.trainer = None
        why = "" if code == 0 else f"{how_it_ended(code)}{f': {words}' if words else ''}"
        if code == 0:
            self.events.note("trainer-exited", **about)
        else:
            self.events.note("trainer-died", **about, code=code, why=why)
        if code in PERMANENT:
            # The others need not wait for us, and who asks the server hears the reason.
            self._tell(courier, words or why)
            self._say_goodbye(courier)
            raise PERMANENT[code](words or f"The trainer ended with exit code {code}.", hint=hint)
        if code == 0 and courier.news.finished:
            return code
        self._failures = 1 if progressed else self._failures + 1
        self.restarts += 1
        delay = pause_before(self._failures)
        self._again_at = time.monotonic() + delay
        again = f"again in {delay:g} s" if delay else "again at once"
        self._tell(courier, f"the trainer ended ({why or 'by itself'}), {again}")
        log.info(courier.state["why"])
        return code

    def _has_progressed(self, courier: SyncThreads) -> bool:
        """Says whether the trainer was any good: it trained, or at least stayed for long."""
        # Until this trainer has spoken, the report in the mailbox is the last one's.
        spoken = courier.state["training"] is None
        trained = spoken and (self.mailbox.progress() or {}).get("training")
        return bool(trained) or time.monotonic() - self._since > HEALTHY_SECONDS

    def _tell(self, courier: SyncThreads, why: str) -> None:
        courier.state.update(training=False, why=why, restarts=self.restarts)
        courier.heard()

    def _leave(self, courier: SyncThreads, why: str) -> int:
        """Stops the trainer, hands over what it has posted, says goodbye."""
        log.info(f"leaving: {why}")
        self._stop_trainer()
        courier.state.update(training=False, why=why, restarts=self.restarts)
        courier.heard()
        deadline = time.monotonic() + DRAIN_SECONDS
        while courier.unsent() and time.monotonic() < deadline and not courier.trouble:
            if courier.away:
                log.info("the server is out of reach; what is posted is sent at the next start")
                break
            self._pause(0.1)
        self._say_goodbye(courier)
        return 0

    def _say_goodbye(self, courier: SyncThreads) -> None:
        report = courier.report(stopping=True)
        courier.close()
        courier.wait(KILL_SECONDS)  # A heartbeat after the goodbye would revive the region.
        try:
            with self.connect(replace(self.options, retry=Retry(tries=2))) as server:
                server.heartbeat(self.region, report)
        except DilocoError as error:
            log.info(f"left without a goodbye: {error.message}")

    def _pause(self, seconds: float) -> None:
        if self.wakeup.wait(seconds):
            self.wakeup.clear()

    def _ring_trainer(self) -> None:
        if trainer := self.trainer:
            trainer.ring()

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


def how_far(progress: Mapping[str, Any]) -> str:
    """Says in one line what a trainer reports of itself."""
    loss, speed = progress.get("loss"), progress.get("tokens_per_second")
    versions = [each.get("version") for each in progress.get("fragments") or []]
    return ", ".join(
        (
            f"step {progress.get('step')}",
            f"loss {loss:.3f}" if loss is not None else "no loss yet",
            f"{speed:.0f} tokens/s" if speed else "no pace yet",
            f"versions {versions}",
            str(progress.get("why") or "training"),
        )
    )
