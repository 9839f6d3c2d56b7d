"""What `diloco run` does around the run itself: folder, background, last words."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from diloco_cli.errors import SpecError
from diloco_cli.launch.cores import deal_cores, my_cores
from diloco_cli.launch.roles import serve_role, work_role
from diloco_cli.launch.subprocesses import LocalLauncher
from diloco_cli.observe.terminal import ProgressDisplay, display, summary_view
from diloco_cli.run.ask import ShortCalls
from diloco_cli.run.find_credential import for_run
from diloco_cli.run.folder import (
    address_of,
    cannot_write,
    held,
    last_summary,
    refuse_foreign,
    runner_of,
    set_aside,
)
from diloco_cli.run.goal import parse_goal
from diloco_cli.run.supervise_run import LocalRun, LocalRunPlan, error_like
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.process_end import last_words

DETACHED_SECONDS = 60.0


@dataclass(frozen=True)
class RunOptions:
    """What stood on the command line."""

    spec_file: Path
    overrides: tuple[str, ...]
    folder: Path
    regions: tuple[str, ...]
    until: str | None
    fresh: bool

    def command(self) -> list[str]:
        """Spells the same command again, without --fresh and --detach."""
        words = ["run", str(self.spec_file), "--dir", str(self.folder)]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += ["--regions", ",".join(self.regions)]
        return words + (["--until", self.until] if self.until else [])


def run(spec: RunSpec, asked: RunOptions) -> int:
    """Runs to the end on this terminal and says the exit code."""
    goal = parse_goal(asked.until)
    refuse_foreign(asked.folder)
    _make_room(asked)
    folder = asked.folder
    with held(folder):
        again = (folder / "server" / "journal").exists()
        resolved = write_resolved(spec, folder)
        if (summary := last_summary(folder)).get("state") == "finished":
            typer.echo(f"{folder} is finished; --fresh starts over.", err=True)
            _last_words(folder, summary)
            return 0
        if again:
            typer.echo(f"resuming the run in {folder}", err=True)
        cores = deal_cores(asked.regions, my_cores())
        plan = LocalRunPlan(
            folder=folder,
            regions=asked.regions,
            elsewhere=len(spec.regions) - len(asked.regions),
            quorum=spec.sync.quorum,
            serve=serve_role(resolved, folder),
            work=lambda region, url: work_role(
                resolved, folder, region, url=url, cores=cores[region]
            ),
            goal=goal,
        )
        with ProgressDisplay() as progress:
            local = LocalRun(
                plan, LocalLauncher(folder / "logs"), ShortCalls(for_run(spec)), progress
            )
            code = local.conduct()
        _last_words(folder, local.summary())
        return code


def detach(spec: RunSpec, asked: RunOptions) -> int:
    """Starts the same command in the background, and stays until it is seen to run."""
    parse_goal(asked.until)
    refuse_foreign(asked.folder)
    _make_room(asked)
    folder = asked.folder
    if pid := runner_of(folder):
        raise SpecError(
            f"{folder} is being run by process {pid}.", hint=f"Watch it: `diloco status {folder}`."
        )
    write_resolved(spec, folder)
    log = folder / "logs" / "run.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            log_start = output.tell()
            child = subprocess.Popen(
                [sys.executable, "-m", "diloco_cli", *asked.command()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise cannot_write(log, error) from None
    if (code := _seen_to_run(child, folder)) is not None:
        if code:
            raise error_like(code, "", last_words(log, since=log_start))
        typer.echo(f"{folder} is over; `diloco status {folder}` says how it ended.", err=True)
        return 0
    typer.echo(child.pid)
    for deed, command in (("watch", "status --watch"), ("stop", "stop")):
        typer.echo(f"{deed} it with: diloco {command} {folder}", err=True)
    typer.echo(f"its log: {log}", err=True)
    # It outlives us on purpose, so nobody waits for it here.
    child.returncode = 0
    return 0


def _seen_to_run(child: subprocess.Popen[bytes], folder: Path) -> int | None:
    """Waits until the server listens; says the exit code if the run ended before."""
    before = address_of(folder).get("pid")
    deadline = time.monotonic() + DETACHED_SECONDS
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            return code
        if address_of(folder).get("pid", before) != before:
            return None
        time.sleep(0.1)
    return None


def _make_room(asked: RunOptions) -> None:
    if asked.fresh and (aside := set_aside(asked.folder)):
        typer.echo(f"the old run is now in {aside}", err=True)


def _last_words(folder: Path, summary: Mapping[str, Any]) -> None:
    if not summary:
        typer.echo(f"nothing is known yet; {folder / 'logs'} has the logs", err=True)
        return
    display(summary_view(summary))
    typer.echo("\nwhere to look next:", err=True)
    typer.echo(f"  {folder / 'summary.json'}   these figures, for programs", err=True)
    typer.echo(f"  {folder / 'logs'}   what each process said", err=True)
    typer.echo(f"  diloco pull {folder} --out weights.safetensors   the weights", err=True)
    if summary.get("state") != "finished":
        typer.echo("  rerun the same command to resume", err=True)
