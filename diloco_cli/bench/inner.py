"""How much of a bare loop's speed is left when a worker also synchronises?

    worker      agent and trainer of a real run, with a real server on another core
    bare loop   the same jitted step on the same data, nothing else

Both live on one core and are measured in turns, a few seconds each, so that whatever
else the machine does disturbs both alike. While one is measured the other is stopped
by a signal and costs nothing.

A region of several hosts is as many processes that share one step, each with a core of its
own if the server still has one too. The bare loop then is the same program started by as many
processes that need nobody to tell them: each reads the text for itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import typer

from diloco_cli.assemble import spelled_out
from diloco_cli.bench.figure import Figure
from diloco_cli.errors import RunFailed
from diloco_cli.launch import Role
from diloco_cli.launch.cores import my_cores
from diloco_cli.launch.ports import free_addresses
from diloco_cli.launch.roles import follower_role, serve_role, work_role
from diloco_cli.launch.subprocesses import LocalLauncher, LocalProcess
from diloco_cli.spec.resolved import write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.worker.mailbox import Mailbox

GOAL = 0.93
BELIEVABLE = 1.05
"""A worker does all that the bare loop does; what is faster than this was mismeasured."""
REGION = "bench"
START_SECONDS = 600.0
SETTLE_SECONDS = 1.0
"""After a pause a worker finds old news; that is not what is measured."""
WARM_STEPS = 8
"""Of the bare loop, by which the number of steps in a window is reckoned."""
WARM_VERSIONS = 8
"""Versions adopted before the first measurement, so that everything is compiled and warm."""


def inner_figures(*, windows: int, seconds: float, hosts: int = 1) -> list[Figure]:
    """Measures the inner loop of a worker beside a bare loop."""
    region_cores, server_cores = _cores(hosts)
    spec = _spec(hosts)
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        contextlib.ExitStack() as stack,
    ):
        bare = stack.enter_context(_bare(spec, region_cores))
        stack.enter_context(_keep_away(server_cores))
        worker = stack.enter_context(_worker(spec, Path(name), region_cores, server_cores))
        pairs, before = [], bare(seconds)
        for number in range(windows):
            beside, after = worker(seconds), bare(seconds)
            # A machine that slows down or speeds up meanwhile does so for both.
            pairs.append((beside, (before + after) / 2))
            before = after
            _say(f"window {number + 1}: {beside:,.0f} beside {pairs[-1][1]:,.0f} tokens/s")
    return [figure(pairs, hosts)]


def figure(pairs: list[tuple[float, float]], hosts: int = 1) -> Figure:
    """Reports the pair (worker, limit) with the median ratio; refuses one nobody can believe."""
    ratio = statistics.median_low(value / reference for value, reference in pairs)
    value, reference = next(pair for pair in pairs if pair[0] / pair[1] == ratio)
    if ratio > BELIEVABLE:
        raise RunFailed(
            f"The worker seems {ratio:.2f} times as fast as the bare loop that it contains "
            f"({value:,.0f} and {reference:,.0f} tokens/s), so the two are not comparable.",
            hint="Measure again on a machine that does nothing else, with more --windows.",
        )
    name = "inner" if hosts == 1 else f"inner, {hosts} hosts"
    return Figure(name, value, "tokens/s", reference, GOAL)


def _spec(hosts: int) -> RunSpec:
    """One region of the quickstart's size that never ends and measures nothing itself."""
    spread = {"mesh": {"fsdp": hosts}, "hosts": hosts} if hosts > 1 else {}
    spec = RunSpec.model_validate(
        {
            "spec": 1,
            "name": "bench",
            "budget": {"tokens": 10**12},
            "model": {"kind": "decoder", "size": "tiny"},
            "data": {"kind": "python-source"},
            "inner": {"batch": 8, "sequence": 64, "schedule": {"kind": "constant"}},
            "regions": [{"name": REGION, **spread}],
            "sync": {"fragments": 4, "every": 24, "overlap": 2},
            "server": {"lease": 120.0},
            "evaluate": {"every": 10**6},
        }
    )
    return spelled_out(spec)


def _cores(hosts: int) -> tuple[list[int], set[int]]:
    """The core of each host, and those of the server."""
    cores = my_cores()
    if len(cores) > hosts:
        return list(cores[-hosts:]), set(cores[:-hosts])
    return [cores[-1]] * hosts, set(cores[:-1]) or {cores[-1]}


