"""`diloco bench quality`: which cells, into which file, and what they show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from diloco_cli.bench.quality.cells import Cell, table
from diloco_cli.errors import SpecError


def quality_figures(
    file: Path, *, only: str, seeds: str, tokens: int, workers: int, plot: Path | None
) -> tuple[str, list[dict[str, Any]]]:
    """Runs what is missing in the file; gives the table and the goals it can judge."""
    cells, numbers = chosen(only), seeds_of(seeds)
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)  # Before JAX starts.
    from diloco_cli.bench.quality import table as quality_table
    from diloco_cli.bench.quality.experiment import Budget
    from diloco_cli.bench.quality.runner import run_cells

    budget = Budget(tokens=tokens) if tokens else Budget()
    records = run_cells(cells, numbers, budget, file, _say, workers=workers)
    rows = quality_table.rows(cells, records)
    if plot is not None:
        quality_table.plot(rows, plot)
    return quality_table.markdown(rows), quality_table.verdicts(records)


def chosen(only: str) -> list[Cell]:
    """Cells whose names match; with each the one that it is compared with."""
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise SpecError(f"--only {only!r} is no pattern: {error}.") from None
    known = {cell.name: cell for cell in table()}
    wanted = {name for name in known if pattern.search(name)}
    if not wanted:
        raise SpecError(f"--only {only!r} matches no cell.", hint=f"Cells: {', '.join(known)}.")
    more = wanted
    while more:
        more = {known[name].against for name in more if known[name].against} - wanted
        wanted |= more
    return [cell for name, cell in known.items() if name in wanted]


def seeds_of(words: str) -> Sequence[int]:
    """Reads 1,2,3."""
    try:
        numbers = [int(word) for word in words.split(",")]
    except ValueError:
        raise SpecError(f"--seeds {words!r}: write numbers, as in 1,2,3.") from None
    if min(numbers) < 0 or max(numbers) >= 2**32 or len(set(numbers)) < len(numbers):
        raise SpecError(f"--seeds {words!r}: different whole numbers from 0 on, as in 1,2,3.")
    return numbers


def _say(text: str) -> None:
    typer.echo(text, err=True)
