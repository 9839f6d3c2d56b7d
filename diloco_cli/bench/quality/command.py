"""`diloco bench quality`: which cells, into which file, and what they show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from diloco_cli.bench.figure import Figure
from diloco_cli.bench.quality.cells import Cell, table
from diloco_cli.errors import SpecError


@dataclass(frozen=True)
class Setting:
    """What people may say about the model and the budget; zeros are the published table's."""

    model: str = ""
    batch: int = 0
    sequence: int = 0
    tokens: int = 0
    tokens_per_parameter: float = 0.0
    lr: float = 0.0
    lr_regions: float = 0.0


def quality_figures(
    file: Path, setting: Setting, *, only: str, seeds: str, workers: int, plot: Path | None
) -> tuple[str, list[Figure]]:
    """Runs what is missing in the file; gives the table and the goals it can judge."""
    cells, numbers = chosen(only), seeds_of(seeds)
    shape = shape_of(setting.model)
    if setting.tokens and setting.tokens_per_parameter:
        raise SpecError("--tokens and --tokens-per-parameter both say how long a cell is.")
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)  # Before JAX starts.
    from diloco_cli.bench.quality import table as quality_table
    from diloco_cli.bench.quality.experiment import Budget
    from diloco_cli.bench.quality.runner import run_cells

    named = {
        name: value
        for name in ("batch", "sequence", "tokens", "lr", "lr_regions")
        if (value := getattr(setting, name))
    }
    budget = Budget(**shape, **named)
    for cell in cells:
        if budget.batch % max(1, cell.regions):
            raise SpecError(
                f"--batch {budget.batch} does not part into {cell.regions} regions.",
                hint="Give a multiple of 8, or choose cells with --only.",
            )
    if setting.tokens_per_parameter:
        budget = budget.per_parameter(setting.tokens_per_parameter)
    records = run_cells(cells, numbers, budget, file, _say, workers=workers)
    rows = quality_table.rows(cells, records)
    if plot is not None:
        quality_table.plot(rows, plot)
    return quality_table.markdown(rows), quality_table.verdicts(records)


def shape_of(words: str) -> dict[str, int]:
    """Reads 2x64: layers and width; a head for every 32 of the width."""
    if not words:
        return {}
    match = re.fullmatch(r"([1-9][0-9]{0,2})x([1-9][0-9]{0,4})", words)
    if match is None or int(match[2]) % 16:
        raise SpecError(
            f"--model {words!r}: write layers and width, as in 2x64; a width is a multiple of 16."
        )
    layers, width = int(match[1]), int(match[2])
    return {"layers": layers, "width": width, "heads": max(1, width // 32)}


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
