"""What does one synchronisation of a whole model cost, and how much memory does its server need?

    server    `diloco serve` on a free port, its folder on this disk, durable as in every run
    regions   one process each: packs a random pseudo-gradient, posts it, fetches the new version,
              adds it to the weights it holds and compares their digest with the server's

Nobody trains; numbers are drawn once. What is counted is CPU time, of all processes, in user
and kernel mode: it says what training loses, and other load hardly changes it. Starting,
compiling and the first rounds are not counted. Its limit is what packing, merging and adding
the same numbers costs in one process, without a network and without a disk.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from diloco_cli.assemble import RunObjects, resolve, spelled_out
from diloco_cli.bench.figure import Figure
from diloco_cli.bench.support.children import child
from diloco_cli.bench.support.random_region import Spent, be_region, pseudo_gradient
from diloco_cli.errors import RunFailed, SpecError
from diloco_cli.launch.roles import serve_role
from diloco_cli.launch.subprocesses import LocalLauncher, LocalProcess
from diloco_cli.plan.needs import server_disk, server_memory
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import RunSpec

Say = Callable[[str], None]

CPU_GOAL, CPU_GOAL_AT = 0.45, (10_000_000, 4)
UP_GOAL, DOWN_GOAL = 0.42, 0.45
RSS_GOALS_MB = {10_000_000: 345.0, 1_000_000_000: 1500.0}
GROWTH_GOAL, LARGE, LARGE_GROWTH_GOAL = 1.10, 50_000_000, 1.15

START_SECONDS = 300.0
WARM_ROUNDS = 10
"""Not counted: kernels are loaded, connections opened, rates found, memory touched, and the
store has as many versions as it keeps, so that it writes where it wrote before."""

FRAGMENTS, TRIES = 4, 10
"""The cheapest try counts. Other guests of the same host make single ones a third dearer."""

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


@dataclass(frozen=True)
class Cost:
    """One synchronisation of the whole model with so many regions."""

    regions: int
    server_seconds: float
    region_seconds: float
    wall_seconds: float
    bytes_up: float
    """Of one region, a parameter; likewise down."""
    bytes_down: float
    rss_mb: float
    disk_mb: float = 0.0
    """Of the server's folder, at the end."""
    stolen: float = 0.0
    """Share of the cores' time that went to other guests of the same host."""

    @property
    def cpu_seconds(self) -> float:
        return self.server_seconds + self.region_seconds


def sync_figures(
    *,
    parameters: int,
    regions: Sequence[int],
    rounds: int,
    fragments: int = FRAGMENTS,
    tries: int = TRIES,
    warm: int = WARM_ROUNDS,
    say: Say = lambda text: None,
) -> list[Figure]:
    """Measures synchronisations with each number of regions, each with a server of its own."""
    figures, costs = [], []
    for count in regions:
        spec = sync_spec(parameters, count, fragments)
        parts = resolve(spec)
        say(f"{count} regions, {parts.layout.size:,} parameters")
        cost = measure(spec, parts.layout.size, rounds, warm, tries)
        say(
            f"CPU {cost.cpu_seconds:.3f} s: server {cost.server_seconds:.3f}, "
            f"regions {cost.region_seconds:.3f}; {cost.wall_seconds:.2f} s by the clock, "
            f"{cost.stolen:.1%} of the cores' time taken by other guests of this host"
        )
        sizes = [fragment.size for fragment in parts.layout.fragments]
        figures += _figures(parameters, sizes, cost, bare_seconds(spec, parts))
        costs.append(cost)
    if len(costs) > 1:
        figures.append(_growth(parameters, costs[0], costs[-1]))
    return figures


