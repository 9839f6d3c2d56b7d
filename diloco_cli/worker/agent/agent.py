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
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from diloco_cli.errors import DilocoError, LinkError, SpecError
from diloco_cli.net.client import Client, Dismissed, FencedError
from diloco_cli.net.credential_watch import CredentialWatch
from diloco_cli.net.credentials import NOBODY, Credentials
from diloco_cli.net.options import DEFAULTS, ONCE, Options, Retry
from diloco_cli.observe.events import EventLog
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.failpoints import reach
from diloco_cli.system.wakeup import Wakeup, exit_at_once, stop_service_on_signals, wake_on_input
from diloco_cli.wire.messages import Amendments, Joined, Run
from diloco_cli.worker.agent.join import RegionJoin, SharedSettings, order_of
from diloco_cli.worker.agent.spec_correction import SpecCorrection, keep_or_correct
from diloco_cli.worker.agent.sync_threads import Reporting, SyncThreads, terms_of
from diloco_cli.worker.agent.trainer_process import trainer_argv
from diloco_cli.worker.agent.trainer_settings import BuildSpec, TrainerSettings
from diloco_cli.worker.agent.trainer_supervisor import KILL_SECONDS, TrainerSupervisor
from diloco_cli.worker.handover import OWN_TRAINER
from diloco_cli.worker.hosts.first_host import FirstHost
from diloco_cli.worker.mailbox import FINISHED, Mailbox

__all__ = ["Agent", "SharedSettings", "work"]

log = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
LOCK_SECONDS = 5.0
FINISH_SECONDS = 180.0
"""For a trainer to adopt and measure the final weights."""
DRAIN_SECONDS = 10.0
LEAVE_SECONDS, LEAVE_LEASES = 60.0, 12
"""Of either, the longer: a region that leaves for good waits so long for its work to be merged."""


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
        agent.correction, agent.retiring, agent.look = correction, leave, look
        supervisor = agent.supervisor
        supervisor.cores, supervisor.failpoint = tuple(cores or ()), failpoint
        if hosts:
            supervisor.argv = [*argv, *hosts.options(spec, region)]
            supervisor.environment = hosts.environment()

        def at_once(number: int) -> None:
            supervisor.kill()
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
        self.settings, self.shared, self.wakeup = settings, shared, wakeup
        self.region, self.mailbox = settings.region, settings.mailbox
        self.mailbox.prepare()
        self.events = EventLog(folder / "events.jsonl", self.region)
        self.supervisor = TrainerSupervisor(
            settings, folder, self.events, wakeup, argv=argv, say_goodbye=self._say_goodbye
        )
        self.options, self.connect = options, partial(Client, url)
        self.correction: SpecCorrection | None = None
        self._heard_terms: Amendments | None = None
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
        order = None if self.supervisor.own else order_of(self.settings.spec, self.region)
        join = RegionJoin(self.mailbox, self.region, self.shared, self.wakeup, order)
        join.boot()
        self.supervisor.adopt()
        try:
            return self._run(join, wait=float("inf") if self.supervisor.trainer else wait)
        finally:
            if self.mailbox.gone():
                self.supervisor.kill()  # It has nowhere to leave anything.
            self.supervisor.stop()
            self.mailbox.remove_fifos()

    def _run(self, join: RegionJoin, *, wait: float) -> int:
        with self.connect(replace(self.options, retry=ONCE)) as server:
            about = join.ask(server.run, wait=wait)
            if about is None:
                return 0
            if self.correction:
                self.correction.make(about.was)
            if join.is_replaced(about) or join.is_continued(about):
                self.supervisor.vacate()
                if self.wakeup.stop_reason:
                    return 0  # Somebody may be training still; the next worker goes on from here.
            if join.is_replaced(about):
                join.begin_anew(about)
            if join.is_continued(about):
                reach("realign.stopped")
                join.go_over(about)
                reach("realign.named")
            join.check(about)
            if about.state == "finished" and not join.identity.run:
                log.info("the run is finished: there is nothing left to train")
                return 0
            join.remember_terms(terms_of(about))
            if self.supervisor.trainer is None:
                self.settings.follow(terms_of(about))
                self.look(self.settings.spec)
            self.connect = partial(self.connect, run=about.run)
            # Once it was there it may be away for any time.
            while (joined := self._join(join, server, about, wait=wait)) is not None:
                wait = float("inf")
                if joined.high > self.mailbox.newest_clock(len(joined.versions)):
                    self.supervisor.stop()  # Another folder spoke for us meanwhile: begin anew.
                try:
                    return self._serve(joined)
                except FencedError as error:
                    log.info(f"this worker no longer speaks for {self.region}: {error.message}")
                    self.supervisor.stop()
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
            self.supervisor.stop()  # It leaves a last report, which says what is not merged.
            held = self.mailbox.unmerged(about.fragments)
            message = f"{error.message} {held:.0f} tokens that are not merged are discarded."
            raise Dismissed(message, hint=error.hint) from None

    # While we hold the lease

    def _serve(self, joined: Joined) -> int:
        sync = SyncThreads(
            self.mailbox,
            self.region,
            joined,
            connect=self.connect,
            options=self.options,
            events=self.events,
            on_mail=self.supervisor.wake,
            on_change=self.wakeup.wake,
            retiring=self.retiring,
        )
        sync.remark = self.remark
        log.info(f"joined as epoch {joined.epoch}, versions {list(joined.versions)}")
        self.supervisor.serve(sync)
        sync.start()
        try:
            return self._supervise(sync)
        finally:
            sync.close()
            sync.wait(KILL_SECONDS)

    def _supervise(self, sync: SyncThreads) -> int:
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
                if self.supervisor.is_due:
                    self.supervisor.start(sync)
                elif (code := self.supervisor.ended) is not None:
                    self.supervisor.note_end(sync, code)
                    if sync.news.finished and (code == 0 or self.supervisor.is_hopeless):
                        return self._leave(sync, FINISHED)
                    continue  # The next one may be due already.
            if sync.news.finished and self._is_late():
                return self._leave(sync, FINISHED)
            if self.watch and (credentials := self.watch.look()):
                self.options = replace(self.options, credentials=credentials)
                sync.renew(self.options)
            self.supervisor.end_if_stuck(sync)
            self.supervisor.end_who_stays()
            if self.retiring and self._may_go(sync):
                return self._leave(sync, "leaving for good")
            self.supervisor.say_how_it_goes(sync)
            self.supervisor.keep_log_small()
            self.wakeup.pause(self.supervisor.until_next_start)

    def _follow(self, sync: SyncThreads) -> None:
        """Goes over to newer terms; a trainer that works by a key they change starts anew."""
        digest, self._heard_terms = self.settings.digest, sync.terms
        self.settings.follow(sync.terms)
        if remark := self.settings.trouble:
            log.info(remark)
            self.events.note("note", region=self.region, why=remark)
        sync.remark = "; ".join(filter(None, (self.remark, remark)))
        if self.supervisor.trainer and self.settings.digest != digest:
            self.supervisor.start_anew(sync)
        else:
            sync.follows = self.settings.terms

    def _may_go(self, sync: SyncThreads) -> bool:
        """Says whether nothing more of ours will be merged, or nothing was for too long."""
        reporting = self.supervisor.trainer and isinstance(sync.trainer, Reporting)
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

    def _is_late(self) -> bool:
        """Says whether a trainer had its time to adopt and measure the final weights."""
        self._finished_at = self._finished_at or time.monotonic()
        return time.monotonic() - self._finished_at > FINISH_SECONDS

    def _leave(self, sync: SyncThreads, why: str) -> int:
        """Stops the trainer, hands over what it has posted, says goodbye."""
        log.info(f"leaving: {why}")
        # Stopped on the way, it stays a member and can be told to leave again.
        self.over = sync.news.finished or sync.news.stop or self.retiring
        sync.retiring = self.retiring and not self.wakeup.stop_reason and not sync.news.stop
        self.supervisor.stop()
        self.supervisor.idle(sync, why)
        deadline = time.monotonic() + DRAIN_SECONDS
        while sync.unsent() and time.monotonic() < deadline and not sync.trouble:
            if sync.away:
                log.info("the server is out of reach; what is posted is sent at the next start")
                break
            self.wakeup.pause(0.1)
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
