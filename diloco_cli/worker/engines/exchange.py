"""How do a fragment's vectors meet the weights without holding up the training?

What is posted and what is adopted are vectors: `held = anchor − weights`, and after a version
`weights = new − (α · held − κ · frame)`. There are two ways to compute them:

    host      on one processor, whose memory is the host's: rows are copied between two steps,
              the rest is numpy, and posting waits for nothing
    devices   on accelerators and on meshes: both are programs between two steps, in the order
              of the steps; only codes cross to the host, beside the training

On devices a vector lies in the memory of the host, cut into equal parts, one for each device.
It crosses over while it is used. A program belongs to the form of a fragment: fragments whose
pieces differ only in their place in a stack share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from diloco_cli.core.fragments import Fragment
from diloco_cli.core.unmerged_work import Mix
from diloco_cli.wire.codecs import Codec, codecs
from diloco_cli.wire.frame import Header, pack
from diloco_cli.worker.engines.device_codec import (
    Encoded,
    encode,
    last_blocks,
    pack_encoded,
    packable,
)
from diloco_cli.worker.engines.placement import Params, Placement
from diloco_cli.worker.engines.protocol import HeldWork, Vector
from diloco_cli.worker.engines.rows_engine import HeldRows, adopted

HOST_MEMORY = "pinned_host"
"""What JAX calls memory of the host that devices reach."""


class Exchange(Protocol):
    def keep(self, fragment: Fragment, values: np.ndarray) -> Vector: ...

    def held(
        self, params: Params, fragment: Fragment, anchor: Vector, codec: Mapping[str, Any]
    ) -> HeldWork: ...

    def held_values(self, params: Params, fragment: Fragment, anchor: Vector) -> Any:
        """What is held of a fragment, where vectors rest; the next step does not change it."""
        ...

    def adopt(
        self,
        params: Params,
        fragment: Fragment,
        anchor: Vector,
        new: Vector,
        mix: Mix,
        frame: Vector | None,
    ) -> Params: ...


def exchange_of(placement: Placement) -> Exchange:
    """Chooses by where the weights lie."""
    alone = placement.mesh is None and jax.local_devices()[0].platform == "cpu"
    return HostExchange(placement) if alone else DeviceExchange(placement)


# On the host


@dataclass(frozen=True)
class HostExchange:
    placement: Placement

    def keep(self, fragment: Fragment, values: np.ndarray) -> Vector:
        return values

    def held(
        self, params: Params, fragment: Fragment, anchor: Vector, codec: Mapping[str, Any]
    ) -> HeldWork:
        return HeldRows(np.asarray(anchor), self.placement.begin_read(params, fragment))

    def held_values(self, params: Params, fragment: Fragment, anchor: Vector) -> np.ndarray:
        return np.asarray(anchor) - self.placement.read(params, fragment)

    def adopt(
        self,
        params: Params,
        fragment: Fragment,
        anchor: Vector,
        new: Vector,
        mix: Mix,
        frame: Vector | None,
    ) -> Params:
        local = partial(self.placement.read, params, fragment)
        weights = adopted(anchor, new, mix, frame, local)
        return self.placement.write(params, fragment, weights)


# On devices


class _Piece(NamedTuple):
    """Where a piece's rows lie, as far as the program depends on it."""

    array: int
    """Which of the arrays that hold some of the fragment."""
    stacked: bool
    rows: tuple[int, int] | None
    """None stands for all of a tensor."""
    shape: tuple[int, ...]


class _Form(NamedTuple):
    """All that a program of a fragment depends on beside its arguments."""

    pieces: tuple[_Piece, ...]
    size: int
    spread: Any
    """How vectors are cut."""
    everywhere: Any
    shardings: tuple[Any, ...] | None
    """Of the arrays."""


