"""`diloco bench quality`: which cells, into which file, and what they show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diloco_cli.bench.figure import Figure
from diloco_cli.bench.quality.cells import Cell, table
from diloco_cli.bench.quality.setting import QualitySetting, shape_of
from diloco_cli.errors import SpecError

if TYPE_CHECKING:
    from diloco_cli.bench.quality.experiment import Budget


def quality_figures(
    file: Path, setting: QualitySetting, *, only: str, seeds: str, workers: int, plot: Path | None
) -> tuple[str, list[Figure]]:
    """Runs what is missing in the file; gives the table and the goals it can judge."""
    cells, numbers = chosen(only), seeds_of(seeds)
    shape = shape_of(setting.model)
    if setting.tokens is not None and setting.tokens_per_parameter is not None:
        raise SpecError("--tokens and --tokens-per-parameter both say how long a cell is.")
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)  # Before JAX starts.
    from diloco_cli.bench.quality import table as quality_table
    from diloco_cli.bench.quality.experiment import Budget
    from diloco_cli.bench.quality.runner import run_cells

    named = {
        name: value
        for name in ("batch", "sequence", "tokens", "lr", "lr_regions")
        if (value := getattr(setting, name)) is not None
    }
    budget = Budget(**shape, **named)
    for cell in cells:
        if budget.batch % max(1, cell.regions):
            raise SpecError(
                f"--batch {budget.batch} does not part into {cell.regions} regions.",
                hint="Give a multiple of 8, or choose cells with --only.",
            )
    if setting.tokens_per_parameter is not None:
        budget = budget.per_parameter(setting.tokens_per_parameter)
    _refuse_too_few(cells, budget, setting)
    records = run_cells(cells, numbers, budget, file, _say, workers=workers)
    rows = quality_table.rows(cells, records)
    if plot is not None:
        quality_table.plot(rows, plot)
    return quality_table.markdown(rows), quality_table.verdicts(records)


def _refuse_too_few(cells: Sequence[Cell], budget: Budget, setting: QualitySetting) -> None:
    """Says how many tokens every one of the cells needs, where there are fewer."""
    from diloco_cli.bench.quality.experiment import Budget, spec_of
    from diloco_cli.spec.rules import MOST_TOKENS, least_tokens

    ample = replace(budget, tokens=MOST_TOKENS)
    needs = {cell.name: least_tokens(spec_of(cell, ample, 0)) for cell in cells}
    name = max(needs, key=lambda each: needs[each])
    if budget.tokens < needs[name]:
        told = f"--tokens {budget.tokens} is"
        if (share := setting.tokens_per_parameter) is not None:
            told = f"--tokens-per-parameter {share:g} makes {budget.tokens} tokens,"
        raise SpecError(
            f"{told} too few: {name!r} needs at least {needs[name]} tokens, those of one round "
            "(sync.every × batch × sequence); it would end before anything is merged.",
            hint=f"Give --tokens {needs[name]} or more (published: {Budget().tokens}), or a "
            "smaller --batch or --sequence.",
        )


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
