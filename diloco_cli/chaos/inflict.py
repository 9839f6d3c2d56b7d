"""Inflicts a fault schedule on a real run.

    inflictor = FaultInflictor(faults, target, links, seconds)
    inflictor.begin(now)               # every region has made its first step
    while not inflictor.over(now):
        inflictor.tend(now)            # inflicts what is due, ends what has lasted long enough
    inflictor.end_all()                # whatever still lasts, however this ended

Processes are struck by the ids that their supervisors and locks give, links through proxies that
the regions connect to from the start, the pace through a file that the trainer reads. A fault
without a target is recorded with the reason. Nothing here restarts anything: that is up to the
run's supervisors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NotRequired, Protocol
from urllib.parse import urlsplit

import psutil

from diloco_cli.chaos.emulator.proxy import Proxy, emulated
from diloco_cli.launch.subprocesses import LocalProcess
from diloco_cli.launch.supervise import Supervisor
from diloco_cli.sim.faults import Fault, FaultRecord
from diloco_cli.spec.fault_kinds import ON_LINKS, Kind
from diloco_cli.spec.schema import ChaosSpec
from diloco_cli.worker.mailbox import SLOW, TRAINER_LOCK

Seconds = float


class ChaosTarget(Protocol):
    """What the inflictor needs to know of a run."""

    @property
    def folder(self) -> Path: ...

    def supervisor(self, region: str) -> Supervisor | None:
        """The supervisor of a region's worker, or of the server for ''; None before its start."""
        ...


class InflictedRecord(FaultRecord):
    """A fault as JSON, and what came of it in a real run."""

    at: Seconds
    """Since the schedule began."""
    skipped: NotRequired[str]
    """Why it had no target."""
    recovery: NotRequired[dict[str, float]]
    """Seconds until its region trained again, in `total` and by part."""


@dataclass
class InflictedFault:
    """One fault of the schedule and what came of it."""

    fault: Fault
    at: Seconds
    """Since the schedule began."""
    wall: Seconds
    """Seconds since 1970, as in the run log."""
    skipped: str = ""
    """Why it had no target; empty if it had one."""

    def as_record(self) -> InflictedRecord:
        record: InflictedRecord = {**self.fault.as_record(), "at": round(self.at, 3)}
        if self.skipped:
            record["skipped"] = self.skipped
        return record


class NoTarget(Exception):
    """The fault has nothing to strike; says why."""


class LinkBytes(NamedTuple):
    """What a link has carried each way."""

    up: int
    down: int


class EmulatedLinks:
    """The emulated links of a run: one per region whose link is shaped or struck."""

    def __init__(self, chaos: ChaosSpec, faults: Sequence[Fault], regions: Sequence[str]) -> None:
        struck = {fault.region for fault in faults if fault.kind in ON_LINKS}
        named = {name: chaos.links.get(name) or chaos.link for name in regions}
        self.words = {
            name: words or "unlimited" for name, words in named.items() if words or name in struck
        }
        self.proxies: dict[str, Proxy] = {}
        self._targets: dict[str, str] = {}
        self._before: dict[str, LinkBytes] = {}
        """Carried by proxies that made way for another."""

    def url(self, region: str, server: str) -> str:
        """The URL under which this region reaches the server at `server`."""
        if region not in self.words:
            return server
        if self._targets.get(region) != server:
            old, at = self.proxies.pop(region, None), urlsplit(server)
            if old:
                self._before[region] = self._carried(region, old)
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

    def carried(self) -> dict[str, LinkBytes]:
        """Bytes of the connections so far, by region: frames, headers, heartbeats, everything."""
        return {name: self._carried(name, proxy) for name, proxy in self.proxies.items()}

    def _carried(self, region: str, proxy: Proxy) -> LinkBytes:
        up, down = self._before.get(region, LinkBytes(0, 0))
        return LinkBytes(up + proxy.up_bytes, down + proxy.down_bytes)

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()


