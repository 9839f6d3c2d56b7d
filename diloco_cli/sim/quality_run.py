"""Cell after cell into one file, going on where the last run stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from diloco_cli.errors import StoreError
from diloco_cli.sim.cells import Cell
from diloco_cli.sim.quality import Budget, name_of, run_cell

Say = Callable[[str], None]


def run_cells(
    cells: Iterable[Cell], seeds: Sequence[int], budget: Budget, file: Path, say: Say
) -> list[dict[str, Any]]:
    """Adds a line to the file for every cell that is not in it; gives all that were asked for."""
    known = {record["id"]: record for record in read(file)}
    asked = [(cell, seed, name_of(cell, budget, seed)) for seed in seeds for cell in cells]
    missing = [one for one in asked if one[2] not in known]
    say(f"{len(asked)} cells, {len(asked) - len(missing)} of them in {file}")
    began = time.monotonic()
    for number, (cell, seed, name) in enumerate(missing, 1):
        if name in known:  # Two names for one thing.
            continue
        record = known[name] = run_cell(cell, budget, seed)
        _append(file, record)
        left = (time.monotonic() - began) / number * (len(missing) - number)
        found = record.get("failed") or f"{record['loss']:.4f}"
        say(f"{number} of {len(missing)}: {cell.name}, seed {seed}: {found}; {left / 60:.0f} min")
    # Under the name that was asked for: two names may mean the same run.
    return [{**known[name], "cell": cell.name} for cell, _, name in asked]


def read(file: Path) -> list[dict[str, Any]]:
    """Reads what was measured; a line that a death cut off is measured again."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}.") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["id"], record["cell"], record["seed"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise StoreError(
                f"{file}, line {number} is no cell.", hint="Delete the line, or name another file."
            ) from None
        found.append(record)
    return found


def _append(file: Path, record: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text("utf-8") if file.exists() else ""
        cut = text.rfind("\n") + 1
        with open(file, "a", encoding="utf-8") as out:
            out.truncate(len(text[:cut].encode()))
            out.write(json.dumps(record) + "\n")
    except OSError as error:
        raise StoreError(f"{file} cannot be written: {error.strerror}.") from None
