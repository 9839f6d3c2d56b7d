"""Starting a run on this machine: its folder is checked and held, its processes are planned.

`supervise_run.py` then keeps the processes running; `cli/run.py` reads the command line and
prints what the run came to.
"""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from diloco_cli.errors import SpecError
from diloco_cli.launch.cores import deal_cores, my_cores
from diloco_cli.launch.ports import free_addresses
from diloco_cli.launch.roles import follower_role, serve_role, work_role
from diloco_cli.launch.subprocesses import LocalLauncher
from diloco_cli.observe.terminal import ProgressDisplay
from diloco_cli.run.ask import ShortCalls
from diloco_cli.run.doctor.before_start import before_start, refuse_unready
from diloco_cli.run.edited_spec import settle_spec
from diloco_cli.run.find_credential import for_run
from diloco_cli.run.first_weights import check_first_weights
from diloco_cli.run.folder import (
    RESOLVED,
    address_of,
    cannot_write,
    held,
    last_summary,
    refuse_foreign,
    runner_of,
    set_aside,
)
from diloco_cli.run.goal import StopCondition, parse_goal
from diloco_cli.run.supervise_run import LocalRun, LocalRunPlan, error_like
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system import logs
from diloco_cli.system.process_log import ProcessLog

log = logging.getLogger(__name__)

DETACHED_SECONDS = 60.0


@dataclass(frozen=True)
class RunOptions:
    """What stood on the command line."""

    spec_file: Path
    overrides: tuple[str, ...]
    folder: Path
    regions: tuple[str, ...] | None
    """Those to start here; None for all that the run has."""
    until: str | None
    fresh: bool

    def command(self) -> list[str]:
        """Spells the same command again, without --fresh and --detach."""
        words = ["run", str(self.spec_file), "--dir", str(self.folder)]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += ["--regions", ",".join(self.regions)] if self.regions else []
        return words + (["--until", self.until] if self.until else [])


class LoggedProgress(ProgressDisplay):
    """Logs what a display would show to people."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()))

    def say(self, text: str, *, style: str | None = None) -> None:
        log.info(text)


def run_here(spec: RunSpec, options: RunOptions, progress: ProgressDisplay) -> int:
    """Runs to the end on this terminal and returns the exit code."""
    goal = parse_goal(options.until)
    looked = _prepare(spec, options, progress)
    folder = options.folder
    with held(folder):
        settled = settle_spec(spec, folder)
        current, resumed = settled.current, (folder / "server" / "journal").exists()
        if is_finished(folder):
            progress.say(f"{folder} is finished; --fresh starts over.")
            return 0
        if settled.remark:
            progress.say(settled.remark)
        if resumed:
            progress.say(f"resuming the run in {folder}")
        regions = options.regions or [region.name for region in current.regions]
        if not looked:
            _look(current, folder, regions, progress)
        plan = plan_run(current, settled.file, regions, goal=goal)
        with progress:
            progress.follow(folder)
            launcher, calls = LocalLauncher(folder / "logs"), ShortCalls(for_run(current))
            return LocalRun(plan, launcher, calls, progress).run()


def plan_run(
    spec: RunSpec,
    spec_file: Path,
    regions: Sequence[str],
    *,
    goal: StopCondition | None = None,
    url_for: Callable[[str, str], str] = lambda region, url: url,
) -> LocalRunPlan:
    """Says which processes to start; `url_for` may give a region another URL of the server."""
    folder, cores = spec_file.parent, deal_cores(regions, my_cores())
    many = [region for region in regions if spec.region(region).host_count > 1]
    coordinators = dict(zip(many, free_addresses(len(many)), strict=True))
    return LocalRunPlan(
        folder=folder,
        regions=tuple(regions),
        elsewhere=len(spec.regions) - len(regions),
        quorum=spec.sync.quorum,
        serve=serve_role(spec_file, folder),
        work=lambda region, url: work_role(
            spec_file,
            folder,
            region,
            url=url_for(region, url),
            cores=cores[region],
            coordinator=coordinators.get(region, ""),
        ),
        followers=tuple(
            follower_role(
                spec_file,
                folder,
                region,
                host=host,
                coordinator=coordinators[region],
                cores=cores[region],
            )
            for region in many
            for host in range(1, spec.region(region).host_count)
        ),
        goal=goal,
    )


@dataclass(frozen=True)
class BackgroundRun:
    """A run that was started in the background."""

    pid: int
    log: Path
    is_over: bool
    """It ended well before it was seen to run."""


def run_in_background(
    spec: RunSpec, options: RunOptions, progress: ProgressDisplay
) -> BackgroundRun:
    """Starts the same command in the background, and waits until its server listens."""
    parse_goal(options.until)
    _prepare(spec, options, progress)
    folder = options.folder
    if pid := runner_of(folder):
        raise SpecError(
            f"{folder} is being run by process {pid}.", hint=f"Watch it: `diloco status {folder}`."
        )
    if remark := settle_spec(spec, folder).remark:
        progress.say(remark)
    log_file = folder / "logs" / "run.log"
    log = ProcessLog(log_file)
    try:
        with log.opened() as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "diloco_cli", *options.command(), *logs.options()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise cannot_write(log_file, error) from None
    code = _exit_code_at_start(child, folder)
    if code:
        raise error_like(code, "", log.last_words())
    child.returncode = 0  # It outlives us on purpose, so nothing waits for it here.
    return BackgroundRun(child.pid, log_file, is_over=code is not None)


def is_finished(folder: Path) -> bool:
    summary = last_summary(folder)
    return summary is not None and summary.state == "finished"


def _exit_code_at_start(child: subprocess.Popen[bytes], folder: Path) -> int | None:
    """Waits until the server listens; returns the exit code if the run ended before that."""
    before = address_of(folder).pid
    deadline = time.monotonic() + DETACHED_SECONDS
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            return code
        if address_of(folder).pid not in (None, before):
            return None
        time.sleep(0.1)
    return None


def _prepare(spec: RunSpec, options: RunOptions, progress: ProgressDisplay) -> bool:
    """Looks before anything is made or moved; says whether text, disk and memory were seen."""
    refuse_foreign(options.folder)
    new = options.fresh or not (options.folder / RESOLVED).exists()
    if new:
        regions = options.regions or [region.name for region in spec.regions]
        _look(spec, options.folder, regions, progress)
    check_first_weights(spec, options.folder, fresh=options.fresh)
    if options.fresh and (aside := set_aside(options.folder)):
        progress.say(f"the old run is now in {aside}")
    return new


def _look(spec: RunSpec, folder: Path, regions: Sequence[str], progress: ProgressDisplay) -> None:
    for warning in refuse_unready(before_start(spec, folder, regions, os.environ, serves=True)):
        progress.say(f"warning: {warning}")
