"""`diloco bench`: the commands are in diloco_cli.bench.commands, and loaded when one is needed."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class LazyBench(TyperGroup):
    """A group whose commands are looked up, not registered."""

    @property
    def commands(self) -> Any:
        from diloco_cli.bench.commands import bench

        command: Any = typer.main.get_command(bench)
        return command.commands

    @commands.setter
    def commands(self, registered: Any) -> None:
        assert not registered


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.add_typer(group, name="bench", cls=LazyBench)


group = typer.Typer(no_args_is_help=True, help="Measure, each figure beside its limit.")


@group.callback()
def _begin() -> None:
    from diloco_cli.bench.support.children import end_on_signals

    end_on_signals()
