"""What does the loss of a server's disk cost the model? The same run, undisturbed and rebuilt.

    python -m tests.verify.rebuild.loss --out build/lost-server.jsonl

Two regions, each with a folder of its own as on two hosts, train a small model to a budget. In
every second run the server is killed at two fifths of it and its disk destroyed; the run is
rebuilt from the folders of its regions in another place and at another address, and the regions
are started again with that. Same spec and seed otherwise. OUT has one line for each run, and a
second call goes on after the last one; at the end the held-out losses stand side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from diloco_cli.launch.roles import serve_role, work_role
from diloco_cli.launch.subprocesses import LocalProcess
from diloco_cli.net.client import Client
from diloco_cli.observe.status import Status
from diloco_cli.worker.agent.trainer_process import end_trainer
from diloco_cli.worker.mailbox import Mailbox
from tests.live.processes import Live

REGIONS = ("paris", "tokyo")
LOST_AT = 0.4
"""Of the budget."""
PATIENCE = 3600.0


class OneRun:
    def __init__(self, folder: Path, seed: int, tokens: int) -> None:
        self.folder = folder
        self.run = Live(
            folder / "server-host",
            [{"name": name} for name in REGIONS],
            seed=seed,
            budget={"tokens": tokens},
            model={"kind": "decoder", "layers": 2, "width": 32, "heads": 2},
            data={"kind": "python-source", "limit": 2_000_000},
            inner={"batch": 4, "sequence": 64, "schedule": {"kind": "constant"}},
            sync={"fragments": 2, "every": 16},
            evaluate={"batches": 32, "every": 20},
        )
        self.server = self.run.serve()
        self.home = self.run.folder
        self.workers = self._work()

    def go(self, *, lose: bool) -> dict[str, Any]:
        began = time.monotonic()
        told = self._lose() if lose else {}
        self.run.exit_code(self.server, seconds=PATIENCE)
        summary = json.loads((self.home / "summary.json").read_text())
        assert summary["state"] == "finished" and summary["balanced"], summary
        for worker in self.workers:
            self.run.exit_code(worker, seconds=300)
        return {
            "heldout": summary["loss"]["heldout"],
            "outer_steps": summary["outer_steps"],
            "trained": summary["tokens"]["trained"],
            "applied": summary["tokens"]["applied"],
            "seconds": round(time.monotonic() - began, 1),
            **told,
        }

    def _lose(self) -> dict[str, Any]:
        budget = self.run.spec.budget.tokens
        self.run.wait_for(
            lambda: self._status().tokens.applied >= LOST_AT * budget,
            self.server,
            *self.workers,
            seconds=PATIENCE,
        )
        before = self._status()
        os.kill(self.server.pid, signal.SIGKILL)
        self.run.exit_code(self.server)
        lost_at = time.monotonic()
        shutil.rmtree(self.home / "server")
        for worker in self.workers:  # The new server is elsewhere.
            worker.ask()
        for worker in self.workers:
            self.run.exit_code(worker, seconds=300)
        new = self.folder / "another-host"
        folders = [self.folder / name for name in REGIONS]
        words = ["restore", "--from-regions", *folders, "--dir", new, "--yes"]
        done = subprocess.run(
            [sys.executable, "-m", "diloco_cli", *map(str, words)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        rebuilt_at = time.monotonic()
        self.home = new
        self.server = self.run.start(serve_role(new / "spec.resolved.yaml", new))
        self.run.wait_for(lambda: bool(self.server.url()), self.server, seconds=300)
        start = self._status().outer_steps
        self.workers = self._work()
        self.run.wait_for(
            lambda: self._status().outer_steps > start, self.server, *self.workers, seconds=600
        )
        down = time.monotonic() - lost_at
        self.run.wait_for(lambda: not self._awaited(), self.server, *self.workers, seconds=600)
        now = self._status().rebuilt
        assert now
        return {
            "lost_at": round(before.tokens.applied),
            "versions_lost": before.outer_steps - start,
            "tokens_lost": now.lost,
            "down_seconds": round(down, 1),
            "rebuilding_seconds": round(rebuilt_at - lost_at, 1),
            "load": round(os.getloadavg()[1], 1),
        }

    def _awaited(self) -> bool:
        status = self._status()
        # Who has joined has told what it lost once its trainer reports.
        return (
            not status.rebuilt
            or bool(status.rebuilt.awaited)
            or not all(region.training for region in status.regions)
        )

    def _work(self) -> list[LocalProcess]:
        url = str(self.server.url())
        return [
            self.run.start(work_role(self.run.file, self.folder / name, name, url=url, cores=()))
            for name in REGIONS
        ]

    def _status(self) -> Status:
        with Client(str(self.server.url())) as client:
            return client.status()

    def end(self) -> None:
        self.run.launcher.stop(self.run.started, grace=0.0)
        for name in REGIONS:
            end_trainer(Mailbox(self.folder / name / "regions" / name))


def table(lines: list[dict[str, Any]]) -> str:
    losses = {kind: [each for each in lines if each["run"] == kind] for kind in ("calm", "rebuilt")}
    rows = [
        f"seed {calm['seed']}: {calm['heldout']:.4f} undisturbed, {other['heldout']:.4f} rebuilt, "
        f"{other['heldout'] - calm['heldout']:+.4f}; down for {other['down_seconds']} s, "
        f"{other['versions_lost']} versions and {other['tokens_lost']:.0f} tokens lost"
        for calm, other in zip(losses["calm"], losses["rebuilt"], strict=False)
    ]
    calm = [each["heldout"] for each in losses["calm"]]
    if len(calm) > 1:
        spread = statistics.stdev(calm)
        rows.append(f"standard deviation of the undisturbed runs: {spread:.4f}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    text = chosen.out.read_text() if chosen.out.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    plan = [(seed, kind) for seed in range(chosen.seeds) for kind in ("calm", "rebuilt")]
    for seed, kind in plan[len(lines) :]:
        with tempfile.TemporaryDirectory() as folder:
            one = OneRun(Path(folder), seed, chosen.tokens)
            try:
                told = one.go(lose=kind == "rebuilt")
            finally:
                one.end()
        lines.append({"seed": seed, "run": kind, **told})
        with open(chosen.out, "a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(lines[-1], flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
