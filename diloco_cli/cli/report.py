"""Commands that show a run to others: report, compare, observe."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco_cli.cli.options import output_file
from diloco_cli.cli.status import TargetArgument
from diloco_cli.observe.sinks import Tool
from diloco_cli.run.find_credential import CertsOption, for_calls

if TYPE_CHECKING:
    from diloco_cli.observe.page.report import Environment, Sample
    from diloco_cli.observe.run_record import RunRecord
    from diloco_cli.observe.sinks import Sink
    from diloco_cli.observe.sinks.points import Point, RunPoints
    from diloco_cli.system.wakeup import Signals

SAMPLE_TOKENS = 200
LOOK_SECONDS = 2.0
QUIET_LOOKS = 5
"""So often nobody may work on a run that is followed before it is over."""

OutOption = Annotated[
    Path,
    typer.Option("--out", metavar="FILE", callback=output_file, help="The HTML file to write."),
]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command()(report)
    app.command()(compare)
    app.command()(observe)


def report(
    target: TargetArgument = None,
    out: OutOption = Path("report.html"),
    png: Annotated[
        bool, typer.Option("--png", help="Also write the curves as PNG files beside it.")
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="TEXT",
            help="Continue this prompt with the first and with the newest weights.",
        ),
    ] = None,
    certs: CertsOption = None,
) -> None:
    """Write one HTML file about a run: losses, speed, token fates, faults, traffic, settings.

    Of a run that goes on, stopped or finished; its folder is only read. Or of a record: the
    chaos.json of `diloco chaos`, the lines that `diloco bench quality` wrote. The file asks nobody
    for anything and can be sent as it is.
    """
    from diloco_cli.observe.page.report import report as render

    if target and Path(target).suffix in (".json", ".jsonl") and Path(target).is_file():
        return _write(out, _of_a_record(Path(target)))
    record = _record(target, certs)
    chaos = record.folder / "chaos.json"
    text = render(
        record,
        _environment(),
        samples=_samples(target, sample, certs) if sample else (),
        chaos=_json_in(chaos) if chaos.exists() else None,
    )
    _write(out, text)
    if png:
        from diloco_cli.observe.page.pictures import pictures
        from diloco_cli.system.outputs import writing

        with writing(out, "--out"):
            written = pictures(record, out)
        for path in written:
            typer.echo(f"wrote {path}", err=True)


def compare(
    targets: Annotated[
        list[str], typer.Argument(metavar="RUN RUN…", help="Folders or specs of runs.")
    ],
    out: OutOption = Path("compare.html"),
    certs: CertsOption = None,
) -> None:
    """Lay the held-out losses of several runs over one axis, in one HTML file."""
    from diloco_cli.errors import SpecError
    from diloco_cli.observe.page.report import comparison

    if len(targets) < 2:
        raise SpecError("There is one run to compare.", hint="Name two or more.")
    records = [_record(target, certs) for target in targets]
    _write(out, comparison(records, _environment()))


def observe(
    target: TargetArgument = None,
    to: Annotated[Tool, typer.Option("--to", help="The tool that shows it.")] = Tool.tensorboard,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="FOLDER|URL",
            help="Where to: a folder, FOLDER/observe/TOOL of the run when left out; of otlp the "
            "collector's URL, OTEL_EXPORTER_OTLP_ENDPOINT when left out.",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(help="Go on until the run ends, or only pass on what there is now."),
    ] = True,
) -> None:
    """Pass a run's curves on to TensorBoard, Weights & Biases, a collector or CSV files.

    One series per region and one of the run, over merged tokens, from the beginning. The run's
    folder is only read; a run that is over is passed on whole.
    """
    from diloco_cli.errors import SpecError
    from diloco_cli.observe.sinks import open_sink
    from diloco_cli.observe.sinks.points import ObservedRun, RunPoints
    from diloco_cli.run.folder import find
    from diloco_cli.system.wakeup import Signals

    found = find(target)
    if found.folder is None:
        raise SpecError(
            f"{found.url} is a server; curves are passed on from the run's folder.",
            hint="Name the folder, on the server's host or on a region's, or a copy of it.",
        )
    run = ObservedRun(found.folder)
    sink = open_sink(to, run, out)
    typer.echo(f"{run.name} goes to {sink.where}", err=True)
    with Signals() as signals:
        try:
            count = _pass_on(RunPoints(run), sink, signals, follow=follow)
        finally:
            sink.close()
    typer.echo(f"{count} points were passed on", err=True)
    if signals.first:
        raise typer.Exit(signals.exit_code)


def _pass_on(points: RunPoints, sink: Sink, signals: Signals, *, follow: bool) -> int:
    """Gives a sink all there is, and what comes, until nobody works on the run; says how much."""
    from diloco_cli.run.folder import is_going_on, last_summary

    folder, count = points.run.folder, 0
    quiet = QUIET_LOOKS  # A run that nobody works on at first is over; later it may be a restart.
    while True:
        quiet = 0 if is_going_on(folder) else quiet + 1
        ended = quiet and (summary := last_summary(folder)) and summary.over
        over = bool(not follow or ended or quiet > QUIET_LOOKS)
        while not signals.first and (found := points.more(over=over)):
            _deliver(found, sink, signals, patient=bool(count) and not over)
            count += len(found)
        if over or signals.first:
            return count
        signals.pause(LOOK_SECONDS)


def _deliver(points: list[Point], sink: Sink, signals: Signals, *, patient: bool) -> None:
    """Waits for a sink that has taken points before and takes none now."""
    from diloco_cli.errors import LinkError

    said = False
    while True:
        try:
            return sink.write(points)
        except LinkError as error:
            if signals.first:
                return None
            if not patient:
                raise
            if not said:
                typer.echo(f"{error.message} Trying again; Ctrl-C ends this.", err=True)
            said = True
            signals.pause(LOOK_SECONDS)


def _record(target: str | None, certs: Path | None) -> RunRecord:
    from diloco_cli.errors import DilocoError, SpecError
    from diloco_cli.observe.run_record import read_run, summary_of
    from diloco_cli.run.ask import ShortCalls
    from diloco_cli.run.folder import find

    if target and Path(target).suffix == ".jsonl" and Path(target).is_file():
        raise SpecError(
            f"{target} is a record, and runs are compared by their folders.",
            hint="`diloco report FILE` compares the cells of one file of `diloco bench quality`.",
        )
    run = find(target)
    if run.folder is None:
        raise SpecError(
            f"{run.url} is a server; a report is made from the run's folder.",
            hint="Name the folder, on the server's host, or a copy of it.",
        )
    record = read_run(run.folder)
    if run.url:
        # Its summary is of the last stop, or there is none yet; without an answer that is it.
        calls = ShortCalls(for_calls(run, certs))
        try:
            record = replace(record, summary=summary_of(calls.status(run.url)))
        except DilocoError as error:
            typer.echo(f"{run.url} does not answer ({error.message})", err=True)
        finally:
            calls.close()
    return record


def _of_a_record(path: Path) -> str:
    """A report on a record that no run's folder goes with."""
    from diloco_cli.errors import SpecError
    from diloco_cli.observe.page.records import chaos_part, quality_part
    from diloco_cli.observe.page.report import study

    if path.suffix == ".jsonl":
        rows = [_json_of(line, path) for line in path.read_text().splitlines() if line.strip()]
        if any("cell" in row for row in rows):
            return study(path.stem, quality_part(rows, str(path)), _environment())
    else:
        document = _json_in(path)
        if isinstance(document.get("faults"), list) and "goodput" in document:
            name = str(document.get("name") or path.stem)
            return study(name, chaos_part(document), _environment())
    raise SpecError(
        f"{path} is no record of a run.",
        hint="Name a run's folder, the chaos.json of `diloco chaos` or the file of `diloco bench "
        "quality`.",
    )