def _figures(parameters: int, sizes: list[int], cost: Cost, bare: float) -> list[Figure]:
    name = f"{parameters / 1e6:g} M × {cost.regions} regions"
    cpu_goal = CPU_GOAL if (parameters, cost.regions) == CPU_GOAL_AT else None
    planned = server_memory(sizes) / 1e6
    disk = server_disk(sizes, cost.regions, 8 * cost.bytes_up, 8 * cost.bytes_down) / 1e6
    rss_goal = RSS_GOALS_MB.get(parameters)
    rows = [
        ("CPU of all", cost.cpu_seconds, "s/sync", bare, cpu_goal),
        ("by the clock", cost.wall_seconds, "s/sync", bare, None),
        ("up", cost.bytes_up, "bytes/parameter", 4.0, UP_GOAL),
        ("down", cost.bytes_down, "bytes/parameter", 4.0, DOWN_GOAL),
        ("server's peak memory", cost.rss_mb, "MB", planned, rss_goal),
        ("server's disk", cost.disk_mb, "MB", disk, None),
    ]
    return [
        Figure(f"{name}, {what}", value, unit, limit, goal, "value", lower=True)
        for what, value, unit, limit, goal in rows
    ]


def _growth(parameters: int, few: Cost, many: Cost) -> Figure:
    goal = LARGE_GROWTH_GOAL if parameters >= LARGE else GROWTH_GOAL
    name = f"server's peak memory, {many.regions} regions / {few.regions}"
    return Figure(name, many.rss_mb, "MB", few.rss_mb, goal, lower=True)


def parameters_of(text: str) -> int:
    """Reads a number such as 10M, 250k or 1_000_000."""
    scale = UNITS.get(text[-1:].lower(), 1)
    try:
        parameters = round(float(text[:-1] if scale > 1 else text) * scale)
    except (ValueError, OverflowError):
        parameters = 0
    if not 100_000 <= parameters <= 2 * 10**9:
        raise SpecError(
            f"--params {text} is not understood.",
            hint="Write a number of parameters from 100k to 2B, for example --params 10M.",
        )
    return parameters


def regions_of(text: str) -> list[int]:
    """Reads numbers of regions such as 4, or 2,8."""
    counts = [int(each) if each.strip().isdecimal() else 0 for each in text.split(",")]
    if not all(1 <= count <= 64 for count in counts):
        raise SpecError(
            f"--regions {text} is not understood.",
            hint="Write a number from 1 to 64, or several: --regions 2,8 compares them.",
        )
    return counts


