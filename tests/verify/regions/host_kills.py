"""Kills the parts of a region of two hosts, beside a region of one device, under TLS.

    python -m tests.verify.regions.host_kills --kills 100 --results FILE

First every failpoint of several hosts once, each in the process where it is, and kills while both
hosts write a sharded checkpoint; then random kills of the lead, the follower, its supervisor, the
agent, or all of a host at once, at random moments; one in seven comes before the region has
recovered from the one before. After each the region must step again by itself. The kills are done
in chunks, each with a run of its own: at its end every token must have one fate, and a replay must
give every version to the bit. FILE has a line for each chunk that is done, and a second call goes
on after the last one. The run of a chunk that was broken stays beside FILE.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.verify.regions.two_hosts import (
    AGENT_POINT,
    DEVICES,
    FOLLOWER_POINTS,
    LEAD_POINTS,
    SHARDED,
    SURVIVED,
    Broken,
    TwoHosts,
    strikes,
    two_hosts,
)

CHUNK = 10
FILE_POINTS = [point for point in (*LEAD_POINTS, *FOLLOWER_POINTS) if point != "save.sent"]
MID_WRITE = ("lead", "follower", "host 0", "host 1")
"""Killed while both hosts write a sharded checkpoint."""


def kill_at_points(hosts: TwoHosts, points: list[str]) -> list[dict[str, Any]]:
    done = []
    for number, point in enumerate(points):
        if point == AGENT_POINT:
            hosts.kill_at_an_amendment(rate=0.001 * (number + 1))
        elif point.startswith("mid-write: "):
            hosts.kill_in_mid_write(point.removeprefix("mid-write: "))
        else:
            hosts.kill_at(point)
        began = time.monotonic()
        hosts.until_it_steps()
        done.append({"killed": point, "seconds": round(time.monotonic() - began, 1)})
        _say(f"{point}: {done[-1]['seconds']} s")
    return done


def kill_at_random(hosts: TwoHosts, kills: int, seed: int) -> list[dict[str, Any]]:
    done: list[dict[str, Any]] = []
    other_than: str | None = None
    for number, (part, delay, recovers) in enumerate(strikes(kills, seed)):
        time.sleep(delay)  # At any moment of a round.
        if part not in SURVIVED:
            other_than = hosts.generation()
        began = time.monotonic()
        hosts.kill(part)
        done.append({"killed": part})
        if recovers or number == kills - 1:
            hosts.until_it_steps(other_than=other_than)
            done[-1]["seconds"], other_than = round(time.monotonic() - began, 1), None
        _say(f"{number + 1} of {kills}: {part}, {done[-1].get('seconds', 'no')} s")
    return done


@dataclass(frozen=True)
class Chunk:
    """What is killed in one run."""

    name: str
    sharded: bool = False
    points: tuple[str, ...] = ()
    kills: int = 0
    seed: int = 0

    def run(self, folder: Path) -> dict[str, Any]:
        right = {"checkpoint": SHARDED} if self.sharded else None
        with two_hosts(folder, patience=600.0, right=right) as hosts:
            hosts.until_it_steps()
            done = kill_at_points(hosts, list(self.points))
            done += kill_at_random(hosts, self.kills, self.seed)
            books = hosts.stop()
        return {"chunk": self.name, "kills": done, "books": books, "load": os.getloadavg()[1]}


def plan(kills: int) -> list[Chunk]:
    """Failpoints first; every other run of random kills has sharded checkpoints."""
    points = [
        Chunk("failpoints, first half", points=tuple(FILE_POINTS[:4])),
        Chunk("failpoints, second half", points=tuple(FILE_POINTS[4:])),
        Chunk("failpoints, sharded", sharded=True, points=("save.sent", AGENT_POINT)),
        Chunk(
            "in mid-write", sharded=True, points=tuple(f"mid-write: {part}" for part in MID_WRITE)
        ),
    ]
    for seed, first in enumerate(range(0, kills, CHUNK)):
        number = min(CHUNK, kills - first)
        points.append(Chunk(f"random {seed}", sharded=seed % 2 == 1, kills=number, seed=seed))
    return points


def table(chunks: list[dict[str, Any]]) -> str:
    """What was killed, how often, and how long until the region stepped again."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    count: collections.Counter[str] = collections.Counter()
    for kill in (kill for chunk in chunks for kill in chunk["kills"]):
        count[kill["killed"]] += 1
        if "seconds" in kill:  # Not where the next kill came before it had recovered.
            times[kill["killed"]].append(kill["seconds"])
    lines = ["| killed | times | seconds to the next step, median | longest |"]
    lines.append("| --- | --: | --: | --: |")
    for what, number in count.items():
        known = sorted(times[what])
        figures = (f"{known[len(known) // 2]:.0f}", f"{known[-1]:.0f}") if known else ("–", "–")
        lines.append(f"| {what} | {number} | {' | '.join(figures)} |")
    sums = collections.Counter()
    for chunk in chunks:
        sums.update({key: chunk["books"][key] for key in chunk["books"] if key != "share"})
    said = ", ".join(f"{key} {value:,.0f}" for key, value in sums.items())
    return "\n".join([*lines, "", f"{len(chunks)} runs, {count.total()} kills: {said}"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(kills: int, results: Path) -> int:
    os.environ["XLA_FLAGS"] = DEVICES
    results.parent.mkdir(parents=True, exist_ok=True)
    chunks = [json.loads(line) for line in results.open()] if results.exists() else []
    for chunk in plan(kills):
        if chunk.name in {done["chunk"] for done in chunks}:
            continue
        _say(chunk.name)
        place = results.with_suffix(".run")
        shutil.rmtree(place, ignore_errors=True)
        try:
            chunks.append(chunk.run(place))
        except Broken as error:
            _say(f"broken, {chunk.name}: {error}\nits run is in {place}")
            return 1
        shutil.rmtree(place)
        with results.open("a") as file:
            file.write(json.dumps(chunks[-1]) + "\n")
    print(table(chunks))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--results", type=Path, default=Path("build/host-kills.jsonl"))
    chosen = parser.parse_args()
    sys.exit(main(chosen.kills, chosen.results))
