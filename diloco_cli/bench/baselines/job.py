"""The baselines: one synchronous data-parallel job of all regions, on real processes.

Every region is a process that computes the gradient of its own batch; the mean of all is
applied by all, every step (`reducer.py`, `member.py`). The faults are the very
schedule a decoupled run is given:

    rigid     any death stops everybody; all processes are started again, load the last
              checkpoint and repeat what came after it
    elastic   the others go on without the dead at once; it is started again, gets weights
              and optimiser from a survivor, and everybody stands while it does

Where a choice had to be made it favours the baseline: whoever is killed is started again
at once, checkpoints cost what copying costs and come at Young's interval, the reduction
hides behind the paced step, and evaluation happens after the run.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from diloco_cli.assemble import shared_digest
from diloco_cli.bench.baselines.accounts import (
    MeasuredAgainst,
    StepAccounts,
    goodput,
    recovery,
)
from diloco_cli.bench.baselines.reducer import GradientReducer, ParallelOptions
from diloco_cli.chaos.emulator.proxy import Proxy, emulated
from diloco_cli.chaos.inflict import InflictedRecord
from diloco_cli.chaos.report import ChaosRecord
from diloco_cli.chaos.run import ChaosOptions
from diloco_cli.errors import RunFailed
from diloco_cli.launch import Role
from diloco_cli.launch.cores import deal_cores, my_cores
from diloco_cli.launch.subprocesses import LocalLauncher, LocalProcess
from diloco_cli.observe.metrics import recoveries
from diloco_cli.sim.faults import Fault, in_order
from diloco_cli.sim.network import Link
from diloco_cli.spec.fault_kinds import KILLS, ON_LINKS
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import ChaosSpec, RunSpec
from diloco_cli.system.wakeup import Signals

LOOK_SECONDS = 0.01
STOP_SECONDS = 600.0
"""For the last restart and for the evaluation of the whole curve."""
PATIENCE = 3
"""Times in a row a member may end by itself."""
CURVE_POINTS = 40


def run_parallel(
    spec: RunSpec,
    faults: Sequence[Fault],
    folder: Path,
    *,
    elastic: bool,
    seconds: float,
    say: Callable[[str], None],
    link: Link | str | None = None,
    gradients: str | None = None,
    checkpoint: float | None = None,
    until: Callable[[GradientReducer], bool] = lambda reducer: False,
) -> ChaosRecord:
    """Trains for so many seconds under these faults, and gives the record of what happened.

    `gradients` travel as fp32, or as bf16 where there is a link; a `checkpoint` is written
    as often as Young's rule says unless told otherwise, in seconds. Without a `link` of its own
    for all, every region has the one that the spec's `chaos` gives it. The job ends sooner when
    `until` says so, which is asked often; what it raises ends the job at once.
    """
    own = chaos_of(spec, "links") or {}
    usual = link or chaos_of(spec, "link")
    links = {region.name: usual if link else own.get(region.name, usual) for region in spec.regions}
    links = {name: words for name, words in links.items() if words}
    kills = sum(fault.kind in KILLS for fault in faults)
    options = ParallelOptions(
        elastic=elastic,
        gradients=gradients or ("bf16" if links else "fp32"),
        mtbf=seconds / max(1, kills),
        checkpoint=checkpoint,
        snapshots=seconds / CURVE_POINTS,
    )
    with ExitStack() as stack:
        job = ParallelJob(spec, in_order(faults), folder, options, seconds, say)
        stack.callback(job.close)
        struck = {fault.region for fault in faults if fault.kind in ON_LINKS}
        for region in sorted(struck | set(links)):
            proxy = emulated(links.get(region, Link()), "127.0.0.1", job.reducer.port)
            job.proxies[region] = stack.enter_context(proxy)
        job.run(until)
        return job.record({name: str(words) for name, words in links.items()})


def chaos_of(spec: RunSpec, key: str) -> Any:
    """What the spec's `chaos` says under this key; None where it says nothing."""
    return getattr(spec.chaos, key) if spec.chaos else None


@dataclass
class MemberProcess:
    """One region on this machine."""

    process: LocalProcess | None = None
    boot: int = 0
    down_until: float = -math.inf
    factor: float = 1.0
    failures: int = 0
    """Times in a row it ended without having been told to."""


