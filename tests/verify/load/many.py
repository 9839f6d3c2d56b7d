"""Many clients and one server: python -m tests.verify.load.many --clients 256 --seconds 600

    server    `diloco serve`, its folder on this disk, durable as in every run
    clients   in a few processes beside it, on the same cores: see `clients.py`

Counted are uploads that the server acknowledged, so that are on its disk, each once however
often it was tried; the first samples of its memory are taken before it has what it needs, so
they are left out. Afterwards its journal is compared with what the clients were told. Writes
JSON if asked; ends with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from diloco_cli.assemble import resolve, spelled_out
from diloco_cli.bench.sync import _address, _cpu_seconds, sync_spec
from diloco_cli.launch.roles import serve_role
from diloco_cli.launch.subprocesses import LocalLauncher, LocalProcess
from diloco_cli.spec.resolved import resolved, write_resolved
from diloco_cli.spec.schema import RunSpec
from tests.verify.load.clients import Outcome, be_clients
from tests.verify.load.report import Sample, audit, figures, text

LEASE = 60.0
DRAIN_SECONDS = 120.0


@dataclass(frozen=True)
class Load:
    """What is asked of a server."""

    clients: int = 256
    seconds: float = 600.0
    parameters: int = 10_000_000
    processes: int = 2
    grace: float = 10.0
    """How long a round waits for those who have not answered yet."""
    sample: float = 10.0
    """Seconds between two looks at the server's memory."""

    @property
    def spec(self) -> RunSpec:
        spec = resolved(sync_spec(self.parameters, self.clients))
        # With a quorum of one, what was acknowledged last is merged too, whoever has left.
        spec["sync"] |= {"quorum": 1, "grace": {"kind": "fixed", "seconds": self.grace}}
        # Merged contributions are kept for one version: 1 GB of them for 256 clients.
        store = {"kind": "folder", "history": 4, "replay": 1}
        spec["server"] |= {"lease": LEASE, "store": store}
        return spelled_out(RunSpec.model_validate(spec))


def run_load(load: Load, folder: Path) -> dict[str, Any]:
    """Runs the whole of it in an empty folder; says what was seen."""
    spec = load.spec
    with _stage(load, spec, folder) as (server, pipes):
        began, cpu = time.monotonic(), _cpu_seconds(server.pid)
        until = began + load.seconds
        for pipe in pipes:
            pipe.send((until, until + DRAIN_SECONDS))
        samples = _watch(server, pipes, began, until, load.sample)
        cpu, took = _cpu_seconds(server.pid) - cpu, time.monotonic() - began
        outcomes: list[Outcome] = [pipe.recv() for pipe in pipes]
    found = figures(outcomes, samples, began=began, seconds=load.seconds, server_cpu=cpu)
    faults = audit(folder / "server", len(resolve(spec).layout.fragments), outcomes)
    about = {"clients": load.clients, "parameters": resolve(spec).layout.size}
    return {**about, **found, "faults": faults, "seconds_with_drain": took}


@contextlib.contextmanager
def _stage(
    load: Load, spec: RunSpec, folder: Path
) -> Iterator[tuple[LocalProcess, list[Connection]]]:
    context = multiprocessing.get_context("spawn")
    spec_file = write_resolved(spec, folder)
    launcher, started = LocalLauncher(folder / "logs"), []
    server = launcher.start(serve_role(spec_file, folder))
    try:
        url, pipes = _address(server), []
        names = [region.name for region in spec.regions]
        for number in range(load.processes):
            ours, theirs = context.Pipe()
            mine = names[number :: load.processes]
            process = context.Process(
                target=be_clients, args=(theirs, spec_file, mine, url), daemon=True
            )
            process.start()
            theirs.close()
            started.append(process)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        yield server, pipes
    finally:
        for process in started:
            process.kill()
            process.join()
        launcher.stop([server], grace=20.0)


def _watch(
    server: LocalProcess, pipes: list[Connection], began: float, until: float, every: float
) -> list[Sample]:
    """Looks at the server's memory until the time is over, then waits for the clients."""
    samples, ready = [], set()
    while len(ready) < len(pipes):
        now = time.monotonic()
        if now < until:
            samples.append(Sample.of(server.pid, now - began))
        # Until the next look, or until somebody else is ready.
        rest = [pipe for pipe in pipes if pipe not in ready]
        ready |= set(wait(rest, max(0.0, min(now + every, until) - now) or None))
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verify.load.many")
    parser.add_argument("--clients", type=int, default=Load.clients)
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    parser.add_argument("--processes", type=int, default=Load.processes)
    parser.add_argument("--folder", type=Path, help="where the server keeps its run")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    asked = parser.parse_args()
    sample = min(Load.sample, asked.seconds / 10)
    load = Load(asked.clients, asked.seconds, processes=asked.processes, sample=sample)
    busy = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="diloco-load-", dir=asked.folder) as folder:
        found = run_load(load, Path(folder))
    found |= {"load_before": busy, "load_after": os.getloadavg(), "cores": os.cpu_count()}
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(text(found))
    return 0 if found["met"] and not found["faults"] else 1


if __name__ == "__main__":
    sys.exit(main())
