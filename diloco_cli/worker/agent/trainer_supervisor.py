"""What an agent does around its trainer: start, take over, wake, restart, end.

    none ──▶ started or taken over ──▶ reports ──▶ ended ──▶ none, after a pause
                                        │ amended: stopped, started anew at once
                                        │ makes no step: killed, then as if it had ended

At most one trainer is at work in a region's folder at any time. How its end is judged, and how
long it pauses before the next start, is decided here; when to leave, by the agent.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from diloco_cli.core.guard import STRIKES
from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.observe.events import EventLog
from diloco_cli.system.process_end import exit_in_words
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.worker.agent.command_trainer import CommandTrainer, filled
from diloco_cli.worker.agent.sync_threads import Idle, Reporting, SyncThreads
from diloco_cli.worker.agent.trainer_process import (
    InheritedTrainer,
    TrainerProcess,
    end_trainer,
    how_far,
    pause_before,
    take_over,
)
from diloco_cli.worker.agent.trainer_settings import TrainerSettings
from diloco_cli.worker.handover import TERMS, HandoverRecord
from diloco_cli.worker.mailbox import STARTING, AgentReady, FolderOwner

log = logging.getLogger(__name__)

STOP_SECONDS = 45.0
"""For a trainer to finish its step and its checkpoint."""
KILL_SECONDS = 5.0
HEALTHY_SECONDS = 60.0
TELL_SECONDS = 60.0
"""Between two lines that say how far the region is."""
HOPELESS = 3
"""Trainers in a row that came to nothing, after which a finished run is left without the next."""
MOST_LETTERS = 600
"""Of a reason that is passed on; a heartbeat has room for a thousand."""
PERMANENT: dict[int, type[DilocoError]] = {2: SpecError, 5: StoreError}
"""A trainer that ends with one of these would only do so again."""


class TrainerSupervisor:
    """Keeps the trainer of one region running."""

    def __init__(
        self,
        settings: TrainerSettings,
        folder: Path,
        events: EventLog,
        wakeup: Wakeup,
        *,
        argv: Sequence[str],
        say_goodbye: Callable[[SyncThreads], None],
    ) -> None:
        """`say_goodbye` tells the server of an end that a restart cannot mend."""
        self.settings, self.folder, self.events, self.wakeup = settings, folder, events, wakeup
        self.region, self.mailbox, self.argv = settings.region, settings.mailbox, argv
        self.own = settings.spec.region(self.region).trainer
        """A trainer that is not ours, if that is what the region has."""
        self.log = folder / "logs" / f"{self.region}.trainer.log"
        self.cores: tuple[int, ...] = ()
        self.environment: Mapping[str, str] | None = None
        """Of the trainer, where it differs from ours."""
        self.failpoint = ""
        """Set in the first trainer, for tests."""
        self.trainer: TrainerProcess | CommandTrainer | InheritedTrainer | None = None
        self.restarts = 0
        self._say_goodbye = say_goodbye
        self._sync: SyncThreads | None = None
        self._following = ""
        """Why a trainer that worked under older terms is started anew; empty if none is."""
        self._failures, self._since, self._restart_at = 0, 0.0, 0.0
        self._told_at: float | None = None
        self._last_step, self._stepped_at, self._stuck = -1, 0.0, ""
        self._sent_away: tuple[int | None, float] = None, 0.0
        """A trainer that was told to leave because it is not ours to take over, and when."""

    def serve(self, sync: SyncThreads) -> None:
        """From now on the server hears through `sync` what the trainer does."""
        self._sync, self._failures, self._restart_at = sync, 0, 0.0
        if self.trainer:
            self._heard(b"posted progress")
        else:
            self.idle(sync, sync.FETCHING)

    @property
    def ended(self) -> int | None:
        """How the trainer ended, until `note_end` has taken note of it."""
        return self.trainer.code if self.trainer else None

    @property
    def is_due(self) -> bool:
        """Says whether a trainer has to be started."""
        return self.trainer is None and time.monotonic() >= self._restart_at

    @property
    def is_hopeless(self) -> bool:
        """Says whether nothing can be expected of the next trainer either."""
        return self._failures >= HOPELESS

    @property
    def until_next_start(self) -> float:
        """How long to sleep; a wake-up ends it for everything but a pause that is over."""
        left = self._restart_at - time.monotonic()
        return left if self.trainer is None and 0 < left < 1 else 1.0

    def adopt(self) -> None:
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
            self._since = self._stepped_at = time.monotonic()
            self._stuck, self._sent_away = "", (None, 0.0)  # It may have joined again, as ours.
            progress, pid = self.mailbox.progress(), self.trainer.pid
            step = progress.step if progress else None
            self.events.note("trainer-adopted", region=self.region, pid=pid, step=step)
            log.info(f"took over the trainer {pid} at step {step}")
        else:
            self._sent_away = self.mailbox.trainer_lock_holder(), time.monotonic()

    def _heard(self, words: bytes) -> None:
        if (sync := self._sync) is None:
            return
        ends = self._following or (self.trainer and self.trainer.code is not None)
        if not ends:  # Its end is told by us.
            sync.trainer = Reporting()
        sync.wake(words)

    def start(self, sync: SyncThreads) -> None:
        """Starts a trainer, or takes one in that was started elsewhere."""
        attach = self.own is not None and self.own.attach
        ready = self.mailbox.ready() if attach else None
        if ready is not None and ready.terms == self.settings.terms:
            return self._await_trainer()
        self.mailbox.withdraw_ready()  # Nobody joins with settings that are about to change.
        self.settings.write()
        sync.follows = self.settings.terms
        awaited = "waiting for the trainer, which is started elsewhere, to join"
        if attach:
            starting = f"{self._following}; {awaited}" if self._following else awaited
        else:
            starting = self._following or "starting the trainer"
        self.idle(sync, starting)
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
            log.info(starting)
            return None
        pid, restarts = self.trainer.pid, self.restarts
        self.events.note("trainer-started", region=self.region, pid=pid, restarts=restarts)

    def _started(self, sync: SyncThreads, command: Sequence[str]) -> CommandTrainer:
        threads = {"OMP_NUM_THREADS": str(len(self.cores))} if self.cores else {}
        folder = self.folder.absolute()  # It may have gone elsewhere when it looks.
        try:
            return CommandTrainer(
                filled(command, self.region, folder),
                self.mailbox,
                self._record(),
                self.log,
                environment={
                    "DILOCO_FOLDER": str(folder),
                    "DILOCO_REGION": self.region,
                    **({} if "OMP_NUM_THREADS" in os.environ else threads),
                },
                on_output=self._heard,
                on_end=self.wakeup.wake,
            )
        except SpecError as error:
            self.idle(sync, error.message[:MOST_LETTERS])
            self._say_goodbye(sync)
            raise

    def _await_trainer(self) -> None:
        """Takes a trainer in that was started elsewhere, once it has joined."""
        pid = self.mailbox.trainer_lock_holder()
        if pid is not None and self._record().names(self.mailbox, pid):
            self.adopt()

    def _record(self) -> HandoverRecord:
        identity = self.mailbox.identity() or FolderOwner("", 0)
        return HandoverRecord.of(self.argv, self.settings.spec, self.region, identity)

    def start_anew(self, sync: SyncThreads) -> None:
        """Stops a trainer that works under older terms; the next one is due at once."""
        assert self.trainer is not None
        self._following = f"following amendment {self.settings.terms}"
        log.info(f"{self._following}: the trainer starts anew")
        self.idle(sync, self._following)
        pid, why = self.trainer.pid, self._following
        self.mailbox.withdraw_ready()
        self.stop()
        self.events.note("trainer-exited", region=self.region, pid=pid, why=why)

    def say_how_it_goes(self, sync: SyncThreads) -> None:
        """Says a line when training begins, and one every minute from then on."""
        reporting = self.trainer and isinstance(sync.trainer, Reporting)
        now, progress = time.monotonic(), self.mailbox.progress() if reporting else None
        if progress is None or (self._told_at is None and not progress.training):
            return
        if self._told_at is None or now - self._told_at >= TELL_SECONDS:
            first, self._told_at = self._told_at is None, now
            log.info(f"training begins: {how_far(progress)}" if first else how_far(progress))
            if progress.divergence and progress.divergence.times >= STRIKES:
                log.warning(progress.divergence.in_words())

    def keep_log_small(self) -> None:
        """Bounds what the trainer has logged, however long it trains."""
        if self.trainer:
            self.trainer.log.keep_small()

    def end_if_stuck(self, sync: SyncThreads) -> None:
        """Ends a program that a worker started and that makes no step, though nothing holds it up.

        Also one that the worker before us started: who else would find that it hangs?
        """
        if self.trainer is None or self.own is None or self.own.attach or self._stuck:
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

    def end_who_stays(self) -> None:
        """Ends a trainer that was sent away and hangs: the next one waits for its lock."""
        pid, since = self._sent_away
        if pid is None or time.monotonic() - since <= STOP_SECONDS:
            return
        self._sent_away = None, 0.0
        if self.mailbox.trainer_lock_holder() == pid:
            log.info(f"the trainer {pid} of another run or other settings is killed: it stayed")
            end_trainer(self.mailbox)

    def _first_failpoint(self) -> list[str]:
        words, self.failpoint = ["--failpoint", self.failpoint] if self.failpoint else [], ""
        return words

    def note_end(self, sync: SyncThreads, code: int) -> None:
        """Takes note of a trainer's end; raises what a restart cannot fix."""
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
            self.idle(sync, words or why)
            self._say_goodbye(sync)
            raise PERMANENT[code](words or f"The trainer ended with exit code {code}.", hint=hint)
        if code == 0 and sync.news.finished:
            return
        if code == 0 and self.mailbox.left_at_the_end():
            log.info("the run goes on: the trainer starts again")
            self.idle(sync, "the run goes on")
            return
        self._failures = 1 if progressed else self._failures + 1
        self.restarts += 1
        delay = pause_before(self._failures)
        self._restart_at = time.monotonic() + delay
        restart = f"restarting in {delay:g} s" if delay else "restarting at once"
        if self.own and self.own.attach:
            restart = "waiting for it to join again"
        ended = f"the trainer ended ({why or 'by itself'}), {restart}"
        self.idle(sync, ended)
        log.info(ended)

    def _has_progressed(self, sync: SyncThreads) -> bool:
        """Says whether the trainer was any good: it trained, or at least stayed for long."""
        progress = self.mailbox.progress() if isinstance(sync.trainer, Reporting) else None
        trained = progress is not None and progress.training
        return trained or time.monotonic() - self._since > HEALTHY_SECONDS

    def idle(self, sync: SyncThreads, why: str) -> None:
        """Tells the server that nothing trains, and why."""
        sync.trainer, sync.restarts = Idle(why), self.restarts
        sync.wake()

    def wake(self) -> None:
        """Says that there is mail."""
        if trainer := self.trainer:
            trainer.wake()

    def stop(self) -> None:
        """Has the trainer checkpoint and leave; one that does not is killed."""
        if trainer := self.trainer:
            trainer.stop()
            deadline = time.monotonic() + STOP_SECONDS
            while trainer.code is None and time.monotonic() < deadline:
                self.wakeup.pause(0.5)
            trainer.kill()
            trainer.wait(KILL_SECONDS)
            self.trainer = None

    def vacate(self) -> None:
        """Stops the trainer, and waits for one that was sent away: nobody may be training."""
        self.stop()
        while (pid := self._sent_away[0]) is not None and not self.wakeup.stop_reason:
            if self.mailbox.trainer_lock_holder() != pid:
                break
            self.end_who_stays()
            self.wakeup.pause(0.5)

    def kill(self) -> None:
        """Ends the trainer at once; may be called from a signal handler."""
        if trainer := self.trainer:
            trainer.kill()
