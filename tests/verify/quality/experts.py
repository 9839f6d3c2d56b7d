"""Does a mixture of experts lose more than a dense model when four regions train apart?

    python -m tests.verify.quality.experts --tokens 1000000 --seeds 1,2

Four cells of `diloco bench quality` for each seed: dense and with experts, data parallel and in
four regions, at equal tokens. Prints a line as each is done, then the two gaps.
"""

from __future__ import annotations

import argparse
import json
from statistics import mean

from diloco_cli.bench.quality.cells import Cell
from diloco_cli.bench.quality.experiment import Budget, run_cell
from diloco_cli.worker.engines.jax_engine import use_compile_cache

EXPERTS = (("model.experts", 4), ("model.active", 2), ("model.ffn", 64))
DENSE = (("model.ffn", 128),)
"""As many multiplications a token."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--tokens", type=int, default=1_000_000)
    asked.add_argument("--seeds", default="1,2")
    options = asked.parse_args()
    use_compile_cache()
    losses: dict[str, list[float]] = {}
    for seed in map(int, options.seeds.split(",")):
        for kind, settings in (("dense", DENSE), ("experts", EXPERTS)):
            for name, regions in (("data parallel", 0), ("regions 4", 4)):
                cell = Cell(f"{kind}, {name}", regions, settings)
                record = run_cell(cell, Budget(tokens=options.tokens), seed)
                print(json.dumps(record), flush=True)
                losses.setdefault(cell.name, []).append(record["loss"])
    for kind in ("dense", "experts"):
        apart, together = (
            mean(losses[f"{kind}, {name}"]) for name in ("regions 4", "data parallel")
        )
        print(f"{kind}: {apart:.4f} in four regions, {together:.4f} data parallel: "
              f"{100 * (apart / together - 1):+.2f} %")  # fmt: skip


if __name__ == "__main__":
    main()
