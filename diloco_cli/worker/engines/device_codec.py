"""Quantising on the device, so that packed codes cross to the host instead of floats.

The same bodies as the codecs of `wire/` write, to the bit: each step is one float32
operation that XLA neither fuses with another nor replaces by an approximation. Whole
numbers are summed, never floats; nothing is divided by a constant (XLA multiplies by its
rounded inverse); magnitudes are compared as bits. Numbers below 2**-126, which XLA flushes
to zero, become zero on the other side as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diloco_cli.wire.chunks import CHUNK
from diloco_cli.wire.codecs import Codec, NotFinite, codecs
from diloco_cli.wire.codecs.block import SCALE_FLOOR, Int4, Int8, Uniform, largest_scale
from diloco_cli.wire.frame import Header, pack_bodies

UP, NEAREST = 0xFFFF, 0x8000
INFINITY = 0x7F800000

Packable = Int4 | Int8 | Uniform


def packable(codec: object) -> TypeGuard[Packable]:
    """Says whether bodies of this codec can be written on a device."""
    return isinstance(codec, Packable)


class Encoded(NamedTuple):
    """The chunks of a frame on the device, begun and perhaps not there yet."""

    whole: jax.Array
    """Bodies of the chunks that are full, one a row."""
    rest: jax.Array
    """Body of the last one; empty if that is full."""
    wrong: jax.Array
    """Place of the first NaN or infinity, or −1."""
    value: jax.Array
    """What stands there."""


def pack_on_device(header: Header, values: jax.Array, *, level: int = 1) -> bytes:
    """Writes the frame that `pack` writes; only packed codes leave the device.

    Raises NotFinite where a value is NaN or infinite.
    """
    codec = codecs.build(header.codec)
    return pack_encoded(header, _encoder(codec)(values, last_blocks(codec, values.size)), level)


def pack_encoded(header: Header, encoded: Encoded, level: int = 1) -> bytes:
    """Writes a frame of what `encode` began; waits for it."""
    whole, rest = np.asarray(encoded.whole), np.asarray(encoded.rest)
    if (place := int(encoded.wrong)) >= 0:
        raise NotFinite(float(encoded.value), place)
    bodies = [row.data for row in whole] + ([rest.data] if rest.size else [])
    return pack_bodies(header, bodies, level=level)


def encode(codec: Codec, values: jax.Array, lasts: jax.Array) -> Encoded:
    """Encodes a vector in chunks; to be traced. `lasts` is what `last_blocks` gives."""
    write = partial(_body, _known(codec))
    whole = values.size // CHUNK * CHUNK
    bodies, wrongs = jax.vmap(write, (0, None))(values[:whole].reshape(-1, CHUNK), lasts[0])
    rest, wrong = (
        write(values[whole:], lasts[1])
        if whole < values.size
        else (jnp.zeros(0, jnp.uint8), jnp.int32(-1))
    )
    found = jnp.append(wrongs, wrong).astype(jnp.int32)
    places = jnp.where(found >= 0, found + jnp.arange(found.size) * CHUNK, values.size)
    first = jnp.min(places)
    return Encoded(
        bodies,
        rest,
        jnp.where(first < values.size, first, -1),
        jax.lax.dynamic_index_in_dim(values, jnp.minimum(first, values.size - 1), keepdims=False),
    )


def last_blocks(codec: Codec, size: int) -> np.ndarray:
    """How many values are in the last block of a full chunk, and of the last chunk."""
    block = _known(codec).block
    return np.array([_last_block(length, block) for length in (CHUNK, size % CHUNK)])


def _last_block(length: int, block: int) -> np.float32:
    return np.float32(length - (-(-length // block) - 1) * block)


@cache
def _encoder(codec: Codec) -> Callable[[jax.Array, np.ndarray], Encoded]:
    return jax.jit(partial(encode, codec))


def body_of(codec: Codec, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encodes one chunk; gives its body and the place of the first NaN or infinity, or −1."""
    known = _known(codec)
    return _chunk(known)(values, _last_block(values.size, known.block))


def _known(codec: Codec) -> Packable:
    if not packable(codec):
        raise ValueError(f"{codec} is written on the host alone")
    return codec


@cache
def _chunk(codec: Packable) -> Callable[..., Any]:
    return jax.jit(partial(_body, codec))


def _body(codec: Packable, values: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = -(-values.size // codec.block)
    padded = jnp.pad(values, (0, rows * codec.block - values.size))
    magnitudes = lax.bitcast_convert_type(padded, jnp.int32) & 0x7FFFFFFF
    blocks = padded.reshape(rows, codec.block)
    largest = _float(jnp.max(magnitudes.reshape(rows, codec.block), axis=1))
    codes, bits = WRITERS[type(codec)](codec, blocks, largest, last)
    scales = jnp.concatenate([bits & 255, bits >> 8]).astype(jnp.uint8)
    body = jnp.concatenate([codes.reshape(-1)[: _code_bytes(codec, values.size)], scales])
    wrong = magnitudes >= INFINITY
    return body, jnp.where(wrong.any(), jnp.argmax(wrong), -1)


def _code_bytes(codec: Packable, size: int) -> int:
    return codec.body_size(size) - 2 * -(-size // codec.block)


def _int8(codec: Packable, blocks: jax.Array, largest: jax.Array, last: jax.Array) -> Any:
    bits = _scale_bits(largest * _per(127), 127, UP)
    return _scaled(blocks, bits).astype(jnp.int8).astype(jnp.uint8), bits


def _int4(codec: Packable, blocks: jax.Array, largest: jax.Array, last: jax.Array) -> Any:
    bits = _scale_bits(largest * _per(7), 7, UP)
    return _nibbles(_scaled(blocks, bits)), bits


def _uniform(codec: Uniform, blocks: jax.Array, largest: jax.Array, last: jax.Array) -> Any:
    unit = _scale_bits(largest * _per(127), 127, UP)
    squares = jnp.sum(jnp.square(_scaled(blocks, unit)), axis=1, dtype=jnp.int32)
    rows = blocks.shape[0]
    # `last` is an argument, not a constant, so that this stays a division.
    counts = jnp.where(jnp.arange(rows) == rows - 1, last, jnp.float32(codec.block))
    rms = jnp.sqrt(squares.astype(jnp.float32) / counts)
    bits = _scale_bits(rms * np.float32(codec.step) * _float(unit << 16), 7, NEAREST)
    return _nibbles(jnp.clip(_scaled(blocks, bits), -7, 7)), bits


def _per(top: int) -> np.float32:
    return np.float32(1) / np.float32(top)


def _scale_bits(wanted: jax.Array, top: int, rounding: int) -> jax.Array:
    bits = (lax.bitcast_convert_type(wanted, jnp.uint32) + jnp.uint32(rounding)) >> 16
    return jnp.clip(bits.astype(jnp.int32), SCALE_FLOOR, largest_scale(top))


def _scaled(blocks: jax.Array, bits: jax.Array) -> jax.Array:
    inverse = jnp.float32(1) / _float(bits << 16)
    return lax.round(blocks * inverse[:, None], lax.RoundingMethod.TO_NEAREST_EVEN).astype(
        jnp.int32
    )


def _nibbles(codes: jax.Array) -> jax.Array:
    half = codes.shape[1] // 2
    return ((codes[:, :half] & 15) | ((codes[:, half:] & 15) << 4)).astype(jnp.uint8)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


WRITERS: dict[type, Callable[..., tuple[jax.Array, jax.Array]]] = {
    Int8: _int8,
    Int4: _int4,
    Uniform: _uniform,
}
