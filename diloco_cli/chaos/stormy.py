"""A local run that a fault schedule passes over.

It is `LocalRun`, supervised as ever; between two looks it strikes what is due. It stops
when the schedule is over, not when the budget is spent, and however it ends everything
that was paused, cut or kept down is mended first, so that nobody is left behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_cli.chaos.report import Span
from diloco_cli.chaos.storm import EmulatedLinks, InflictedFault, Storm
from diloco_cli.errors import RunFailed
from diloco_cli.launch import Launcher
from diloco_cli.launch.supervise import Patience, Supervisor
from diloco_cli.observe.terminal import ProgressDisplay
from diloco_cli.run.supervise_run import LocalRun, LocalRunPlan, ServerCalls
from diloco_cli.sim.faults import Fault
from diloco_cli.system.wakeup import Signals

START_SECONDS = 600.0
"""For every region to make its first step."""
RETURN_SECONDS = 60.0
"""For a server that was down at the end to say what it all came to."""
PATIENCE = Patience(healthy=5.0, tries=1_000_000)
"""What is killed on purpose, again and again, is not to be given up."""


class ChaosRun(LocalRun):
    def __init__(
        self,
        plan: LocalRunPlan,
        launcher: Launcher,
        link: ServerCalls,
        progress: ProgressDisplay,
        *,
        faults: Sequence[Fault],
        links: EmulatedLinks,
        seconds: float,
    ) -> None:
        super().__init__(plan, launcher, link, progress, patience=PATIENCE, poll=0.5)
        self.storm = Storm(faults, self, links, seconds, say=self._noted)
        self._before: dict[str, Any] = {}
        self._after: dict[str, Any] = {}
        self._ended = 0.0

    @property
    def folder(self) -> Path:
        return self.plan.folder

    def keeper(self, region: str) -> Supervisor | None:
        return self._workers.get(region) if region else self._server

    def span(self) -> Span | None:
        """The time of the storm; None if it never began."""
        if self.storm.began is None:
            return None
        ended = self._ended or time.monotonic()
        after = self._after or self.status
        return Span(self.storm.began_wall, ended - self.storm.began, self._before, after)

    def _reason_to_stop(self, fresh: dict[str, Any] | None) -> str:
        now = time.monotonic()
        if self.storm.began is None:
            self._begin_when_all_step(fresh, now)
            return ""
        if not self.storm.over(now):
            self.storm.tend(now)
            return ""
        if not self._ended:
            self._ended = now
            self._mend()
        # Whoever was down at the end may first come back.
        if not fresh and now < self._ended + RETURN_SECONDS:
            return ""
        self._after = fresh or self.status
        return f"the schedule's {self.storm.seconds:g} s are over"

    def _begin_when_all_step(self, fresh: dict[str, Any] | None, now: float) -> None:
        regions = (fresh or {}).get("regions") or []
        idle = [region["name"] for region in regions if not region.get("step")]
        if fresh and not idle:
            self.storm.begin(now)
            self._before = fresh
            self.progress.say(f"every region trains; {len(self.storm.faults)} faults are to come")
        elif now > self._began + START_SECONDS:
            raise RunFailed(
                f"After {START_SECONDS:g} s no step was made by {', '.join(idle) or 'any region'}.",
                hint=f"Look into {self.folder / 'logs'}.",
            )

    def _until_next_look(self) -> float:
        now = time.monotonic()
        due = self._poll if self.storm.over(now) else self.storm.until_next(now)
        return min(self._poll, due)

    def _mend(self) -> None:
        self.storm.mend()
        for keeper in (self._server, *self._workers.values()):
            keeper.call_back()

    def _wind_down(self, signals: Signals, why: str) -> None:
        self._ended = self._ended or time.monotonic()
        self._after = self._after or self.status
        self._mend()
        super()._wind_down(signals, why)

    def _leave_nobody(self, signals: Signals) -> None:
        self.storm.mend()
        super()._leave_nobody(signals)
        self.storm.links.close()

    def _noted(self, struck: InflictedFault) -> None:
        fault, about = struck.fault, {"fault": struck.fault.kind, "at": round(struck.at, 3)}
        if fault.region:
            about["region"] = fault.region
        if fault.duration is not None:
            about["duration"] = fault.duration
        if struck.skipped:
            about["why"] = f"nobody was struck: {struck.skipped}"
        self._log.note("fault", **about)
        whom = f"{fault.kind} {fault.region}".strip()
        self.progress.say(
            f"{struck.at:.0f} s: {whom}{f' ({struck.skipped})' * bool(struck.skipped)}"
        )
