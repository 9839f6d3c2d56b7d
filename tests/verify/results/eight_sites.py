"""What do eight real regions send over lines as narrow as were published?

    diloco chaos tests/verify/results/eight-sites.yaml --dir build/chaos/eight-sites
    python -m tests.verify.results.eight_sites build/chaos/eight-sites \
        --json docs/results/raw/eight-sites.json --png docs/results/eight-sites.png

Reads the run's own events and what its emulated links carried. A site's rate is told as published,
for 5 B parameters in steps of 1 s: bits a step and parameter of the run, times 5 B.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from diloco_cli.observe.events import Event, read_events
from tests.verify.results.goodput import canvas, finish

PUBLISHED = 0.84
"""Gbit/s of each of eight sites."""
PARAMETERS = 5e9
STEP = 1.0
"""Seconds, of the published rate."""
BODY_SHARE = 0.85
"""Of a line that bodies get, as `diloco bench link` asks for and the simulator assumes."""


class FrameBits(NamedTuple):
    """Bits per parameter of one round of a fragment."""

    version: int
    up: float
    """Mean of its contributions."""
    down: float


def rounds_of(events: Iterable[Event], sizes: Sequence[int]) -> list[FrameBits]:
    """Of every round that was published, oldest first."""
    up: dict[tuple[int, int], list[float]] = {}
    found: list[FrameBits] = []
    for event in events:
        about = event.fields
        if event.kind == "accepted":
            place = about["fragment"], about["version"]
            # Of the version that it makes another of.
            up.setdefault(place, []).append(8 * about["bytes"] / sizes[place[0]])
        elif event.kind == "published":
            fragment, version = about["fragment"], about["version"]
            if sent := up.get((fragment, version - 1)):
                bits = 8 * about["bytes"] / sizes[fragment]
                found.append(FrameBits(version, mean(sent), bits))
    return found


def by_version(rounds: Sequence[FrameBits]) -> list[FrameBits]:
    """The mean over all fragments."""
    versions = sorted({each.version for each in rounds})
    of = {version: [each for each in rounds if each.version == version] for version in versions}
    return [
        FrameBits(version, mean(r.up for r in mine), mean(r.down for r in mine))
        for version, mine in of.items()
    ]


def measured(folder: Path) -> dict[str, Any]:
    from diloco_cli.assemble import resolve
    from diloco_cli.run.folder import read_json
    from diloco_cli.spec.load import load_spec
    from diloco_cli.spec.resolved import FILE

    spec, record = load_spec(folder / FILE).spec, read_json(folder / "chaos.json")
    assert spec.chaos is not None and spec.chaos.step_seconds is not None
    sizes = [fragment.size for fragment in resolve(spec).layout.fragments]
    events = list(read_events(folder / "events.jsonl"))
    rounds = rounds_of(events, sizes)
    seconds, step = record["seconds"], spec.chaos.step_seconds
    links: dict[str, dict[str, int]] = record["links"]
    scale = 8 / seconds * step / sum(sizes) * PARAMETERS / STEP / 1e9
    rates = {way: [link[way] * scale for link in links.values()] for way in ("up", "down")}
    began = next(e.time for e in events if e.kind == "published")
    within = [e for e in events if e.kind == "published" and e.time - began <= seconds]
    return {
        "regions": len(spec.regions),
        "parameters": sum(sizes),
        "fragments": len(sizes),
        "every": spec.sync.every,
        "step_seconds": step,
        "seconds": seconds,
        "link": spec.chaos.link,
        "rounds": len(rounds),
        "pace": len(within) / len(sizes) / (seconds / step / spec.sync.every),
        "participation": record["goodput"]["participation"],
        "goodput": record["goodput"]["time"],
        "blocked": record["blocked"],
        "loss": record["loss"]["heldout"],
        "bits": [
            [version, round(up, 3), round(down, 3)] for version, up, down in by_version(rounds)
        ],
        "gbits": {way: [round(rate, 3) for rate in each] for way, each in rates.items()},
    }


def table(found: dict[str, Any]) -> str:
    bits = [FrameBits(*each) for each in found["bits"]]
    last = bits[-1].version
    parts = [(1, 2), (3, last // 3), (last // 3 + 1, 2 * last // 3), (2 * last // 3 + 1, last)]
    lines = ["| versions | bits per parameter up | down |", "| --- | --: | --: |"]
    for first, until in parts:
        mine = [each for each in bits if first <= each.version <= until]
        if mine:
            up, down = mean(each.up for each in mine), mean(each.down for each in mine)
            lines.append(f"| {first} to {until} | {up:.2f} | {down:.2f} |")
    lines += [
        "",
        "| of each site, as 5 B parameters in steps of 1 s | up | down |",
        "| --- | --: | --: |",
    ]
    frames = [mean(getattr(each, way) for each in bits) for way in ("up", "down")]
    need = [each * found["pace"] * PARAMETERS / found["every"] / STEP / 1e9 for each in frames]
    carried = [mean(found["gbits"][way]) for way in ("up", "down")]
    rows = {
        "frames alone, Gbit/s": need,
        f"frames, where bodies get {BODY_SHARE:.0%} of a line": [e / BODY_SHARE for e in need],
        "all that its line carried": carried,
    }
    lines += [f"| {name} | {up:.2f} | {down:.2f} |" for name, (up, down) in rows.items()]
    lines += [
        "",
        f"Published: {PUBLISHED}. {found['seconds']:.0f} s, {found['rounds']} rounds, pace "
        f"{found['pace']:.0%} of one round in {found['every']} steps, participation "
        f"{found['participation']:.1%}, blocked {found['blocked']:.1%}, held-out loss "
        f"{found['loss']:.3f}.",
    ]
    return "\n".join(lines)


def draw(found: dict[str, Any], file: Path) -> None:
    figure, axes = canvas()
    versions, up, down = zip(*found["bits"], strict=True)
    axes.plot(versions, up, marker="o", markersize=3, label="up, mean of the contributions")
    axes.plot(versions, down, marker="o", markersize=3, label="down")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("version of a fragment, mean of all fragments")
    axes.set_ylabel("bits per parameter, headers included")
    finish(figure, axes, f"{found['regions']} regions, {found['fragments']} fragments", file)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tests.verify.results.eight_sites")
    parser.add_argument("run", type=Path, help="the folder of the run, or a file that --json wrote")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    asked = parser.parse_args(words)
    found = json.loads(asked.run.read_text()) if asked.run.is_file() else measured(asked.run)
    print(table(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.png:
        draw(found, asked.png)


if __name__ == "__main__":
    main()