@dataclass
class FaultInflictor:
    """Inflicts one schedule on one run."""

    faults: Sequence[Fault]
    target: ChaosTarget
    links: EmulatedLinks
    seconds: Seconds
    report: Callable[[InflictedFault], None] = lambda inflicted: None
    inflicted: list[InflictedFault] = field(default_factory=list)
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
        """Ends the faults whose time is over and inflicts those that are due."""
        if self.began is None:
            return
        for key, (until, undo) in list(self._lasting.items()):
            if now >= self.began + until:
                del self._lasting[key]
                undo()
        while self._next < len(self.faults) and self._due(self._next) <= now:
            self._inflict(self.faults[self._next], now - self.began)
            self._next += 1

    def until_next(self, now: Seconds) -> Seconds:
        """Seconds until something is due."""
        if self.began is None:
            return float("inf")
        ends = [until for until, _ in self._lasting.values()]
        starts = [self.faults[self._next].time] if self._next < len(self.faults) else []
        return max(0.0, self.began + min([*ends, *starts, self.seconds]) - now)

    def end_all(self) -> None:
        """Ends every fault that still lasts; may be called again."""
        lasting, self._lasting = self._lasting, {}
        for _, undo in lasting.values():
            undo()

    def _due(self, number: int) -> Seconds:
        assert self.began is not None
        return self.began + self.faults[number].time

    def _inflict(self, fault: Fault, at: Seconds) -> None:
        inflicted = InflictedFault(fault, at, time.time())
        try:
            undo = HANDLERS[fault.kind](self, fault)
        except NoTarget as reason:
            inflicted.skipped = str(reason)
        except ProcessLookupError:
            inflicted.skipped = "it had just ended by itself"
        else:
            if undo:
                key = (fault.kind, fault.region)
                until = at + (fault.duration or 0.0)
                # Two that overlap are one, which ends with the later of them.
                until = max(until, self._lasting[key][0]) if key in self._lasting else until
                self._lasting[key] = until, undo
        self.inflicted.append(inflicted)
        self.report(inflicted)

    # One handler per kind; those of kinds that last return what ends the fault.

    def _running(self, region: str) -> Supervisor:
        supervisor = self.target.supervisor(region)
        handle = supervisor.handle if supervisor and supervisor.state == "running" else None
        # The supervisor may not have looked since the last fault.
        if supervisor and handle and handle.exit_code() is None:
            return supervisor
        raise NoTarget(f"the {'worker' if region else 'server'} was not running")

    def _pid(self, region: str) -> int:
        handle = self._running(region).handle
        assert isinstance(handle, LocalProcess)
        return handle.pid

    def _trainer(self, region: str) -> int | None:
        supervisor = self.target.supervisor(region)
        handle = supervisor.handle if supervisor else None
        agent = handle.pid if isinstance(handle, LocalProcess) else None
        return trainer_pid(self.target.folder / "regions" / region, agent)

    def _kill_trainer(self, fault: Fault) -> None:
        if (pid := self._trainer(fault.region)) is None:
            raise NoTarget("there was no trainer at that moment")
        os.kill(pid, signal.SIGKILL)

    def _kill_agent(self, fault: Fault) -> None:
        os.kill(self._pid(fault.region), signal.SIGKILL)

    def _kill_process(self, fault: Fault) -> None:
        supervisor = self._running(fault.region)
        trainer = self._trainer(fault.region) if fault.region else None
        if fault.duration is not None:
            supervisor.send_away(until=time.monotonic() + fault.duration, kill=True)
        elif supervisor.handle is not None:
            supervisor.handle.kill()
        # One that an earlier agent started may not be in the group that was killed.
        _signal(os.kill, trainer, signal.SIGKILL)

    def _leave(self, fault: Fault) -> None:
        until = time.monotonic() + (fault.duration or 0.0)
        self._running(fault.region).send_away(until=until, kill=False)

    def _pause(self, fault: Fault) -> Callable[[], None]:
        group, trainer = self._pid(fault.region), self._trainer(fault.region)

        def signal_both(number: int) -> None:
            _signal(os.killpg, group, number)
            _signal(os.kill, trainer, number)

        signal_both(signal.SIGSTOP)
        return lambda: signal_both(signal.SIGCONT)

    def _slow(self, fault: Fault) -> Callable[[], None]:
        file = self.target.folder / "regions" / fault.region / SLOW
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


HANDLERS: Mapping[Kind, Callable[[FaultInflictor, Fault], Callable[[], None] | None]] = {
    "kill-trainer": FaultInflictor._kill_trainer,
    "kill-agent": FaultInflictor._kill_agent,
    "kill-region": FaultInflictor._kill_process,
    "kill-server": FaultInflictor._kill_process,
    "pause": FaultInflictor._pause,
    "slow": FaultInflictor._slow,
    "leave": FaultInflictor._leave,
    "cut": FaultInflictor._cut,
    "narrow": FaultInflictor._narrow,
    "reset": FaultInflictor._reset,
}


def _signal(send: Callable[[int, int], None], pid: int | None, number: int) -> None:
    """Signals a process, or a group, that may be gone."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)


def trainer_pid(folder: Path, agent: int | None) -> int | None:
    """Finds a region's trainer: the holder of its lock, or a child of the agent."""
    candidates: list[psutil.Process] = []
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        candidates.append(psutil.Process(int((folder / TRAINER_LOCK).read_text())))
    with contextlib.suppress(psutil.Error):
        candidates += psutil.Process(agent).children() if agent else []
    for process in candidates:
        with contextlib.suppress(psutil.Error):
            # The lock keeps the number of a trainer that died, which may be another's by now.
            if {"trainer", folder.name} <= {*process.cmdline()}:
                return process.pid
    return None
