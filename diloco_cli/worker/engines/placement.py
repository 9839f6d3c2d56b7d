"""Where do a region's weights lie: in which arrays, on which devices?

Outside an engine weights have the names of the model's tensors. On the devices an array is
such a tensor or a stack of several of one shape, and a mesh cuts it along one axis or two:

    tensor   over its heads, hidden numbers or vocabulary; products then work on their share
    fsdp     over its longest other axis that divides; put together while it is used

Norms lie on every device, and so does what does not divide. An array of the optimiser lies
where the weights of its name do. Everything that enters or leaves the devices through this
module is copied: on a CPU numpy and JAX would share memory wherever they can.

A mesh may reach over several processes. Each then holds its own shares alone: values come to
them through `transfer`, and what leaves the devices is put together on all of them first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from diloco_cli.core.fragments import Fragment, Piece, Tensor
from diloco_cli.errors import StoreError
from diloco_cli.models import Model, Partitioned

Params = dict[str, jax.Array]
State = Any
"""What the inner optimiser remembers; a tree of arrays only optax can read."""

ROWS = PartitionSpec(("data", "fsdp"))
"""How a mesh deals out the sequences of a batch."""


Share = Callable[[Any], np.ndarray]
"""Gives the values of an array at an index, which is a slice of each of its axes."""


class ValueTransfer(Protocol):
    def put(
        self, shape: tuple[int, ...], sharding: Sharding, dtype: Any, share: Share | None
    ) -> jax.Array:
        """Makes an array on the devices; without `share`, of values that another process has."""
        ...


class OneProcess:
    """All devices are this process's own."""

    def put(
        self, shape: tuple[int, ...], sharding: Sharding, dtype: Any, share: Share | None
    ) -> jax.Array:
        assert share is not None
        return jax.make_array_from_callback(shape, sharding, share).block_until_ready()


ONE_PROCESS = OneProcess()


