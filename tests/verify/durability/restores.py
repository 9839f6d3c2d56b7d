"""Copies of a server under load, brought back at random moments: does the run go on each time?

    python -m tests.verify.durability.restores --restores 50 --results build/restores.jsonl

Two regions train while `diloco backup --every 1s` runs. Again and again, at random moments, the
server is killed, its folder destroyed and one of the copies brought back, the newest or an older
one. Regions that have seen newer versions than the copy stop with exit code 5 and name two
commands, of which one is run as they say: `--set-back`, or `--from-regions --and COPY`; then they
are started again. Every time

    the copy replays to the same bits before and after it is brought back
    every token has its fate once the run goes on
    rounds go on with both regions

FILE has one line for each restore that went well, and a second call does what is left. The first
three of ten have our own trainers; the rest numpy programs, which start in no time.
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
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco_cli import Region
from diloco_cli.launch.subprocesses import LocalProcess
from diloco_cli.region import NumpyWeights
from diloco_cli.worker.agent.trainer_process import end_trainer
from diloco_cli.worker.mailbox import Mailbox
from tests.live.processes import Live
from tests.region.linear_loop import first

REGIONS = ("paris", "tokyo")
SPARING = {"step_seconds": 0.03}
"""Regions that leave the machine to what is tried: starts, copies and recoveries."""
KEEP = 5
WAYS = ("--set-back", "--from-regions")


@dataclass
class Restored:
    """What one restore was like."""

    age: int
    """Outer steps that were made after the copy."""
    healed: str
    """By which option, where regions were ahead of the copy; empty if they went on themselves."""
    seconds: float
    """From the SIGKILL until rounds went on with both regions."""
    trainers: str


class Loop:
    def __init__(self, run: Live, copies: Path, rng: random.Random, trainers: str) -> None:
        self.run, self.copies, self.rng, self.trainers = run, copies, rng, trainers
        self.server = run.serve()
        self.workers = {name: run.work(name) for name in REGIONS}
        self.grow(2)
        self.backup = self._start_backup()

    def grow(self, rounds: int) -> None:
        """Waits until so many more versions are made."""
        steps = self.run.status().outer_steps
        self.run.wait_for(
            lambda: self.run.status().outer_steps >= steps + rounds,
            self.server,
            *self.workers.values(),
            seconds=300,
        )

    def restore(self) -> Restored:
        run, rng = self.run, self.rng
        self._wait_for_copies(rng.randint(1, KEEP - 1))
        time.sleep(rng.uniform(0.0, 2.0))  # At a random moment.
        before, url = run.status(), run.address["url"]
        os.kill(self.server.pid, signal.SIGKILL)
        run.exit_code(self.server)
        began = time.monotonic()
        shutil.rmtree(run.folder / "server")
        assert self.backup.poll() is None, "backup has ended"
        made = self._copies(before.run)
        chosen = made[-1] if rng.random() < 0.5 else rng.choice(made)
        copy = chosen.rename(self.copies / "taken")  # Or `backup` removes it meanwhile.
        self._diloco("restore", copy, "--dir", run.folder)
        self._serve(url)
        age = before.outer_steps - run.status().outer_steps
        healed = self._heal(copy, url) if self._watch() else ""
        shutil.rmtree(copy)
        self.grow(2)
        seconds = time.monotonic() - began
        run.wait_for(lambda: not any(it.unbalanced for it in run.status().regions), self.server)
        return Restored(age, healed, round(seconds, 1), self.trainers)

    def _heal(self, copy: Path, url: str) -> str:
        """Runs one of the commands that the regions named when they gave up."""
        self.server.ask()
        assert self.run.exit_code(self.server) == 0
        home, way = self.run.folder, self.rng.choice(WAYS)
        if way == "--set-back":
            self._diloco("restore", home, "--dir", home, way)
        else:
            shutil.rmtree(home / "server")
            named = ("--and", copy, "--dir", home, "--yes")
            done = self._try("restore", way, home, *named)
            if "give the folders of that one only" in done.stderr:
                # One region was not ahead and went on with the copy: there are two histories.
                side = home / "regions" / self.rng.choice(REGIONS)
                done, way = self._try("restore", way, side, *named), f"{way}, one side"
            assert done.returncode == 0, done.stderr
        self._serve(url)
        self._revive()
        for old in home.glob("server.lost-*"):
            shutil.rmtree(old)
        return way

    def _start_backup(self) -> subprocess.Popen[bytes]:
        words = ["backup", self.run.folder, "--to", self.copies, "--every", "1s", "--keep", KEEP]
        with open(self.run.folder / "logs" / "backup.log", "ab") as log:
            command = [sys.executable, "-m", "diloco_cli", *map(str, words)]
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _copies(self, run: str) -> list[Path]:
        """The whole copies of the run as it is now, oldest first."""
        if not self.copies.exists():
            return []
        found = sorted(path for path in self.copies.iterdir() if path.name[:1].isdigit())
        return [path for path in found if _run_of(path) == run]

    def _wait_for_copies(self, count: int) -> None:
        run = self.run.status().run
        self.run.wait_for(lambda: len(self._copies(run)) >= count, self.server, seconds=300)

    def end(self) -> None:
        self.backup.terminate()
        assert self.backup.wait(60) == 0
        for process in (*self.workers.values(), self.server):
            process.ask()
            assert self.run.exit_code(process, seconds=120) == 0
        assert self.run.summary()["balanced"], self.run.summary()
        self._diloco("replay", self.run.folder)

    def _serve(self, url: str) -> None:
        # Where the workers look for it.
        address = self.run.folder / "server" / "address.json"
        address.write_text(json.dumps({"url": url, "pid": 0}))
        self.server = self.run.serve()

    def _stopped(self) -> dict[str, LocalProcess]:
        ended = {name: each for name, each in self.workers.items() if each.exit_code() is not None}
        for worker in ended.values():
            assert worker.exit_code() == 5 and "--set-back" in str(worker.last_words()), (
                worker.last_words()
            )
        return ended

    def _revive(self) -> None:
        """Starts again whoever stops, one sooner, one later, until rounds go on with all."""
        steps = self.run.status().outer_steps

        def going_on() -> bool:
            for name in self._stopped():
                self.workers[name] = self.run.work(name)
            status = self.run.status()
            well = [it for it in status.regions if it.training]
            return len(well) == len(REGIONS) and status.outer_steps >= steps + 2

        self.run.wait_for(going_on, self.server, seconds=300)

    def _watch(self) -> bool:
        """Waits until rounds go on with all regions, or some have given up: says whether."""
        steps = self.run.status().outer_steps

        def decided() -> bool:
            status = self.run.status()
            # Heard by this server, which refuses those that have seen more than it has.
            well = [it for it in status.regions if it.training]
            return len(well) == len(REGIONS) and status.outer_steps >= steps + 4

        self.run.wait_for(lambda: bool(self._stopped()) or decided(), self.server, seconds=300)
        return bool(self._stopped())

    def _diloco(self, *words: object) -> None:
        done = self._try(*words)
        assert done.returncode == 0, done.stderr

    def _try(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "diloco_cli", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True)


def _run_of(copy: Path) -> str:
    try:
        return json.loads((copy / "server" / "run.json").read_text())["run"]
    except OSError:  # It is being removed.
        return ""


def _with_jax(folder: Path) -> Live:
    regions = [{"name": name, "pace": 5000} for name in REGIONS]
    return Live(folder / "run", regions, chaos=SPARING)


def _with_numpy(folder: Path) -> Live:
    file = Region.describe(NumpyWeights(first()), folder / "init.safetensors")
    command = [sys.executable, "-m", "tests.region.linear_loop", "sleep=0.01"]
    regions = [{"name": name, "pace": 2000, "trainer": {"command": command}} for name in REGIONS]
    model, sync = {"kind": "tensors", "file": str(file)}, {"fragments": 2, "every": 32}
    return Live(folder / "run", regions, model=model, sync=sync)


RUNS = {"jax": _with_jax, "numpy": _with_numpy}


def restore_again_and_again(
    folder: Path, restores: int, seed: int, trainers: str, *, done: Callable[[Restored], None]
) -> None:
    run, loop = RUNS[trainers](folder), None
    try:
        loop = Loop(run, folder / "copies", random.Random(seed), trainers)
        for _ in range(restores):
            done(loop.restore())
        loop.end()
    finally:
        if loop:
            loop.backup.kill()
            loop.backup.wait()
        run.launcher.stop(run.started, grace=0.0)
        for name in REGIONS:  # A trainer may outlive its agent.
            end_trainer(Mailbox(run.folder / "regions" / name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restores", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, required=True)
    chosen = parser.parse_args()
    results: Path = chosen.results
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Whatever was started is ended.
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = results.read_text().splitlines() if results.exists() else []

    def done(restored: Restored) -> None:
        lines.append(json.dumps(asdict(restored)))
        results.write_text("\n".join(lines) + "\n")
        print(f"{len(lines)}: {restored}", flush=True)

    for trainers, last in (("jax", chosen.restores * 3 // 10), ("numpy", chosen.restores)):
        if (left := last - len(lines)) > 0:
            with tempfile.TemporaryDirectory() as folder:
                seed = chosen.seed * 10_000 + len(lines)
                restore_again_and_again(Path(folder), left, seed, trainers, done=done)
    print(Counter(json.loads(line)["healed"] or "by themselves" for line in lines))


if __name__ == "__main__":
    main()
