"""The loop: train, post when called, adopt what arrived.

At every step boundary, in this order:

    what became of the frames in flight   returned, refused, foreign
    newer images                          adopted; what they merged leaves `held`
    open calls                            answered with all of `held`, one frame per fragment
    lanes of the text                     taken up and given up, as the server says
    one inner step                        unless the end has come, `overlap: 0` waits, there is
                                          nothing to read, or the region has trained its part of
                                          the budget

`OuterLoop` does all of that but the inner step: whoever owns the loop asks it whether to `go_on`
and tells it what was `stepped`. `Trainer` (built_in_trainer.py) is the built-in owner of one.

With adopt replace or blend an open call is answered before adopting, because adopting
costs the work. `WeightsAndBooks` moves books and arrays together; reading, encoding and
writing happen in threads (mail.py, checkpoint.py). This process never touches the network.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, SupportsFloat, TypeVar

from diloco_cli.core import unmerged_work
from diloco_cli.core.fragments import piece_of
from diloco_cli.core.guard import NOT_FINITE, STRIKES
from diloco_cli.errors import WireError
from diloco_cli.observe.events import EventLog
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.codecs import NotFinite
from diloco_cli.worker.mailbox import FINISHED, Fate, FolderOwner, Mailbox
from diloco_cli.worker.trainer.checkpoints.checkpoint import CheckpointFile, CheckpointWriter
from diloco_cli.worker.trainer.checkpoints.resume import RegionPlace, ResumePoint, resume
from diloco_cli.worker.trainer.evaluation import HeldoutEvaluation, MeasureWeights
from diloco_cli.worker.trainer.lanes import LaneFollower
from diloco_cli.worker.trainer.mail import LOOK_SECONDS, Inbox, MailThread, OutgoingFrame
from diloco_cli.worker.trainer.pacing import pacing_of
from diloco_cli.worker.trainer.progress import ProgressReport, StartupTimes
from diloco_cli.worker.trainer.step_profiler import StepProfiler
from diloco_cli.worker.trainer.task import RegionTask
from diloco_cli.worker.trainer.weights_and_books import WeightsAndBooks

if TYPE_CHECKING:  # It loads JAX.
    from diloco_cli.worker.trainer.checkpoints.sharded_checkpoint import ShardedCheckpoints

Books = TypeVar("Books", bound=WeightsAndBooks)

RETRY_SECONDS = 5.0
"""Between two tries to write to a disk that refused."""
PATIENCE = 5
"""Steps in a row without a finite loss before the unmerged work is given up."""


class OuterLoop(Generic[Books]):
    """All that one region's training process does beside its inner steps."""

    def __init__(
        self,
        task: RegionTask,
        mailbox: Mailbox,
        wakeup: Wakeup,
        *,
        begin: Callable[[ResumePoint, FolderOwner], Books],
        tell: Callable[[str], None],
        events: EventLog,
        measure: MeasureWeights | None = None,
        sharded: ShardedCheckpoints | None = None,
        startup: StartupTimes | None = None,
    ) -> None:
        """`begin` puts the weights of a resume point where the inner steps find them."""
        place = RegionPlace(task.region, task.layout, task.alpha)
        self.inbox = Inbox(mailbox, task.layout.fragments)
        start = resume(mailbox, place, task.tensors, sharded and sharded.newest)
        self.mailbox, self.wakeup = mailbox, wakeup
        self.weights = begin(start, mailbox.identity() or FolderOwner("", 0))
        self.task = self.weights.task
        self.sync = task.spec.sync
        self.drafts: list[OutgoingFrame | None] = [None] * self.sync.fragments
        self.mail = MailThread(
            mailbox,
            task.region,
            level=task.spec.wire.zstd,
            wake=wakeup.wake,
            tell=tell,
            keep=self.weights.keep,
        )
        self.progress = ProgressReport(task, mailbox, events, tell=tell)
        self.averages = self.progress.averages
        before = None if start.realigned else mailbox.progress()
        self.evaluation = HeldoutEvaluation(self.task, mailbox, before, measure)
        self.compiled = self.ended = False
        self._loss: SupportsFloat | None = None
        self.pacing = pacing_of(task, mailbox)
        self._retry_at = 0.0
        self.profiler = StepProfiler(mailbox, self.weights.engine)
        self.checkpoints = CheckpointWriter(
            sharded or CheckpointFile(mailbox.checkpoint), wake=wakeup.wake, now=time.monotonic()
        )
        self.lanes = self._lanes_of(start)
        if start.realigned:
            self.checkpoints.keep_realigned(self.weights)
            self.progress.realigned(self.weights, since=start.realigned)
        elif start.renamed:
            # Before anything is posted: a restart must not begin the books once more.
            self._checkpoint()
            self.checkpoints.wait()
        elif before:  # A folder with a new name begins its books anew.
            self.progress.resume(before, self.weights)
        if start.terms and self.weights.new_optimizer:
            kind = self.task.optimizer
            self.progress.note(f"the inner optimiser ({kind}) begins without averages")
        for remark in start.remarks:
            self.progress.note(remark)
        self.resumed = start.resumed
        self._startup = startup or StartupTimes(time.time())
        self._startup.mark()

    def _lanes_of(self, start: ResumePoint) -> LaneFollower | None:
        """Who says which part of the run's text is read; None where the text is another."""
        return None

    def go_on(self) -> bool:
        """Does all there is to do before the next inner step, and waits if it must.

        False means that there is no next one: everything is in the checkpoint, leave now.
        """
        while True:
            self.boundary()
            if self.wakeup.stop_reason or (self.inbox.news and self.inbox.news.stop):
                self.leave(self.wakeup.stop_reason or "the run was stopped")
                return False
            if self.inbox.news and self.inbox.news.finished and self._is_up_to_date():
                self._finish()
                return False
            if why := self._waits_for():
                self._wait(why)
            elif (early := self.pacing.due - time.monotonic()) > 0:
                self.wakeup.wait(early)  # Mail is answered meanwhile, at the next boundary.
            else:
                return True

    def close(self) -> None:
        """Ends the threads, once they have written what was handed to them."""
        self.profiler.end()
        self.mail.close()
        self.checkpoints.close()

    def boundary(self) -> None:
        """Does all that may be done between two steps, in the order of the protocol."""
        began = time.monotonic()
        self._exchange()
        self.averages.blocked += time.monotonic() - began
        self._follow_lanes()
        if self.inbox.news and (self.inbox.news.end or self.inbox.news.finished):
            self._drain()
        else:
            self.ended = False  # Or no longer: the run was opened again.
        if self.averages.bad >= PATIENCE:
            everything = set(range(self.sync.fragments))
            self.give_up(f"the loss was not finite {self.averages.bad} times in a row", everything)
        news = self.inbox.news
        asked = news if news and news.evaluate and self.compiled else None
        if asked and self.evaluation.is_due(self.weights.versions):
            self.evaluate()
        if asked and asked.ema and self.evaluation.run_average():
            self.averages.paused()
            self.report()
        self._checkpoint_when_due()
        if self.compiled and self.inbox.profile_asked and not self.profiler.is_tracing:
            self.inbox.profile_asked = False
            if self.profiler.begin():
                self.averages.paused()

    def _exchange(self) -> None:
        """Takes in what arrived and answers what is asked."""
        self._collect_drafts()
        if self.wakeup.clear() or self.inbox.is_due(now=time.monotonic()):
            self.inbox.look(self.mail)
        for number, fate in enumerate(self.inbox.fates):
            if fate and self.weights.answered(number, fate):
                self._answered(number, fate)
        if self.task.alpha < 1:
            self._answer_calls()
        self._adopt()
        self._answer_calls()

    def _collect_drafts(self, *, wait: bool = False) -> None:
        if unfit := self._written_drafts(wait=wait):
            self.give_up(next(iter(unfit.values())), set(unfit))

    def _written_drafts(self, *, wait: bool = False, retry: bool = True) -> dict[int, str]:
        """Takes note of frames that are in the outbox; why those of some fragments cannot be."""
        unfit: dict[int, str] = {}
        for number, draft in enumerate(self.drafts):
            if draft is None or not (wait or draft.done.done()):
                continue
            try:
                self.weights.written(number, draft.header.clock, draft.done.result())
                self.drafts[number], self.progress.trouble = None, ""
            except WireError as error:
                self.drafts[number] = None
                unfit[number] = self._unsendable(number, draft, error)
            except OSError as error:
                if retry:
                    self._retry(number, draft, error)
                else:
                    self.drafts[number] = None
        return unfit

    def _unsendable(self, number: int, draft: OutgoingFrame, error: WireError) -> str:
        """Names the tensor that holds what cannot be sent."""
        if not isinstance(error, NotFinite):
            return f"fragment {number} could not be sent: {error.message}"
        piece = piece_of(self.task.layout.fragments[number], error.index)
        return (
            f"{piece.tensor} (rows {piece.start}:{piece.stop}) of region {self.task.region} has "
            f"the value {error.value} at step {draft.header.clock}, so fragment {number} was not "
            f"sent (hint: {(error.hint or '').rstrip('.')})"
        )

    def _retry(self, number: int, draft: OutgoingFrame, error: OSError) -> None:
        """A disk that is full may have room later; until then the frame does not exist."""
        self.progress.trouble = f"the outbox cannot be written: {error.strerror}"
        if time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self.drafts[number] = self.mail.post(draft.header, draft.work)
            self.progress.note(self.progress.trouble)

    def _answered(self, number: int, fate: Fate) -> None:
        self.progress.note(f"fragment {number}: the last frame was {fate.fate}: {fate.why}")
        earlier = fate.why.startswith("in quarantine")  # Then the reason is an older frame's.
        if fate.fate == "refused" and not earlier and NOT_FINITE in fate.why:
            self.weights.engine.reset_optimizer()
        self.report()

    def _adopt(self) -> None:
        for number, book in enumerate(self.weights.books):
            # A frame being written has no digest yet, so an image that merged it could not
            # be told from one that merged a stranger's.
            arrived = None if self.drafts[number] else self.inbox.take(number)
            if arrived is None or arrived.image.version < book.version:
                continue
            if arrived.image.version == book.version:  # Only an image that was mended comes again.
                self.weights.replace_anchor(number, arrived)
                continue
            merged = self.weights.adopt(number, arrived)
            if merged and book.flight:
                self.progress.divergence.merged(book.flight.clock)
            self.progress.events.note(
                "adopted",
                region=self.task.region,
                fragment=number,
                version=arrived.image.version,
                merged=merged,
                step=self.weights.clock,
            )
            if self.progress.why != "training":
                self.report()  # Otherwise the server hears nothing while we stand still.

    def _answer_calls(self) -> None:
        if self.inbox.news is None or self.inbox.news.finished or self.wakeup.stop_reason:
            return
        for number, version in self.inbox.news.calls.items():
            if self.weights.may_answer(number, version):
                self.drafts[number] = self.mail.post(*self.weights.post(number))

    def _follow_lanes(self) -> None:
        """Takes lanes up and gives lanes up; those that are asked for are not held up for long."""
        if self.lanes is None:
            return
        if moved := self.lanes.follow(self.inbox.lanes):
            taken, released = moved
            about = {"region": self.task.region, "step": self.weights.clock}
            self.progress.events.note("lanes-followed", **about, taken=taken, released=released)
            if self.lanes.owes_checkpoint and not self.compiled:
                # Nobody should wait for our compiler.
                self._checkpoint()
                self._note_trouble(self.checkpoints.wait())
            self.report()
        elif self.lanes.has_news:
            self.report()

    def stepped(self, loss: SupportsFloat | None, tokens: float, *, began: float) -> None:
        """Takes note of an inner step that was made and booked; its loss may not be computed."""
        # The loss of the step before: asking for this one's would leave the device idle.
        # A region that is slowed down knows how long each step took.
        last, self._loss = self._loss, loss
        if last is not None:
            self._lost(last)
        elif loss is None:
            self.progress.divergence.stepped(sound=True)
        if self.pacing.measures or not self.compiled:
            self.weights.engine.wait()
        now = time.monotonic()
        self.pacing.stepped(began if self.compiled else now, now)
        if not self.compiled:
            self._compiled(now)
        self.averages.stepped(tokens, now=now)
        if self.profiler.stepped():
            self.averages.paused()  # Writing a trace is no part of a step.
        self.progress.why = "training"
        if self.progress.is_due(self.weights, every=self._every()):
            self.report()

    def _every(self) -> int:
        """How many steps make a round, as the server says now."""
        news = self.inbox.news
        return (news and news.every) or self.sync.every

    def _compiled(self, now: float) -> None:
        """The first step was mostly compiling: it says nothing about the pace."""
        self.compiled = True
        self._startup.mark()
        self.progress.began(self.weights, self._startup, resumed=self.resumed)
        gc.collect()
        gc.freeze()  # All of the framework: a collection that looks through it holds a step up.
        gc.enable()
        self.averages.read(now=now)

    def _waits_for(self) -> str:
        """Says what has to happen before the next inner step; empty if nothing."""
        reading = self.lanes.waits_for(self.inbox.lanes) if self.lanes else ""
        if self.inbox.news is None:
            return reading
        if self.inbox.news.finished:
            return "waiting for the final weights"
        if self.inbox.news.end:
            return "drained, waiting for the others" if self._is_drained() else self._draining()
        if self._is_out_of_room():
            return self._out_of_room()
        if self.sync.overlap == 0:
            number = unmerged_work.waits_for(self.weights.books, self.inbox.news.calls)
            if number is not None:
                return f"waiting for fragment {number} (overlap 0)"
        return reading

    def _is_out_of_room(self) -> bool:
        """Says whether the region has trained as far as the server lets it."""
        until = self.inbox.news.until if self.inbox.news else None
        return until is not None and self.weights.trained >= until

    def _out_of_room(self) -> str:
        """Names what is held: where it does not get through, the run looks far from its budget."""
        why = "waiting for the token budget: "
        if held := max(book.pending for book in self.weights.books):
            trained = self.weights.trained
            why += f"{held:.0f} of the {trained:.0f} tokens trained here are not merged yet, and "
        return why + "what is left of it is for other regions"

    def _draining(self) -> str:
        holding = [n for n, book in enumerate(self.weights.books) if book.flight or book.held.steps]
        return f"draining fragments {', '.join(map(str, holding))}"

    def _wait(self, why: str) -> None:
        self._catch_up()
        self.averages.paused()
        self.pacing.paused()
        no_room = not self.ended and self._is_out_of_room()
        if why != self.progress.why or no_room:  # Room comes with answers to reports alone.
            self.progress.why = why
            self.report()
        began = time.monotonic()
        self.wakeup.wait(LOOK_SECONDS)
        # Near the end everybody waits for the others, and at the end for the last versions.
        if not self.ended and not no_room:
            self.averages.blocked += time.monotonic() - began

    def _catch_up(self) -> None:
        if self._loss is not None:
            self._lost(self._loss)
            self._loss = None

    def _lost(self, loss: SupportsFloat) -> None:
        self.averages.lost(float(loss))
        self.progress.divergence.stepped(sound=not self.averages.bad)

    def _drain(self) -> None:
        """After the end: gives up crumbs below one step, and leaves a checkpoint once."""
        for number, book in enumerate(self.weights.books):
            if book.flight is None and 0 < book.held.steps < 1:
                self.weights.abandon(number)
        if not self.ended:
            self.ended = True
            self._checkpoint()

    def _is_drained(self) -> bool:
        return self.ended and all(
            book.flight is None and book.held.steps < 1 for book in self.weights.books
        )

    def _is_up_to_date(self) -> bool:
        assert self.inbox.news is not None
        newest = self.inbox.news.versions
        return all(have >= new for have, new in zip(self.weights.versions, newest, strict=True))

    def give_up(self, why: str, unfit: set[int]) -> None:
        """Goes back to the published weights where ours are unfit, with a fresh optimiser."""
        self.averages.bad = 0
        # What could not be written is not tried again: it is refused here, and a frame of it
        # that became durable later would be merged all the same.
        unfit = unfit | set(self._written_drafts(wait=True, retry=False))
        before, divergence = self.weights.given_up(), self.progress.divergence
        for number in range(self.sync.fragments):
            if number in unfit or not self.weights.is_finite(number):
                self.weights.refuse(number)
        self.weights.engine.reset_optimizer()
        tokens = self.weights.given_up() - before
        divergence.gave_up(why, tokens, step=self.weights.clock, now=time.monotonic())
        # Who diverges does so many times a second; each is in the report, not in the run log.
        if divergence.times.bit_count() == 1 or divergence.times == STRIKES:
            again = f" (time {divergence.times} in a row)" if divergence.times > 1 else ""
            self.progress.note(f"{why}; going on from the published weights{again}")
        self.report()

    def report(self) -> None:
        self.progress.report(
            self.weights,
            measured=self.evaluation.report(),
            ended=self.inbox.news.ended if self.inbox.news and self._is_drained() else 0,
            reading=self.lanes.report() if self.lanes else None,
        )

    def evaluate(self) -> None:
        loss = self.evaluation.run(self.weights)
        if not math.isfinite(loss):
            versions = self.weights.versions
            self.progress.note(f"the held-out loss of versions {versions} is {loss}")
        self.averages.paused()
        self.report()

    def _checkpoint_when_due(self) -> None:
        self._note_trouble(self.checkpoints.trouble())
        gives = self.lanes and self.lanes.owes_checkpoint and not self.checkpoints.busy
        if gives or self.checkpoints.is_due(now=time.monotonic()):
            self._checkpoint()

    def _checkpoint(self) -> None:
        self.weights.engine.wait()  # The step in progress is no cost of saving.
        self.checkpoints.save(self.weights)

    def _note_trouble(self, trouble: str) -> None:
        if trouble:
            self.progress.note(trouble)

    def leave(self, why: str) -> None:
        """Stops in order: nothing half written, everything in the checkpoint."""
        self._collect_drafts(wait=True)
        self.checkpoints.wait()
        self._checkpoint()
        self._note_trouble(self.checkpoints.wait())
        self.progress.why = f"stopped: {why}"
        self.report()

    def _finish(self) -> None:
        """The run is over: what was not merged by now never will be."""
        self._collect_drafts(wait=True)
        self._catch_up()
        for number in range(self.sync.fragments):
            self.weights.abandon(number)
        self.ended = True
        news, versions = self.inbox.news, self.weights.versions
        if news and news.evaluate and self.evaluation.possible:
            if self.evaluation.is_stale(versions):
                self.evaluate()
            if news.ema:
                self.evaluation.wait_for_average(versions, self.wakeup)
        self.leave(FINISHED)
