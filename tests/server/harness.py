"""A small run to try a server with: three regions, two fragments, a clock turned by hand."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.core.fragments import Tensor, gather
from diloco_cli.core.journal_records import Entry, VersionPublished, decode_all
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.rounds import Answer, Receipt
from diloco_cli.net.client import Client
from diloco_cli.server.recovery.start import FirstWeights, open_coordinator
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.journal import FileJournal
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.versions.next_version import Version, next_version
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.frame import Header, open_frame, pack
from diloco_cli.wire.messages import (
    WIRE_VERSION,
    Amend,
    Amended,
    Heartbeat,
    Join,
    Joined,
    News,
    TextCursor,
    TextOrder,
    Tokens,
)

NAMES = ("iowa", "paris", "tokyo")
TENSORS = (
    Tensor("embed", (40, 8), embedding=True),
    Tensor("norm", (8,)),
    Tensor("w1", (8, 24)),
    Tensor("w2", (24, 8)),
)
LEASE = 10.0
Positions = dict[int, tuple[int, int]]
TEXT = TextOrder(digest="a" * 32, settings="b" * 32, tokens=4000, windows=400, sequence=8, lanes=8)


def make_spec(
    names: Sequence[str] = NAMES, *, pace: float | None = 1000.0, **changes: Any
) -> RunSpec:
    """A spec; `changes` replace single keys of `sync`, or whole sections.

    With that `pace` all counts that regions claim: tests make frames as fast as they can.
    """
    spec: dict[str, Any] = {
        "spec": 1,
        "name": "trial",
        "budget": {"tokens": 1_000_000},
        "data": {"kind": "python-source", "lanes": 8},
        "inner": {"batch": 4, "sequence": 8},
        "regions": [{"name": name, "pace": pace} for name in names],
        "sync": {
            "fragments": 2,
            "every": 6,
            "quorum": 2,
            "grace": {"kind": "fixed", "seconds": 5.0},
        },
        "server": {"listen": "127.0.0.1:0", "lease": LEASE},
    }
    for key, value in changes.items():
        if key in ("budget", "server", "evaluate", "wire", "outer", "merge", "data"):
            spec[key] = {**spec.get(key, {}), **value}
        else:
            spec["sync"][key] = value
    return RunSpec.model_validate(spec)


def storing_all(**store: Any) -> ServerSettings:
    """A run whose every version is stored as a whole."""
    return make_settings(make_spec(server={"store": {"kind": "folder", "whole": 1, **store}}))


def make_settings(spec: RunSpec | None = None) -> ServerSettings:
    spec = spec or make_spec()
    shared = spec.model_dump(mode="json", include={"name", "seed", "sync", "wire"})
    # A test may reopen a folder with another spec: only the name is in the digest.
    return replace(ServerSettings.of(spec, TENSORS), settings=shared)


def initial() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {each.name: rng.normal(size=each.shape).astype(np.float32) for each in TENSORS}


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Lets an async test run; what it leaves behind in the loop is cancelled."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def open_server(
    folder: Path, settings: ServerSettings | None = None, clock: Clock | None = None, **options: Any
) -> Coordinator:
    """Opens or reopens the server of a folder."""
    clock, settings = clock or Clock(), settings or make_settings()
    start = settings.spec.start
    return open_coordinator(
        settings,
        folder / "server",
        lambda: FirstWeights(initial(), start.weights) if start else initial(),
        clock=clock,
        wall=lambda: 1.7e9 + clock.now,
        **options,
    )


async def close_server(coordinator: Coordinator) -> None:
    await coordinator.publisher.settled()
    coordinator.state.close()
    coordinator.state.store.close()


def kill_server(coordinator: Coordinator) -> None:
    """Forgets the server as SIGKILL would: nothing is flushed, only the lock is let go."""
    store: Any = coordinator.state.store
    coordinator.state.close()
    store.journal._dead = "killed"
    store.close()


class Region:
    """A region's worker as far as the server can tell: it sends frames made from seeds."""

    def __init__(
        self,
        name: str,
        settings: ServerSettings,
        run: str,
        *,
        owner: str = "",
        key: str | None = None,
    ) -> None:
        self.name, self.settings, self.run, self.key = name, settings, run, key
        self.owner, self.boot, self.epoch, self.clock = owner or f"disk-of-{name}", 1, 0, 0
        count = len(settings.sizes)
        self.versions = [0] * count
        self.prev = [""] * count
        self.order: TextOrder | None = None
        self.sent: dict[int, bytes] = {}
        self.trained = [0.0] * count
        self.applied = [0.0] * count
        self.pending = [0.0] * count

    @property
    def join(self) -> Join:
        return Join(
            owner=self.owner,
            boot=self.boot,
            spec_digest=self.settings.spec_digest,
            layout_digest=self.settings.layout.digest,
            order=self.order,
            wire=WIRE_VERSION,
            key=self.key,
        )

    def join_through(self, client: Client) -> int:
        """Joins over HTTP; gives the epoch."""
        self.epoch = client.join(
            self.name,
            owner=self.owner,
            boot=self.boot,
            spec_digest=self.settings.spec_digest,
            layout_digest=self.settings.layout.digest,
        ).epoch
        return self.epoch

    def beat(self, steps: float | Sequence[float] = 0.0, **said: Any) -> Heartbeat:
        count = len(self.settings.sizes)
        every = [float(steps)] * count if isinstance(steps, int | float) else list(steps)
        zeros = (0.0,) * count
        tokens = Tokens(
            trained=tuple(self.trained),
            applied=tuple(self.applied),
            pending=tuple(self.pending),
            refused=zeros,
            discarded=zeros,
        )
        about: dict[str, Any] = {
            "epoch": self.epoch,
            "step": self.clock,
            "training": True,
            "stopping": False,
            "ended": 0,
            "fragments": [
                {"version": version, "steps": held}
                for version, held in zip(self.versions, every, strict=True)
            ],
            "tokens": tokens.model_dump(),
        }
        return Heartbeat.model_validate({**about, **said})

    def frame(self, fragment: int, steps: float = 6.0, **header: Any) -> bytes:
        """Trains a little and packs all of it."""
        self.clock += 1
        size = self.settings.sizes[fragment]
        name = int.from_bytes(self.name.encode(), "little")
        values = np.random.default_rng([name, fragment, self.clock]).normal(size=size)
        self.trained[fragment] += 32 * steps
        self.pending[fragment] += 32 * steps
        about: dict[str, Any] = {
            "kind": "contribution",
            "run": self.run,
            "layout": self.settings.layout.digest,
            "fragment": fragment,
            "size": size,
            "codec": self.settings.spec.wire.up,
            "base": self.versions[fragment],
            "version": self.versions[fragment],
            "region": self.name,
            "clock": self.clock,
            "prev": self.prev[fragment],
            "tokens": 32 * steps,
            "steps": steps,
        }
        scaled = (0.01 * values).astype(np.float32)
        self.sent[fragment] = pack(Header(**{**about, **header}), scaled)
        return self.sent[fragment]

    def adopt(self, fragment: int, version: int, merged: str) -> None:
        """Takes a version over; what it merged of ours is no longer pending."""
        self.versions[fragment] = version
        if merged and merged != self.prev[fragment]:
            frame = open_frame(self.sent[fragment])
            assert merged == frame.digest
            self.applied[fragment] += frame.header.tokens
            self.pending[fragment] -= frame.header.tokens
            self.prev[fragment] = merged


