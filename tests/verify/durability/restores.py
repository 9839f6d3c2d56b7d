"""Copies of a server under load, brought back at random moments: does the run go on each time?

    python -m tests.verify.durability.restores --restores 50 --results build/restores.jsonl

Two regions train while copies are made at random moments. Again and again the server is killed,
its folder moved away and one of the copies brought back. Regions that have seen newer versions
than the copy stop with exit code 5 and name the command that declares the loss; it is run as they
say, and they are started again. Every time

    the copy replays to the same bits before and after it is brought back
    every token has its fate once the run goes on
    rounds go on
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
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco_cli.launch.subprocesses import LocalProcess
from diloco_cli.run.copies import back_up
from tests.live.processes import Live

REGIONS = ("paris", "tokyo")


@dataclass
class Restored:
    """What one restore was like."""

    age: int
    """Outer steps that were made after the copy."""
    set_back: bool
    """Regions were ahead of the copy, and the loss was declared."""
    seconds: float
    """Until rounds went on."""


class Loop:
    def __init__(self, run: Live, copies: Path, rng: random.Random) -> None:
        self.run, self.copies, self.rng = run, copies, rng
        self.server = run.serve()
        self.workers = {name: run.work(name) for name in REGIONS}
        self.grow(2)

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
        run = self.run
        copy = back_up(run.folder, self.copies, keep=2)
        made = run.status().outer_steps
        self.grow(self.rng.randint(1, 4))
        before, url = run.status(), run.address["url"]
        os.kill(self.server.pid, signal.SIGKILL)
        run.exit_code(self.server)
        began = time.monotonic()
        shutil.rmtree(run.folder / "server")
        self._diloco("restore", copy, "--dir", run.folder)
        self._serve(url)
        if stopped := self._watch():
            self.server.ask()
            assert run.exit_code(self.server) == 0
            self._diloco("restore", run.folder, "--dir", run.folder, "--set-back")
            self._serve(url)
            self._revive()
            for old in run.folder.glob("server.lost-*"):
                shutil.rmtree(old)
        self.grow(2)
        seconds = time.monotonic() - began
        run.wait_for(lambda: not any(it.unbalanced for it in run.status().regions), self.server)
        return Restored(before.outer_steps - made, stopped, round(seconds, 1))

    def end(self) -> None:
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
        done = subprocess.run(
            [sys.executable, "-m", "diloco_cli", *map(str, words)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restores", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=None)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Live(Path(folder) / "run", [{"name": name, "pace": 5000} for name in REGIONS])
        try:
            loop = Loop(run, Path(folder) / "copies", random.Random(chosen.seed))
            for number in range(chosen.restores):
                restored = loop.restore()
                print(f"{number + 1}: {restored}", flush=True)
                if chosen.results:
                    with open(chosen.results, "a") as file:
                        file.write(json.dumps(asdict(restored)) + "\n")
            loop.end()
        finally:
            for process in run.started:
                process.kill()


if __name__ == "__main__":
    main()
