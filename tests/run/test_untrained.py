"""A start that trained nothing takes a corrected spec as it is; one that trained never does."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.assemble import build_terms, load_run, resolve, settings_of, spelled_out
from diloco_cli.errors import SpecError
from diloco_cli.run import untrained
from diloco_cli.run.edited_spec import SettledSpec, settle_spec
from diloco_cli.run.untrained import has_trained_nothing
from diloco_cli.server.http.asgi import make_app
from diloco_cli.server.recovery.start import open_coordinator
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.spec.resolved import read_resolved
from diloco_cli.spec.schema import RunSpec
from tests.server.harness import Bench, close_server, receipt_of

SPEC = """
spec: 1
name: tiny
budget: {tokens: 3_000}
model: {kind: decoder, layers: 1, width: 32, heads: 2}
data: {kind: text, files: [corpse/*.txt]}
inner: {batch: 2, sequence: 32}
regions: [{name: left}, {name: right}]
sync: {fragments: 2, every: 4, overlap: 1, grace: {kind: fixed, seconds: 5}}
"""
CORRECTED = ("model.width=48", "seed=3", "sync.fragments=3", "data.files=[corpus/*.txt]")


class RealBench(Bench):
    def _open(self) -> Coordinator:
        return opened(self.settings.spec, self.folder)


def opened(spec: RunSpec, folder: Path) -> Coordinator:
    parts = resolve(spec)
    return open_coordinator(
        settings_of(spec, parts),
        folder / "server",
        lambda: parts.model.init(spec.seed),
        build=build_terms,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(SPEC)
    return tmp_path / "run"


def started(folder: Path, *overrides: str) -> SettledSpec:
    return settle_spec(spelled_out(load_run(folder.parent / "run.yaml", overrides).spec), folder)


def serve(folder: Path, act: Callable[[Bench], Any], *overrides: str) -> str:
    """Starts the server, lets something happen and stops it; gives the run's id."""

    async def run() -> str:
        spec = started(folder, *overrides).first
        bench = RealBench(folder, settings_of(spec, resolve(spec)))
        await act(bench)
        await close_server(bench.server)
        return bench.run

    return asyncio.run(run())


async def nothing(bench: Bench) -> None:
    pass


async def only_refused(bench: Bench) -> None:
    await bench.join()
    region = bench.regions["left"]
    refused = await bench.server.submit(receipt_of(region.frame(0)), epoch=region.epoch, unfit="no")
    assert type(refused).__name__ == "Refused"


async def accepted(bench: Bench) -> None:
    await bench.join()
    await bench.send("left", 0)


@pytest.mark.parametrize("act", [nothing, only_refused])
def test_a_run_that_trained_nothing_takes_a_corrected_spec_as_another_run(folder, act):
    first = serve(folder, act)
    for name in ("summary.json", "events.jsonl"):
        (folder / name).write_text("of the old run")
    settled = started(folder, *CORRECTED)
    assert settled.remark == (
        f"{folder} had trained nothing and begins anew: its spec has another seed, model.width, "
        "data.files and 1 more keys"
    )
    assert read_resolved(folder).seed == settled.first.seed == settled.current.seed == 3
    assert load_run(settled.file).spec.sync.fragments == 3
    second = serve(folder, accepted, *CORRECTED)
    assert second != first and json.loads((folder / "server/was.json").read_text()) == [first]
    assert sorted(path.name for path in folder.iterdir()) == [
        "server",
        "spec.current.yaml",
        "spec.folder",
        "spec.resolved.yaml",
    ]


def test_the_same_spec_goes_on_with_the_same_run(folder):
    first = serve(folder, only_refused)
    assert started(folder).remark == "" and serve(folder, nothing) == first


def test_one_accepted_contribution_is_enough_to_keep_a_run(folder):
    serve(folder, accepted)
    assert not has_trained_nothing(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SpecError, match="holds a run that has begun with other settings"):
        started(folder, *CORRECTED)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_start_that_never_opened_a_journal_takes_a_corrected_spec(folder):
    started(folder)
    assert "begins anew" in started(folder, *CORRECTED).remark
    assert read_resolved(folder).seed == 3


def test_a_run_that_is_served_is_not_replaced(folder):
    spec = started(folder).first
    server = opened(spec, folder)
    with pytest.raises(SpecError, match="in use by another server"):
        started(folder, *CORRECTED)
    asyncio.run(close_server(server))
    assert read_resolved(folder).seed == 0


def test_a_host_of_regions_asks_its_server(folder):
    started(folder)
    (folder / "regions" / "left").mkdir(parents=True)
    with pytest.raises(SpecError, match="other settings"):
        started(folder, *CORRECTED)


def test_a_server_names_the_runs_it_replaced(folder):
    ids = [serve(folder, nothing, f"seed={seed}") for seed in range(3)]
    assert len(set(ids)) == 3
    server = opened(started(folder, "seed=2").first, folder)
    app = make_app(server, events=folder / "events.jsonl", url=lambda: "")

    async def about() -> dict[str, Any]:
        import httpx

        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get("/v1/run")).json()

    document = asyncio.run(about())
    assert document["run"] == ids[2] and document["was"] == ids[:2]
    asyncio.run(close_server(server))


class Killed(BaseException):
    """What a test throws where the power goes out."""


STEPS = [
    (untrained, "keep_bytes"),
    (os, "rename"),
    (untrained, "sync_folder"),
    (untrained, "replace_resolved"),
    (untrained, "finish"),
]


def dying(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kills whoever makes step `number`, counted from 0, before and after each."""
    made = [0]

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            made[0] += 1
            if made[0] == number + 1:
                raise Killed
            result = real(*arguments, **named)
            made[0] += 1
            if made[0] == number + 1:
                raise Killed
            return result

        return step

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, around(getattr(owner, name)))
    return made


@pytest.mark.parametrize("then", [CORRECTED, (), ("seed=9",)], ids=["corrected", "old", "third"])
def test_whoever_dies_while_beginning_anew_is_finished_by_the_next_start(
    tmp_path, monkeypatch, then
):
    (tmp_path / "run.yaml").write_text(SPEC)
    number, died = 0, True
    while died:
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        (folder.parent / "run.yaml").write_text(SPEC)
        first = serve(folder, only_refused)
        with monkeypatch.context() as patch:
            dying(number, patch)
            try:
                started(folder, *CORRECTED)
                died = False
            except Killed:
                pass
        last = serve(folder, accepted, *then)
        was = [] if last == first else json.loads((folder / "server/was.json").read_text())
        # The old run goes on, or it is on record that it was replaced.
        assert last == first or first in was, f"step {number}"
        assert started(folder, *then).remark == ""
        assert not list(folder.glob(".server*"))
        number += 1
    assert number > 12