@contextlib.contextmanager
def _keep_away(cores: set[int]) -> Iterator[None]:
    """Keeps this process, which watches, off the core that is measured."""
    if sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _bare(spec: RunSpec, cores: list[int]) -> Iterator[Callable[[float], float]]:
    """Gives a function that measures the bare loop, in a process of its own for each host."""
    context = multiprocessing.get_context("spawn")
    meet = free_addresses(1)[0] if len(cores) > 1 else ""
    pipes: list[Connection] = []
    processes = []
    for host, core in enumerate(cores):
        ours, theirs = context.Pipe()
        words = (theirs, spec, core, host, meet)
        processes.append(context.Process(target=_loop, args=words, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)

    def answer(seconds: float) -> float:
        """What the first host says, when all are done."""
        speeds = []
        for pipe in pipes:
            if not pipe.poll(seconds + START_SECONDS):
                raise RunFailed("The bare loop does not answer.")
            try:
                speeds.append(pipe.recv())
            except EOFError:
                raise RunFailed("The bare loop ended before it was measured.") from None
        return speeds[0]

    def measure(seconds: float) -> float:
        nonlocal speed
        # All must make the same steps, so they are told how many and not how long.
        steps = max(1, round(speed * seconds / (spec.inner.batch * spec.inner.sequence)))
        for pipe in pipes:
            pipe.send(steps)
        speed = answer(seconds)
        return speed

    try:
        _say("compiling the bare loop")
        speed = answer(0)
        yield measure
    finally:
        for process in reversed(processes):  # The first is the one that others would miss.
            process.kill()
            process.join()


def _loop(pipe: Connection, spec: RunSpec, core: int, host: int, meet: str) -> None:
    """Repeats the step as often as asked; never more than one step ahead of the device."""
    from diloco_cli.worker.engines.jax_engine import JaxStep
    from diloco_cli.worker.engines.many_hosts import connect_groups, join_processes
    from diloco_cli.worker.trainer.task import prepare, set_up

    set_up([core])  # As a trainer does: otherwise the limit is not one.
    os.setsid()  # Linux deals processors out to sessions first, and every worker has its own.
    os.dup2(2, 1)  # What libraries print is not our answer.
    if meet:
        join_processes(meet, hosts=spec.region(REGION).host_count, host=host)
    task = prepare(spec, REGION)
    assert isinstance(task.step, JaxStep)
    placement, engine, cursor = task.step.placement, task.step.engine(), task.stream.start()
    if placement.mesh:
        connect_groups(placement.mesh)
    engine.load(task.model.init(spec.seed), None)

    def speed(steps: int) -> float:
        nonlocal cursor
        began, last = time.monotonic(), None
        for _ in range(steps):
            tokens, cursor = task.stream.batch(cursor)
            loss = engine.step(placement.place_batch(tokens))
            if last is not None:
                float(last)  # Waits for it.
            last = loss
        engine.wait()
        return steps * task.tokens / (time.monotonic() - began)

    speed(1)  # It compiles.
    pipe.send(speed(WARM_STEPS))
    while True:
        pipe.send(speed(pipe.recv()))


@contextlib.contextmanager
def _worker(
    spec: RunSpec, folder: Path, region_cores: list[int], server_cores: set[int]
) -> Iterator[Callable[[float], float]]:
    """Gives a function that measures a worker of a real run, which rests in between."""
    launcher = LocalLauncher(folder / "logs")
    spec_file = write_resolved(spec, folder)
    started: list[LocalProcess] = []
    try:
        server = launcher.start(serve_role(spec_file, folder))
        started.append(server)
        _pin(server, server_cores)
        _wait(lambda: server.url() is not None, server, "listen")
        for role, core in zip(
            _roles(spec_file, folder, server, region_cores), region_cores, strict=True
        ):
            started.append(launcher.start(role))
            _pin(started[-1], {core})
        _, *workers = started
        mailbox = Mailbox(folder / "regions" / REGION)
        _say("starting the worker")
        _wait(lambda: _versions(mailbox) >= WARM_VERSIONS, workers[0], "train")
        _send(workers, signal.SIGSTOP)
        yield lambda seconds: _window(mailbox, workers, spec, seconds)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
        launcher.stop(started, grace=0.0)


def _roles(spec_file: Path, folder: Path, server: LocalProcess, cores: list[int]) -> Iterator[Role]:
    """The worker of each host of the region."""
    coordinator = free_addresses(1)[0] if len(cores) > 1 else ""
    first, *others = cores
    url = server.url() or ""
    yield work_role(spec_file, folder, REGION, url=url, cores=[first], coordinator=coordinator)
    for host, core in enumerate(others, 1):
        yield follower_role(
            spec_file, folder, REGION, host=host, coordinator=coordinator, cores=[core]
        )


def _send(workers: list[LocalProcess], number: int) -> None:
    for worker in workers:
        os.killpg(worker.pid, number)


def _window(mailbox: Mailbox, workers: list[LocalProcess], spec: RunSpec, seconds: float) -> float:
    """Lets the worker run and reads its speed off its own progress, in tokens per second."""
    worker = workers[0]
    _send(workers, signal.SIGCONT)
    try:
        time.sleep(SETTLE_SECONDS)
        before, (first, began) = _versions(mailbox), _next(mailbox, worker)
        time.sleep(seconds)
        # Without a version nothing was synchronised; on a busy machine one takes longer.
        _wait(lambda: _versions(mailbox) > before, worker, "adopt a version")
        last, ended = _next(mailbox, worker)
    finally:
        _send(workers, signal.SIGSTOP)
    return (last - first) * spec.inner.batch * spec.inner.sequence / (ended - began)


def _next(mailbox: Mailbox, worker: LocalProcess) -> tuple[int, float]:
    """Waits for the next report; gives its step and the moment it was written."""
    path, seen = mailbox.progress_file, mailbox.progress_file.stat().st_mtime_ns
    _wait(lambda: path.stat().st_mtime_ns != seen, worker, "report")
    while True:
        written, progress = path.stat().st_mtime_ns, mailbox.progress()
        if progress and path.stat().st_mtime_ns == written:
            return progress.step, written / 1e9


def _versions(mailbox: Mailbox) -> int:
    progress = mailbox.progress()
    return sum(fragment.version for fragment in progress.fragments) if progress else 0


def _wait(happened: Callable[[], bool], process: LocalProcess, verb: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not happened():
        if process.exit_code() is not None:
            raise RunFailed(f"It ended before it could {verb}: {process.last_words()}")
        if time.monotonic() > deadline:
            raise RunFailed(f"It did not {verb} within {START_SECONDS:.0f} s.")
        time.sleep(0.005)


def _pin(process: LocalProcess, cores: set[int]) -> None:
    if sys.platform == "linux":
        os.sched_setaffinity(process.pid, cores)


def _say(text: str) -> None:
    typer.echo(text, err=True)