@dataclass(frozen=True, eq=False)
class DeviceExchange:
    placement: Placement

    def keep(self, fragment: Fragment, values: np.ndarray) -> Vector:
        """Waits until it lies where it belongs, so that whoever uses it does not."""
        padded = self.padded(fragment, values)
        return jax.device_put(padded, self.resting).block_until_ready()

    def padded(self, fragment: Fragment, values: np.ndarray) -> np.ndarray:
        """The vector with zeros after it, so that every device gets as much."""
        return np.pad(values, (0, -fragment.size % self._parts))

    def read(self, params: Params, fragment: Fragment) -> np.ndarray:
        """Copies one fragment's weights to the host, also those that other processes hold."""
        names, numbers, form = self._form(fragment)
        values = _weights(form)([params[name] for name in names], numbers)
        return np.array(values)[: fragment.size]

    def held(
        self, params: Params, fragment: Fragment, anchor: Vector, codec: Mapping[str, Any]
    ) -> HeldWork:
        names, numbers, form = self._form(fragment)
        built = codecs.build(codec)
        arrays, at_hand = [params[name] for name in names], self.at_hand(anchor)
        if packable(built):
            lasts = last_blocks(built, fragment.size)
            encoded = _held_codes(form, built)(arrays, numbers, at_hand, lasts)
            for part in encoded:
                part.copy_to_host_async()
            return _Codes(encoded)
        values = _held_floats(form, form.everywhere)(arrays, numbers, at_hand)
        values.copy_to_host_async()
        return _Floats(values, fragment.size)

    def held_values(self, params: Params, fragment: Fragment, anchor: Vector) -> jax.Array:
        names, numbers, form = self._form(fragment)
        arrays = [params[name] for name in names]
        values = _held_floats(form, self._spread)(arrays, numbers, self.at_hand(anchor))
        return jax.device_put(values, self.resting)  # So that one fragment at a time is there.

    def adopt(
        self,
        params: Params,
        fragment: Fragment,
        anchor: Vector,
        new: Vector,
        mix: Mix,
        frame: Vector | None,
    ) -> Params:
        if mix.flight and frame is None:
            raise ValueError("a merged frame leaves `held`, but its values were not given")
        names, numbers, form = self._form(fragment)
        vectors = [
            self.at_hand(anchor) if mix.held else None,
            self.at_hand(new),
            self.at_hand(frame) if mix.flight else None,
        ]
        factors = np.array(mix, np.float32)
        arrays = [params[name] for name in names]
        adopted = _adoption(form)(arrays, numbers, *vectors, factors)
        return {**params, **dict(zip(names, adopted, strict=True))}

    # Where vectors lie

    @cached_property
    def _parts(self) -> int:
        return self.placement.mesh.size if self.placement.mesh else 1

    @cached_property
    def resting(self) -> Any:
        """Where a vector lies while it is not used."""
        return self._spread.with_memory_kind(HOST_MEMORY)

    @cached_property
    def _spread(self) -> Any:
        """Where a vector lies while it is used."""
        mesh = self.placement.mesh
        if mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def at_hand(self, vector: Any) -> jax.Array:
        return jax.device_put(vector, self._spread)

    def _form(self, fragment: Fragment) -> tuple[tuple[str, ...], np.ndarray, _Form]:
        """The arrays that hold some of a fragment, each piece's place in its stack, the rest."""
        placement = self.placement
        places = [placement.place_of(piece.tensor) for piece in fragment.pieces]
        names = tuple(dict.fromkeys(array for array, _ in places))
        pieces = []
        for piece, (array, _) in zip(fragment.pieces, places, strict=True):
            whole = placement.members[array][0].shape == piece.shape
            rows = None if whole else (piece.start, piece.stop)
            stacked = array in placement.stacks
            pieces.append(_Piece(names.index(array), stacked, rows, piece.shape))
        shardings = placement.shardings
        form = _Form(
            tuple(pieces),
            fragment.size,
            self._spread,
            placement.everywhere,
            tuple(shardings[name] for name in names) if shardings else None,
        )
        return names, np.array([number for _, number in places], np.int32), form


