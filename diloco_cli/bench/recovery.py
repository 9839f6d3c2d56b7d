"""How long does a region stand still when its trainer is killed?

A real run of one region; its trainer is killed again and again, at moments drawn from a
seed, and each time the run log says when the next inner step was finished and what the
time went into. The bare start of Python with JAX, measured beside it, is the limit: no
trainer that starts a process of its own is back before that.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

from diloco_cli.assemble import load_run, spelled_out
from diloco_cli.bench.figure import Figure
from diloco_cli.errors import RunFailed
from diloco_cli.launch.roles import serve_role, work_role
from diloco_cli.launch.subprocesses import LocalLauncher, LocalProcess
from diloco_cli.observe.event_file import EVERYTHING, newest_id
from diloco_cli.observe.events import Event, read_events
from diloco_cli.observe.metrics import RECOVERY_PARTS, quantile
from diloco_cli.run.scaffold import TEMPLATES
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.worker.mailbox import Mailbox

GOAL_SECONDS = 5.0
START_SECONDS = 180.0
LONGEST_PHASE = 6.0
"""Seconds of training before a kill, at most: several rounds and checkpoints."""

Say = Callable[[str], None]


def recovery_figures(*, kills: int, model: str, seed: int, say: Say) -> list[Figure]:
    """Kills a trainer again and again; gives p50, p95 and the largest, and the parts."""
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        _region(Path(name), _spec(model), say) as region,
    ):
        recoveries = []
        for number in range(kills):
            time.sleep(chance.uniform(0.0, LONGEST_PHASE))
            recoveries.append(region.kill())
            say(f"kill {number + 1}: {_in_words(recoveries[-1])}")
    return figures(recoveries, limit=_bare_start())


def figures(recoveries: list[dict[str, float]], *, limit: float) -> list[Figure]:
    """Sums up the recoveries, each with `total`, the parts and the tokens `lost`."""

    def share(of: float, key: str) -> float:
        return quantile([recovery[key] for recovery in recoveries], of) or 0.0

    totals = [
        Figure("recovery p50", share(0.5, "total"), "s", limit, lower=True),
        Figure(
            *("recovery p95", share(0.95, "total"), "s", limit, GOAL_SECONDS, "value"),
            lower=True,
            details={"kills": recoveries},
        ),
        Figure("recovery max", share(1.0, "total"), "s", limit, lower=True),
    ]
    parts = [
        Figure(f"  {part} p95", share(0.95, part), "s", None, lower=True) for part in RECOVERY_PARTS
    ]
    lost = Figure("tokens lost p95", share(0.95, "lost"), "tokens", None, lower=True)
    return [*totals, *parts, lost]


class RecoveringRegion:
    """The one region of a run, seen through its run log."""

    def __init__(self, folder: Path, name: str, worker: LocalProcess) -> None:
        self._log, self._worker = folder / "events.jsonl", worker
        self._mailbox = Mailbox(folder / "regions" / name)
        self._read = EVERYTHING

    def kill(self) -> dict[str, float]:
        """Kills the trainer and waits for the next one's first step."""
        if (pid := self._mailbox.trainer_lock_holder()) is None:
            raise RunFailed("There is no trainer to kill.")
        self._read = newest_id(self._log)
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        step = self.first_step()
        died = next(event for event in self._news() if event.kind == "trainer-died")
        fields = step.fields
        return {
            "total": step.time - killed_at,
            "detect": died.time - killed_at,
            "start": fields["import"],
            "fetch": fields["restore"],
            "compile": fields["compile"],
            "lost": fields["lost"],
        }

    def first_step(self) -> Event:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for event in self._news():
                if event.kind == "first-step":
                    return event
            if self._worker.exit_code() is not None:
                raise RunFailed(f"The worker ended: {self._worker.last_words()}")
            time.sleep(0.01)
        raise RunFailed(f"No inner step within {START_SECONDS:.0f} s.")

    def _news(self) -> Iterator[Event]:
        return read_events(self._log, after=self._read)


@contextlib.contextmanager
def _region(folder: Path, spec: RunSpec, say: Say) -> Iterator[RecoveringRegion]:
    launcher, spec_file = LocalLauncher(folder / "logs"), write_resolved(spec, folder)
    name = spec.regions[0].name
    server = launcher.start(serve_role(spec_file, folder))
    started = [server]
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (url := server.url()):
            if server.exit_code() is not None or time.monotonic() > deadline:
                raise RunFailed(f"The server does not listen: {server.last_words()}")
            time.sleep(0.02)
        worker = launcher.start(work_role(spec_file, folder, name, url=url, cores=()))
        started.insert(0, worker)
        region = RecoveringRegion(folder, name, worker)
        say(f"the first start took {region.first_step().fields['total']:.1f} s")
        yield region
    finally:
        launcher.stop(started, grace=0.0)


def _spec(model: str) -> RunSpec:
    """One region of a template that never ends."""
    with resources.as_file(TEMPLATES / "pipelines" / f"{model}.yaml") as path:
        spec = load_run(path, ["budget.tokens=1000000000000"]).spec
    return spelled_out(spec.model_copy(update={"regions": spec.regions[:1]}))


def _bare_start() -> float:
    """The fastest of three starts of Python that import JAX and touch a device."""
    code = "import jax.numpy; jax.numpy.zeros(1).block_until_ready()"
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        taken.append(time.perf_counter() - began)
    return min(taken)


def _in_words(recovery: dict[str, float]) -> str:
    parts = ", ".join(f"{part} {recovery[part]:.2f}" for part in RECOVERY_PARTS)
    return f"{recovery['total']:.2f} s ({parts}), {recovery['lost']:.0f} tokens lost"
