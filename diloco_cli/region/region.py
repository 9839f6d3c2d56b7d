"""A region whose training loop is yours.

    region = Region.here()
    with region.join(weights, optimizer=optimizer) as outer:
        loader.load_state_dict(outer.cursor)
        while outer.go_on():
            loss = train_step(next(loader))
            outer.stepped(tokens=…, loss=loss, cursor=loader.state_dict())

The loop owns the model and makes the steps. Between two of them `go_on` reads rows of the
weights that are to be sent and writes rows that have arrived; on steps without mail it does
next to nothing. Between `go_on` and `stepped` nothing but the step may change the weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, SupportsFloat, cast

import numpy as np

from diloco_cli.assemble import load_run, spelled_out
from diloco_cli.core.fragments import cut, gather
from diloco_cli.core.lanes import Cursor
from diloco_cli.errors import DilocoError, LinkError, SpecError
from diloco_cli.launch.roles import work_role
from diloco_cli.launch.subprocesses import LocalLauncher, LocalProcess
from diloco_cli.models import models
from diloco_cli.observe.events import EventLog
from diloco_cli.region.describe import describe
from diloco_cli.region.ranks import FollowingOuter, LeadingWeights, Ranks
from diloco_cli.spec.schema import InnerSpec, RunSpec
from diloco_cli.system.wakeup import LAST_MOMENT, Wakeup, stop_on_signals
from diloco_cli.worker.engines.rows_engine import (
    OptimizerState,
    RowsEngine,
    Weights,
    check_tensors,
)
from diloco_cli.worker.handover import OWN_TRAINER, HandoverRecord
from diloco_cli.worker.mailbox import STARTING, TRAINER_LOCK, AgentReady, FolderOwner, Mailbox
from diloco_cli.worker.trainer.checkpoints.resume import ResumePoint
from diloco_cli.worker.trainer.loop import OuterLoop
from diloco_cli.worker.trainer.parent_watch import ParentWatch
from diloco_cli.worker.trainer.progress import StartupTimes
from diloco_cli.worker.trainer.task import RegionTask, limit_cores
from diloco_cli.worker.trainer.weights_and_books import WeightsAndBooks

FOLDER, REGION = "DILOCO_FOLDER", "DILOCO_REGION"
"""What a worker tells the program that it starts."""
LOOK_SECONDS = 0.1
WAIT_SECONDS = 600.0
"""For an agent to have joined and fetched the published weights."""
MOST_CURSOR_BYTES = 1 << 18
LEAVE_SECONDS = 60.0
"""For an agent that was started here to hand over what was posted."""


class Region:
    """One region of a run, on this host; `join` it with the weights of your model."""

    def __init__(self, spec: str | Path, region: str, folder: str | Path) -> None:
        """`spec` is the run's file, `folder` where this host keeps the run."""
        self.spec, self.region = Path(spec), region
        self.folder = Path(folder)
        self._started_by_agent = False

    @classmethod
    def here(cls) -> Region:
        """The region that a worker started this program for (`trainer: {command: …}`)."""
        try:
            folder, region = Path(os.environ[FOLDER]), os.environ[REGION]
        except KeyError as missing:
            raise SpecError(
                f"This program was not started by a worker: {missing.args[0]} is not set.",
                hint="Name it in `regions[].trainer.command` and start `diloco run`; or say which "
                'region it is: Region("run.yaml", "paris", "runs/NAME").',
            ) from None
        found = cls(folder / "regions" / region / "spec.yaml", region, folder)
        found._started_by_agent = True
        return found

    def settings(self) -> RunSpec:
        """The run's settings as this region goes by them."""
        return spelled_out(load_run(self.spec).spec)

    @staticmethod
    def describe(weights: Weights, file: str | Path) -> Path:
        """Writes what is trained, names, shapes and first values, for `model: {kind: tensors}`."""
        return describe(weights, file)

    @contextlib.contextmanager
    def join(
        self,
        weights: Weights,
        *,
        optimizer: OptimizerState | None = None,
        evaluate: Callable[[], SupportsFloat] | None = None,
        agent: Literal["running", "start"] = "running",
        server: str | None = None,
        wait: float = WAIT_SECONDS,
        ranks: Ranks | None = None,
    ) -> Iterator[Outer]:
        """Takes part in the run until the block ends.

        The weights are set to what the region goes on from. With `optimizer` the state of the
        inner optimiser is kept in the region's checkpoint; without it that is yours to keep.
        `evaluate` measures the held-out loss of the weights as they are when it is called; it
        is for regions that may be asked to.

        With `agent="start"` a worker is started for as long as the block lasts, for launchers
        that start first (`trainer: {attach: true}`); `server` is its URL. Otherwise one is at
        work already and is waited for, `wait` seconds. A loop that runs in several processes
        gives each of them the same `ranks`.
        """
        if ranks is None and getattr(weights, "spread", False):
            raise SpecError(
                "The weights lie on devices of several processes.",
                hint="Join in every process, with ranks=JaxRanks() of region.jax_weights.",
            )
        if ranks is not None and not ranks.leads:
            follower = FollowingOuter(ranks, weights, optimizer, evaluate)
            yield cast(Outer, follower)
            follower.end()
            return
        leader = LeadingWeights(ranks, weights, optimizer) if ranks else None
        if leader:
            measured = evaluate
            weights, optimizer = leader, leader if optimizer else None
            evaluate = partial(leader.evaluate, measured) if measured else None
        try:
            with contextlib.ExitStack() as stack:
                mailbox = Mailbox(self.folder / "regions" / self.region)
                worker = None
                if agent == "start":
                    worker = stack.enter_context(self._worker(server))
                ready = self._wait_until_ready(mailbox, worker, wait)
                outer = stack.enter_context(
                    self._joined(mailbox, ready, weights, optimizer, evaluate)
                )
                if leader:
                    outer.lead(leader)
                yield outer
        except DilocoError as error:
            if not self._started_by_agent:
                raise
            # In the words that the agent quotes, and with the code that it goes by.
            hint = f"\n  hint: {error.hint}" if error.hint else ""
            print(f"error: {error.message}{hint}", file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from error

    @contextlib.contextmanager
    def _joined(
        self,
        mailbox: Mailbox,
        ready: AgentReady,
        weights: Weights,
        optimizer: OptimizerState | None,
        evaluate: Callable[[], SupportsFloat] | None,
    ) -> Iterator[Outer]:
        startup = StartupTimes()
        startup.mark()
        if ready.cores:
            limit_cores(ready.cores)
        # Made of what the agent has laid down, with all amendments of the run.
        spec = spelled_out(load_run(mailbox.spec_file).spec)
        task = _task(spec, self.region, ready.terms)
        check_tensors(weights.tensors(), task.tensors)
        wakeup = Wakeup()
        with (
            _signals(wakeup, everything=not self._started_by_agent),
            mailbox.locked(TRAINER_LOCK, seconds=LAST_MOMENT + 10),
        ):
            mailbox.clear_trainer_drafts()
            identity = mailbox.identity() or FolderOwner("", 0)
            HandoverRecord.of(OWN_TRAINER, spec, self.region, identity).write(mailbox)
            parent = ParentWatch(wakeup, mailbox, None)
            engine = RowsEngine(weights, task.layout, optimizer)

            def begin(start: ResumePoint, who: FolderOwner) -> WeightsAndBooks:
                return WeightsAndBooks(task, start, engine, run=who.run, owner=who.owner)

            loop = OuterLoop(
                task,
                mailbox,
                wakeup,
                begin=begin,
                tell=parent.tell,
                events=EventLog(self.folder / "events.jsonl", f"{self.region}.trainer"),
                measure=_measure(engine, evaluate) if evaluate else None,
                startup=startup,
            )
            loop.progress.why = STARTING
            outer = Outer(loop, engine, spec.inner_of(self.region))
            try:
                loop.report()
                parent.listen()
                yield outer
                outer.end()
            finally:
                loop.close()

    def _wait_until_ready(
        self, mailbox: Mailbox, worker: LocalProcess | None, wait: float
    ) -> AgentReady:
        deadline = time.monotonic() + wait
        while (ready := mailbox.ready()) is None:
            code = worker.exit_code() if worker else None
            if worker and code is not None:
                words = worker.last_words()
                raise LinkError(
                    f"The worker that was started for {self.region} ended with exit code {code}: "
                    f"{words.message or 'it gave no reason'}",
                    hint=words.hint,
                )
            if time.monotonic() >= deadline:
                raise LinkError(
                    f"No worker is ready for {self.region} in {mailbox.folder} after {wait:g} s.",
                    hint="Start one: `diloco work SPEC --region NAME --dir FOLDER`, with "
                    "`trainer: {attach: true}` for the region; or join with agent='start'.",
                )
            time.sleep(LOOK_SECONDS)
        return ready

    @contextlib.contextmanager
    def _worker(self, server: str | None) -> Iterator[LocalProcess]:
        from diloco_cli.run.folder import address_of

        url = server or os.environ.get("DILOCO_SERVER") or address_of(self.folder).url
        if not url:
            raise SpecError(
                "Where is the server? Neither server= nor DILOCO_SERVER says so, and "
                f"{self.folder} has no server running.",
                hint="Start it with `diloco serve SPEC`; it prints its URL.",
            )
        launcher = LocalLauncher(self.folder / "logs")
        role = work_role(self.spec, self.folder, self.region, url=url, cores=())
        worker = launcher.start(role)
        try:
            yield worker
        finally:
            launcher.stop([worker], grace=LEAVE_SECONDS)


class Outer:
    """What a training loop asks before each of its steps, and says after it."""

    def __init__(
        self, loop: OuterLoop[WeightsAndBooks], engine: RowsEngine, inner: InnerSpec
    ) -> None:
        self._loop, self._engine, self._most = loop, engine, inner.batch * inner.sequence
        self._began = time.monotonic()
        self._leader: LeadingWeights | None = None
        self.over = False
        """`go_on` has said no: everything is kept, and there is no further step."""

    @property
    def cursor(self) -> dict[str, Any]:
        """Where the loader goes on: what the last counted step was told; {} at the beginning."""
        return dict(self._loop.weights.cursor.own or {})

    @property
    def step(self) -> int:
        """Inner steps that this region has made."""
        return self._loop.weights.clock

    @property
    def resumed(self) -> bool:
        """Whether the region goes on from work that it has done before."""
        return self._loop.resumed

    @property
    def versions(self) -> list[int]:
        """The version of each fragment that the weights go on from."""
        return self._loop.weights.versions

    def lead(self, leader: LeadingWeights) -> None:
        """Has the other processes of the region do as this one does from now on."""
        self._leader = leader
        leader.joined(self.cursor, self.step, self.resumed)

    def go_on(self) -> bool:
        """Does what there is to do between two steps, and waits if it must.

        True: make one step. False: the run is over or the region is asked to leave, and all it
        holds is in its checkpoint; leave the loop.
        """
        if not self.over:
            self.over = not self._loop.go_on()
            if self._leader:
                self._leader.decided(not self.over)
        self._began = time.monotonic()
        return not self.over

    def end(self) -> None:
        """Keeps everything when the loop was left though it might have gone on."""
        if not self.over:
            self._loop.leave("its own loop ended")
            self.over = True
            if self._leader:
                self._leader.decided(False)

    def stepped(
        self,
        *,
        tokens: float,
        loss: SupportsFloat | None = None,
        cursor: Mapping[str, Any] | None = None,
        learning_rate: SupportsFloat | None = None,
        gradient_norm: SupportsFloat | None = None,
    ) -> None:
        """Counts a step that was made: what it trained on, and where the loader now stands.

        `loss` may still be on a device: it is looked at after the next step. `cursor` is plain
        data, as small as a loader's state can be; it comes back as `outer.cursor`. The last two
        are for people: they come back in `regions/NAME/metrics.jsonl`.
        """
        if self.over:
            raise SpecError(
                "A step was made after go_on() had said no; it cannot be counted.",
                hint="Leave the loop: `while outer.go_on(): …`.",
            )
        if not 0 < tokens <= self._most:
            raise SpecError(
                f"A step of {tokens:g} tokens was made; inner.batch × inner.sequence is "
                f"{self._most}, and more than that does not count.",
                hint="Set inner.batch and inner.sequence of this region to the largest step that "
                "its trainer makes.",
            )
        own = self._loop.weights.cursor.own if cursor is None else _plain(cursor)
        self._loop.weights.stepped(Cursor(own=own), tokens)
        self._engine.tell((_value(learning_rate), _value(gradient_norm)))
        self._loop.stepped(_value(loss), tokens, began=self._began)


def _value(number: SupportsFloat | None) -> SupportsFloat | None:
    """Without the graph of a framework, which should not live on."""
    detach = getattr(number, "detach", None)
    return detach() if detach else number


def _task(spec: RunSpec, region: str, terms: int) -> RegionTask:
    tensors = models.build(spec.model).tensors()
    layout = cut(tensors, spec.sync.fragments)
    return RegionTask(
        spec=spec, region=region, tensors=tensors, layout=layout, rate=None, terms=terms
    )


def _plain(cursor: Mapping[str, Any]) -> dict[str, Any]:
    """Checks that a loader's state can be written down; it goes into every frame."""
    try:
        size = len(json.dumps(cursor))
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"The cursor of a step is not plain data: {error}.",
            hint="Numbers, strings, lists and mappings with strings as keys; no arrays.",
        ) from None
    if size > MOST_CURSOR_BYTES:
        raise SpecError(
            f"The cursor of a step has {size} bytes, at most {MOST_CURSOR_BYTES} are allowed.",
            hint="Keep a position and a seed rather than the order itself.",
        )
    return dict(cursor)


def _measure(
    engine: RowsEngine, evaluate: Callable[[], SupportsFloat]
) -> Callable[[Mapping[str, np.ndarray]], float]:
    """Has other weights measured in the place of our own, which are put back to the bit."""

    def measure(params: Mapping[str, np.ndarray]) -> float:
        fragments = engine.layout.fragments
        own = [engine.read(fragment) for fragment in fragments]
        try:
            for fragment in fragments:
                engine.write(fragment, gather(params, fragment))
            return float(evaluate())
        finally:
            for fragment, values in zip(fragments, own, strict=True):
                engine.write(fragment, values)

    return measure


@contextlib.contextmanager
def _signals(wakeup: Wakeup, *, everything: bool) -> Iterator[None]:
    """Leaves in order when told to; a Ctrl-C is for the agent, where there is one above us."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread hears signals.
        return
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    try:
        if everything:
            stop_on_signals(wakeup, *kinds)
        else:
            stop_on_signals(wakeup, signal.SIGTERM, second=lambda number: None)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
