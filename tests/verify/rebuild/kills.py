"""Real servers lost or set back again and again, with a SIGKILL at every step of realigning.

    python -m tests.verify.rebuild.kills --results build/realign-kills.jsonl

Two regions train. Again and again the server is killed and its disk destroyed; the run is rebuilt
from the folders of its regions, or set back to an older copy. On the way die

    the command     at a step of writing the new folder; then it is repeated
    the new server  at a step of its start, of the first joins or of the first rounds
    paris           its agent, and then the agent or the trainer at a step of realigning

and are started again. Then frames of the lost run are sent once more, as of it and as of the new
one: none may be taken. At the end a replay is equal, every token has one fate, and as many were
trained in each region as it made inner steps: what was merged, lost and held adds up to that.
First with our own trainers, then with numpy programs, which start in no time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diloco_cli.assemble import resolve, settings_of
from diloco_cli.errors import DilocoError
from diloco_cli.launch.roles import serve_role, work_role
from diloco_cli.net.client import Client
from diloco_cli.observe.events import read_events
from diloco_cli.run.copies import back_up
from diloco_cli.server.store import stores
from diloco_cli.wire.frame import open_frame
from diloco_cli.worker.agent.trainer_process import end_trainer
from diloco_cli.worker.mailbox import Mailbox
from diloco_cli.worker.trainer.checkpoints import checkpoint
from tests.live.processes import Live
from tests.verify.durability.restores import REGIONS, RUNS

STEP_TOKENS = {"jax": 32, "numpy": 16}
WAYS = ("--from-regions", "--set-back")
COMMAND = ("version.written", "version.flushed", "version.renamed", "journal.flushed")
SERVER = (
    "start.replayed",
    "start.swept",
    "journal.appended",
    "journal.flushed",
    "draft.kept",
    "reply.ready",
    "round.closed",
    "version.kept",
    "version.recorded",
    "version.published",
)
AGENT = ("realign.stopped", "realign.named", "realign.fetched")
TRAINER = ("realign.stood", "realign.saved")
ARMED = """
import sys
from diloco_cli.system import failpoints
failpoints.arm(sys.argv.pop(1))
from diloco_cli.__main__ import main
main()
"""


@dataclass
class Plan:
    """One loss, and who dies on the way back."""

    way: str
    command: str
    server: str
    region: str


@dataclass
class Realigned:
    """What one loss was like."""

    plan: Plan
    versions: int
    """Outer steps that were lost."""
    lost: float
    """Tokens, as the server sums up what regions tell."""
    late: int
    """Frames of the lost run that were sent once more and refused."""
    seconds: float


def plans() -> list[tuple[str, Plan]]:
    """Every step of realigning both ways, the other places in turn; with which trainers."""
    # Programs that are not ours take no failpoint.
    steps = [("jax", AGENT + TRAINER), ("numpy", AGENT)]
    cases = [(who, point, way) for who, points in steps for point in points for way in WAYS]
    return [
        (who, Plan(way, COMMAND[n % len(COMMAND)], SERVER[(n + n // 10) % len(SERVER)], point))
        for n, (who, point, way) in enumerate(cases)
    ]


class Kills:
    def __init__(self, run: Live, copies: Path, rng: random.Random, trainers: str) -> None:
        self.run, self.copies, self.rng, self.trainers = run, copies, rng, trainers
        self.server = run.serve()
        self.workers = {name: run.work(name) for name in REGIONS}
        self.given_up = {name: [0.0, 0.0] for name in REGIONS}
        """Tokens lost in losses before the last, by fragment."""
        self.slots: list[dict[str, Any]] = []
        """The fragments that the run was last rebuilt with."""
        self.grow(3)

    def grow(self, rounds: int) -> None:
        steps = self.run.status().outer_steps
        self.run.wait_for(
            lambda: self.run.status().outer_steps >= steps + rounds,
            self.server,
            *self.workers.values(),
            seconds=300,
        )

    def lose(self, plan: Plan) -> Realigned:
        run = self.run
        copy = back_up(run.folder, self.copies, keep=1) if plan.way == "--set-back" else None
        self.grow(self.rng.randint(2, 4))
        before, url = run.status(), run.address["url"]
        for name in REGIONS:
            for fragment, lost in enumerate(self._lost(name)):
                self.given_up[name][fragment] += lost
        os.kill(self.server.pid, signal.SIGKILL)
        run.exit_code(self.server)
        began, late = time.monotonic(), self._frames()
        shutil.rmtree(run.folder / "server")
        paris = self.workers["paris"]
        os.kill(paris.pid, signal.SIGKILL)
        run.exit_code(paris)
        self._restore(plan, copy)
        (run.folder / "server" / "address.json").write_text(json.dumps({"url": url, "pid": 0}))
        self._die_on_the_way(plan, url)
        run.wait_for(self._is_whole, self.server, *self.workers.values(), seconds=300)
        after = run.status()
        assert after.rebuilt and after.rebuilt.continues[-1] == before.run, after.rebuilt
        self.grow(2)
        refused = sum(self._is_refused(*each, as_new=new) for each in late for new in (False, True))
        self.grow(2)
        run.wait_for(self._lost_is_told, self.server, seconds=300)
        assert not any(region.unbalanced for region in run.status().regions)
        now = run.status().rebuilt
        assert now
        versions = before.outer_steps - sum(slot["version"] for slot in self.slots)
        seconds = round(time.monotonic() - began, 1)
        return Realigned(plan, versions, now.lost, refused, seconds)

    def end(self) -> None:
        for process in (*self.workers.values(), self.server):
            process.ask()
            assert self.run.exit_code(process, seconds=120) == 0, process.last_words()
        assert self.run.summary()["balanced"], self.run.summary()
        done = self._diloco(["-m", "diloco_cli"], "replay", self.run.folder)
        assert done.returncode == 0, done.stderr
        for name in REGIONS:
            self._add_up(name)

    def _add_up(self, name: str) -> None:
        """Every inner step of a region is merged, lost, or held."""
        saved = checkpoint.load(Mailbox(self.run.folder / "regions" / name).checkpoint)
        for fragment, book in enumerate(saved.books):
            totals = book["totals"]
            assert totals["discarded"] == book["lost"] and not totals["refused"], (name, book)
            known = self.slots[fragment]["applied"].get(name, 0.0) + self.given_up[name][fragment]
            made = saved.clock * STEP_TOKENS[self.trainers]
            assert known + totals["trained"] == made, (name, fragment, known, totals, made)

    def _restore(self, plan: Plan, copy: Path | None) -> None:
        home = self.run.folder
        words = ["restore", copy or plan.way, *(() if copy else (home,)), "--dir", home, "--yes"]
        words += [plan.way] if copy else []
        died = self._diloco(["-c", ARMED, f"{plan.command}=kill"], *words)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert not (home / "server").exists()
        done = self._diloco(["-m", "diloco_cli"], *words)
        assert done.returncode == 0, done.stderr
        self.slots = self._read_rebuilt()

    def _die_on_the_way(self, plan: Plan, url: str) -> None:
        """Starts the server and paris, each of which dies at its place, and starts them again."""
        run = self.run
        serve = serve_role(run.file, run.folder)
        at = ("--failpoint", f"{plan.server}=kill")
        self.server = run.start(replace(serve, argv=(*serve.argv, *at)))
        work = work_role(run.file, run.folder, "paris", url=url, cores=())
        at = ("--failpoint", f"{plan.region}=kill")
        self.workers["paris"] = run.start(replace(work, argv=(*work.argv, *at)))
        deaths = self._trainer_deaths()
        left = {"server", "paris"}

        def died() -> bool:
            if "server" in left and self.server.exit_code() is not None:
                assert self.server.exit_code() == -signal.SIGKILL, self.server.last_words()
                left.discard("server")
                self.server = run.serve()
            if self.workers["paris"].exit_code() is not None:
                code, words = self.workers["paris"].exit_code(), self.workers["paris"].last_words()
                assert code == -signal.SIGKILL and plan.region in AGENT, words
                left.discard("paris")
                self.workers["paris"] = run.start(work)
            if plan.region in TRAINER and self._trainer_deaths() > deaths:
                left.discard("paris")
            return not left

        run.wait_for(died, self.workers["tokyo"], seconds=300)

    def _is_whole(self) -> bool:
        status = self.run.status()
        training = [region.name for region in status.regions if region.training]
        return bool(status.rebuilt) and not status.rebuilt.awaited and len(training) == 2

    def _lost_is_told(self) -> bool:
        told = self.run.status().rebuilt
        layout = Mailbox(self.run.folder / "regions" / "paris")
        sizes = [image.weights.size for f in (0, 1) if (image := layout.image(f))]
        lost = [self._lost(name) for name in REGIONS]
        mean = sum(s * each[f] for each in lost for f, s in enumerate(sizes)) / sum(sizes)
        return bool(told) and abs(told.lost - mean) < 0.2

    def _lost(self, name: str) -> list[float]:
        saved = checkpoint.load(Mailbox(self.run.folder / "regions" / name).checkpoint)
        return [book["lost"] for book in saved.books]

    def _trainer_deaths(self) -> int:
        log = read_events(self.run.folder / "events.jsonl")
        return sum(e.kind == "trainer-died" and e.fields["region"] == "paris" for e in log)

    def _read_rebuilt(self) -> list[dict[str, Any]]:
        """The fragments of the record that the new run begins with."""
        settings = settings_of(self.run.spec, resolve(self.run.spec))
        _, content = stores.build(settings.spec.server.store).read(
            self.run.folder / "server", layout=settings.layout.digest, spec=settings.spec_digest
        )
        assert content.records[0]["kind"] == "rebuilt"
        return content.records[0]["ledger"]["slots"]

    def _frames(self) -> list[tuple[str, str, bytes]]:
        """What lies in the outboxes: region, run and bytes."""
        found = []
        for name in REGIONS:
            for path in (self.run.folder / "regions" / name / "outbox").glob("[0-9]*.frame"):
                data = path.read_bytes()
                found.append((name, open_frame(data).header.run, data))
        return found

    def _is_refused(self, region: str, run: str, data: bytes, *, as_new: bool = False) -> bool:
        header = open_frame(data).header
        log = read_events(self.run.folder / "events.jsonl")
        epoch = [e.fields["epoch"] for e in log if e.kind == "joined"][-1]
        place = (header.fragment, region, header.base, header.clock)
        with Client(self.run.address["url"], run="" if as_new else run) as client:
            try:
                answer = client.submit(*place, data, epoch=epoch)
            except DilocoError:
                return True
        raise AssertionError(f"a frame of a lost run was answered: {answer}")

    def _diloco(self, how: Sequence[str], *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *how, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, required=True)
    chosen = parser.parse_args()
    results: Path = chosen.results
    results.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Whatever was started is ended.
    lines = results.read_text().splitlines() if results.exists() else []
    for trainers in RUNS:
        left = [plan for who, plan in plans()[len(lines) :] if who == trainers]
        if not left:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = RUNS[trainers](Path(folder))
            rng = random.Random(chosen.seed + len(lines))
            try:
                kills = Kills(run, Path(folder) / "copies", rng, trainers)
                for plan in left:
                    realigned = kills.lose(plan)
                    lines.append(json.dumps(asdict(realigned)))
                    print(f"{len(lines)}: {realigned}", flush=True)
                    results.write_text("\n".join(lines) + "\n")
                kills.end()
                print("every token has one fate, replay equal", flush=True)
            finally:
                run.launcher.stop(run.started, grace=0.0)
                for name in REGIONS:  # A trainer may outlive its agent.
                    end_trainer(Mailbox(run.folder / "regions" / name))


if __name__ == "__main__":
    main()
