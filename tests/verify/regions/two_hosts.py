"""A run under TLS: one region of one device, one of two processes whose parts can be killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from diloco_cli.assemble import build_terms, resolve, settings_of
from diloco_cli.launch.ports import free_addresses
from diloco_cli.launch.roles import follower_role, work_role
from diloco_cli.launch.subprocesses import LocalProcess
from diloco_cli.net.client import Client
from diloco_cli.net.credentials import load_credentials
from diloco_cli.net.options import Options
from diloco_cli.observe.events import read_events
from diloco_cli.server.access.issue import CredentialFolder
from diloco_cli.server.recovery.verify import replay
from diloco_cli.spec.resolved import resolved, write_resolved
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.messages import Amend
from diloco_cli.worker.agent.trainer_process import end_trainer
from diloco_cli.worker.mailbox import Mailbox
from tests.live.processes import Live

DEVICES = "--xla_force_host_platform_device_count=2"
RIGHT = {"name": "right", "mesh": {"fsdp": 4}, "hosts": 2, "speed": 0.3}
INNER = {"batch": 4, "sequence": 16, "schedule": {"kind": "constant"}}
PARTS = ("lead", "follower", "supervisor", "agent", "host 0", "host 1")
"""What can be killed; a host is all of its processes at once."""
SURVIVED = ("agent",)
"""Whose death ends nothing but itself."""
SHARDED = {"kind": "orbax", "every": "3s"}
LEAD_POINTS = {
    "hosts.met": 1,
    "order.sent": 15,
    "held.sent": 1,
    "adopt.sent": 1,
    "snapshot.sent": 1,
    "save.sent": 1,
    "vector.kept": 3,
}
FOLLOWER_POINTS = {"follower.joined": 1, "order.heard": 30}
"""Every failpoint of several hosts, and the time at which it kills."""
AGENT_POINT = "terms.heard"
"""The agent's, which is in every region: here it stands between an amendment and two hosts."""


FATES = ("applied", "uncounted", "pending", "refused", "discarded")
"""One of these has every token that was trained; uncounted is what was faster than its pace."""


class Broken(Exception):
    """A promise was not kept."""