@dataclass(frozen=True)
class _Codes:
    encoded: Encoded

    def pack(self, header: Header, *, level: int) -> bytes:
        return pack_encoded(header, self.encoded, level)


@dataclass(frozen=True)
class _Floats:
    values: jax.Array
    size: int

    def pack(self, header: Header, *, level: int) -> bytes:
        return pack(header, np.asarray(self.values)[: self.size], level=level)


@cache
def _held_codes(form: _Form, codec: Codec) -> Callable[..., Encoded]:
    def codes(arrays: Any, numbers: Any, anchor: jax.Array, lasts: jax.Array) -> Encoded:
        held = anchor - _vector(form, arrays, numbers)
        return encode(codec, held[: form.size], lasts)

    return jax.jit(codes, out_shardings=form.everywhere)


@cache
def _weights(form: _Form) -> Callable[..., jax.Array]:
    def weights(arrays: Any, numbers: Any) -> jax.Array:
        return _vector(form, arrays, numbers)

    return jax.jit(weights, out_shardings=form.everywhere)


@cache
def _held_floats(form: _Form, where: Any) -> Callable[..., jax.Array]:
    def floats(arrays: Any, numbers: Any, anchor: jax.Array) -> jax.Array:
        return anchor - _vector(form, arrays, numbers)

    return jax.jit(floats, out_shardings=where)


@cache
def _adoption(form: _Form) -> Callable[..., list[jax.Array]]:
    def adopt(
        arrays: list[jax.Array],
        numbers: jax.Array,
        anchor: jax.Array | None,
        new: jax.Array,
        frame: jax.Array | None,
        factors: jax.Array,
    ) -> list[jax.Array]:
        held = jnp.zeros(())
        if anchor is not None:
            held = factors[0] * (anchor - _vector(form, arrays, numbers))
        if frame is not None:
            held = held - factors[1] * frame
        return _placed(form, arrays, numbers, new - held)

    outward = None if form.shardings is None else list(form.shardings)
    return jax.jit(adopt, donate_argnums=0, out_shardings=outward)


def _vector(form: _Form, arrays: list[jax.Array], numbers: jax.Array) -> jax.Array:
    """One fragment's weights, cut as vectors are."""
    parts = []
    for place, (array, stacked, rows, _) in enumerate(form.pieces):
        values = arrays[array][numbers[place]] if stacked else arrays[array]
        parts.append((values[slice(*rows)] if rows else values).reshape(-1))
    whole = jnp.concatenate(parts)
    parts_of = form.spread.mesh.size if isinstance(form.spread, NamedSharding) else 1
    padded = jnp.pad(whole, (0, -form.size % parts_of))
    return jax.lax.with_sharding_constraint(padded, form.spread)


def _placed(
    form: _Form, arrays: list[jax.Array], numbers: jax.Array, vector: jax.Array
) -> list[jax.Array]:
    """The arrays with the fragment's rows replaced."""
    changed, offset = list(arrays), 0
    for place, (array, stacked, rows, shape) in enumerate(form.pieces):
        size = int(np.prod(shape))
        new = vector[offset : offset + size].reshape(shape)
        offset += size
        old = changed[array]
        if rows:
            # Rows are put between others by choosing, not by writing into a slice: along an
            # axis that is cut, XLA would put the whole array together for that on every device.
            kept = old[numbers[place]] if stacked else old
            start, stop = rows
            around = [(start, kept.shape[0] - stop), *[(0, 0)] * (kept.ndim - 1)]
            row = jnp.arange(kept.shape[0]).reshape(-1, *(1,) * (kept.ndim - 1))
            new = jnp.where((row >= start) & (row < stop), jnp.pad(new, around), kept)
        changed[array] = old.at[numbers[place]].set(new) if stacked else new
    return changed
