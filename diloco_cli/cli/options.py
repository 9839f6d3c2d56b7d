"""What no option may say, looked at before a command does anything: outputs that cannot be
written, numbers that are none."""

from __future__ import annotations

import math
from pathlib import Path

import typer

from diloco_cli.system.outputs import refuse_file, refuse_folder


def output_file(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """A file that a command writes."""
    if path is not None:
        default = param.default
        example = default.name if isinstance(default, Path) else str(param.metavar or "FILE")
        refuse_file(path, param.opts[0], example=example)
    return path


def record_file(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """A file that a command adds to, whose folder it makes."""
    if path is not None and not path.exists():
        refuse_folder(path.parent, param.opts[0])
    elif path is not None:
        refuse_file(path, param.opts[0], example="quality.jsonl")
    return path


def output_folder(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """A folder that a command makes, or writes into."""
    if path is not None:
        refuse_folder(path, param.opts[0])
    return path


def finite(value: float | None) -> float | None:
    """A number that has an end, also where no range says so."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def above_zero(value: float | None) -> float | None:
    """A finite number that is more than 0."""
    if value is not None and value <= 0:
        raise typer.BadParameter(f"{value:g} is not more than 0.")
    return finite(value)
