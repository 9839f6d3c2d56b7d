"""A run of a hundred million parameters on this machine: does it train, and survive two kills?

    python -m tests.verify.results.hundred_million --out build/hundred-million
    python -m tests.verify.results.hundred_million --rounds 3 --set model.layers=1   (a trial)

Two regions over real processes: one device, and a mesh over two processes, as on two hosts. After
a third of the outer steps the trainer of the mesh is killed with SIGKILL, after two thirds the
server. The run ends when every fragment has had `rounds` outer steps. A program that is stopped
and started again goes on with the run in its folder.

Ends with 1 unless every fragment has had its outer steps, both kills happened, the held-out loss
fell and every trained token has one fate.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from diloco_cli.errors import DilocoError
from diloco_cli.observe.events import read_events
from diloco_cli.observe.status import Status
from diloco_cli.run.ask import ShortCalls
from diloco_cli.run.folder import address_of, last_summary
from diloco_cli.worker.mailbox import Mailbox
from tests import ROOT

SPEC = Path(__file__).with_name("hundred-million.yaml")
POLL = 2.0
MESH = "mesh"


class Progress:
    """What has happened so far; kept in a file, so that the program may be started again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.kills: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []

    def killed(self, what: str, status: Status) -> None:
        found = {"what": what, "time": time.time(), "versions": list(status.clock)}
        self.kills.append({**found, "applied": status.tokens.applied})
        self._file.write_text(json.dumps(self.kills, indent=1) + "\n")


def train(folder: Path, rounds: int, overrides: list[str]) -> Progress:
    """Runs until every fragment has had its outer steps; kills on the way."""
    folder.mkdir(parents=True, exist_ok=True)
    progress, run = Progress(folder / "kills.json"), folder / "run"
    command = [sys.executable, "-m", "diloco_cli", "run", str(SPEC), "--dir", str(run)]
    command += [word for each in overrides for word in ("--set", each)]
    with open(folder / "run.log", "ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        while process.poll() is None:
            time.sleep(POLL)
            status = _status(run)
            if status is None:
                continue
            done = min(status.clock)
            if done >= rounds:
                break
            _kill_when_due(run, status, progress, done / rounds)
        else:
            raise SystemExit(f"the run ended by itself; see {folder}/run.log")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait()
    return progress


def _kill_when_due(run: Path, status: Status, progress: Progress, share: float) -> None:
    targets = (
        (1 / 3, f"trainer of {MESH}", Mailbox(run / "regions" / MESH).trainer_lock_holder()),
        (2 / 3, "server", address_of(run).pid),
    )
    at, what, pid = targets[min(len(progress.kills), len(targets) - 1)]
    if len(progress.kills) == len(targets) or share < at or pid is None:
        return
    trains = any(region.name == MESH and region.training for region in status.regions)
    if trains or what == "server":  # A trainer that has not begun yet has nothing to lose.
        os.kill(pid, signal.SIGKILL)
        progress.killed(what, status)


def _status(run: Path) -> Status | None:
    url = address_of(run).url
    try:
        return ShortCalls().status(url) if url else None
    except DilocoError:
        return None


def account(folder: Path, progress: Progress) -> dict[str, Any]:
    """What came of the run, from its own records."""
    run = folder / "run"
    summary = last_summary(run)
    if summary is None or summary.tokens is None:
        raise SystemExit(f"{run} has no summary")
    events = list(read_events(run / "events.jsonl"))
    tokens, curve = 0.0, []
    for event in sorted(events, key=lambda event: event.time):
        if event.kind == "published":
            tokens = event.fields["tokens"]
        elif event.kind == "evaluated":
            curve.append((event.time, tokens, event.fields["loss"]))
    starts = [event for event in events if event.kind == "first-step"]
    return {
        "parameters": 0,
        "versions": [fragment.version for fragment in summary.fragments],
        "kills": progress.kills,
        "tokens": summary.tokens.plain(),
        "lost": {name: region.lost for name, region in summary.regions.items()},
        "balanced": summary.balanced,
        "loss": summary.loss.plain(),
        "wire": summary.wire.plain() if summary.wire else {},
        "wall_seconds": summary.wall_seconds,
        "starts": [
            {"region": each.fields["region"], "step": each.fields["step"], "time": each.time}
            for each in starts
        ],
        "curve": curve,
        "replay": _replay(run),
    }


def _replay(run: Path) -> str:
    """Whether the journal and the frames give the published weights again."""
    command = [sys.executable, "-m", "diloco_cli", "replay", str(run)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "equal" if ended.returncode == 0 else (ended.stdout + ended.stderr)[-500:]


def draw(found: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    began = found["curve"][0][0]
    axes.plot(
        [(at - began) / 60 for at, *_ in found["curve"]],
        [loss for *_, loss in found["curve"]],
        marker=".",
    )
    for kill in found["kills"]:
        at = (kill["time"] - began) / 60
        axes.axvline(at, color="tab:red", linestyle=":")
        axes.text(at, axes.get_ylim()[1], f" SIGKILL: {kill['what']}", va="top", fontsize=8)
    axes.set_xlabel("minutes since the first evaluation")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.set_title(
        f"{found['parameters'] / 1e6:.0f} M parameters, two regions: "
        f"{min(found['versions'])} outer steps of every fragment"
    )
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def faults(found: dict[str, Any], rounds: int) -> list[str]:
    """What is not as it should be."""
    loss, wrong = found["loss"], []
    if min(found["versions"]) < rounds:
        wrong.append(f"outer steps {found['versions']}, not {rounds} of each fragment")
    if len(found["kills"]) < 2:
        wrong.append(f"{len(found['kills'])} kills, not 2")
    if not (loss["heldout"] < loss["first"]):
        wrong.append(f"the held-out loss went from {loss['first']} to {loss['heldout']}")
    if not found["balanced"]:
        wrong.append("tokens without a fate, or with two")
    if found["replay"] != "equal":
        wrong.append(f"replay: {found['replay']}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("build/hundred-million"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--png", type=Path, default=None)
    asked = parser.parse_args()
    progress = train(asked.out, asked.rounds, asked.overrides)
    found = account(asked.out, progress)
    found["parameters"] = _parameters(asked.out / "run")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.png:
        draw(found, asked.png)
    wrong = faults(found, asked.rounds)
    print(
        f"{found['parameters']:,} parameters, outer steps {found['versions']}, "
        f"{found['tokens']['applied']:,.0f} tokens applied of {found['tokens']['trained']:,.0f} "
        f"trained, held-out loss {found['loss']['first']:.3f} to {found['loss']['heldout']:.3f}, "
        f"{(found['wall_seconds'] or 0) / 60:.0f} min, kills: "
        f"{', '.join(kill['what'] for kill in found['kills'])}; replay: {found['replay']}"
    )
    for each in wrong:
        print(f"NOT MET: {each}")
    return 1 if wrong else 0


def _parameters(run: Path) -> int:
    from diloco_cli.assemble import load_run, resolve
    from diloco_cli.models import parameters
    from diloco_cli.run.folder import RESOLVED

    return parameters(resolve(load_run(run / RESOLVED).spec).model)


if __name__ == "__main__":
    sys.exit(main())