def receipt_of(data: bytes) -> Receipt:
    frame = open_frame(data)
    about = frame.header
    return Receipt(
        about.region,
        about.fragment,
        about.base,
        about.clock,
        frame.digest,
        about.prev,
        about.tokens,
        about.steps,
        len(data),
    )


class Bench:
    """A server without sockets and its regions; every method is one thing that happens."""

    def __init__(self, folder: Path, settings: ServerSettings | None = None) -> None:
        self.folder, self.settings, self.clock = folder, settings or make_settings(), Clock()
        self.noted: list[tuple[str, dict[str, Any]]] = []
        self.server = self._open()
        self.run = self.server.state.store.run
        self.regions = {
            region.name: Region(region.name, self.settings, self.run)
            for region in self.settings.spec.regions
        }

    def _open(self) -> Coordinator:
        def note(kind: str, **fields: Any) -> None:
            self.noted.append((kind, fields))

        return open_server(self.folder, self.settings, self.clock, note=note)

    @property
    def state(self):
        return self.server.state

    @property
    def versions(self) -> list[int]:
        return [slot.version for slot in self.state.ledger.slots]

    def restart(self) -> None:
        """Kills the server and starts the next one on the same folder."""
        kill_server(self.server)
        self.server = self._open()
        self.server.publisher.resume()

    async def join(self, *names: str) -> Joined:
        joined = None
        for name in names or tuple(self.regions):
            joined = await self.server.join(name, self.regions[name].join)
            self.regions[name].epoch = joined.epoch
        assert joined is not None
        return joined

    async def beat(self, name: str, steps: float | Sequence[float] = 0.0, **said: Any) -> News:
        """Reports; `drained` answers the end that stands."""
        if said.pop("drained", False):
            said["ended"] = self.state.ledger.ended
        return await self.server.heartbeat(name, self.regions[name].beat(steps, **said))

    async def call(self, fragment: int = 0, *names: str) -> None:
        """Lets regions report enough work on one fragment, so that it is called."""
        steps = [0.0] * len(self.settings.sizes)
        steps[fragment] = 2.0 * self.settings.spec.sync.every
        for name in names or tuple(self.regions):
            await self.beat(name, steps)
        self.server.tick()
        assert fragment in self.state.ledger.calls()
        for name in names or tuple(self.regions):
            await self.beat(name)

    async def send(self, name: str, fragment: int = 0, data: bytes | None = None) -> Answer:
        """Delivers a frame: its payload durable, then the decision."""
        region = self.regions[name]
        data = data or region.frame(fragment)
        receipt = receipt_of(data)
        self.state.store.keep_payload(receipt.digest, data)
        cursor = open_frame(data).header.cursor
        return await self.server.submit(receipt, epoch=region.epoch, cursor=cursor)

    async def round(self, fragment: int = 0, *names: str) -> None:
        """One whole round in which these regions take part."""
        await self.call(fragment, *(names or tuple(self.regions)))
        for name in names or tuple(self.regions):
            await self.send(name, fragment)
        self.clock.now += self.settings.spec.sync.grace.seconds
        await self.settle()

    async def amend(self, set: dict[str, Any] | None = None, **request: Any) -> Amended:
        """Changes settings of the run, under an id of its own unless one is given."""
        number = self.state.ledger.terms + 1
        wanted = Amend.model_validate({"id": f"amendment-{number}", "set": set or {}, **request})
        return (await self.server.amend(wanted, by="admin"))[0]

    async def settle(self) -> None:
        """Lets the server do all that is due now; regions adopt what it publishes."""
        self.server.tick()
        await self.server.publisher.settled()
        self.server.tick()
        for region in self.regions.values():
            for fragment, newest in enumerate(self.state.weights.newest):
                region.adopt(fragment, newest.number, newest.merged.get(region.name, ""))

    async def reads(
        self, name: str, lanes: Positions, released: Positions | None = None, **said: Any
    ) -> News:
        """A heartbeat that says how far a region has read."""
        cursor = TextCursor(order=TEXT, count=TEXT.lanes, lanes=lanes, released=released or {})
        return await self.beat(name, reading=cursor.model_dump(), **said)

    def digests(self) -> list[str]:
        """Every bit of the newest versions."""
        return [newest.state.digest for newest in self.state.weights.newest]


