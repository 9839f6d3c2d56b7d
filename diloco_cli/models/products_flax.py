"""Products whose factors are rounded and whose gradients for the weights are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rounded_product(x: jax.Array, weights: jax.Array, axis: int, dtype: Any) -> jax.Array:
    """Multiplies in the type of `x`, which the float32 weights are rounded to.

    Sums over this axis of the weights. Their gradient is never rounded: it leaves the product in
    float32, in which micro-batches and devices then add it up.
    """
    return _dot(x, 1, weights.astype(x.dtype), axis, dtype)


def _forwards(x: jax.Array, weights: jax.Array, axis: int, dtype: Any) -> tuple[jax.Array, Any]:
    return rounded_product(x, weights, axis, dtype), (x, weights)


def _backwards(axis: int, dtype: Any, kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weights = kept
    slope = slope.astype(x.dtype)
    pair = (x, slope) if axis == 0 else (slope, x)
    return (
        _dot(slope, 1, weights.astype(x.dtype), 1 - axis, x.dtype),
        _dot(pair[0], 0, pair[1], 0, jnp.float32),
    )


def _dot(left: jax.Array, of_left: int, right: jax.Array, of_right: int, dtype: Any) -> jax.Array:
    axes = (((of_left,), (of_right,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=dtype)


rounded_product.defvjp(_forwards, _backwards)


@jax.custom_vjp
def ragged_product(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies the first `sizes[0]` rows by the first matrix, the next ones by the second, …

    In the type of `x`, and with the weights' gradient in float32, as above.
    """
    return jax.lax.ragged_dot(x, weights.astype(x.dtype), sizes)


def _ragged_forwards(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return ragged_product(x, weights, sizes), (x, weights, sizes)


def _ragged_backwards(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weights, sizes = kept
    slope = slope.astype(x.dtype)
    by_group = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    return (
        jax.lax.ragged_dot(slope, weights.astype(x.dtype).swapaxes(1, 2), sizes),
        jax.lax.ragged_dot_general(x, slope, sizes, by_group, preferred_element_type=jnp.float32),
        None,
    )


ragged_product.defvjp(_ragged_forwards, _ragged_backwards)
