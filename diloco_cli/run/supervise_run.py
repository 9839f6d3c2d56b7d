"""One run on this machine: a server, a worker per region, and nobody left behind.

    start the server ─▶ start the workers ─▶ watch ─▶ finished, or stopped, or hopeless
                                               │
             whatever died is started again ◀──┘

The run's state lives in the folder and in the server; this module only starts, asks
and tells. Killing it at any point loses nothing: its children stop by themselves, and
the same command goes on where they stopped.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diloco_cli.errors import (
    DilocoError,
    LinkError,
    QuorumLost,
    RunFailed,
    SpecError,
    StoreError,
    WireError,
)
from diloco_cli.launch import Launcher, Role
from diloco_cli.launch.supervise import INCURABLE, Change, Patience, Supervisor
from diloco_cli.observe.events import EventLog
from diloco_cli.observe.status import ENDED, RegionStatus, RegionSummary, Status, Summary
from diloco_cli.observe.terminal import ProgressDisplay
from diloco_cli.run.folder import cannot_write, last_summary
from diloco_cli.run.goal import StopCondition
from diloco_cli.system.files import keep_bytes
from diloco_cli.system.locks import FileLock
from diloco_cli.system.process_end import LastWords, exit_in_words
from diloco_cli.system.wakeup import Signals
from diloco_cli.worker.agent.trainer_process import end_trainer
from diloco_cli.worker.mailbox import Mailbox

POLL_SECONDS = 1.0
GRACE_SECONDS = 60.0
"""For a worker to finish its step, its checkpoint and its mail."""
PREDECESSOR_SECONDS = 60.0

_ERRORS: dict[int, type[DilocoError]] = {
    kind.exit_code: kind
    for kind in (RunFailed, SpecError, WireError, LinkError, StoreError, QuorumLost)
}


class ServerCalls(Protocol):
    """How to reach a server; both raise LinkError when it does not answer."""

    def status(self, url: str) -> Status: ...
    def stop(self, url: str) -> None: ...


@dataclass(frozen=True)
class LocalRunPlan:
    """What to start here."""

    folder: Path
    regions: tuple[str, ...]
    """Those with a worker on this machine."""

    elsewhere: int
    """How many regions of the run may join from other machines."""

    quorum: int
    serve: Role
    work: Callable[[str, str], Role]
    """Region and URL of the server to the worker's process."""

    goal: StopCondition | None = None

    followers: tuple[Role, ...] = ()
    """The workers of further hosts of these regions."""


class RunWatcher(Protocol):
    """Looks at a run whenever its supervisor does, and may end it."""

    def reason_to_stop(self, fresh: Status | None) -> str:
        """Why the run is to stop now; empty while it is to go on."""
        ...

    def next_look(self) -> float:
        """Seconds until it wants to look again."""
        ...

    def stopping(self) -> None:
        """The run is about to stop, for whatever reason; may be called again."""
        ...


