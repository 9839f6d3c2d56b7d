"""Is the budget a limit? Whole runs, as `diloco run` makes them, and how far each goes beyond it.

    python -m tests.verify.results.budget --out build/budget

`smoke.yaml`, `quickstart.yaml`, and `smoke.yaml` with one trainer halted (SIGSTOP) for a minute as
soon as it runs: to everybody else it compiles so much longer. Goal: what is applied is at most two
rounds of all regions beyond the budget, and no round short of it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from diloco_cli.assemble import load_run
from diloco_cli.observe.events import read_events
from tests import ROOT

HALT_SECONDS = 60.0
DEADLINE = 1800.0
CASES = {"smoke": False, "quickstart": False, "smoke, one trainer halted": True}


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    case: str
    budget: float
    applied: float
    round: float
    """Tokens of one round: `sync.every` steps of every region."""
    seconds: float
    head_start: float
    """Tokens that the other region had sent before the halted one sent its first frame."""
    balanced: bool

    @property
    def holds(self) -> bool:
        beyond = self.applied - self.budget
        return self.balanced and -self.round < beyond <= 2 * self.round


def trainer_of(folder: Path, region: str) -> psutil.Process | None:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "trainer" in words and str(folder) in words and region in words:
            return process
    return None


def halted(run: subprocess.Popen[bytes], folder: Path, region: str) -> None:
    """Halts a region's trainer for a minute as soon as there is one."""
    while (process := trainer_of(folder, region)) is None:
        if run.poll() is not None:
            return
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)
    time.sleep(HALT_SECONDS)
    process.send_signal(signal.SIGCONT)


def play(case: str, out: Path) -> Outcome:
    file = ROOT / "pipelines" / f"{case.partition(',')[0]}.yaml"
    spec, folder = load_run(file).spec, (out / case.replace(", ", "-").replace(" ", "-")).resolve()
    words = [sys.executable, "-m", "diloco_cli", "run", str(file), "--dir", str(folder), "--fresh"]
    began, slow = time.monotonic(), spec.regions[0].name
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{folder.name}.log").open("wb") as log:
        run = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        if CASES[case]:
            halted(run, folder, slow)
        code = run.wait(DEADLINE)
    if code:
        raise SystemExit(f"{case}: exit code {code}, see {log.name}")
    summary = json.loads((folder / "summary.json").read_text())
    steps = sum(
        inner.batch * inner.sequence
        for inner in (spec.inner_of(region.name) for region in spec.regions)
    )
    return Outcome(
        case,
        float(spec.budget.tokens),
        summary["tokens"]["applied"],
        float(spec.sync.every * steps),
        round(time.monotonic() - began, 1),
        _accepted_before(folder, slow) / spec.sync.fragments if CASES[case] else 0.0,
        summary["balanced"],
    )


def _accepted_before(folder: Path, region: str) -> float:
    """Tokens in the others' frames, of all fragments, that came before the first of a region."""
    tokens = 0.0
    for event in read_events(folder / "events.jsonl"):
        if event.kind == "accepted" and event.fields.get("region") == region:
            break
        if event.kind == "accepted":
            tokens += float(event.fields["tokens"])
    return tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/budget"))
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    outcomes = []
    for case in options.case or CASES:
        outcomes.append(play(case, options.out))
        print(json.dumps({**asdict(outcomes[-1]), "holds": outcomes[-1].holds}), flush=True)
    return 0 if all(outcome.holds for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
