"""A region whose devices belong to several hosts: one process decides, the others do the same.

JAX runs one program on the devices of all processes only if every process starts it, in the same
order. So the lead announces whatever it is about to do to the devices, then does it; followers
obey in the order of the announcements, and decide nothing:

    lead       order ──▶ values, to each host its own share ──▶ start the program
    follower   hear ───▶ receive the own share ───────────────▶ start the same program

Orders and values come through the hosts' own connection, never through the devices: an order
must not wait for what the devices are computing. Vectors are sent in small parts from any thread,
so that steps pass between them, and are named by a number from then on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco_cli.core.fragments import Fragment, Layout
from diloco_cli.core.unmerged_work import DROP, Mix
from diloco_cli.errors import StoreError
from diloco_cli.system.failpoints import reach
from diloco_cli.worker.engines.exchange import DeviceExchange
from diloco_cli.worker.engines.host_speed import EVERY_SECONDS, SAMPLES, HostTimer
from diloco_cli.worker.engines.jax_engine import JaxEngine, JaxStep, use_compile_cache
from diloco_cli.worker.engines.orbax_folder import OrbaxFolder, SavedOptimizer
from diloco_cli.worker.engines.placement import Share, put_together
from diloco_cli.worker.engines.protocol import (
    Arrays,
    EngineSnapshot,
    HeldWork,
    Orders,
    ShardedFolder,
    StepCost,
    ToLead,
    Vector,
)

PATIENCE = 1800
"""Seconds for which processors wait for each other in a program."""
PART = 1 << 20
"""Bytes of a vector that are sent at a time, between two orders."""


def join_processes(address: str, *, hosts: int, host: int) -> None:
    """Makes the devices of all hosts one; call it before anything else is asked of JAX."""
    # Whoever is gone shows in its connection. A host that is slow to compile is waited for.
    patience = f"--xla_cpu_collective_timeout_seconds={PATIENCE}"
    patience += f" --xla_cpu_collective_call_terminate_timeout_seconds={PATIENCE}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {patience}".strip()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Processors wait for each other in the threads that start programs: of two that were started
    # at once, one process may begin with the first and another with the second.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # It would take SIGTERM for itself, which is how an agent tells its trainer to leave.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address, hosts, host, coordinator_bind_address=address if host == 0 else None
    )
    jax.devices()  # Each waits here for all others, so nobody may do something else before.
    if host:
        _keep_compiled(host)


def _keep_compiled(host: int) -> None:
    """Has this host keep what it compiles, in a folder of its own, as the first host does.

    JAX has the first process alone write, for others that see its folder and can use its programs.
    Without this every other host would compile each time that the region begins again.
    """
    if (folder := use_compile_cache()) is None:
        return
    use_compile_cache(folder / f"host-{host}")
    try:  # There is no public way; without it a start takes longer, and that is all.
        from jax._src import compilation_cache, compiler
    except ImportError:
        return

    def write(
        key: str, seconds: float, name: str, backend: Any, program: Any, callbacks: Sequence[Any]
    ) -> None:
        if not callbacks:
            with contextlib.suppress(Exception):
                compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))

    if hasattr(compiler, "_cache_write"):
        compiler._cache_write = write


def connect_groups(mesh: Mesh) -> None:
    """Has the devices of every group meet once, with a program that is quickly compiled.

    Processors wait half a minute for each other when a group first meets, and a step may take
    one of them longer to compile than another.
    """
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    ones = jax.make_array_from_callback(
        (mesh.size,), spread, lambda index: np.ones(mesh.size, np.float32)[index]
    )
    for count in range(len(axes), 0, -1):
        for some in itertools.combinations(axes, count):
            rest = tuple(axis for axis in mesh.axis_names if axis not in some)
            total = jax.shard_map(
                partial(jax.lax.psum, axis_name=some),
                mesh=mesh,
                in_specs=PartitionSpec(mesh.axis_names),
                out_specs=PartitionSpec(rest),
            )
            jax.block_until_ready(jax.jit(total)(ones))


# Values


@dataclass(frozen=True)
class SentValues:
    """The lead's way of bringing values to the devices: it has them all."""

    orders: Orders

    def put(self, shape: Any, sharding: Any, dtype: Any, share: Share | None) -> jax.Array:
        assert share is not None
        for host, index in _shares(sharding, shape):
            if host != jax.process_index():
                self.orders.give(host, np.ascontiguousarray(share(index), dtype))
        return jax.make_array_from_callback(shape, sharding, share).block_until_ready()


