"""The commands of `diloco bench`, and how they print figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diloco_cli.bench.figure import Figure
from diloco_cli.bench.quality.setting import BATCH, MODEL, RATE, SEQUENCE, QualitySetting
from diloco_cli.cli.options import above_zero, finite, output_file, record_file
from diloco_cli.cli.spec import Format, OutputFormat
from diloco_cli.net.credentials import NOBODY
from diloco_cli.run.find_credential import CertsOption, for_url

bench = typer.Typer()


@bench.command()
def inner(
    windows: Annotated[int, typer.Option(min=1, help="How often each side is measured.")] = 8,
    seconds: Annotated[
        float, typer.Option(min=2.0, callback=finite, help="How long one measurement takes.")
    ] = 4.0,
    hosts: Annotated[
        int, typer.Option(min=1, max=2, help="Processes that share the region's step.")
    ] = 1,
    format: OutputFormat = Format.text,
) -> None:
    """Compare a worker beside live synchronisation with a bare loop of the same step.

    Both get the same core, in turns: while one is measured the other is stopped.
    """
    from diloco_cli.bench.inner import inner_figures

    show(inner_figures(windows=windows, seconds=seconds, hosts=hosts), format)


@bench.command()
def start(
    times: Annotated[int, typer.Option(min=1, help="How often each command is started.")] = 10,
    format: OutputFormat = Format.text,
) -> None:
    """Measure how long `diloco --help` and `diloco validate` take."""
    from diloco_cli.bench.start import start_figures

    show(start_figures(times=times), format)


@bench.command()
def data(
    tries: Annotated[int, typer.Option(min=1, help="How often each side is measured.")] = 5,
    vocabulary: Annotated[int, typer.Option(min=300, help="Of the tokenizer.")] = 8192,
    format: OutputFormat = Format.text,
) -> None:
    """Measure `diloco data prepare` beside the tokenizers library, and a batch beside a step."""
    from diloco_cli.bench.data import data_figures

    say = partial(typer.echo, err=True)
    show(data_figures(tries=tries, vocabulary=vocabulary, say=say), format)


@bench.command()
def wire(
    tries: Annotated[int, typer.Option(min=1, help="How often each figure is measured.")] = 25,
    file: Annotated[
        Path | None, typer.Option(help="Measure bits and error on this vector (.npy).")
    ] = None,
    format: OutputFormat = Format.text,
) -> None:
    """Measure codecs and merge beside memcpy, zstd alone and plain numpy."""
    from diloco_cli.bench.wire import wire_figures
    from diloco_cli.system.malloc import keep_memory

    keep_memory()  # Frames are packed by trainers, which do so too.
    show(wire_figures(tries=tries, file=file), format)


@bench.command()
def link(
    url: Annotated[str | None, typer.Option(help="Measure the way to this server instead.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small bodies, once each: too few to judge by.")
    ] = False,
    certs: CertsOption = None,
    format: OutputFormat = Format.text,
) -> None:
    """Measure transfers beside raw TLS, over loopback and over emulated links."""
    from diloco_cli.bench.link import link_figures

    credentials = for_url(certs) if url else NOBODY
    figures = link_figures(
        url, quick=quick, credentials=credentials, say=lambda text: typer.echo(text, err=True)
    )
    show([replace(each, goal=None) for each in figures] if quick else figures, format)


@bench.command()
def sync(
    params: Annotated[str, typer.Option(metavar="N", help="Parameters, as in 10M.")] = "10M",
    regions: Annotated[
        str, typer.Option(metavar="N[,N…]", help="Regions; 2,8 compares the server's memory.")
    ] = "4",
    fragments: Annotated[int, typer.Option(min=1, max=256, help="Fragments of the model.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Synchronisations in each try.")] = 4,
    tries: Annotated[int, typer.Option(min=1, help="Tries; the cheapest counts.")] = 10,
    warm: Annotated[int, typer.Option(min=1, help="Synchronisations before the first.")] = 10,
    format: OutputFormat = Format.text,
) -> None:
    """Measure what synchronising a whole model costs, without training.

    A real server and one process for each region: CPU time, bytes per parameter, memory, disk.
    """
    from diloco_cli.bench.sync import parameters_of, regions_of, sync_figures

    figures = sync_figures(
        parameters=parameters_of(params),
        regions=regions_of(regions),
        fragments=fragments,
        rounds=rounds,
        tries=tries,
        warm=warm,
        say=lambda text: typer.echo(text, err=True),
    )
    show(figures, format)


@bench.command()
def recovery(
    kills: Annotated[int, typer.Option(min=1, help="How often the trainer is killed.")] = 20,
    model: Annotated[
        str, typer.Option(help="Which of our pipelines to run, with one region.")
    ] = "quickstart",
    seed: Annotated[int, typer.Option(help="Of the moments at which it is killed.")] = 0,
    format: OutputFormat = Format.text,
) -> None:
    """Measure how long a region stands still when its trainer is killed.

    From SIGKILL to the end of the next inner step, with the parts it consists of.
    """
    from diloco_cli.bench.recovery import recovery_figures

    figures = recovery_figures(
        kills=kills, model=model, seed=seed, say=lambda text: typer.echo(text, err=True)
    )
    show(figures, format)


@bench.command()
def quality(
    file: Annotated[
        Path,
        typer.Option(
            "--file",
            callback=record_file,
            help="Where cells are kept; those in it are not run again. Its folder is made.",
        ),
    ] = Path("build/quality.jsonl"),
    only: Annotated[str, typer.Option(metavar="REGEX", help="Cells whose names match.")] = "",
    seeds: Annotated[str, typer.Option(metavar="N,N…", help="Seeds, each its own run.")] = "1,2,3",
    model: Annotated[
        str, typer.Option(metavar="LxW", help="Layers and width, as in 2x64.")
    ] = MODEL,
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences in a step of all regions together.")
    ] = BATCH,
    sequence: Annotated[int, typer.Option(min=8, help="Tokens in a sequence.")] = SEQUENCE,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each cell; as in the published table if left out."),
    ] = None,
    tokens_per_parameter: Annotated[
        float | None,
        typer.Option(
            callback=above_zero, help="Tokens of each cell for each parameter of the model."
        ),
    ] = None,
    lr: Annotated[
        float, typer.Option(callback=above_zero, help="Inner rate of data parallel.")
    ] = RATE,
    lr_regions: Annotated[
        float | None,
        typer.Option(
            callback=above_zero, help="Inner rate of cells with regions; the same if left out."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Cells that run at the same time.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(callback=output_file, help="Draw the table into this file (PNG).")
    ] = None,
    format: OutputFormat = Format.text,
) -> None:
    """Compare ways to synchronise by held-out loss at equal tokens.

    Real training steps, frames and merges on a virtual clock, in one process. Takes an hour or
    more on one core; stopped and started again, it goes on.
    """
    from diloco_cli.bench.quality.command import quality_figures

    setting = QualitySetting(model, batch, sequence, tokens, tokens_per_parameter, lr, lr_regions)
    table, figures = quality_figures(
        file, setting, only=only, seeds=seeds, workers=workers, plot=plot
    )
    if format is Format.text:
        typer.echo(table)
    show(figures, format)


def show(figures: Sequence[Figure], format: Format) -> None:
    """Prints figures, each with the limit it was measured against in the same run."""
    if format is Format.json:
        typer.echo(json.dumps({"figures": [figure.plain() for figure in figures]}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", "limit", "unit", "ratio", "goal", "", box=None)
    for figure in figures:
        bound = "≤" if figure.lower else "≥"
        table.add_row(
            figure.name,
            _number(figure.value),
            _number(figure.reference),
            figure.unit,
            _number(figure.ratio),
            "" if figure.goal is None else f"{bound} {figure.goal:g}",
            "" if figure.met is None else "met" if figure.met else "missed",
        )
    Console().print(table)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
