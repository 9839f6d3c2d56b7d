"""A run in the tools of others: `diloco observe RUN --to tensorboard | wandb | otlp | csv`.

In come the files of a run, which are only read; out go the same numbers to where the tool looks for
them. Nothing is sent to anybody unless somebody asks for it. Read points.py first.

    points.py       what a run's folder has said since it was last asked, as points
    csv_files.py    one table per region and one of the run
    event_files.py  what TensorBoard reads, one folder per region; needs the extra `tensorboard`
    otlp.py         gauges to an OpenTelemetry collector; needs the extra `otlp`
    wandb_run.py    one Weights & Biases run; needs the extra `wandb`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from diloco_cli.errors import SpecError
from diloco_cli.system.outputs import refuse_folder

if TYPE_CHECKING:  # The command's help needs none of it.
    from diloco_cli.observe.sinks.points import ObservedRun, Point


class Tool(StrEnum):
    """What `--to` may say."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    otlp = "otlp"
    csv = "csv"


class Sink(Protocol):
    """Where points go."""

    where: str
    """For people to find it."""

    def write(self, points: Sequence[Point]) -> None:
        """Takes points in the order of their time; LinkError if nobody takes them now."""
        ...

    def close(self) -> None: ...


def open_sink(tool: Tool, run: ObservedRun, out: str | None) -> Sink:
    """Opens what `--to` names; `out` is a folder, or a URL for `otlp`."""
    openers: dict[Tool, Callable[[ObservedRun, Path], Sink]] = {
        Tool.csv: _csv,
        Tool.tensorboard: _tensorboard,
        Tool.wandb: _wandb,
    }
    try:
        if tool is Tool.otlp:
            return _otlp(run, out)
        folder = Path(out) if out else run.folder / "observe" / tool
        refuse_folder(folder, "--out")
        return openers[tool](run, folder)
    except ImportError as error:
        raise SpecError(
            f"--to {tool} needs {error.name}, which is not installed.",
            hint=f"Install it: pip install 'diloco-cli[{tool}]'.",
        ) from None


def _csv(_: ObservedRun, folder: Path) -> Sink:
    from diloco_cli.observe.sinks.csv_files import CsvFiles

    return CsvFiles(folder)


def _tensorboard(_: ObservedRun, folder: Path) -> Sink:
    from diloco_cli.observe.sinks.event_files import EventFiles

    return EventFiles(folder)


def _wandb(run: ObservedRun, folder: Path) -> Sink:
    from diloco_cli.observe.sinks.wandb_run import WandbRun

    return WandbRun(run, folder)


def _otlp(run: ObservedRun, url: str | None) -> Sink:
    from diloco_cli.observe.sinks.otlp import Collector

    return Collector(run, url)
