"""Kills the server again and again under load; ends with 1 if a promise was broken.

    python -m tests.verify.durability.killloop --kills 1000 --results FILE

Four client processes upload as fast as the server takes it. At random moments the server
gets SIGKILL; its disk is then compared with what every client was told, and the weights are
made again from the journal. The kills are done in chunks, each with a run folder of its own
and the next seed; FILE has one line for each chunk that is done, and a second call goes on
after the last one. Most starts are forks of a process that has all modules loaded;
one in twenty is the real thing, and only those are timed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.verify.durability.killable_server import Broken, Stage

CHUNK = 200
COLD = 20
"""One start in so many loads all of Python itself, and is timed; the others are forks."""


def kill_again_and_again(
    folder: Path, kills: int, seed: int, *, cold_every: int = COLD
) -> dict[str, Any]:
    """One run; raises Broken, or gives what was seen."""
    rng, stage = random.Random(seed), Stage(folder)
    starts: list[float] = []
    forks: list[float] = []
    try:
        stage.start()
        stage.add_clients()
        for number in range(kills):
            stage.until_accepted(1)
            until = time.monotonic() + rng.uniform(0.0, 0.4)
            stage.wait(lambda until=until: stage.accepted and time.monotonic() >= until)
            stage.kill()
            stage.check()
            cold = number % cold_every == cold_every - 1
            began = stage.start(cold=cold)
            stage.wait(lambda began=began: stage.accepted and stage.first_accepted(began))
            first = stage.first_accepted(began)
            assert first is not None
            (starts if cold else forks).append(first - began)
            if number % 25 == 24:
                print(f"seed {seed}: {number + 1} of {kills} kills", file=sys.stderr, flush=True)
        stage.until_published()
        stage.kill()
        found = stage.check()
    except (Broken, AssertionError) as error:
        raise Broken(f"seed {seed}, {folder}: {error}") from error
    finally:
        stage.close()
    return {
        "seed": seed,
        "kills": kills,
        "acknowledged": stage.accepted,
        "lost": 0,
        "doubled": 0,
        "versions": sum(line.version for line in found.lines),
        "made_again": stage.made_again,
        "compacted_up_to": found.base,
        "starts": [round(each, 3) for each in starts],
        "forks": [round(each, 3) for each in forks],
    }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("build/killloop.jsonl"))
    parser.add_argument("--cold-every", type=int, default=COLD)
    asked = parser.parse_args()
    done = []
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    if asked.results.exists():
        done = [json.loads(line) for line in asked.results.read_text().splitlines()]
    seed, left = asked.seed + len(done), asked.kills - sum(each["kills"] for each in done)
    while left > 0:
        with tempfile.TemporaryDirectory(prefix="diloco-kill-") as folder:
            try:
                kills = min(CHUNK, left)
                result = kill_again_and_again(
                    Path(folder) / "run", kills, seed, cold_every=asked.cold_every
                )
            except Broken as error:
                print(f"broken: {error}", file=sys.stderr)
                return 1
        done.append(result)
        with open(asked.results, "a") as file:
            file.write(json.dumps(result) + "\n")
        seed, left = seed + 1, left - result["kills"]
        print(summary(done), flush=True)
    print(summary(done))
    return 0


def summary(done: list[dict[str, Any]]) -> str:
    starts = [each for result in done for each in result["starts"]] or [math.nan]
    total = {key: sum(result[key] for result in done) for key in ("kills", "acknowledged")}
    versions = {key: sum(result[key] for result in done) for key in ("versions", "made_again")}
    return (
        f"{total['kills']} kills, {total['acknowledged']} acknowledged, lost 0, doubled 0, "
        f"{versions['made_again']} of {versions['versions']} versions made again, all equal; "
        f"restart to first accepted upload p50 {percentile(starts, 0.5):.2f} s, "
        f"p99 {percentile(starts, 0.99):.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
