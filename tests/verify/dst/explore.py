"""Plays the server's bad days, as many as there is patience for.

    python -m tests.verify.dst.explore --seeds 10000
    python -m tests.verify.dst.explore --from 4711 --trace             replay one run, every step
    python -m tests.verify.dst.explore --every-step                    die at each step of the disk
    python -m tests.verify.dst.explore --seeds 200 --bug published-twice
    python -m tests.verify.dst.explore --bugs                          find every planted defect

Ends with 1 if a promise was broken, and says which run to replay. A replay in another
process is the same to the letter: sets and dictionaries are iterated in a fixed order.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from tests.verify.dst.bugs import BUGS, planted
from tests.verify.dst.run_seed import Outcome, play
from tests.verify.dst.seeded_run import swept

PATIENCE = 600
"""Seeds within which a planted defect must be found."""

SWEPT = 160
"""Steps of the disk that the fixed run takes at least."""

Once = Callable[[int, str | None], Outcome]

SHOWN = (
    *("kills", "power cuts", "SIGTERM", "failed", "stopped", "EIO", "ENOSPC"),
    *("lost", "reply lost", "twice", "cut", "gone", "fenced"),
    *(
        "amended",
        "joined unlisted",
        "retired",
        "removed",
        "lanes moved",
        "restart",
        "pause",
        "rival",
        "restore",
        "lose",
        "leave",
        "stop",
        "clock",
    ),
)


def attempt(seed: int, bug: str | None = None) -> Outcome:
    """Plays the run of a seed, or the run of that number in which this defect is looked for."""
    of = BUGS[bug].setting if bug else None
    with planted(bug):
        return play(seed, of(seed) if of else None)


def at_step(step: int, bug: str | None = None) -> Outcome:
    """Lets the server die at one step of its disk: killed, or without power, whichever is worse."""
    with planted(bug):
        killed = play(step, swept(step, power=False))
        return killed if killed.problem else play(step, swept(step, power=True))


def find(bug: str, patience: int = PATIENCE) -> Outcome | None:
    """The first run in which a planted defect shows."""
    about = BUGS[bug]
    once = at_step if about.swept else attempt
    runs = range(1, SWEPT) if about.swept else range(patience)
    return next((found for each in runs if (found := once(each, bug)).problem), None)


class Table:
    def __init__(self, total: int) -> None:
        self.total, self.runs, self.broken = total, 0, 0
        self.sums: Counter[str] = Counter()
        self.seconds, self.events = 0.0, 0
        self.began = time.monotonic()

    def add(self, how: str, outcome: Outcome) -> None:
        self.runs += 1
        self.sums.update(outcome.count)
        self.seconds += outcome.seconds
        self.events += outcome.events
        if outcome.problem:
            self.broken += 1
            print(f"{outcome.problem.rstrip()}\n    replay: {how} --trace", flush=True)
        if self.runs % 100 == 0:
            print(f"… {self.line()}", file=sys.stderr, flush=True)

    def line(self) -> str:
        took = time.monotonic() - self.began
        return f"{self.runs} of {self.total} runs, {self.broken} broken, {took:.0f} s"

    def print(self) -> None:
        print(
            f"{self.line()}; {self.seconds / 3600:.1f} virtual hours, {self.events} events, "
            f"{self.sums['acknowledged']} frames acknowledged, {self.sums['versions']} versions"
        )
        print(", ".join(f"{self.sums[kind]} × {kind}" for kind in SHOWN))


def _command(*arguments: object) -> str:
    return " ".join(("python -m tests.verify.dst.explore", *map(str, arguments)))


def runs(once: Once, how: str, start: int, count: int, bug: str | None, *, trace: bool) -> int:
    """Plays one run after another; gives the number of those that broke a promise."""
    table = Table(count)
    more = ("--bug", bug) if bug else ()
    with suppress(KeyboardInterrupt):  # Whoever has seen enough still gets the sums.
        for number in range(start, start + count):
            outcome = once(number, bug)
            if trace:
                print("\n".join(outcome.trace))
            table.add(_command(how, number, *more), outcome)
    table.print()
    return table.broken


def planted_bugs() -> int:
    """Looks for every planted defect, twice; gives the number of those that stay hidden."""
    missed = 0
    for bug, about in BUGS.items():
        found = find(bug)
        if found is None:
            missed += 1
            print(f"{bug:24} NOT FOUND ({about.says})", flush=True)
            continue
        again = (at_step if about.swept else attempt)(found.seed, bug)
        same = again.trace == found.trace
        missed += not same
        what = "step" if about.swept else "seed"
        why = found.problem.strip().splitlines()[-1][:60]
        how = "replays" if same else "DOES NOT REPLAY"
        print(f"{bug:24} {what} {found.seed:<4} {how}: {why}", flush=True)
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verify.dst.explore")
    parser.add_argument("--seeds", type=int, help="how many runs")
    parser.add_argument("--from", type=int, default=0, dest="start", help="first seed")
    parser.add_argument("--trace", action="store_true", help="print every step")
    parser.add_argument("--bug", choices=sorted(BUGS), metavar="NAME", help="see bugs.py")
    parser.add_argument("--bugs", action="store_true", help="find every planted defect")
    parser.add_argument("--every-step", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.bugs:
        return int(planted_bugs() > 0)
    options = {"bug": asked.bug, "trace": asked.trace}
    if asked.every_step:
        how, start = "--every-step --seeds 1 --from", max(1, asked.start)
        return int(runs(at_step, how, start, asked.seeds or SWEPT, **options) > 0)
    return int(runs(attempt, "--from", asked.start, asked.seeds or 1, **options) > 0)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.verify.dst.explore", *sys.argv[1:]])
    sys.exit(main())