@dataclass(frozen=True, eq=False)
class Placement:
    tensors: tuple[Tensor, ...]
    stacks: Mapping[str, tuple[str, ...]]
    """The members of each array that holds several tensors."""
    mesh: Mesh | None
    axes: Mapping[str, int]
    """The axis of a tensor that the mesh's `tensor` cuts."""
    transfer: ValueTransfer = ONE_PROCESS
    """How values come to the devices of a mesh."""

    # What there is

    @cached_property
    def members(self) -> dict[str, tuple[Tensor, ...]]:
        """The tensors in each array, by the array's name."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        stacked = {member for stack in self.stacks.values() for member in stack}
        alone = {name: (tensor,) for name, tensor in by_name.items() if name not in stacked}
        return alone | {
            array: tuple(by_name[member] for member in stack)
            for array, stack in self.stacks.items()
        }

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array."""
        return {
            array: (len(members), *members[0].shape) if array in self.stacks else members[0].shape
            for array, members in self.members.items()
        }

    def like(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays without their values."""
        return {
            array: jax.ShapeDtypeStruct(shape, jnp.float32) for array, shape in self.shapes.items()
        }

    def place_of(self, tensor: str) -> tuple[str, int]:
        """The array that holds a tensor, and the tensor's number in it."""
        return self._places[tensor]

    @cached_property
    def _places(self) -> dict[str, tuple[str, int]]:
        return {
            tensor.name: (array, number)
            for array, members in self.members.items()
            for number, tensor in enumerate(members)
        }

    # On which devices

    @cached_property
    def shardings(self) -> dict[str, NamedSharding] | None:
        """Where each array lies; None where there is one device."""
        if self.mesh is None:
            return None
        return {array: self._sharding(array) for array in self.members}

    def _sharding(self, array: str) -> NamedSharding:
        assert self.mesh is not None
        spec = self._cuts(self.members[array][0])
        return NamedSharding(
            self.mesh, PartitionSpec(*((None,) if array in self.stacks else ()), *spec)
        )

    def _cuts(self, tensor: Tensor) -> tuple[str | None, ...]:
        """What cuts each axis of a tensor."""
        assert self.mesh is not None
        cuts: list[str | None] = [None] * len(tensor.shape)
        if len(tensor.shape) < 2:
            return tuple(cuts)
        sizes, own = self.mesh.shape, self.axes.get(tensor.name)
        if own is not None and tensor.shape[own] % sizes["tensor"] == 0 and sizes["tensor"] > 1:
            cuts[own] = "tensor"
        # Rows that are looked up one by one stay whole: to find them, no device needs another.
        free = [
            axis
            for axis, length in enumerate(tensor.shape)
            if cuts[axis] is None and length % sizes["fsdp"] == 0
        ]
        wide = [axis for axis in free if axis > 0] if tensor.embedding else []
        if (free := wide or free) and sizes["fsdp"] > 1:
            cuts[max(free, key=lambda axis: tensor.shape[axis])] = "fsdp"
        return tuple(cuts)

    @cached_property
    def everywhere(self) -> NamedSharding | None:
        return NamedSharding(self.mesh, PartitionSpec()) if self.mesh else None

    @cached_property
    def rows(self) -> NamedSharding | None:
        """Where the sequences of a batch lie."""
        return NamedSharding(self.mesh, ROWS) if self.mesh else None

    def of_state(self, state: State) -> State:
        """Where each array of an optimiser's state lies; `state` may be shapes alone."""

        def where(path: Any, leaf: Any) -> NamedSharding | None:
            array = self._array_of(path, leaf.shape)
            return self.shardings[array] if array and self.shardings else self.everywhere

        return jax.tree_util.tree_map_with_path(where, state)

    def _array_of(self, path: Any, shape: tuple[int, ...]) -> str | None:
        """The array of weights that an array of the optimiser belongs to."""
        keys = [step.key for step in path if isinstance(step, jax.tree_util.DictKey)]
        return next((key for key in keys if self.shapes.get(key) == shape), None)

    # In and out

    def place(self, params: Mapping[str, np.ndarray] | None) -> Params:
        """Copies weights to the devices; None stands for those that another process sends."""
        return {
            array: self._put(
                array,
                None if params is None else [params[tensor.name] for tensor in members],
                np.float32,
            )
            for array, members in self.members.items()
        }

    def place_batch(self, tokens: np.ndarray | None, shape: tuple[int, ...] = ()) -> Any:
        """Deals a batch out, as far as it can be; one of this shape that another process sends."""
        if self.mesh is None:
            return tokens
        shape = shape if tokens is None else tokens.shape
        shares = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        sharding = self.rows if shape[0] % shares == 0 else self.everywhere
        assert sharding is not None
        share = None if tokens is None else lambda index: tokens[index].copy()
        return self.transfer.put(shape, sharding, np.int32, share)

    def _put(self, array: str, parts: Sequence[np.ndarray] | None, dtype: Any) -> jax.Array:
        stacked = array in self.stacks
        if self.shardings is None:
            assert parts is not None
            return _copied(np.stack(parts) if stacked else parts[0], dtype)
        if parts is None:
            return self.transfer.put(self.shapes[array], self.shardings[array], dtype, None)

        def share(index: Any) -> np.ndarray:
            if not stacked:
                return np.array(parts[0][index], dtype, copy=True)
            return np.stack([part[index[1:]] for part in parts[index[0]]], dtype=dtype)

        return self.transfer.put(self.shapes[array], self.shardings[array], dtype, share)

    def fetch(self, params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        """Copies weights to the host; the copies stay as they are, whatever the next step does."""
        arrays = fetch(params)
        return {
            tensor.name: arrays[array][number] if array in self.stacks else arrays[array]
            for array, members in self.members.items()
            for number, tensor in enumerate(members)
        }

    # Fragments

    def read(self, params: Mapping[str, jax.Array], fragment: Fragment) -> np.ndarray:
        """Copies one fragment to the host as a vector; nothing else leaves the devices."""
        return self.begin_read(params, fragment)()

    def begin_read(
        self, params: Mapping[str, jax.Array], fragment: Fragment
    ) -> Callable[[], np.ndarray]:
        """Begins to copy one fragment; gives what waits for it and puts it together.

        Whatever the next step does, that is the fragment as of now.
        """
        found = [(piece, shard) for piece in fragment.pieces for shard in self._rows(params, piece)]
        for _, (_, values) in found:
            values.copy_to_host_async()

        def finish() -> np.ndarray:
            vector = np.empty(fragment.size, np.float32)
            for piece, (into, values) in found:
                vector[piece.span].reshape(piece.shape)[into] = np.asarray(values)
            return vector

        return finish

    def _rows(self, params: Mapping[str, jax.Array], piece: Piece) -> list[tuple[Any, jax.Array]]:
        """The arrays that a piece's rows are found in, each with its place among them."""
        array, number = self._places[piece.tensor]
        values, stacked = params[array], array in self.stacks
        shape = self.members[array][0].shape
        if self.shardings is None:
            if stacked:
                values = _member(None)(values, number)
            # The start is an argument of the compiled slice, so pieces of one size share it.
            # All of a tensor is copied too: the next step takes the array's memory.
            return [((), _slice(values, piece.start, piece.stop - piece.start))]
        if stacked:
            values = _member(self._one(array))(values, number)
        found = []
        for shard in values.addressable_shards:
            if shard.replica_id:
                continue
            first, *others = shard.index
            start, stop, _ = first.indices(shape[0])
            begin, end = max(start, piece.start), min(stop, piece.stop)
            if begin < end:
                rows = _slice(shard.data, begin - start, end - begin)
                found.append(((slice(begin - piece.start, end - piece.start), *others), rows))
        return found

    def _one(self, array: str) -> NamedSharding:
        """Where one member of a stack lies."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*self._cuts(self.members[array][0])))

    def write(self, params: Params, fragment: Fragment, vector: np.ndarray) -> Params:
        """Gives the weights with one fragment replaced; all others are the same arrays.

        The arrays of `params` that hold some of the fragment are given up.
        """
        changed = dict(params)
        for piece in fragment.pieces:
            array, number = self._places[piece.tensor]
            rows = vector[piece.span].reshape(piece.shape)
            if array not in self.stacks and piece.shape == self.shapes[array]:
                changed[array] = self._put(array, [rows], np.float32)
            elif self.shardings is None:
                at = (number, piece.start) if array in self.stacks else (piece.start,)
                changed[array] = _overwrite(changed[array], _copied(rows, np.float32), at)
            else:
                changed[array] = self._write_shards(changed[array], array, number, piece, rows)
        return changed

    def _write_shards(
        self, old: jax.Array, array: str, number: int, piece: Piece, rows: np.ndarray
    ) -> jax.Array:
        """Replaces rows without moving any between devices: each gets those it holds."""
        assert self.shardings is not None
        shape = self.members[array][0].shape

        def share(index: Any) -> np.ndarray:
            first, *others = index
            start, stop, _ = first.indices(shape[0])
            begin, end = max(start, piece.start), min(stop, piece.stop)
            found = np.zeros((stop - start, *rows[:0, *others].shape[1:]), np.float32)
            if begin < end:
                source = rows[begin - piece.start : end - piece.start, *others]
                found[begin - start : end - start] = source
            return found

        new = jax.make_array_from_callback(shape, self._one(array), share).block_until_ready()
        where = (piece.start, piece.stop, number)
        stacked = array in self.stacks
        return _replace(self.shardings[array], stacked)(old, new, *where)

    # The optimiser

    def flatten(self, state: State) -> dict[str, np.ndarray]:
        """Copies an optimiser's state to the host, each array under its place in the tree.

        Stacks are taken apart, so that a region may go on with them or without.
        """
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        arrays = fetch({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
        found: dict[str, np.ndarray] = {}
        for path, leaf in leaves:
            values = arrays[jax.tree_util.keystr(path)]
            if names := self._taken_apart(path, leaf.shape):
                found |= zip(names, values, strict=True)
            else:
                found[jax.tree_util.keystr(path)] = values
        return found

    def named(self, state: State) -> tuple[dict[str, jax.Array], dict[str, list[str]]]:
        """The arrays of an optimiser's state where they lie, each under its place in the tree;
        and the tensors in those that are stacks."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        parts = {
            jax.tree_util.keystr(path): self._taken_apart(path, at.shape) for path, at in leaves
        }
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}, parts

    def spread_out(self, like: State) -> dict[str, jax.ShapeDtypeStruct]:
        """What `named` gives for a state with these shapes, without its values."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(like)
        alone = SingleDeviceSharding(jax.local_devices()[0])
        where = [alone] * len(leaves) if self.mesh is None else jax.tree.leaves(self.of_state(like))
        return {
            jax.tree_util.keystr(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
            for (path, leaf), at in zip(leaves, where, strict=True)
        }

    def put_together(self, like: State, arrays: Mapping[str, jax.Array]) -> State:
        """The state that `named` took apart."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: arrays[jax.tree_util.keystr(path)], like
        )

    def _taken_apart(self, path: Any, shape: tuple[int, ...]) -> list[str]:
        """Under which names the parts of a stack are saved; none if it is no stack."""
        array = self._array_of(path, shape)
        if array is None or array not in self.stacks:
            return []
        key = jax.tree_util.DictKey(array)
        return [
            jax.tree_util.keystr(
                tuple(jax.tree_util.DictKey(member) if step == key else step for step in path)
            )
            for member in self.stacks[array]
        ]

    def fits(self, like: State, saved: Mapping[str, np.ndarray]) -> bool:
        """Says whether this is a saved state of an optimiser whose own is `like`."""
        found = {name: (values.shape, values.dtype) for name, values in saved.items()}
        return found == self._wanted(like)

    def _wanted(self, like: State) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and type of every array that `flatten` gives."""
        wanted: dict[str, tuple[tuple[int, ...], Any]] = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(like)[0]:
            if names := self._taken_apart(path, leaf.shape):
                wanted |= dict.fromkeys(names, (leaf.shape[1:], leaf.dtype))
            else:
                wanted[jax.tree_util.keystr(path)] = (leaf.shape, leaf.dtype)
        return wanted

    def restore(self, like: State, saved: Mapping[str, np.ndarray] | None) -> State:
        """Rebuilds the state `flatten` took apart, bit for bit; `like` gives its shapes.

        None stands for a state that another process sends.
        """
        if saved is not None and not self.fits(like, saved):
            differing = sorted(set(self._wanted(like)) ^ set(saved)) or ["the shapes of its arrays"]
            raise StoreError(
                "The saved optimiser state does not fit the optimiser of this run: "
                f"it differs in {differing[0]}.",
                hint="Delete the region's checkpoint; it then restarts from the published weights.",
            )

        def made(path: Any, leaf: Any) -> jax.Array:
            names = self._taken_apart(path, leaf.shape) or [jax.tree_util.keystr(path)]
            if array := self._array_of(path, leaf.shape):
                parts = None if saved is None else [saved[name] for name in names]
                return self._put(array, parts, leaf.dtype)
            if self.everywhere is None:
                assert saved is not None
                return _copied(saved[names[0]], leaf.dtype)
            values = None if saved is None else np.array(saved[names[0]], leaf.dtype)
            share = None if values is None else lambda index: values[index].copy()
            return self.transfer.put(leaf.shape, self.everywhere, leaf.dtype, share)

        return jax.tree_util.tree_map_with_path(made, like)


def place_model(
    model: Model,
    *,
    stacked: bool = False,
    mesh: Mesh | None = None,
    transfer: ValueTransfer = ONE_PROCESS,
) -> Placement:
    """Says where a model's weights go."""
    able = isinstance(model, Partitioned)
    return Placement(
        tensors=model.tensors(),
        stacks=model.stacks() if able and stacked else {},
        mesh=mesh,
        axes=model.tensor_axes() if able else {},
        transfer=transfer,
    )


