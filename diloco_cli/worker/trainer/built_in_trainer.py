"""The built-in trainer: a process that makes one region's inner steps with our own model and text.

`train` is the process: signals, the trainer's lock, the handover record, the hosts of the region.
`Trainer` owns an `OuterLoop` and makes its inner steps.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from diloco_cli.observe.events import EventLog
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.wakeup import LAST_MOMENT, Wakeup, stop_on_signals
from diloco_cli.wire.messages import News
from diloco_cli.worker.engines.learning_rate import REWARM
from diloco_cli.worker.handover import HandoverRecord
from diloco_cli.worker.hosts.lead import Lead
from diloco_cli.worker.hosts.listener import RegionTerms
from diloco_cli.worker.hosts.other_hosts import OtherHosts
from diloco_cli.worker.hosts.which_host import HostPlace
from diloco_cli.worker.mailbox import TRAINER_LOCK, FolderOwner, Mailbox
from diloco_cli.worker.trainer.checkpoints.resume import ResumePoint
from diloco_cli.worker.trainer.evaluation import list_heldout
from diloco_cli.worker.trainer.lanes import LaneFollower
from diloco_cli.worker.trainer.loop import OuterLoop
from diloco_cli.worker.trainer.parent_watch import ALONE_SECONDS, ParentWatch, take_over_stdout
from diloco_cli.worker.trainer.progress import StartupTimes
from diloco_cli.worker.trainer.schedule_place import SchedulePlace
from diloco_cli.worker.trainer.task import Task, prepare, set_up
from diloco_cli.worker.trainer.weights_and_books import TrainedWeights


def train(
    spec: RunSpec,
    region: str,
    folder: Path,
    *,
    terms: int = 0,
    cores: Sequence[int] | None = None,
    alone: float = ALONE_SECONDS,
    place: HostPlace | None = None,
    own: str = "",
) -> int:
    """Trains one region until it is told to stop or the run is finished.

    The agent writes to our standard input when there is mail and hears of ours on our
    standard output. When our input ends the agent is gone, and unless another takes us
    over we follow it `alone` seconds later. In a region of several hosts `place` says that we
    are the first, and `own` what the others must agree with.
    """
    from diloco_cli.worker.engines.devices import out_of_memory

    startup = StartupTimes()
    set_up(cores)
    startup.mark()
    wakeup = Wakeup()
    # A signal to the whole process group reaches us twice: directly, and through the agent.
    # A trainer that hangs is killed by the agent, so asking again is not needed.
    stop_on_signals(wakeup, signal.SIGTERM, second=lambda number: None)
    # Ctrl-C and a closed terminal are for the agent, which tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mailbox = Mailbox(folder / "regions" / region)
    parent = ParentWatch(wakeup, mailbox, take_over_stdout(), alone=alone)
    parent.listen()
    # A trainer that was sent away may still be writing its last checkpoint.
    with mailbox.locked(TRAINER_LOCK, seconds=LAST_MOMENT + 10):
        if parent.orphaned:
            return 0  # No agent can know of us yet, and our successor may be waiting already.
        mailbox.clear_trainer_drafts()
        identity = mailbox.identity() or FolderOwner("", 0)
        HandoverRecord.of(sys.orig_argv, spec, region, identity).write(mailbox)
        list_heldout(spec, region, mailbox.folder)
        events = EventLog(folder / "events.jsonl", f"{region}.trainer")

        def begin(orders: Lead | None) -> int:
            task, trainer = prepare(spec, region, terms=terms, orders=orders), None
            try:
                trainer = Trainer(
                    task, mailbox, wakeup, tell=parent.tell, events=events, startup=startup
                )
                return trainer.run()
            except RuntimeError as error:
                stepped = trainer is not None and trainer.compiled
                if full := out_of_memory(error, region, stepped=stepped):
                    raise full from error
                raise

        if place is None:
            return begin(None)
        others = OtherHosts(RegionTerms(place, spec, region, own), mailbox, wakeup, parent.tell)
        return others.lead(begin)


class Trainer(OuterLoop[TrainedWeights]):
    """The built-in training process, without its surroundings."""

    def __init__(
        self,
        task: Task,
        mailbox: Mailbox,
        wakeup: Wakeup,
        *,
        tell: Callable[[str], None],
        events: EventLog,
        startup: StartupTimes | None = None,
    ) -> None:
        from diloco_cli.worker.trainer.checkpoints.sharded_checkpoint import sharded_checkpoints

        self.place = SchedulePlace(task.rate.horizon)
        self._heard: News | None = None

        def begin(start: ResumePoint, identity: FolderOwner) -> TrainedWeights:
            before, now, place = start.terms, task, 0
            if before and before.rate:
                now, place = task.after(before.rate, before.place)
            elif before is None and start.clock > REWARM:
                told = mailbox.calls()
                share = told.progress if told else None
                place = start.clock if share is None else round(share * task.rate.horizon)
                now = task.warmed_again(place)
                remarks.append(
                    "the averages of the inner optimiser were lost with the checkpoint: the "
                    f"learning rate rises again over {now.rate.rise} steps"
                )
            self.place = SchedulePlace(now.rate.horizon, place)
            return TrainedWeights(now, start, run=identity.run, owner=identity.owner)

        remarks: list[str] = []
        super().__init__(
            task,
            mailbox,
            wakeup,
            begin=begin,
            tell=tell,
            events=events,
            measure=self._measure,
            sharded=sharded_checkpoints(task.spec.region(task.region), mailbox),
            startup=startup,
        )
        for remark in remarks:
            self.progress.note(remark)

    def _lanes_of(self, start: ResumePoint) -> LaneFollower:
        return LaneFollower(self.weights, self.checkpoints, start.cursor)

    def _measure(self, params: Mapping[str, np.ndarray]) -> float:
        batches = self.weights.stream.heldout(self.task.spec.evaluate.batches)
        return self.weights.stepper.evaluate(params, batches)

    def run(self) -> int:
        """Trains until there is a reason to leave."""
        self.report()
        try:
            while self.go_on():
                self.inner_step()
        finally:
            self.close()
        return 0

    def inner_step(self) -> None:
        began = time.monotonic()
        loss = self.weights.train(self._place())
        self.place.stepped()
        self.stepped(loss, self.weights.tokens_a_step, began=began)

    def _place(self) -> int:
        """Where in the learning-rate schedule the run is; what the server says may be new."""
        news = self.inbox.news
        if news is not self._heard:
            self._heard = news
            # What was said before an amendment is a share of another budget.
            if news and news.progress is not None and news.terms == self.task.terms:
                self.place.hear(news.progress)
        return self.place.next
