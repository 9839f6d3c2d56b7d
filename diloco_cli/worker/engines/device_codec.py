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
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diloco_cli.wire.chunks import CHUNK, span_of
from diloco_cli.wire.codecs import Codec, NotFinite, codecs
from diloco_cli.wire.codecs.block import SCALE_FLOOR, Int4, Int8, Uniform, largest_scale
from diloco_cli.wire.frame import Header, pack_bodies

UP, NEAREST = 0xFFFF, 0x8000
INFINITY = 0x7F800000

Packable = Int4 | Int8 | Uniform


def packable(codec: object) -> TypeGuard[Packable]:
    """Says whether bodies of this codec can be written on a device."""
    return isinstance(codec, Packable)


def pack_on_device(header: Header, values: jax.Array, *, level: int = 1) -> bytes:
    """Writes the frame that `pack` writes; only packed codes leave the device.

    Raises NotFinite where a value is NaN or infinite.
    """
    codec = codecs.build(header.codec)
    spans = [span_of(place, header.size) for place in range(-(-header.size // CHUNK))]
    # All chunks are under way before the first one is waited for.
    begun = [body_of(codec, values[span]) for span in spans]
    for span, (_, index) in zip(spans, begun, strict=True):
        if int(index) >= 0:
            place = span.start + int(index)
            raise NotFinite(float(values[place]), place)
    return pack_bodies(header, [np.asarray(body).data for body, _ in begun], level=level)


def body_of(codec: Codec, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encodes a vector; gives its body and the place of the first NaN or infinity, or −1."""
    if not packable(codec):
        raise ValueError(f"{codec} is written on the host alone")
    last = values.size - (-(-values.size // codec.block) - 1) * codec.block
    return _compiled(codec)(values, np.float32(last))


@cache
def _compiled(codec: Packable) -> Callable[..., Any]:
    writers = {Int8: _int8, Int4: _int4, Uniform: _uniform}
    return jax.jit(partial(_body, codec, writers[type(codec)]))


def _body(
    codec: Packable, write: Callable[..., Any], values: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows = -(-values.size // codec.block)
    padded = jnp.pad(values, (0, rows * codec.block - values.size))
    magnitudes = lax.bitcast_convert_type(padded, jnp.int32) & 0x7FFFFFFF
    blocks = padded.reshape(rows, codec.block)
    largest = _float(jnp.max(magnitudes.reshape(rows, codec.block), axis=1))
    codes, bits = write(codec, blocks, largest, last)
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