async def joined(folder: Path, spec: RunSpec | None = None) -> Bench:
    """A bench whose regions have joined."""
    bench = Bench(folder, make_settings(spec))
    await bench.join()
    return bench


def read_journal(folder: Path) -> list[Entry]:
    journal, records = FileJournal.open(folder / "server" / "journal")
    journal.close()
    return records


class MemoryPayloads:
    """As much of a store as merging needs: frames by their digest."""

    run = "replay"

    def __init__(self, frames: Iterable[bytes]) -> None:
        self._kept = {open_frame(data).digest: data for data in frames}

    def payload(self, digest: str) -> memoryview:
        return memoryview(self._kept[digest])


def replayed(settings: ServerSettings, folder: Path, frames: Iterable[bytes]) -> list[StoredState]:
    """Makes every version again from the initial weights, the journal and the frames."""
    ledger, store = Ledger.empty(len(settings.sizes)), MemoryPayloads(frames)
    versions = []
    for fragment in settings.layout.fragments:
        theta = gather(initial(), fragment)
        state = StoredState(theta, settings.outer.start(fragment.size), theta)
        versions.append(Version(0, state, "", {}, ()))
    for number, record in decode_all(read_journal(folder)):
        if isinstance(record, VersionPublished):
            about = settings.layout.fragments[record.fragment]
            slot, old = ledger.slots[about.number], versions[about.number]
            receipts = list(slot.closing.values())
            how = {"drain": slot.drain, "live": slot.live}
            made = next_version(settings, store, old, about, receipts, **how)
            assert isinstance(made, tuple), made
            versions[about.number] = made[0]
            assert made[0].digest == record.published
        ledger.apply(number, record)
    return [version.state for version in versions]