class ParallelJob:
    def __init__(
        self,
        spec: RunSpec,
        faults: list[Fault],
        folder: Path,
        options: ParallelOptions,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.spec, self.faults, self.folder = spec, faults, folder
        self.options, self.seconds, self.say = options, seconds, say
        self.regions = [region.name for region in spec.regions]
        self.places = {name: MemberProcess() for name in self.regions}
        self.cores = deal_cores(self.regions, my_cores())
        self.proxies: dict[str, Proxy] = {}
        self.files = folder / "parallel"
        (self.files / "curve").mkdir(parents=True, exist_ok=True)
        # Members are told their pace and hear nothing of what is going to happen to them. All
        # make every step together, so their schedules must not follow their own speeds.
        level = tuple(region.model_copy(update={"speed": 1.0}) for region in spec.regions)
        same = spec.model_copy(update={"chaos": None, "regions": level})
        self.spec_file = write_resolved(same, self.files)
        self.launcher = LocalLauncher(folder / "logs")
        self.inflicted: list[InflictedRecord] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.rebuilt = 0
        self.elapsed = seconds
        inner = {name: spec.inner_of(name) for name in self.regions}
        tokens = {name: each.batch * each.sequence for name, each in inner.items()}
        self.reducer = GradientReducer(self.regions, StepAccounts(tokens), options)

    def run(self, until: Callable[[GradientReducer], bool]) -> None:
        self.say(f"starting {len(self.regions)} members")
        self.reducer.open()
        for name in self.regions:
            self._start(name)
        left = list(self.faults)
        stopped_at = 0.0
        while not self.reducer.finished:
            time.sleep(LOOK_SECONDS)
            self._look_after()
            now, t0, enough = time.monotonic(), self.reducer.t0, until(self.reducer)
            for due, act in [item for item in self.later if item[0] <= now]:
                self.later.remove((due, act))
                act()
            if t0 is None or stopped_at:
                if stopped_at and now > stopped_at + STOP_SECONDS:
                    raise RunFailed(f"The job had not stopped {STOP_SECONDS:g} s after the end.")
                continue
            while left and left[0].time <= now - t0:
                self._inflict(left.pop(0), t0)
            if now >= t0 + self.seconds or enough:
                stopped_at, self.elapsed = now, min(now - t0, self.seconds)
                self.say(f"stopping after {self.elapsed:.0f} s")
                self.reducer.stop()
        if self.reducer.failure:
            raise self.reducer.failure

    def close(self) -> None:
        self.reducer.close()
        for place in self.places.values():
            if place.process:
                place.process.kill()

    def _start(self, name: str) -> None:
        place = self.places[name]
        place.boot += 1
        self.reducer.expect(name, place.boot)
        proxy = self.proxies.get(name)
        options = {
            "--files": str(self.files),
            "--region": name,
            "--reducer": f"127.0.0.1:{proxy.port if proxy else self.reducer.port}",
            "--cores": ",".join(map(str, self.cores[name])),
            "--gradients": self.options.gradients,
            "--pace": str(self._paces().get(name, 0.0)),
            "--factor": str(place.factor),
            "--boot": str(place.boot),
            "--born": str(time.monotonic()),
        }
        words = [word for option in options.items() for word in option]
        member = (sys.executable, "-m", "diloco_cli.bench.baselines.member", str(self.spec_file))
        place.process = self.launcher.start(Role(name, (*member, *words)))

    def _paces(self) -> dict[str, float]:
        """What a step takes in each region, where the spec says so."""
        paced = chaos_of(self.spec, "step_seconds")
        return {region.name: paced / region.speed for region in self.spec.regions} if paced else {}

    def _inflict(self, fault: Fault, t0: float) -> None:
        at = time.monotonic()
        record: InflictedRecord = {**fault.as_record(), "at": at - t0}
        self.inflicted.append(record)
        if why := self._strike(fault):
            record["skipped"] = why
        self.say(f"{fault.kind} {fault.region} at {at - t0:.1f} s{f': {why}' if why else ''}")

    def _strike(self, fault: Fault) -> str:
        """Does it, and sees to its end; says why if it could not be done."""
        place, proxy = self.places.get(fault.region), self.proxies.get(fault.region)
        if place is None or fault.kind == "kill-agent":
            return "data parallel has neither server nor agents"
        if fault.kind in ON_LINKS:
            assert proxy is not None
            return self._strike_link(fault, proxy)
        process = place.process
        if fault.kind == "slow":
            self._slow(fault.region, fault.factor)
            self._after(fault.duration, lambda: self._slow(fault.region, 1.0))
        elif process is None or process.exit_code() is not None:
            return f"{fault.region} is down already"
        elif fault.kind in (*KILLS, "leave"):
            # The others notice a leave as they notice a death, so it needs no messages.
            process.kill()
            place.down_until = time.monotonic() + (fault.duration or 0.0)
        elif fault.kind == "pause":
            process.send_signal(signal.SIGSTOP)
            self._after(fault.duration, lambda: process.send_signal(signal.SIGCONT))
        else:
            return f"{fault.kind} means nothing to data parallel"
        return ""

    def _strike_link(self, fault: Fault, proxy: Proxy) -> str:
        if fault.kind == "cut":
            proxy.cut()
            self._after(fault.duration, proxy.heal)
        elif fault.kind == "reset":
            proxy.reset_all()
        else:
            usual = proxy.link
            proxy.shape(getattr(fault, "link", None) or usual)
            self._after(fault.duration, lambda: proxy.shape(usual))
        return ""

    def _after(self, seconds: float | None, act: Callable[[], None]) -> None:
        if seconds is not None:
            self.later.append((time.monotonic() + seconds, act))

    def _slow(self, region: str, factor: float) -> None:
        self.places[region].factor = factor
        self.reducer.tell(region, do="pace", factor=factor)

    def _look_after(self) -> None:
        """Starts again whoever ended, and everybody where one death is the death of all."""
        if self.rebuilt != self.reducer.rebuilt:
            self.rebuilt = self.reducer.rebuilt
            if not self.options.elastic:
                for place in self.places.values():
                    if place.process:
                        place.process.kill()
        for name, place in self.places.items():
            active = name in self.reducer.members
            if active:
                place.failures = 0
            if place.process and (code := place.process.exit_code()) is not None:
                # The reducer must have noticed first, or a rigid job would restart us twice.
                if active or name in self.reducer.stopped:
                    continue
                self._ended(name, code)
            if place.process is None and time.monotonic() >= place.down_until:
                self._start(name)

    def _ended(self, name: str, code: int) -> None:
        place = self.places[name]
        assert place.process is not None
        if code >= 0 and self.reducer.last_boots.get(name) != place.boot:
            place.failures += 1
        if code == 2 or place.failures >= PATIENCE:
            raise RunFailed(
                f"The member {name} ended with exit code {code}: {place.process.last_words()}",
                hint=f"Its log is {self.folder / 'logs' / name}.log.",
            )
        place.process = None

    def record(self, links: dict[str, str]) -> ChaosRecord:
        """What happened, in the form all methods share."""
        reducer, accounts = self.reducer, self.reducer.accounts
        assert reducer.t0 is not None
        digests = sorted({words["digest"] for words in reducer.results.values()})
        if len(digests) > 1:
            raise RunFailed(
                "The members of the data-parallel job ended with different weights.",
                hint="All of them need the same optimiser and schedule: see `regions[].inner`.",
            )
        self._enter_recoveries(reducer.t0)
        fault_free, shares = goodput(accounts, MeasuredAgainst(self.elapsed, self._paces()))
        last = reducer.results[min(reducer.results)]
        curve = [[*reducer.points[int(n)], loss] for n, loss in last["curve"].items()]
        points = [[tokens, loss, at] for tokens, at, loss in curve]
        return {
            "method": "elastic" if self.options.elastic else "rigid",
            "name": self.spec.name,
            "spec": shared_digest(self.spec.model_copy(update={"chaos": None})),
            "seed": chaos_of(self.spec, "seed") or 0,
            "seconds": self.elapsed,
            "regions": len(self.regions),
            "faults": self.inflicted,
            "tokens": {
                "trained": accounts.trained,
                "applied": accounts.applied,
                "fault_free": fault_free,
            },
            "goodput": shares,
            "recovery": recoveries(
                [fault["recovery"] for fault in self.inflicted if "recovery" in fault]
            ),
            "loss": {
                "heldout": last["heldout"],
                "curve": [*points, [accounts.applied, last["heldout"], self.elapsed]],
            },
            "parallel": {
                "steps": len(accounts.counted),
                "steps_lost": accounts.lost,
                "restarts_of_all": reducer.rebuilt,
                "gradients": self.options.gradients,
                "links": links,
                "checkpoint_seconds": reducer.checkpoint_seconds,
                "checkpoint_cost": reducer.cost,
                "digests": digests,
            },
        }

    def _enter_recoveries(self, t0: float) -> None:
        hits = [
            fault for fault in self.inflicted if fault["kind"] in KILLS and "skipped" not in fault
        ]
        for number, hit in enumerate(hits):
            region = hit.get("region", "")
            later = [later["at"] for later in hits[number + 1 :] if later.get("region") == region]
            until = t0 + min(later, default=math.inf)
            if recovered := recovery(self.reducer.news, region, t0 + hit["at"], until):
                hit["recovery"] = recovered


def parallel_run(
    spec: RunSpec, chaos: ChaosSpec, faults: Sequence[Fault], options: ChaosOptions
) -> tuple[int, ChaosRecord | None]:
    """The methods `rigid` and `elastic` of `diloco chaos`."""
    with Signals() as signals:

        def until(reducer: GradientReducer) -> bool:
            # Before the first step of all there is nothing that a record could be about.
            if signals.impatient or (signals.count and reducer.t0 is None):
                raise _Stopped
            return signals.count > 0

        try:
            record = run_parallel(
                spec,
                list(faults),
                options.folder,
                elastic=options.method == "elastic",
                seconds=chaos.seconds,
                say=lambda text: typer.echo(text, err=True),
                until=until,
            )
        except _Stopped:
            typer.echo(f"stopped by {signals.name}; there is no record", err=True)
            record = None
        return signals.exit_code if signals.count else 0, record


class _Stopped(Exception):
    """The user asked for an immediate end."""