@dataclass(frozen=True)
class ReceivedValues:
    """A follower's way: its own shares come after the order, one after the other."""

    receive: Callable[[], Any]
    """Waits for the bytes of the next share."""

    def put(self, shape: Any, sharding: Any, dtype: Any, share: Share | None) -> jax.Array:
        found: dict[Any, np.ndarray] = {}
        for host, index in _shares(sharding, shape):
            if host == jax.process_index():
                values = np.frombuffer(self.receive(), dtype)
                found[_named(index)] = values.reshape(_lengths(index, shape)).copy()
        return jax.make_array_from_callback(
            shape, sharding, lambda index: found[_named(index)]
        ).block_until_ready()


def _shares(sharding: Any, shape: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
    """Each host with an index of values that it holds; the same sequence in every process."""
    seen: set[Any] = set()
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        key = device.process_index, _named(index)
        if key not in seen:
            seen.add(key)
            yield device.process_index, index


def _named(index: Any) -> tuple[Any, ...]:
    return tuple((part.start, part.stop) for part in index)


def _start(index: Any, size: int) -> int:
    return index[0].indices(size)[0]


def _lengths(index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        len(range(*part.indices(length))) for part, length in zip(index, shape, strict=True)
    )


# The lead


class SpreadVector:
    """One fragment's values in the memory of all hosts."""

    def __init__(self, number: int, array: jax.Array, show: Callable[[SpreadVector], Any]) -> None:
        self.number, self.array, self._show = number, array, show

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, from all hosts; only between two steps."""
        values = np.array(self._show(self))
        return values if dtype is None else values.astype(dtype)


@dataclass(frozen=True)
class LeadStep:
    """A step on the devices of several hosts, as the process that decides sees it."""

    compiled: JaxStep
    orders: Orders
    announcement: Mapping[str, Any] = field(default_factory=dict)
    """What followers need to build the same step."""

    @property
    def cost(self) -> StepCost:
        return self.compiled.cost

    def engine(self) -> LeadEngine:
        with self.orders.order("build", **self.announcement):
            return LeadEngine(self.compiled, self.orders)


class LeadEngine(JaxEngine):
    """The engine of the process that decides: it announces, then does; see `Engine`."""

    def __init__(self, compiled: JaxStep, orders: Orders) -> None:
        super().__init__(compiled)
        assert compiled.placement.mesh is not None
        connect_groups(compiled.placement.mesh)
        self._orders, self._numbers = orders, itertools.count()
        self._spread = DeviceExchange(compiled.placement)
        self._speed = HostTimer(list(compiled.placement.mesh.devices.flat))
        self._steps = self._rounds = self._looks = 0
        self._looked = 0.0

    def begin(self, params: Arrays | None, optimizer: Arrays | None, *, restore: bool) -> None:
        with self._orders.order("begin", restore=restore):
            super().begin(params, optimizer, restore=restore)

    def begin_saved(self, params: Arrays | None, optimizer: SavedOptimizer) -> None:
        with self._orders.order("begin_saved", **optimizer.record()):
            super().begin_saved(params, optimizer)

    def place(self, place: int) -> None:
        if place != self._next:
            with self._orders.order("place", place=place):
                super().place(place)

    def step(self, tokens: np.ndarray) -> jax.Array:
        with self._orders.order("step", shape=tokens.shape):
            rows = self._placement.place_batch(tokens)
        reach("order.sent")
        loss = super().step(rows)
        self._steps += 1
        # The first step compiles; after it, a few looks in a row say how fast each host is.
        due = self._looks < SAMPLES or time.monotonic() >= self._looked + EVERY_SECONDS
        if self._steps > 1 and due:
            loss.block_until_ready()
            self._compare_hosts()
        return loss

    def _compare_hosts(self) -> None:
        self._rounds = self._rounds or self._speed.choose_rounds()
        with self._orders.order("compare", rounds=self._rounds):
            pass
        seconds = self._speed.measure(self._rounds)
        if seconds is not None:
            self._orders.note_speed(jax.process_index(), seconds)
        self._looks, self._looked = self._looks + 1, time.monotonic()

    def read(self, fragment: Fragment) -> np.ndarray:
        with self._orders.order("read", fragment=fragment.number):
            return self._spread.read(self.params, fragment)

    def write(self, fragment: Fragment, values: np.ndarray) -> None:
        kept = self.keep(fragment, values)
        self.adopt(fragment, kept, kept, DROP, None)

    def keep(self, fragment: Fragment, values: np.ndarray) -> Vector:
        number = next(self._numbers)
        padded, sharding = self._spread.padded(fragment, values), self._spread.resting
        each = PART // padded.itemsize
        for host, (part,) in _shares(sharding, padded.shape):
            if host == jax.process_index():
                continue
            start, stop, _ = part.indices(padded.size)
            for at in range(start, stop, each):
                sent = padded[at : min(stop, at + each)]
                self._orders.give(
                    host, sent, "part", vector=number, size=padded.size, start=start, at=at
                )
        array = jax.make_array_from_callback(padded.shape, sharding, lambda index: padded[index])
        vector = SpreadVector(number, array.block_until_ready(), self._show)
        weakref.finalize(vector, self._orders.forget, number).atexit = False
        reach("vector.kept")
        return vector  # pyright: ignore[reportReturnType]

    def _show(self, vector: SpreadVector) -> np.ndarray:
        with self._orders.order("show", vector=vector.number):
            return np.array(put_together(self._spread.at_hand(vector.array)))

    def held(self, fragment: Fragment, anchor: Vector, codec: Mapping[str, Any]) -> HeldWork:
        with self._orders.order(
            "held", fragment=fragment.number, anchor=_number(anchor), codec=dict(codec)
        ):
            pass
        reach("held.sent")
        return super().held(fragment, _array(anchor), codec)

    def adopt(
        self, fragment: Fragment, anchor: Vector, new: Vector, mix: Mix, frame: Vector | None
    ) -> None:
        with self._orders.order(
            "adopt",
            fragment=fragment.number,
            anchor=_number(anchor),
            new=_number(new),
            mix=list(mix),
            frame=None if frame is None else _number(frame),
        ):
            pass
        reach("adopt.sent")
        super().adopt(
            fragment, _array(anchor), _array(new), mix, None if frame is None else _array(frame)
        )

    def snapshot(self) -> EngineSnapshot:
        with self._orders.order("snapshot"):
            pass
        reach("snapshot.sent")
        return super().snapshot()

    def save(
        self,
        folder: ShardedFolder,
        notes: Mapping[str, Any],
        anchors: Iterable[tuple[Fragment, Vector]],
        number: int | None = None,
    ) -> None:
        assert isinstance(folder, OrbaxFolder)
        if why := folder.failed or self._orders.unsaved():
            # Hosts that do not know where each other stopped would wait for each other.
            raise StoreError(f"no more of them until the region is started again: {why}")
        listed, number = list(anchors), folder.next_number()
        with self._orders.order(
            "save",
            folder=str(folder.folder.resolve()),
            keep=folder.keep,
            mark=folder.mark,
            number=number,
            anchors=[_number(anchor) for _, anchor in listed],
        ):
            pass
        reach("save.sent")
        arrays = [(fragment, _array(anchor)) for fragment, anchor in listed]
        super().save(folder, notes, arrays, number)

    def reset_optimizer(self) -> None:
        with self._orders.order("reset"):
            super().reset_optimizer()

    def evaluate(self, params: Arrays, batches: Iterable[np.ndarray]) -> float:
        listed = list(batches)
        with self._orders.order("evaluate", shapes=[batch.shape for batch in listed]):
            return super().evaluate(params, listed)


def _number(vector: Any) -> int:
    assert isinstance(vector, SpreadVector)
    return vector.number


def _array(vector: Any) -> jax.Array:
    assert isinstance(vector, SpreadVector)
    return vector.array


# A follower


class FollowerEngine:
    """The engine of a process that obeys; it holds its hosts' shares and knows no books."""

    def __init__(self, compiled: JaxStep, layout: Layout, lead: ToLead) -> None:
        assert compiled.placement.mesh is not None
        connect_groups(compiled.placement.mesh)
        self._speed = HostTimer(list(compiled.placement.mesh.devices.flat))
        self._lead = lead
        self._engine, self._compiled = JaxEngine(compiled), compiled
        self._placement, self._fragments = compiled.placement, layout.fragments
        self._spread = DeviceExchange(compiled.placement)
        self._parts: dict[int, dict[int, np.ndarray]] = {}
        self._vectors: dict[int, jax.Array] = {}
        self._loss: jax.Array | None = None
        self._folder: OrbaxFolder | None = None

    def obey(self, name: str, arguments: Mapping[str, Any], values: Any) -> None:
        """Does what the lead does."""
        reach("order.heard")
        getattr(self, f"_{name}")(values, **arguments)

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._vectors.pop(number, None)

    def _begin(self, _: Any, *, restore: bool) -> None:
        self._engine.begin(None, None, restore=restore)

    def _begin_saved(self, _: Any, **saved: Any) -> None:
        self._engine.begin_saved(None, SavedOptimizer.of_record(**saved))

    def _save(
        self, _: Any, *, folder: str, keep: int, mark: str, number: int, anchors: list[int]
    ) -> None:
        if self._folder is None:
            self._folder = OrbaxFolder(Path(folder), keep=keep)
            self._folder.find_mark(mark)
        vectors = [self._vectors[anchor] for anchor in anchors]
        named = zip(self._fragments, vectors, strict=True)
        try:
            self._engine.save(self._folder, {}, named, number)
        except StoreError as error:
            self._lead.tell_unsaved(error.message)
            return
        threading.Thread(target=self._saved, name="checkpoint", daemon=True).start()

    def _saved(self) -> None:
        assert self._folder is not None
        try:
            self._folder.wait()
        except StoreError as error:
            self._lead.tell_unsaved(error.message)

    def _place(self, _: Any, *, place: int) -> None:
        self._engine.place(place)

    def _step(self, _: Any, *, shape: list[int]) -> None:
        rows = self._placement.place_batch(None, tuple(shape))
        if self._loss is not None:
            self._loss.block_until_ready()  # One step ahead of the devices, as the lead is.
        self._loss = self._engine.step(rows)

    def _compare(self, _: Any, *, rounds: int) -> None:
        if self._loss is not None:
            self._loss.block_until_ready()
        seconds = self._speed.measure(rounds)
        if seconds is not None:
            self._lead.tell_speed(seconds)

    def _read(self, _: Any, *, fragment: int) -> None:
        self._spread.read(self._engine.params, self._fragments[fragment])

    def _part(self, values: Any, *, vector: int, size: int, start: int, at: int) -> None:
        assert self._placement.mesh is not None
        share = size // self._placement.mesh.size
        parts = self._parts.setdefault(vector, {})
        whole = parts.setdefault(start, np.empty(share, np.float32))
        sent = np.frombuffer(values, np.float32)
        whole[at - start : at - start + sent.size] = sent
        own = [
            index
            for host, (index,) in _shares(self._spread.resting, (size,))
            if host == jax.process_index()
        ]
        starts = [index.indices(size)[0] for index in own]
        if start == starts[-1] and at + sent.size == start + share:  # They come in this order.
            self._vectors[vector] = jax.make_array_from_callback(
                (size,), self._spread.resting, lambda index: parts[_start(index, size)]
            ).block_until_ready()
            del self._parts[vector]

    def _show(self, _: Any, *, vector: int) -> None:
        put_together(self._spread.at_hand(self._vectors[vector])).block_until_ready()

    def _held(self, _: Any, *, fragment: int, anchor: int, codec: Mapping[str, Any]) -> None:
        self._engine.held(self._fragments[fragment], self._vectors[anchor], codec)

    def _adopt(
        self, _: Any, *, fragment: int, anchor: int, new: int, mix: list[float], frame: int | None
    ) -> None:
        vectors = [None if each is None else self._vectors[each] for each in (anchor, new, frame)]
        assert vectors[0] is not None and vectors[1] is not None
        self._engine.adopt(self._fragments[fragment], vectors[0], vectors[1], Mix(*mix), vectors[2])

    def _snapshot(self, _: Any) -> None:
        for values in [*self._engine.params.values(), *jax.tree.leaves(self._engine.state)]:
            put_together(values).block_until_ready()  # One at a time, as the lead does.

    def _reset(self, _: Any) -> None:
        self._engine.reset_optimizer()

    def _evaluate(self, _: Any, *, shapes: list[list[int]]) -> None:
        params, place = self._placement.place(None), self._placement.place_batch
        for shape in shapes:
            jax.block_until_ready(self._compiled.loss(params, place(None, tuple(shape))))