class TwoHosts:
    """A server, a region `left` of one device, and a region `right` of two hosts: this machine."""

    def __init__(self, run: Live, *, patience: float) -> None:
        self.run, self._patience = run, patience
        self.coordinator = free_addresses(1)[0]
        self.server = run.serve()
        self.left = run.work("left")
        self.first, self.second = self._start_first(), self._start_second()

    def _start_first(self, *more: str) -> LocalProcess:
        run = self.run
        several = run.spec.region("right").host_count > 1
        role = work_role(
            run.file,
            run.folder,
            "right",
            url=run.address["url"],
            cores=(),
            coordinator=self.coordinator if several else "",
        )
        return run.start(dataclasses.replace(role, argv=(*role.argv, *more)))

    def _start_second(self, *more: str) -> LocalProcess:
        run = self.run
        role = follower_role(
            run.file, run.folder, "right", host=1, coordinator=self.coordinator, cores=()
        )
        return run.start(dataclasses.replace(role, argv=(*role.argv, *more)))

    def move(self, mesh: dict[str, int], hosts: int) -> None:
        """Stops the region in order and has it go on with another mesh on so many hosts."""
        run = self.run
        for process in [*self._processes("host 0"), *self._processes("host 1")]:
            process.terminate()  # All of them at once, as a launcher would.
        for process in (self.first, self.second):
            if code := run.exit_code(process, seconds=self._patience):
                raise Broken(f"exit code {code}: {process.last_words()}")
        data = resolved(run.spec)
        data["regions"][1] |= {"mesh": mesh, "hosts": hosts}
        # What its own hosts say of its devices; the run is the same.
        run.spec = RunSpec.model_validate(data)
        run.file = write_resolved(run.spec, run.folder.with_name(f"on-{hosts}-hosts"))
        self.first = self._start_first()
        self.second = self._start_second() if hosts > 1 else self.first

    # Killing

    def kill(self, part: str) -> None:
        """Ends a part as a kernel or a power cut would; what has no parent here is started anew."""
        self._strike(part)
        self._replace(part)

    def kill_at(self, point: str) -> None:
        """Begins a host anew with a failpoint set, and waits until it has died there."""
        first = point in LEAD_POINTS
        count = (LEAD_POINTS if first else FOLLOWER_POINTS)[point]
        before = self.generation()
        self._strike("host 0" if first else "host 1")
        self._replace("host 0" if first else "host 1", "--failpoint", f"{point}=kill@{count}")
        self._until(lambda: self.generation() != before, f"a start with {point}")
        armed = self.generation()
        self._until(lambda: self.generation() != armed, f"a death at {point}")

    def kill_at_an_amendment(self, rate: float) -> None:
        """Has the agent die when it has just heard of new terms, which the lead does not know."""
        joined = len(self._events("joined"))
        self._strike("agent")
        self._replace("agent", "--failpoint", f"{AGENT_POINT}=kill")
        # What it hears before that is another matter.
        self._until(lambda: len(self._events("joined")) > joined, "an agent that has joined")
        before = self.generation()
        with Client(self.run.address["url"], Options(credentials=self.run.credentials)) as client:
            change = Amend(id=f"rate-{rate}", sure=False, set={"inner.optimizer.lr": rate})
            terms = client.amend(change).terms
        died = -signal.SIGKILL
        self._until(lambda: self.first.exit_code() == died, f"a death at {AGENT_POINT}")
        if self.generation() != before:
            raise Broken("the lead did not outlive its agent")
        self.first = self._start_first()
        self._until(lambda: self.run.region("right").terms == terms, "the new terms")
        self._until(lambda: self.generation() != before, "a lead under the new terms")

    def kill_in_mid_write(self, part: str, *, tries: int = 20) -> None:
        """Kills a part while both hosts write a sharded checkpoint, and leaves it half written.

        A write is over in a moment, so it may take several kills; the last one is such a one. The
        region must go on from the checkpoint before, and not even try the one that is half written.
        """
        for _ in range(tries):
            self._until(lambda: bool(self.complete()), "a sharded checkpoint")
            draft, before = self._next_draft(), self.generation()
            self._strike(part)
            self._replace(part)
            self._until(lambda: self.generation() != before, "the next generation")  # noqa: B023
            complete, left = self.complete()[-1], draft.is_dir()
            notes = json.loads((complete / "notes" / "metadata").read_text())
            self.until_it_steps()
            if left and int(complete.name) < int(draft.name.partition(".")[0]):
                self._check_resumed(notes["clock"])
                return
        raise Broken(f"{tries} kills met no sharded checkpoint that was half written")

    def _check_resumed(self, clock: int) -> None:
        """Whatever is in the outbox may be newer than the checkpoint."""
        starts = self._events("first-step")
        if not starts[-1]["resumed"] or starts[-1]["step"] <= clock:
            raise Broken(f"it went on with {starts[-1]}, not after step {clock}")
        if "cannot be read" in (self.run.folder / "logs" / "right.trainer.log").read_text():
            raise Broken("it tried a checkpoint that was half written")

    def _next_draft(self) -> Path:
        """Waits for bytes of a checkpoint that has no name yet; looks as often as it can."""
        found: list[Path] = []
        known = {each for each in self._checkpoints() if not each.name.isdigit()}
        deadline = time.monotonic() + self._patience
        while not found and time.monotonic() < deadline:
            for draft in self._checkpoints():
                with contextlib.suppress(OSError):
                    if draft.is_dir() and draft not in known and not draft.name.isdigit():
                        found += [draft] * any(draft.glob("state*/*"))
            time.sleep(0.001)
        if not found:
            raise Broken("no sharded checkpoint was begun")
        return found[0]

    def complete(self) -> list[Path]:
        """Sharded checkpoints that both hosts have written, the newest last."""
        named = [each for each in self._checkpoints() if each.name.isdigit()]
        return sorted(named, key=lambda each: int(each.name))

    def _checkpoints(self) -> list[Path]:
        return [*(self.run.folder / "regions" / "right").glob("checkpoints/*/*")]

    def _strike(self, part: str) -> None:
        for process in self._processes(part):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _replace(self, part: str, *more: str) -> None:
        if part in ("agent", "host 0"):
            self.run.exit_code(self.first)
            self.first = self._start_first(*more)
        if part in ("supervisor", "host 1"):
            self.run.exit_code(self.second)
            self.second = self._start_second(*more)

    def _processes(self, part: str) -> Iterator[psutil.Process]:
        lead = Mailbox(self.run.folder / "regions" / "right").trainer_lock_holder()
        with contextlib.suppress(psutil.NoSuchProcess):
            if part in ("agent", "host 0"):
                yield psutil.Process(self.first.pid)
            if part in ("lead", "host 0") and lead is not None:
                yield psutil.Process(lead)  # Not a child of an agent that took it over.
            if self.second is self.first:
                return  # There is no other host.
            if part in ("follower", "host 1"):
                yield from psutil.Process(self.second.pid).children()
            if part in ("supervisor", "host 1"):
                yield psutil.Process(self.second.pid)

    # Looking

    def _events(self, kind: str) -> list[Any]:
        """What is noted of the region of two hosts."""
        found = read_events(self.run.folder / "events.jsonl")
        return [
            event.fields
            for event in found
            if event.kind == kind and event.fields["region"] == "right"
        ]

    def generation(self) -> str:
        with contextlib.suppress(OSError):
            return (self.run.folder / "regions" / "right" / "generation").read_text()
        return ""

    def until_it_steps(self, *, other_than: str | None = None) -> None:
        """Waits for inner steps; of another generation, where one is named."""
        if other_than is not None:
            self._until(lambda: self.generation() != other_than, "the next generation")
        report, since = self.run.folder / "regions" / "right" / "progress.json", time.time()

        def trains() -> bool:
            new = report.exists() and report.stat().st_mtime > since
            return new and self.run.progress("right").training

        self._until(trains, "a report of training")
        first = self.run.progress("right").step
        self._until(lambda: self.run.progress("right").step != first, "a further step")

    def _until(self, happened: Callable[[], bool], what: str) -> None:
        try:
            self.run.wait_for(happened, self.server, self.left, seconds=self._patience)
        except AssertionError as error:
            said = self.first.last_words(), self.second.last_words()
            raise Broken(f"{what} did not come: {error}; {said}") from error

    # The end

    def stop(self) -> dict[str, Any]:
        """Stops everything in order; gives what the books say, or raises Broken."""
        run = self.run
        applied = run.status().tokens.applied
        self._until(lambda: run.status().tokens.applied > applied, "a merge")
        codes = {}
        for name, process in (("right", self.first), ("left", self.left), ("server", self.server)):
            os.kill(process.pid, signal.SIGTERM)
            codes[name] = run.exit_code(process, seconds=self._patience)
        if any(codes.values()):
            raise Broken(f"exit codes {codes}")
        if self.second is not self.first and self.second.exit_code() is not None:
            raise Broken("the other host did not wait for the next generation")
        return audit(run)