def sync_spec(parameters: int, regions: int, fragments: int = FRAGMENTS) -> RunSpec:
    """A run of a decoder of about so many parameters; both ways in int4, rounds of everybody."""
    width = 64 * max(1, round(1.8 * parameters ** (1 / 3) / 64))
    names = [f"region-{number}" for number in range(regions)]
    spec = {
        "spec": 1,
        "name": "sync",
        "budget": {"tokens": 10**15},
        "model": {"kind": "decoder", "width": width, "heads": width // 64, "layers": 1},
        "inner": {"batch": 4, "sequence": 64},
        # They train nothing, and claim steps as fast as rounds follow one another.
        "regions": [{"name": name, "pace": 1e6} for name in names],
        "sync": {"fragments": fragments, "every": max(8, fragments), "quorum": regions},
        "wire": {"up": {"kind": "int4"}, "down": {"kind": "int4"}},
        "server": {"listen": "127.0.0.1:0", "lease": 600.0},
    }
    from diloco_cli.models import models
    from diloco_cli.models import parameters as count

    first = count(models.build({**spec["model"], "vocabulary": 2}))
    block = count(models.build({**spec["model"], "layers": 2, "vocabulary": 2})) - first
    layers = max(1, int(0.92 * parameters / block))
    left = parameters - first - (layers - 1) * block
    spec["model"] |= {"layers": layers, "vocabulary": max(256, left // width)}
    return spelled_out(RunSpec.model_validate(spec))


def measure(spec: RunSpec, parameters: int, rounds: int, warm: int, tries: int) -> Cost:
    """Runs a server and its regions; counts what `rounds` synchronisations take, at best."""
    with tempfile.TemporaryDirectory(prefix="diloco-sync-") as name:
        with _stage(spec, Path(name)) as (server, pipes):
            _rounds(server, pipes, warm)
            costs = [_cost(server, pipes, parameters, rounds) for _ in range(tries)]
        disk = _disk_mb(Path(name) / "server")
    # What else the machine does only adds; memory is the most there ever was.
    best = min(costs, key=lambda cost: cost.cpu_seconds)
    return replace(best, rss_mb=costs[-1].rss_mb, disk_mb=disk)


def _cost(server: LocalProcess, pipes: list[Connection], parameters: int, rounds: int) -> Cost:
    before, taken, began = _cpu_seconds(server.pid), _stolen_seconds(), time.monotonic()
    spent = _rounds(server, pipes, rounds)
    wall, after = time.monotonic() - began, _cpu_seconds(server.pid)
    values = rounds * len(pipes) * parameters
    return Cost(
        regions=len(pipes),
        server_seconds=(after - before) / rounds,
        region_seconds=sum(each.cpu_seconds for each in spent) / rounds,
        wall_seconds=wall / rounds,
        bytes_up=sum(each.bytes_up for each in spent) / values,
        bytes_down=sum(each.bytes_down for each in spent) / values,
        rss_mb=_peak_mb(server.pid),
        stolen=(_stolen_seconds() - taken) / wall / (os.cpu_count() or 1),
    )


@contextlib.contextmanager
def _stage(spec: RunSpec, folder: Path) -> Iterator[tuple[LocalProcess, list[Connection]]]:
    regions = contextlib.ExitStack()
    spec_file = write_resolved(spec, folder)
    launcher = LocalLauncher(folder / "logs")
    server = launcher.start(serve_role(spec_file, folder))
    try:
        url, pipes = _address(server), []
        for region in spec.regions:
            ours, theirs = multiprocessing.Pipe()
            regions.enter_context(child(be_region, theirs, spec_file, region.name, url))
            theirs.close()
            pipes.append(ours)
        for pipe in pipes:
            _answer(pipe, server)
        yield server, pipes
    finally:
        regions.close()
        launcher.stop([server], grace=0.0)


def _address(server: LocalProcess) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not (url := server.url()):
        if server.exit_code() is not None or time.monotonic() > deadline:
            raise RunFailed(f"The server did not start: {server.last_words()}")
        time.sleep(0.02)
    return url


def _rounds(server: LocalProcess, pipes: list[Connection], rounds: int) -> list[Spent]:
    for pipe in pipes:
        pipe.send(rounds)
    return [_answer(pipe, server) for pipe in pipes]


def _answer(pipe: Connection, server: LocalProcess) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise RunFailed(
            f"A region ended before it was measured. The server said: {server.last_words()}"
        ) from None


def _cpu_seconds(pid: int) -> float:
    """What a process has used so far, all its threads together."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _stolen_seconds() -> float:
    """What the host gave to others while our cores had work; it makes the rest dearer, too."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(words[8]) / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int) -> float:
    """The most memory a process ever had, with the files it maps."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024 / 1e6


def _disk_mb(folder: Path) -> float:
    """What a folder takes of its disk."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*")) / 1e6


def bare_seconds(spec: RunSpec, parts: RunObjects) -> float:
    """CPU time of the arithmetic alone: every region packs, one merges, every region adds."""
    import numpy as np

    from diloco_cli.merge.outer_step import MergePlan, next_weights
    from diloco_cli.wire.frame import Header, open_frame, pack, seal

    fragment = parts.layout.fragments[0]
    codecs = {"up": dict(spec.wire.up), "down": dict(spec.wire.down)}
    header = Header.contribution(
        run="bare",
        layout=parts.layout.digest,
        fragment=0,
        size=fragment.size,
        codec=codecs["up"],
        base=0,
        region="bare",
    )
    delta = pseudo_gradient(fragment, np.random.default_rng(0))
    weights, method = np.ones_like(delta), MergePlan(parts.merge, parts.outer, parts.down)
    state = (weights, parts.outer.start(fragment.size), weights)

    def once() -> float:
        began = time.process_time()
        members = [(1.0, open_frame(pack(header, delta))) for _ in spec.regions]
        made = next_weights(method, fragment, members, state)
        down = open_frame(seal(replace(header, codec=codecs["down"]), made.chunks))
        for _ in spec.regions:
            down.added_to(weights)
        return time.process_time() - began

    once()
    return min(once() for _ in range(3)) * parts.layout.size / fragment.size