class LocalRun:
    """Starts the processes of one run, restarts what dies, and knows how it ended."""

    def __init__(
        self,
        plan: LocalRunPlan,
        launcher: Launcher,
        link: ServerCalls,
        progress: ProgressDisplay,
        *,
        patience: Patience | None = None,
        grace: float = GRACE_SECONDS,
        poll: float = POLL_SECONDS,
    ) -> None:
        self.plan = plan
        self.status: Status | None = None
        self.progress = progress
        self._launcher = launcher
        self._link = link
        self._patience = patience
        self._grace = grace
        self._poll = poll
        self.watcher: RunWatcher | None = None
        # Nothing a server says before it first listens is cured by another start.
        self._server = Supervisor(
            launcher, plan.serve, patience=patience, incurable=frozenset(range(1, 128))
        )
        self._workers: dict[str, Supervisor] = {}
        self._followers: list[Supervisor] = []
        self._url = ""
        self.log = EventLog(plan.folder / "events.jsonl", "run")
        self.began = time.monotonic()
        self._empty_since: float | None = None
        self._why = ""
        """Why the run was stopped, where we know better than its server."""

    def run(self) -> int:
        """Runs to the end and returns the exit code; raises what made it impossible."""
        with Signals() as signals:
            # Until they are gone this folder is theirs: nothing in it may be ended or written.
            self._await_predecessors(signals)
            if signals.count:
                return signals.exit_code
            try:
                self._start(signals)
                return self._watch(signals)
            except OSError as error:
                raise cannot_write(self.plan.folder, error) from error
            except DilocoError as error:
                self._why = _first_line(error.message)
                raise
            finally:
                self._leave_nobody(signals)
                self.log.close()
                self._sum_up()

    def supervisor(self, region: str) -> Supervisor | None:
        """The supervisor of a region's worker, or of the server for ''; None before its start."""
        return self._workers.get(region) if region else self._server

    # -- start ------------------------------------------------------------------------

    def _await_predecessors(self, signals: Signals) -> None:
        """Waits for what a killed `diloco run` left draining in this folder."""
        folder = self.plan.folder
        locks = {"server": folder / "server" / "lock"}
        locks |= {name: folder / "regions" / name / "lock" for name in self.plan.regions}
        deadline = time.monotonic() + PREDECESSOR_SECONDS
        announced = False
        while busy := [name for name, lock in locks.items() if not FileLock(lock).is_free()]:
            if not announced:
                self.progress.say(f"waiting for an earlier run to let go of: {', '.join(busy)}")
                announced = True
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"{folder} is in use: another process holds {', '.join(busy)}.",
                    hint=f"`diloco stop {folder}` ends it; `ps ax | grep {folder}` shows it.",
                )
            if signals.count:
                return
            signals.pause(0.2)

    def _start(self, signals: Signals) -> None:
        self._server.start(now=time.monotonic())
        while not signals.count and not self._ask():
            for change in self._tend():
                self._tell(change)
            self._server_must_go_on()
            signals.pause(0.1)
        if signals.count:
            return
        self._server.incurable = INCURABLE
        self.progress.say(f"server at {self._url}")
        for region in self.plan.regions:
            keeper = Supervisor(
                self._launcher, self.plan.work(region, self._url), patience=self._patience
            )
            keeper.start(now=time.monotonic())
            self._workers[region] = keeper
        for role in self.plan.followers:
            keeper = Supervisor(self._launcher, role, patience=self._patience)
            keeper.start(now=time.monotonic())
            self._followers.append(keeper)

    def _find_server(self) -> bool:
        """Says whether the server we started listens, and remembers where."""
        handle = self._server.handle
        url = handle.url() if handle else None
        if not url:
            return False
        if self._url and url != self._url:
            # A restarted server could not have its port back, so the workers must follow it.
            for region, keeper in self._workers.items():
                keeper.move(self.plan.work(region, url))
        self._url = url
        return True

    # -- watch ------------------------------------------------------------------------

    def _watch(self, signals: Signals) -> int:
        while True:
            for change in self._tend():
                self._tell(change)
            if signals.count:
                self._why = f"{signals.name} received"
                self._wind_down(signals, "stopping; press Ctrl-C again to kill")
                return signals.exit_code
            fresh = self._ask()
            if fresh:
                self.progress.show(fresh)
                if fresh.ended:
                    self._server.retire()  # It goes by itself when everybody has heard.
            self._server_must_go_on()
            if self._all_over(fresh):
                self._refuse_hopeless()
                return 0
            if why := self._reason_to_stop(fresh):
                self._why = why
                self._wind_down(signals, f"{why}; stopping")
                return signals.exit_code if signals.count else 0
            signals.pause(self._until_next_look())

    def _all_over(self, fresh: Status | None) -> bool:
        """Says whether the run ended as it should; raises when it can never end."""
        left = [keeper for keeper in self._workers.values() if keeper.over]
        if self._state() in ENDED and len(left) == len(self._workers):
            return True
        if self._server.state == "done":
            if self._state() not in ENDED:
                self.progress.say("the server was stopped; stopping the workers")
            return True
        joined = sum(r.alive and not r.listed for r in fresh.regions) if fresh else 0
        possible = self.plan.elsewhere + joined + len(self._workers) - len(left)
        # Only a server that answers now can know that nothing is over yet: the workers of
        # a finished run leave before we have heard of its end.
        if possible >= self.plan.quorum or not fresh or fresh.ended:
            self._empty_since = None
            return False
        self._quorum_is_lost(left, possible)
        return False

    def _refuse_hopeless(self) -> None:
        """Raises where the run ended because everybody worked for nothing."""
        newest = self._newest()
        if newest and newest.hopeless:
            raise RunFailed(
                f"The run was stopped: {newest.hopeless}",
                hint="Lower inner.optimizer.lr or outer.lr: in this run, if its weights are sound "
                "(`diloco serve`, `diloco amend`, `diloco stop`, the same command again), or anew "
                "with --fresh.",
            )

    def _quorum_is_lost(self, left: Sequence[Supervisor], possible: int) -> None:
        failed = [keeper for keeper in left if keeper.state == "gone"]
        if not failed:
            # Everybody left politely. A run that is being stopped looks like this for a moment.
            self._empty_since = self._empty_since or time.monotonic()
            if time.monotonic() - self._empty_since < self._grace / 2:
                return
        if failed and possible == 0 and len({keeper.code for keeper in left}) == 1:
            raise error_like(failed[0].code or 1, failed[0].role.name, failed[0].last_words)
        reasons = "; ".join(f"{k.role.name}: {_first_line(k.why)}" for k in failed)
        raise QuorumLost(
            f"{possible} of the regions can still contribute, a round needs {self.plan.quorum}"
            f" ({reasons or 'all others have left'}).",
            hint=f"Look into {self.plan.folder / 'logs'}; rerun the same command to resume.",
        )

    def _server_must_go_on(self) -> None:
        if self._server.state == "gone":
            raise error_like(self._server.code or 1, "the server", self._server.last_words)

    def _reason_to_stop(self, fresh: Status | None) -> str:
        """Says why the run is over before its budget; empty while it is not."""
        if self.watcher and (why := self.watcher.reason_to_stop(fresh)):
            return why
        goal, seconds = self.plan.goal, time.monotonic() - self.began
        reached = goal and goal.reached(self.status, seconds=seconds)
        return f"reached --until {goal}" if reached else ""

    def _until_next_look(self) -> float:
        return min(self._poll, self.watcher.next_look()) if self.watcher else self._poll

    def _state(self) -> str:
        """Says the run's state from the newest source: the server, or what it wrote last."""
        newest = self._newest()
        return newest.state if newest else ""

    def _newest(self) -> Summary | Status | None:
        return (last_summary(self.plan.folder) if self._server.over else None) or self.status

    def _tend(self) -> Iterator[Change]:
        for keeper in (self._server, *self._workers.values(), *self._followers):
            if change := keeper.tend(now=time.monotonic()):
                yield change

    def _ask(self) -> Status | None:
        if self._server.state != "running" or not self._find_server():
            return None
        try:
            status = self._link.status(self._url)
        except (LinkError, WireError):
            return None
        regions = tuple(self._with_its_worker(region) for region in status.regions)
        self.status = status.model_copy(update={"regions": regions})
        return self.status

    def _with_its_worker(self, region: RegionStatus) -> RegionStatus:
        """Adds what only we know of a region: its worker failed for good, or is starting."""
        if failed := self._failed.get(region.name):
            return region.model_copy(update={"failed": failed})
        never_reported = region.step is None and region.last_merged_seconds is None
        if region.name in self._workers and not region.alive and never_reported:
            return region.model_copy(update={"starting": True})
        return region

    @property
    def _failed(self) -> dict[str, str]:
        """Regions whose worker is not started again, each with its last words."""
        gone = {name: keeper for name, keeper in self._workers.items() if keeper.state == "gone"}
        return {name: _first_line(keeper.why) for name, keeper in gone.items()}

    def _tell(self, change: Change) -> None:
        server = change.name == "server"
        region = {} if server else {"region": change.name.partition(".host-")[0]}
        facts = {"code": change.code, "why": change.why, "restarts": change.restarts}
        if change.what == "died":
            self.progress.say(
                f"{change.name} died: {_first_line(change.why)}; restarting in {change.delay:.0f} s"
            )
        elif change.what == "restarted":
            self.log.note(f"{'server' if server else 'worker'}-restarted", **region, **facts)
            self.progress.say(f"{change.name} was restarted (restart {change.restarts})")
        elif change.what == "gone" and not server:
            self.log.note("worker-gone", **region, **facts)
            self.progress.say(f"{change.name} cannot go on: {change.why}")
        elif change.what == "left" and not server and self._state() == "training":
            self.progress.say(f"the worker of {change.name} has ended")

    # -- end --------------------------------------------------------------------------

    def _wind_down(self, signals: Signals, why: str) -> None:
        """Lets the run drain: the server tells the workers, each leaves when it is done."""
        if self.watcher:
            self.watcher.stopping()
        self.progress.say(why)
        for keeper in (self._server, *self._workers.values(), *self._followers):
            keeper.retire()
        if not self._ask_to_stop():
            for keeper in self._workers.values():
                if keeper.handle:
                    keeper.handle.ask()
        deadline = time.monotonic() + self._grace
        while not all(keeper.over for keeper in self._workers.values()):
            if signals.impatient or time.monotonic() > deadline:
                return
            for change in self._tend():
                self._tell(change)
            if fresh := self._ask():
                self.progress.show(fresh)
            signals.pause(0.2)

    def _ask_to_stop(self) -> bool:
        try:
            if self._url:
                self._link.stop(self._url)
            return bool(self._url)
        except (LinkError, WireError):
            return False

    def _leave_nobody(self, signals: Signals) -> None:
        """Stops what still runs: workers first, so that their last words find a server."""
        if self.watcher:
            self.watcher.stopping()
        grace = 0.0 if signals.impatient else self._grace
        for keepers in (list(self._workers.values()), self._followers, [self._server]):
            handles = [keeper.handle for keeper in keepers if keeper.handle]
            self._launcher.stop(handles, grace=grace, hurry=lambda: signals.impatient)
        # A trainer that outlived a killed worker is in no group of ours.
        for region in self.plan.regions:
            end_trainer(Mailbox(self.plan.folder / "regions" / region))

    def summary(self) -> Summary | None:
        """What the run came to, if anything."""
        return last_summary(self.plan.folder)

    def _sum_up(self) -> None:
        """Adds to the server's summary what only we know, or writes down what is known."""
        before = last_summary(self.plan.folder)
        summary = before or self._without_summary()
        if summary is None:
            return
        if summary.state == "stopped" and self._why:
            summary = summary.model_copy(update={"why": self._why, "regions_go_on": False})
        if failed := self._failed:
            regions = dict(summary.regions)
            for name, why in failed.items():
                region = regions.get(name, RegionSummary())
                regions[name] = region.model_copy(update={"failed": why})
            summary = summary.model_copy(update={"regions": regions})
        if summary != before:
            with contextlib.suppress(OSError):
                write_json(self.plan.folder / "summary.json", summary.plain())

    def _without_summary(self) -> Summary | None:
        status = self.status
        if status is None:
            return Summary(state="stopped", why=self._why) if self._why else None
        return Summary(
            run=status.run,
            name=status.name,
            state=status.state if status.ended else "stopped",
            tokens=status.tokens,
            loss=status.loss,
            outer_steps=status.outer_steps,
            wire=status.wire,
            goodput=status.goodput,
            goodputs=status.goodputs,
            start=status.start,
            wall_seconds=round(time.monotonic() - self.began, 1),
        )


def error_like(code: int, who: str, words: LastWords) -> DilocoError:
    """Makes a child's failure our own: same exit code, its message and its hint."""
    kind = _ERRORS.get(code, RunFailed)
    message = words.message or f"it ended with {exit_in_words(code)}"
    return kind(f"{who}: {message}" if who else message, hint=words.hint)


def write_json(path: Path, document: Mapping[str, object]) -> None:
    keep_bytes(path, json.dumps(document, indent=2).encode() + b"\n", mode=0o644)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