def fetch(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Copies arrays to the host; whatever other processes hold of them comes over."""
    for values in arrays.values():
        if values.is_fully_addressable:
            values.copy_to_host_async()
    return {name: np.array(put_together(values), copy=True) for name, values in arrays.items()}


def put_together(values: jax.Array) -> jax.Array:
    """An array that this process can read all of; a program of all processes that hold it."""
    if values.is_fully_addressable or values.is_fully_replicated:
        return values
    assert isinstance(values.sharding, NamedSharding)
    return _everywhere(NamedSharding(values.sharding.mesh, PartitionSpec()))(values)


@cache
def _everywhere(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda values: values, out_shardings=sharding)


def _copied(values: np.ndarray, dtype: Any) -> jax.Array:
    # JAX only queues the copy, and would copy whatever the array holds by then.
    return jnp.array(values, dtype, copy=True).block_until_ready()


@partial(jax.jit, static_argnames="count")
def _slice(values: jax.Array, start: int, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(values, start, count)


@partial(jax.jit, donate_argnums=0)
def _overwrite(values: jax.Array, rows: jax.Array, at: tuple[int, ...]) -> jax.Array:
    new = rows.reshape((1,) * (values.ndim - rows.ndim) + rows.shape)
    return jax.lax.dynamic_update_slice(values, new, (*at, *(0,) * (values.ndim - len(at))))


@cache
def _member(sharding: NamedSharding | None) -> Callable[[jax.Array, int], jax.Array]:
    """Takes one tensor out of a stack."""
    return jax.jit(lambda stack, number: stack[number], out_shardings=sharding)


@cache
def _replace(sharding: NamedSharding, stacked: bool) -> Callable[..., jax.Array]:
    """Takes over the rows from `start` to `stop`; all arguments are cut alike."""

    def replace(old: jax.Array, new: jax.Array, start: int, stop: int, number: int) -> jax.Array:
        row = jnp.arange(new.shape[0]).reshape(-1, *(1,) * (new.ndim - 1))
        kept = old[number] if stacked else old
        mixed = jnp.where((row >= start) & (row < stop), new, kept)
        return old.at[number].set(mixed) if stacked else mixed

    return jax.jit(replace, donate_argnums=0, out_shardings=sharding)
