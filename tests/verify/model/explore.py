"""Tries the protocol on as many unlucky runs as there is patience for.

    python -m tests.verify.model.explore --seeds 1000
    python -m tests.verify.model.explore --seeds 1 --start 4711           replay one run
    python -m tests.verify.model.explore --every-crash-point
    python -m tests.verify.model.explore --seeds 200 --rule-off "exact chain"

Ends with 1 if a promise was broken, and says which run to replay.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

from diloco_cli.core import claims, ledger
from tests.verify.model.amendments import amended
from tests.verify.model.rules import RULES, without
from tests.verify.model.run_seed import Outcome, play
from tests.verify.model.seeded_run import (
    LONGEST_GAP,
    SCHEDULES,
    Setting,
    drawn,
    fixed,
    with_claims,
    with_members,
)
from tests.verify.model.virtual_time import Violation

AMENDED_SHARE = 4
"""All but one run in so many are amended."""
MEMBERS_SHARE = 3
"""All but one run in so many have regions that come, are forgotten, removed and added."""
CLAIMS_SHARE = 7
"""In one run in so many a region claims more than it has done, and the server's clock jumps."""
CALM_SHARE = 5
"""One run in so many has no faults: some promises are only made then."""


def attempt(setting: Setting, off: str | None = None) -> Outcome:
    """Plays one run; whatever the core raises is a broken promise, too."""
    try:
        with without(off), _in_small(setting):
            return play(setting, {off} if off else ())
    except Exception as error:
        outcome = Outcome(setting.seed)
        outcome.violation = Violation("x", f"{error!r}\n{traceback.format_exc()}")
        return outcome


@contextmanager
def _in_small(setting: Setting) -> Iterator[None]:
    """What takes days in a real run takes a part of one here."""
    small = (("FIRST_CREDIT", 0.0), ("LEARNING", 40.0), ("ENOUGH", 4), ("LONGEST_GAP", LONGEST_GAP))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ledger, "MOST_RETIRED", setting.keeps))
        for name, value in small:
            stack.enter_context(mock.patch.object(claims, name, value))
        yield


def schedule(seed: int, off: str | None = None) -> Setting:
    """The run of a seed, made likelier to need the rule that is off."""
    if off is None:
        setting = drawn(seed, calm=seed % CALM_SHARE == 0)
        setting = with_members(setting) if seed % MEMBERS_SHARE else setting
        setting = amended(setting) if seed % AMENDED_SHARE else setting
        return setting if seed % CLAIMS_SHARE else with_claims(setting)
    return RULES[off].focus(drawn(seed, calm=RULES[off].calm))


def random_runs(first: int, count: int, off: str | None = None) -> Iterator[tuple[str, Outcome]]:
    rule = f' --rule-off "{off}"' if off else ""
    for seed in range(first, first + count):
        yield f"--seeds 1 --start {seed}{rule}", attempt(schedule(seed, off), off)


def crash_points(name: str, step: int = 1) -> Iterator[tuple[str, Outcome]]:
    """Crashes one process of a fixed schedule at each point at which one may die."""
    points = attempt(fixed(name)).points
    for point in range(1, points + 1, step):
        yield f'--schedule "{name}" --point {point}', attempt(fixed(name, point))


class Table:
    """Counts what happened, and what broke."""

    def __init__(self) -> None:
        self.runs = 0
        self.sums: Counter[str] = Counter()
        self.longest = 0
        self.broken: Counter[str] = Counter()
        self.began = time.monotonic()

    def add(self, how: str, outcome: Outcome) -> None:
        self.runs += 1
        self.sums.update(outcome.stats)
        self.longest = max(self.longest, outcome.stats["left out"])
        if outcome.violation:
            self.broken[outcome.violation.kind] += 1
            print(f"{outcome.violation}\n    replay: {how}", flush=True)
        if self.runs % 250 == 0:
            print(f"… {self.line()}", file=sys.stderr, flush=True)

    def line(self) -> str:
        broken, seconds = self.broken.total(), time.monotonic() - self.began
        rounds = self.sums["rounds"]
        return f"{self.runs} runs, {rounds} rounds, {broken} violations, {seconds:.0f} s"

    def print(self) -> None:
        print(f"\n{self.line()}")
        for kind in ("trainer", "agent", "server"):
            print(f"{self.sums[kind]:>10} × {kind} crashed")
        strokes = ("pause", "cut", "leave", "lose", "restore", "rival", "fenced", "dropped")
        lanes = ("grants", "silent lanes", "windows", "repeated", "left out windows")
        claimed = ("resumed", "paced", "uncounted")
        for kind in (*strokes, "arrived", "forgotten", "removed", "reopened", *claimed, *lanes):
            print(f"{self.sums[kind]:>10} × {kind}")
        print(f"{self.longest:>10} rounds were the longest that a live region was left out")
        for kind, count in sorted(self.broken.items()):
            print(f"{count:>10} violations of ({kind})")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verify.model.explore")
    parser.add_argument("--seeds", type=int, default=0, help="random runs")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--rule-off", choices=sorted(RULES), metavar="NAME", help="see rules.py")
    parser.add_argument("--every-crash-point", action="store_true")
    parser.add_argument("--schedule", choices=SCHEDULES, help="one fixed schedule")
    parser.add_argument("--point", type=int, default=0, help="crash there")
    asked = parser.parse_args(arguments)

    table = Table()
    for how, outcome in random_runs(asked.start, asked.seeds, asked.rule_off):
        table.add(how, outcome)
    if asked.every_crash_point:
        for name in SCHEDULES:
            for how, outcome in crash_points(name):
                table.add(how, outcome)
    if asked.schedule:
        how = f'--schedule "{asked.schedule}" --point {asked.point}'
        table.add(how, attempt(fixed(asked.schedule, asked.point)))
    table.print()
    return 1 if table.broken else 0


if __name__ == "__main__":
    sys.exit(main())
