"""A tiny run for the commands: its spec, its folder after some rounds, and how it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from diloco_cli.assemble import build_terms, load_run, resolve, settings_of, spelled_out
from diloco_cli.cli.app import main
from diloco_cli.server.recovery.start import open_coordinator
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.spec.resolved import write_resolved
from tests.server.harness import Bench, close_server

SPEC = """
spec: 1
name: tiny
budget: {tokens: 100_000}
model: {kind: decoder, layers: 1, width: 32, heads: 2}
data: {kind: python-source}
inner: {batch: 2, sequence: 32}
regions: [{name: left}, {name: right}]
sync: {fragments: 2, every: 4, overlap: 1, grace: {kind: fixed, seconds: 5}}
"""
STORED = SPEC + "server: {store: {kind: folder, whole: 1}}\n"


class RealBench(Bench):
    """The server's bench, with a real model's weights."""

    def _open(self) -> Coordinator:
        weights = resolve(self.settings.spec).model.init(0)
        return open_coordinator(
            self.settings,
            self.folder / "server",
            lambda: weights,
            clock=self.clock,
            build=build_terms,
        )


def trained(folder: Path, rounds: Iterable[int], text: str = STORED) -> Path:
    """The folder of a run that had rounds of these fragments; its spec is beside it."""
    (folder / "run.yaml").write_text(text)
    spec = spelled_out(load_run(folder / "run.yaml").spec)
    write_resolved(spec, folder / "run")

    async def train() -> None:
        bench = RealBench(folder / "run", settings_of(spec, resolve(spec)))
        await bench.join()
        for fragment in rounds:
            await bench.round(fragment)
        await close_server(bench.server)

    asyncio.run(train())
    return folder / "run"


def diloco(
    capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int | str | None, str, str]:
    """Runs a command; gives its exit code, what it printed and what it said."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err
