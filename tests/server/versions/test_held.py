"""Vectors of the newest versions: held in memory, or in files of which one at a time is mapped."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from diloco_cli.core.fragments import Tensor
from diloco_cli.errors import StoreDamaged
from diloco_cli.server.recovery.start import open_coordinator
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.filed_state import FiledState
from diloco_cli.server.versions import held
from tests.server.harness import (
    Bench,
    close_server,
    in_a_loop,
    make_settings,
    make_spec,
    read_journal,
)

FRAGMENTS, VALUES = 8, 1 << 17
LARGE = tuple(Tensor(f"w{number}", (256, VALUES // 256)) for number in range(FRAGMENTS))


class DrawnLate(Mapping[str, np.ndarray]):
    """First weights of the large model, a tensor at a time."""

    def __getitem__(self, name: str) -> np.ndarray:
        return np.random.default_rng(int(name[1:])).standard_normal(LARGE[0].shape, np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(tensor.name for tensor in LARGE)

    def __len__(self) -> int:
        return FRAGMENTS


class LargeBench(Bench):
    """Eight fragments, each as large as one tensor."""

    def _open(self) -> Coordinator:
        return open_coordinator(
            self.settings, self.folder / "server", DrawnLate, clock=self.clock, wall=lambda: 1.7e9
        )


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "HELD_BYTES", 0)


class Traced:
    """What the process allocates in a block, in states of one fragment."""

    def __enter__(self) -> Traced:
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        current, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.current, self.peak = current / (12 * VALUES), peak / (12 * VALUES)


@in_a_loop
async def test_memory_is_that_of_a_fragment_not_of_the_model(tmp_path, in_files):
    settings = ServerSettings.of(make_spec(fragments=FRAGMENTS, every=FRAGMENTS), LARGE)
    assert settings.sizes == [VALUES] * FRAGMENTS
    small = Bench(tmp_path / "small")  # What it imports and loads is not looked at.
    await small.join()
    await small.round(0)
    await close_server(small.server)
    with Traced() as begun:
        bench = LargeBench(tmp_path / "large", settings)
    await bench.join()
    with Traced() as merged:
        for _ in range(2):
            for fragment in range(FRAGMENTS):
                await bench.round(fragment)
                for region in bench.regions.values():
                    region.sent.clear()
    with Traced() as restarted:
        bench.restart()
    with Traced() as sent:
        model = bench.state.weights.model()
        assert model is not None
        pieces, count = model.read(0, model.size), 0
        while piece := pieces.next():
            count += len(piece)
    assert count == model.size > 4 * FRAGMENTS * VALUES
    for what in (begun, merged, restarted, sent):
        assert what.current < 2 and what.peak < 6, (what.current, what.peak)
    await close_server(bench.server)


@in_a_loop
async def test_in_files_and_in_memory_the_bits_and_the_records_are_the_same(tmp_path, monkeypatch):
    outcomes = []
    for limit in (0, held.HELD_BYTES):
        monkeypatch.setattr(held, "HELD_BYTES", limit)
        bench = Bench(tmp_path / str(limit), make_settings())
        bench.state.store.run = bench.run = "same"
        for region in bench.regions.values():
            region.run = "same"
        await bench.join()
        for number in range(6):
            await bench.round(number % 2)
        assert isinstance(bench.state.weights.newest[0].state, FiledState) == (limit == 0)
        model = bench.state.weights.model()
        assert model is not None
        whole = await bench.state.weights.whole(0, bench.versions[0])
        assert whole is not None
        content = b"".join(iter(model.read(0, model.size).next, b""))
        frame = b"".join(whole.read(0, whole.size))
        digests = bench.digests()
        await close_server(bench.server)
        records = [{**record, "time": 0} for record in read_journal(bench.folder)[1:]]
        outcomes.append((digests, content, frame, model.etag, records))
    assert outcomes[0] == outcomes[1]


def _delete(path: Path) -> None:
    path.unlink()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # Of the published weights.
    path.write_bytes(data)


def _swap(path: Path) -> None:
    """Puts the state of the version before there, which is sound and another."""
    path.write_bytes((path.parent.parent / "fragments/1/v00000000.state").read_bytes())


@in_a_loop
@pytest.mark.parametrize("damage", [_delete, _flip, _swap])
async def test_what_was_set_aside_is_believed_by_its_digest_or_recomputed(
    tmp_path, in_files, damage: Callable[[Path], None]
):
    sound, harmed = Bench(tmp_path / "sound"), Bench(tmp_path / "harmed")
    for bench in (sound, harmed):
        await bench.join()
        await bench.round(1)
    state = harmed.state.weights.newest[1].state
    assert isinstance(state, FiledState) and not state.stored
    damage(tmp_path / "harmed" / "server" / state.name)
    with pytest.raises(StoreDamaged):
        harmed.state.weights.model()
    with pytest.raises(StoreDamaged):
        await harmed.state.weights.whole(1, 1)
    for bench in (sound, harmed):
        await bench.round(1)
    assert harmed.digests() == sound.digests() and harmed.versions == [0, 2]
    await close_server(harmed.server)
    await close_server(sound.server)


@in_a_loop
async def test_a_stored_version_that_is_damaged_ends_the_server(tmp_path, in_files):
    bench = Bench(tmp_path)
    await bench.join()
    _flip(tmp_path / "server/fragments/0/v00000000.state")
    await bench.round(0)
    assert isinstance(bench.state.failure, StoreDamaged) and "v00000000" in str(bench.state.failure)
    await close_server(bench.server)


@in_a_loop
async def test_a_download_goes_on_while_newer_versions_come(tmp_path, in_files):
    bench = Bench(tmp_path)
    await bench.join()
    await bench.round(1)
    model = bench.state.weights.model()
    assert model is not None
    pieces = model.read(0, model.size)
    expected = b"".join(iter(model.read(0, model.size).next, b""))
    for _ in range(10):
        await bench.round(1)
    assert b"".join(iter(pieces.next, b"")) == expected
    assert [path.name for path in (tmp_path / "server/cache").glob("*.state")] == [
        "1-v00000011.state"
    ] * (not bench.state.ledger.slots[1].made[-1].stored)
    await close_server(bench.server)


@in_a_loop
async def test_what_was_set_aside_is_gone_after_a_restart_and_not_needed(tmp_path, in_files):
    bench = Bench(tmp_path)
    await bench.join()
    for _ in range(2):
        await bench.round(1)
    digests = bench.digests()
    for path in (tmp_path / "server/cache").glob("*.state"):
        path.write_bytes(b"half of it")
    bench.restart()
    assert bench.digests() == digests
    await close_server(bench.server)
