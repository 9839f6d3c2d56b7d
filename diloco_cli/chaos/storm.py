"""Inflicts a fault schedule on a real run.

    storm = Storm(faults, stage, links=links)
    storm.begin(now)                   # every region has made its first step
    while not storm.over(now):
        storm.tend(now)                # strikes what is due, mends what is over
    storm.mend()                       # whatever still lasts, however this ended

Processes are struck by the ids that their own supervisors and locks give, links through
proxies that the regions were sent to from the start, the pace through a file the trainer
looks at. What strikes nobody is written down with the reason. Nothing here restarts
anything: that is for whoever supervises the run anyway.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from diloco_cli.chaos.emulator.proxy import Proxy, emulated
from diloco_cli.launch.subprocesses import LocalProcess
from diloco_cli.launch.supervise import Supervisor
from diloco_cli.sim.faults import Fault
from diloco_cli.spec.chaos_rules import ON_LINKS
from diloco_cli.spec.schema import ChaosSpec
from diloco_cli.worker.mailbox import SLOW, TRAINER_LOCK

Seconds = float


class ChaosTarget(Protocol):
    """A run as somebody sees it who wants to disturb it."""

    @property
    def folder(self) -> Path: ...

    def keeper(self, region: str) -> Supervisor | None:
        """Who keeps a region's worker running; the server's for ''. None before it was started."""
        ...


@dataclass
class InflictedFault:
    """One fault of the schedule and what came of it."""

    fault: Fault
    at: Seconds
    """Since the beginning."""
    wall: Seconds
    """Seconds since 1970, as in the run log."""
    skipped: str = ""
    """Why nobody was struck."""

    def as_record(self) -> dict[str, Any]:
        record = {**self.fault.as_record(), "at": round(self.at, 3)}
        return {**record, "skipped": self.skipped} if self.skipped else record


class NoTarget(Exception):
    """There is nobody to strike; says why."""


class EmulatedLinks:
    """The emulated links of a run, one for each region that needs one."""

    def __init__(self, chaos: ChaosSpec, faults: Sequence[Fault], regions: Sequence[str]) -> None:
        struck = {fault.region for fault in faults if fault.kind in ON_LINKS}
        named = {name: chaos.links.get(name) or chaos.link for name in regions}
        self.words = {
            name: words or "unlimited" for name, words in named.items() if words or name in struck
        }
        self.proxies: dict[str, Proxy] = {}
        self._targets: dict[str, str] = {}

    def url(self, region: str, server: str) -> str:
        """Says where this region finds the server that listens at this URL."""
        if region not in self.words:
            return server
        if self._targets.get(region) != server:
            old, at = self.proxies.pop(region, None), urlsplit(server)
            if old:
                old.close()
            assert at.hostname and at.port
            self.proxies[region] = emulated(
                self.words[region],
                at.hostname,
                at.port,
                scheme=at.scheme,
                port=old.port if old else 0,
            )
            self._targets[region] = server
        return self.proxies[region].url

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()


@dataclass
class Storm:
    """One schedule on its way over one run."""

    faults: Sequence[Fault]
    stage: ChaosTarget
    links: EmulatedLinks
    seconds: Seconds
    say: Callable[[InflictedFault], None] = lambda struck: None
    struck: list[InflictedFault] = field(default_factory=list)
    began: Seconds | None = None
    began_wall: Seconds = 0.0

    def __post_init__(self) -> None:
        self._next = 0
        self._lasting: dict[tuple[str, str], tuple[Seconds, Callable[[], None]]] = {}

    def begin(self, now: Seconds) -> None:
        self.began, self.began_wall = now, time.time()

    def over(self, now: Seconds) -> bool:
        return self.began is not None and now >= self.began + self.seconds

    def tend(self, now: Seconds) -> None:
        """Does all that is due."""
        if self.began is None:
            return
        for key, (until, undo) in list(self._lasting.items()):
            if now >= self.began + until:
                del self._lasting[key]
                undo()
        while self._next < len(self.faults) and self._due(self._next) <= now:
            self._strike(self.faults[self._next], now - self.began)
            self._next += 1

    def until_next(self, now: Seconds) -> Seconds:
        """Says how long nothing is due."""
        if self.began is None:
            return float("inf")
        ends = [until for until, _ in self._lasting.values()]
        starts = [self.faults[self._next].time] if self._next < len(self.faults) else []
        return max(0.0, self.began + min([*ends, *starts, self.seconds]) - now)

    def mend(self) -> None:
        """Ends whatever lasts; harmless when repeated."""
        lasting, self._lasting = self._lasting, {}
        for _, undo in lasting.values():
            undo()

    def _due(self, number: int) -> Seconds:
        assert self.began is not None
        return self.began + self.faults[number].time

    def _strike(self, fault: Fault, at: Seconds) -> None:
        struck = InflictedFault(fault, at, time.time())
        try:
            undo = _ACTS[fault.kind](self, fault)
        except NoTarget as nobody:
            struck.skipped = str(nobody)
        except ProcessLookupError:
            struck.skipped = "it had just ended by itself"
        else:
            if undo:
                key = (fault.kind, fault.region)
                until = at + (fault.duration or 0.0)
                # Two that overlap are one, which ends with the later of them.
                until = max(until, self._lasting[key][0]) if key in self._lasting else until
                self._lasting[key] = until, undo
        self.struck.append(struck)
        self.say(struck)

    # What each kind does; those that last give back what ends them.

    def _running(self, region: str) -> Supervisor:
        keeper = self.stage.keeper(region)
        handle = keeper.handle if keeper and keeper.state == "running" else None
        # A keeper may not have looked since the last fault.
        if keeper and handle and handle.exit_code() is None:
            return keeper
        raise NoTarget(f"the {'worker' if region else 'server'} was not running")

    def _pid(self, region: str) -> int:
        handle = self._running(region).handle
        assert isinstance(handle, LocalProcess)
        return handle.pid

    def _trainer(self, region: str) -> int | None:
        keeper = self.stage.keeper(region)
        handle = keeper.handle if keeper else None
        agent = handle.pid if isinstance(handle, LocalProcess) else None
        return trainer_pid(self.stage.folder / "regions" / region, agent)

    def _kill_trainer(self, fault: Fault) -> None:
        if (pid := self._trainer(fault.region)) is None:
            raise NoTarget("there was no trainer at that moment")
        os.kill(pid, signal.SIGKILL)

    def _kill_agent(self, fault: Fault) -> None:
        os.kill(self._pid(fault.region), signal.SIGKILL)

    def _kill_process(self, fault: Fault) -> None:
        keeper = self._running(fault.region)
        trainer = self._trainer(fault.region) if fault.region else None
        if fault.duration is not None:
            keeper.send_away(until=time.monotonic() + fault.duration, kill=True)
        elif keeper.handle is not None:
            keeper.handle.kill()
        # One that an earlier agent started may not be in the group that was killed.
        _signal(os.kill, trainer, signal.SIGKILL)

    def _leave(self, fault: Fault) -> None:
        until = time.monotonic() + (fault.duration or 0.0)
        self._running(fault.region).send_away(until=until, kill=False)

    def _pause(self, fault: Fault) -> Callable[[], None]:
        group, trainer = self._pid(fault.region), self._trainer(fault.region)

        def both(number: int) -> None:
            _signal(os.killpg, group, number)
            _signal(os.kill, trainer, number)

        both(signal.SIGSTOP)
        return lambda: both(signal.SIGCONT)

    def _slow(self, fault: Fault) -> Callable[[], None]:
        file = self.stage.folder / "regions" / fault.region / SLOW
        file.write_text(f"{fault.factor:g}\n")
        return lambda: file.unlink(missing_ok=True)

    def _cut(self, fault: Fault) -> Callable[[], None]:
        self._proxy(fault).cut()
        return lambda: self._proxy(fault).heal()

    def _narrow(self, fault: Fault) -> Callable[[], None]:
        self._proxy(fault).shape(fault.link)
        return lambda: self._proxy(fault).shape(self.links.words[fault.region])

    def _reset(self, fault: Fault) -> None:
        if not self._proxy(fault).reset_all():
            raise NoTarget("no connection was open")

    def _proxy(self, fault: Fault) -> Proxy:
        if fault.region not in self.links.proxies:
            raise NoTarget("the region was never started")
        return self.links.proxies[fault.region]


_ACTS: Mapping[str, Callable[[Storm, Fault], Callable[[], None] | None]] = {
    "kill-trainer": Storm._kill_trainer,
    "kill-agent": Storm._kill_agent,
    "kill-region": Storm._kill_process,
    "kill-server": Storm._kill_process,
    "pause": Storm._pause,
    "slow": Storm._slow,
    "leave": Storm._leave,
    "cut": Storm._cut,
    "narrow": Storm._narrow,
    "reset": Storm._reset,
}


def _signal(send: Callable[[int, int], None], whom: int | None, number: int) -> None:
    """Signals somebody who may be gone."""
    if whom is not None:
        with contextlib.suppress(ProcessLookupError):
            send(whom, number)


def trainer_pid(folder: Path, agent: int | None) -> int | None:
    """Finds a region's trainer: who holds its lock, or a child of the agent that still loads."""
    found: list[psutil.Process] = []
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        found.append(psutil.Process(int((folder / TRAINER_LOCK).read_text())))
    with contextlib.suppress(psutil.Error):
        found += psutil.Process(agent).children() if agent else []
    for process in found:
        with contextlib.suppress(psutil.Error):
            # The lock keeps the number of a trainer that died, which may be another's by now.
            if {"trainer", folder.name} <= {*process.cmdline()}:
                return process.pid
    return None