def _json_in(path: Path) -> dict[str, Any]:
    return _json_of(path.read_text(encoding="utf-8"), path)


def _json_of(text: str, path: Path) -> dict[str, Any]:
    from diloco_cli.errors import SpecError

    try:
        document = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}.", hint="Was it written whole?") from None
    if not isinstance(document, dict):
        raise SpecError(f"{path} holds no JSON object.", hint="Name a record of diloco's.")
    return document


def _samples(target: str | None, prompt: str, certs: Path | None) -> list[Sample]:
    """What the first and the newest weights write after a prompt."""
    from diloco_cli.errors import DilocoError
    from diloco_cli.models.generate_flax import generate
    from diloco_cli.observe.page.report import Sample
    from diloco_cli.run.model.find import find_model
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    samples = []
    for name, version in (("the first weights", 0), ("the newest weights", None)):
        try:
            trained = find_model(target, version=version, certs=certs)
            codec = trained.needed_text()
            start = codec.encode(prompt)
            following = list(
                generate(
                    trained.model.shape,
                    trained.weights,
                    start,
                    tokens=SAMPLE_TOKENS,
                    temperature=0.5,
                    top_p=0.95,
                    seed=0,
                )
            )
        except DilocoError as error:
            typer.echo(f"no sample of {name}: {error.message}", err=True)
            continue
        samples.append(Sample(name, prompt, codec.decode(following)))
    return samples


def _environment() -> Environment:
    import platform
    from importlib.metadata import version

    from diloco_cli.observe.page.report import Environment

    host = f"on Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return Environment(version("diloco-cli"), "diloco " + shlex.join(sys.argv[1:]), host)


def _write(out: Path, text: str) -> None:
    from diloco_cli.system.outputs import writing

    with writing(out, "--out"):
        out.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {out} ({len(text) / 1000:.0f} kB)", err=True)
