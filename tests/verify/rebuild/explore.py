"""Many seeds of lost and set-back servers: python -m tests.verify.rebuild.explore --seeds 3000"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

from tests.verify.rebuild.rules import NAMES, Broken, Rules
from tests.verify.rebuild.world import World


def explore(seeds: range, rules: Rules | None = None) -> tuple[Counter[str], dict[int, str]]:
    """What happened in all of them, and the seeds that broke a promise."""
    total, broken = Counter[str](), dict[int, str]()
    for seed in seeds:
        world = World(seed, rules)
        try:
            total += world.go()
        except Broken as error:
            broken[seed] = str(error)
    return total, broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--rules", action="store_true", help="each rule switched off in turn")
    chosen = parser.parse_args()
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    for name in NAMES if chosen.rules else ():
        _, broken = explore(seeds, replace(Rules(), **{name: False}))
        first = next(iter(broken.values()), "")
        print(f"{name} off: {len(broken)} of {len(seeds)} are broken: {first}")
    total, broken = explore(seeds)
    print(dict(total), f"{len(broken)} broken")
    for seed, why in list(broken.items())[:5]:
        print(f"seed {seed}: {why}")
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
