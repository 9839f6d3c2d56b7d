"""`diloco work`: a region's agent holds the lease, moves the mail, keeps the trainer running.

    who am I ──▶ which run is this ──▶ join ──▶ images ──▶ trainer ──▶ leave
                                        ▲                    │ died: again, after a pause
                                        │                    │ amended: again, at once
                                        └──── fenced ◀───────┘ (a stand-by while another lives)

    a trainer that outlived its last agent ──▶ taken over at once, and goes on meanwhile

It never imports JAX, so it outlives whatever happens to the training, and a trainer that
dies is back as fast as JAX can start. Everything it knows is in the region's folder.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from diloco_cli.errors import DilocoError, LinkError, SpecError, StoreError
from diloco_cli.net.client import Client, Dismissed, FencedError
from diloco_cli.net.credential_watch import CredentialWatch
from diloco_cli.net.credentials import NOBODY, Credentials
from diloco_cli.net.options import DEFAULTS, ONCE, Options, Retry
from diloco_cli.observe.events import EventLog
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.failpoints import reach
from diloco_cli.system.process_end import exit_in_words
from diloco_cli.system.wakeup import Wakeup, exit_at_once, stop_service_on_signals, wake_on_input
from diloco_cli.wire.messages import Amendments, Joined, Run
from diloco_cli.worker.agent.command_trainer import CommandTrainer, filled
from diloco_cli.worker.agent.join import RegionJoin, SharedSettings, order_of
from diloco_cli.worker.agent.spec_correction import SpecCorrection, keep_or_correct
from diloco_cli.worker.agent.sync_threads import Idle, Reporting, SyncThreads, terms_of
from diloco_cli.worker.agent.trainer_process import (
    InheritedTrainer,
    TrainerProcess,
    how_far,
    pause_before,
    take_over,
    trainer_argv,
)
from diloco_cli.worker.agent.trainer_settings import BuildSpec, TrainerSettings
from diloco_cli.worker.handover import OWN_TRAINER, TERMS, HandoverRecord
from diloco_cli.worker.hosts.first_host import FirstHost
from diloco_cli.worker.mailbox import FINISHED, STARTING, AgentReady, FolderOwner, Mailbox

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
LEAVE_SECONDS, LEAVE_LEASES = 60.0, 12
"""Of either, the longer: a region that leaves for good waits so long for its work to be merged."""
HEALTHY_SECONDS = 60.0
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
    shared: SharedSettings,
    build: BuildSpec,
    cores: Sequence[int] | None = None,
    with_parent: bool = False,
    wait: float = WAIT_SECONDS,
    credentials: Credentials = NOBODY,
    leave: bool = False,
    hosts: FirstHost | None = None,
    failpoint: str = "",
    look: Callable[[RunSpec], None] = lambda spec: None,
    renewed: Callable[[], Credentials] | None = None,
) -> int:
    """Runs one region until the run is finished or stopped; to `leave`, only until what it holds
    is merged, after which it is no member any more.

    `wait` is how long a server that does not answer is waited for at the start; later it
    may be away for any time. With `with_parent` the end of our standard input means that
    whoever started us is gone. Of a region of several `hosts` this is the first. `look` raises
    what would keep a trainer from starting here, `renewed` reads the credential again.
    """
    wakeup = Wakeup()
    mailbox = Mailbox(folder / "regions" / region)
    mailbox.prepare()
    with mailbox.locked(seconds=LOCK_SECONDS):
        mailbox.clear_agent_drafts()
        correction = keep_or_correct(spec, folder)
        settings = TrainerSettings(mailbox, region, spec, build)
        own = spec.region(region).trainer
        argv = OWN_TRAINER if own else trainer_argv(region, cores, mailbox.spec_file, folder)
        options = Options(rate_limit=spec.wire.bits_per_second, credentials=credentials)
        agent = Agent(settings, folder, server_url, shared, wakeup, argv=argv, options=options)
        agent.correction, agent.cores = correction, tuple(cores or ())
        agent.retiring = leave
        if hosts:
            agent.argv = [*argv, *hosts.options(spec, region)]
            agent.environment = hosts.environment()
        agent.failpoint, agent.look = failpoint, look

        def at_once(number: int) -> None:
            agent.kill_trainer()
            exit_at_once(number)

        agent.watch = CredentialWatch(credentials, renewed) if renewed else None
        stop_service_on_signals(wakeup, second=at_once)
        if with_parent:
            wake_on_input(wakeup, 0, at_end="the process that started this worker is gone")
        gc.freeze()  # What is there by now stays: looking through it again and again is no use.
        if hosts is None:
            return agent.run(wait=wait)
        return hosts.tell_the_end(lambda: agent.run(wait=wait), lambda: agent.over)


class Agent:
    def __init__(
        self,
        settings: TrainerSettings,
        folder: Path,
        url: str,
        shared: SharedSettings,
        wakeup: Wakeup,
        *,
        argv: Sequence[str],
        options: Options = DEFAULTS,
    ) -> None:
        self.settings, self.shared, self.wakeup, self.argv = settings, shared, wakeup, argv
        self.region, self.mailbox = settings.region, settings.mailbox
        self.mailbox.prepare()
        self.folder, self.log = folder, folder / "logs" / f"{self.region}.trainer.log"
        self.own = settings.spec.region(self.region).trainer
        """A trainer that is not ours, if that is what the region has."""
        self.cores: tuple[int, ...] = ()
        self.events = EventLog(folder / "events.jsonl", self.region)
        self.options, self.connect = options, partial(Client, url)
        self.correction: SpecCorrection | None = None
        self.trainer: TrainerProcess | CommandTrainer | InheritedTrainer | None = None
        self._sync: SyncThreads | None = None
        self.restarts = 0
        self._heard_terms: Amendments | None = None
        self._following = ""
        """Why a trainer that worked under older terms is started anew; empty if none is."""
        self._failures, self._since, self._restart_at = 0, 0.0, 0.0
        self.environment: Mapping[str, str] | None = None
        """Of the trainer, where it differs from ours."""
        self.failpoint = ""
        """Set in the first trainer, for tests."""
        self.look: Callable[[RunSpec], None] = lambda spec: None
        self.watch: CredentialWatch | None = None
        self.over = False
        """The run is, or this region leaves it for good."""
        self.retiring = False
        """Leave for good as soon as what is held is merged."""
        self.remark = ""
        """What people should know of this region's folder."""
        self._held, self._held_since = "", 0.0
        self._finished_at: float | None = None
        self._told_at: float | None = None
        self._last_step, self._stepped_at, self._stuck = -1, 0.0, ""

    def run(self, *, wait: float) -> int:
        """Joins and serves, as another owner if the folder is deleted; says the exit code."""
        with contextlib.ExitStack() as held:
            while True:
                try:
                    return self._begin(wait=wait)
                except (DilocoError, OSError):
                    if not (gone := self.mailbox.gone()):
                        raise
                    self.remark = f"{gone}; it begins anew"
                    log.warning(self.remark)
                    self.mailbox.prepare()
                    held.enter_context(self.mailbox.locked())

    def _begin(self, *, wait: float) -> int:
        self.settings.follow(self.mailbox.terms())
        order = None if self.own else order_of(self.settings.spec, self.region)
        join = RegionJoin(self.mailbox, self.region, self.shared, self.wakeup, order)
        join.boot()
        self._adopt_trainer()
        try:
            return self._run(join, wait=float("inf") if self.trainer else wait)
        finally:
            if self.mailbox.gone():
                self.kill_trainer()  # It has nowhere to leave anything.
            self._stop_trainer()
            self.mailbox.remove_fifos()

    def _run(self, join: RegionJoin, *, wait: float) -> int:
        with self.connect(replace(self.options, retry=ONCE)) as server:
            about = join.ask(server.run, wait=wait)
            if about is None:
                return 0
            if self.correction:
                self.correction.make(about.was)
            if join.is_replaced(about):
                self._stop_trainer()
                join.begin_anew(about)
            if join.is_continued(about):
                self._stop_trainer()
                reach("realign.stopped")
                join.go_over(about)
                reach("realign.named")
            join.check(about)
            if about.state == "finished" and not join.identity.run:
                log.info("the run is finished: there is nothing left to train")
                return 0
            join.remember_terms(terms_of(about))
            if self.trainer is None:
                self.settings.follow(terms_of(about))
                self.look(self.settings.spec)
            self.connect = partial(self.connect, run=about.run)
            # Once it was there it may be away for any time.
            while (joined := self._join(join, server, about, wait=wait)) is not None:
                wait = float("inf")
                if joined.high > self.mailbox.newest_clock(len(joined.versions)):
                    self._stop_trainer()  # Another folder spoke for us meanwhile: begin anew.
                try:
                    return self._serve(joined)
                except FencedError as error:
                    log.info(f"this worker no longer speaks for {self.region}: {error.message}")
                    self._stop_trainer()
                except SpecError:
                    if not self._is_replaced(join):
                        raise
                    return self._run(join, wait=wait)
        return 0

    def _is_replaced(self, join: RegionJoin) -> bool:
        """Says whether the server that refuses us has begun anew, or was rebuilt, meanwhile."""
        self.connect = partial(self.connect, run="")
        try:
            with self.connect(replace(self.options, retry=ONCE)) as server:
                about = server.run()
                return join.is_replaced(about) or join.is_continued(about)
        except DilocoError:
            return False

    def _join(self, join: RegionJoin, server: Client, about: Run, *, wait: float) -> Joined | None:
        try:
            return join.join(server, about.run, wait=wait)
        except Dismissed as error:
            self._stop_trainer()  # It leaves a last report, which says what is not merged.
            held = self.mailbox.unmerged(about.fragments)
            message = f"{error.message} {held:.0f} tokens that are not merged are discarded."
            raise Dismissed(message, hint=error.hint) from None

    def _adopt_trainer(self) -> None:
        """Takes over a trainer whose agent was killed, before it gives us up."""
        identity = self.mailbox.identity()
        if identity is None:
            return
        self.trainer = take_over(
            self.mailbox,
            self._record(),
            self.log,
            ours=self.own is None,
            on_output=self._heard,
            on_end=self.wakeup.wake,
        )
        if self.trainer:
            self._since = time.monotonic()
            progress, pid = self.mailbox.progress(), self.trainer.pid
            step = progress.step if progress else None
            self.events.note("trainer-adopted", region=self.region, pid=pid, step=step)
            log.info(f"took over the trainer {pid} at step {step}")

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
            retiring=self.retiring,
        )
        self._sync, sync.remark = sync, self.remark
        log.info(f"joined as epoch {joined.epoch}, versions {list(joined.versions)}")
        if self.trainer:
            self._heard(b"posted progress")
        else:
            self._idle(sync, sync.FETCHING)
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
            self.mailbox.check_there()
            if sync.trouble:
                raise sync.trouble
            if self.wakeup.stop_reason or sync.news.stop:
                return self._leave(sync, self.wakeup.stop_reason or "the run was stopped")
            if sync.terms is not self._heard_terms:
                self._follow(sync)
            if not sync.news.finished:
                self._finished_at = None  # Or no longer: it was opened again.
            if sync.up_to_date.is_set():
                if self.trainer is None and time.monotonic() >= self._restart_at:
                    self._start_trainer(sync)
                elif self.trainer and self.trainer.code is not None:
                    code = self._note_end(sync, self.trainer.code)
                    if code == 0 and sync.news.finished:
                        return self._leave(sync, FINISHED)
                    continue  # The next one may be due already.
            if sync.news.finished and self._is_late():
                return self._leave(sync, FINISHED)
            if self.watch and (credentials := self.watch.look()):
                self.options = replace(self.options, credentials=credentials)
                sync.renew(self.options)
            self._end_if_stuck(sync)
            if self.retiring and self._may_go(sync):
                return self._leave(sync, "leaving for good")
            self._say_how_it_goes(sync)
            self._pause(self._until_next_start())

    def _follow(self, sync: SyncThreads) -> None:
        """Goes over to newer terms; a trainer that works by a key they change starts anew."""
        digest, self._heard_terms = self.settings.digest, sync.terms
        self.settings.follow(sync.terms)
        if remark := self.settings.trouble:
            log.info(remark)
            self.events.note("note", region=self.region, why=remark)
        sync.remark = "; ".join(filter(None, (self.remark, remark)))
        if self.trainer and self.settings.digest != digest:
            self._following = f"following amendment {self.settings.terms}"
            log.info(f"{self._following}: the trainer starts anew")
            self._idle(sync, self._following)
            pid, why = self.trainer.pid, self._following
            self._stop_trainer()
            self.events.note("trainer-exited", region=self.region, pid=pid, why=why)
        else:
            sync.follows = self.settings.terms

    def _may_go(self, sync: SyncThreads) -> bool:
        """Says whether nothing more of ours will be merged, or nothing was for too long."""
        reporting = self.trainer and isinstance(sync.trainer, Reporting)
        progress = self.mailbox.progress() if reporting else None
        if progress is None:
            self._held_since = time.monotonic()
            return False
        if max(progress.tokens.pending, default=0.0) <= 0 and not sync.unsent():
            return True
        held = str(progress.tokens.pending)
        if held != self._held:
            self._held, self._held_since = held, time.monotonic()
        patience = max(LEAVE_SECONDS, LEAVE_LEASES * sync.news.lease_seconds)
        if time.monotonic() - self._held_since < patience:
            return False
        log.info(f"nothing of what is held was merged for {patience:.0f} s; it is discarded")
        return True

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
        ends = self._following or (self.trainer and self.trainer.code is not None)
        if not ends:  # Its end is told by us.
            sync.trainer = Reporting()
        sync.wake(words)

    def _start_trainer(self, sync: SyncThreads) -> None:
        if self.own and self.own.attach and self.mailbox.ready() is not None:
            return self._await_trainer()
        self.settings.write()
        sync.follows = self.settings.terms
        attach = "waiting for the trainer, which is started elsewhere, to join"
        starting = attach if self.own and self.own.attach else "starting the trainer"
        self._idle(sync, self._following or starting)
        self._following = ""
        self._since = self._stepped_at = time.monotonic()
        self._told_at, self._stuck = None, ""
        if self.own:
            ready = AgentReady(os.getpid(), self.settings.terms, self.cores)
            self.mailbox.write_ready(ready)
        if self.own is None:
            self.trainer = TrainerProcess(
                [*self.argv, *self._first_failpoint(), TERMS, str(self.settings.terms)],
                self.log,
                on_output=self._heard,
                on_end=self.wakeup.wake,
                environment=self.environment,
            )
        elif self.own.command:
            self.trainer = self._started(sync, self.own.command)
        else:
            log.info(attach)
            return None
        pid, restarts = self.trainer.pid, self.restarts
        self.events.note("trainer-started", region=self.region, pid=pid, restarts=restarts)

    def _started(self, sync: SyncThreads, command: Sequence[str]) -> CommandTrainer:
        threads = {"OMP_NUM_THREADS": str(len(self.cores))} if self.cores else {}
        try:
            return CommandTrainer(
                filled(command, self.region, self.folder),
                self.mailbox,
                self._record(),
                self.log,
                environment={
                    "DILOCO_FOLDER": str(self.folder),
                    "DILOCO_REGION": self.region,
                    **({} if "OMP_NUM_THREADS" in os.environ else threads),
                },
                on_output=self._heard,
                on_end=self.wakeup.wake,
            )
        except SpecError as error:
            self._idle(sync, error.message[:MOST_LETTERS])
            self._say_goodbye(sync)
            raise

    def _await_trainer(self) -> None:
        """Takes a trainer in that was started elsewhere, once it has joined."""
        pid = self.mailbox.trainer_lock_holder()
        if pid is not None and self._record().names(self.mailbox, pid):
            self._adopt_trainer()

    def _record(self) -> HandoverRecord:
        identity = self.mailbox.identity() or FolderOwner("", 0)
        return HandoverRecord.of(self.argv, self.settings.spec, self.region, identity)

    def _end_if_stuck(self, sync: SyncThreads) -> None:
        """Ends a program that was started here and makes no step, though nothing holds it up."""
        if not isinstance(self.trainer, CommandTrainer) or self.own is None or self._stuck:
            return
        now, progress = time.monotonic(), None
        if isinstance(sync.trainer, Reporting):
            progress = self.mailbox.progress()
        waits = progress is not None and not progress.training and progress.why != STARTING
        step = progress.step if progress else -1
        if waits or step != self._last_step:
            self._last_step, self._stepped_at = step, now
        elif now - self._stepped_at > self.own.patience_seconds:
            joined = "made no step" if progress else "did not join"
            self._stuck = f"it {joined} for {self.own.patience}"
            log.info(f"the trainer is killed: {self._stuck}")
            self.trainer.kill()

    def _first_failpoint(self) -> list[str]:
        words, self.failpoint = ["--failpoint", self.failpoint] if self.failpoint else [], ""
        return words

    def _note_end(self, sync: SyncThreads, code: int) -> int:
        """Takes note of a trainer's end and says how it ended; raises what a restart cannot fix."""
        assert self.trainer is not None
        end, pid = self.trainer.last_words(), self.trainer.pid
        words, hint = end.message[:MOST_LETTERS], (end.hint or "")[:MOST_LETTERS] or None
        progressed = self._has_progressed(sync)
        self.trainer = None
        words = self._stuck or words
        why = "" if code == 0 else f"{exit_in_words(code)}{f': {words}' if words else ''}"
        if code == 0:
            self.events.note("trainer-exited", region=self.region, pid=pid)
        else:
            self.events.note("trainer-died", region=self.region, pid=pid, code=code, why=why)
        if code in PERMANENT:
            self.mailbox.check_there()
            # The others need not wait for us, and the server's status shows the reason.
            self._idle(sync, words or why)
            self._say_goodbye(sync)
            raise PERMANENT[code](words or f"The trainer ended with exit code {code}.", hint=hint)
        if code == 0 and sync.news.finished:
            return code
        if code == 0 and self.mailbox.left_at_the_end():
            log.info("the run goes on: the trainer starts again")
            self._idle(sync, "the run goes on")
            return code
        self._failures = 1 if progressed else self._failures + 1
        self.restarts += 1
        delay = pause_before(self._failures)
        self._restart_at = time.monotonic() + delay
        restart = f"restarting in {delay:g} s" if delay else "restarting at once"
        if self.own and self.own.attach:
            restart = "waiting for it to join again"
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
        # Stopped on the way, it stays a member and can be told to leave again.
        self.over = sync.news.finished or sync.news.stop or self.retiring
        sync.retiring = self.retiring and not self.wakeup.stop_reason and not sync.news.stop
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
        sync.note_metrics(report, last=True)
        sync.close()
        sync.wait(KILL_SECONDS)  # A heartbeat after the goodbye would revive the region.
        try:
            with self.connect(replace(self.options, retry=Retry(tries=2))) as server:
                server.heartbeat(self.region, report)
        except FencedError:
            return  # It was heard, and its answer was lost; or another one speaks for us.
        except DilocoError as error:
            if report.retiring:
                hint = "Repeat the command when the server is back; until then it is a member."
                message = f"{self.region} could not tell the server that it leaves for good"
                raise LinkError(f"{message}: {error.message}", hint=hint) from None
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