def audit(run: Live) -> dict[str, Any]:
    """Every token has one fate, and every version is made again from the journal."""
    summary = run.summary()
    tokens, regions = summary["tokens"], summary["regions"]
    fates = sum(tokens[fate] for fate in FATES)
    if not summary["balanced"] or abs(tokens["trained"] - fates) > 1e-6 * tokens["trained"]:
        raise Broken(f"the books do not balance: {tokens}")
    if not regions["right"]["share"]:
        raise Broken("nothing of the region of two hosts was merged")
    settings = settings_of(run.spec, resolve(run.spec))
    lines = replay(settings, run.folder / "server", build=build_terms).lines
    if not lines or not all(line.made for line in lines):
        raise Broken(f"replay: {lines}")
    return {
        **{each: tokens[each] for each in ("trained", *FATES)},
        "lost": regions["right"]["lost"],
        "outer_steps": summary["outer_steps"],
        "share": regions["right"]["share"],
    }


@contextlib.contextmanager
def two_hosts(
    folder: Path, *, patience: float = 240.0, right: dict[str, Any] | None = None
) -> Iterator[TwoHosts]:
    """Starts all of it, and leaves nothing running; XLA_FLAGS must ask for two devices."""
    credentials = CredentialFolder(folder / "certs")
    credentials.create_missing("tiny", [], 30)
    for region in ("left", "right"):
        credentials.issue("upload", region, 30, renew=False)
    run = Live(
        folder / "run",
        [{"name": "left", "speed": 0.02}, {**RIGHT, **(right or {})}],
        sync={"fragments": 2, "every": 8},
        inner=INNER,
        server={"lease": 3.0, "certs": str(credentials.folder)},
    )
    run.credentials = load_credentials(credentials.folder / "admins" / "operator")
    try:
        yield TwoHosts(run, patience=patience)
    finally:
        run.launcher.stop(run.started, grace=0.0)
        for region in run.spec.regions:  # A trainer may outlive its agent.
            end_trainer(Mailbox(run.folder / "regions" / region.name))


def strikes(kills: int, seed: int) -> Iterator[tuple[str, float, bool]]:
    """What to kill, how long after the last recovery, and whether to wait for the next one."""
    draw = random.Random(seed)
    for _ in range(kills):
        yield draw.choice(PARTS), draw.uniform(0.0, 3.0), draw.random() < 0.85
