"""How well does `diloco plan` foretell a run?

    python -m tests.verify.foretell.plan FOLDER PLAN.json

FOLDER is of a `diloco chaos` without faults, PLAN.json what `diloco plan SPEC --probe URL
--format json` printed while it ran, with the URL that one of its workers was given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco_cli.observe.metrics import blocked_share
from diloco_cli.worker.mailbox import Mailbox

Event = dict[str, Any]
WITHIN = 0.15
WARM = 3
"""Versions of a fragment before its times are counted: regions do not start at one moment."""


def compared(folder: Path, plan: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """What was seen, and what the plan said."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    published = [event for event in events if event["kind"] == "published"]
    steady = [event for event in published if event["version"] > WARM]
    accepted = [event for event in events if event["kind"] == "accepted"]
    names, fragments = list(plan["step_seconds"]), len(plan["fragments"])
    traffic, expected = plan["traffic"], plan["expected"]
    yield "kB up, a frame", _mean(accepted, "bytes") / 1e3, traffic["fragment_up"] / 1e3
    yield "kB down, a version", _mean(published, "bytes") / 1e3, traffic["fragment_down"] / 1e3
    periods = [
        after["time"] - before["time"]
        for number in range(fragments)
        for before, after in itertools.pairwise(e for e in steady if e["fragment"] == number)
    ]
    round_time = expected["seconds"] * fragments / expected["versions"]
    yield "s from version to version", statistics.mean(periods), round_time
    members = statistics.mean(len(event["members"]) for event in steady) / len(names)
    yield "participation", members, expected["participation"]
    yield "utilisation", _utilisation(folder, names), expected["utilisation"]
    seconds = steady[-1]["time"] - steady[0]["time"]
    tokens = (steady[-1]["tokens"] - steady[0]["tokens"]) / seconds * 86400 / 1e6
    yield "M tokens a day", tokens, expected["tokens_per_day"] / 1e6


def _mean(events: list[Event], key: str) -> float:
    return statistics.mean(event[key] for event in events)


def _utilisation(folder: Path, names: list[str]) -> float:
    shares = []
    for name in names:
        progress = Mailbox(folder / "regions" / name).progress()
        assert progress is not None
        shares.append(blocked_share(progress.blocked, progress.worked) or 0.0)
    return 1.0 - statistics.mean(shares)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.verify.foretell.plan"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("plan", type=Path)
    given, missed = parser.parse_args(), 0
    print("| | seen | as planned | off by |\n| --- | --: | --: | --: |")
    for name, seen, said in compared(given.folder, json.loads(given.plan.read_text())):
        missed += abs(said / seen - 1) > WITHIN
        print(f"| {name} | {seen:,.4g} | {said:,.4g} | {said / seen - 1:+.1%} |")
    raise SystemExit(f"{missed} off by more than {WITHIN:.0%}" if missed else 0)


if __name__ == "__main__":
    main()
