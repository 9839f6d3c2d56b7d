"""Experts: where each token goes, and what the experts make of it.

    dense     every expert works on every token, and what was not asked for counts nothing; CPUs,
              where the library's other way is slower than that
    ragged    tokens are sorted by expert, and each expert works on its own; accelerators, on a
              mesh by each device for its own sequences

No token is turned away, however many go to one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco_cli.models.products_flax import ragged_product, rounded_product
from diloco_cli.models.protocol import LossForm
from diloco_cli.models.transformer import ExpertShape

Activation = Callable[[jax.Array], jax.Array]
Matrices = tuple[jax.Array, jax.Array, jax.Array]
"""Gate, up and down of every expert."""


class Route(NamedTuple):
    """Where tokens go."""

    chosen: jax.Array
    """(tokens, active): numbers of experts."""
    shares: jax.Array
    """(tokens, active): how much each of them counts."""
    uneven: jax.Array
    """1 if all experts get as many tokens, more if some get more than others."""


def routed(scores: jax.Array, experts: ExpertShape) -> Route:
    """Picks the experts of each token by its scores, (tokens, experts)."""
    likely = jax.nn.softmax(scores, axis=-1)
    shares, chosen = jax.lax.top_k(likely, experts.active)
    # Of the tokens' choices and of their likelihoods: only the latter have a slope.
    taken = jnp.zeros_like(likely).at[jnp.arange(len(scores))[:, None], chosen].set(1.0)
    load = jnp.mean(taken, axis=0) / experts.active
    uneven = experts.number * jnp.sum(load * jnp.mean(likely, axis=0))
    if experts.renormalised:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return Route(chosen, shares, uneven)


def fed_forward(
    x: jax.Array, route: Route, weights: Matrices, activate: Activation, form: LossForm
) -> jax.Array:
    """Sums what the chosen experts make of each token, (tokens, width), in float32."""
    mesh = form.mesh
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform == "cpu":
        return dense(x, route, weights, activate)
    return ragged(x, route, weights, activate, mesh)


def dense(x: jax.Array, route: Route, weights: Matrices, activate: Activation) -> jax.Array:
    count = weights[0].shape[0]
    rows = jnp.arange(len(x))[:, None]
    shares = jnp.zeros((len(x), count)).at[rows, route.chosen].set(route.shares)

    def product(values: Any, matrix: jax.Array) -> Any:
        return rounded_product(values, matrix, 0, x.dtype)

    # One after another: XLA's CPU backend has no products of several matrices in bfloat16.
    def add(total: jax.Array, one: Any) -> tuple[jax.Array, None]:
        (gate, up, down), share = one
        made = product(activate(product(x, gate)) * product(x, up), down)
        return total + made.astype(jnp.float32) * share[:, None], None

    nothing = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.scan(add, nothing, (weights, shares.T))[0]


def ragged(
    x: jax.Array, route: Route, weights: Matrices, activate: Activation, mesh: Any = None
) -> jax.Array:
    if mesh is None:
        return _sorted(x, route.chosen, route.shares, *weights, activate=activate)
    rows = PartitionSpec(("data", "fsdp"))
    wide, narrow = PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor", None)

    def local(*given: jax.Array) -> jax.Array:
        return jax.lax.psum(_sorted(*given, activate=activate), "tensor")

    spread = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, rows, rows, wide, wide, narrow),
        out_specs=rows,
        check_vma=False,
    )
    return spread(x, route.chosen, route.shares, *weights)


def _sorted(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    activate: Activation,
) -> jax.Array:
    choices = chosen.reshape(-1)
    order = jnp.argsort(choices)
    token = order // chosen.shape[1]
    sizes = jnp.bincount(choices, length=gate.shape[0]).astype(jnp.int32)
    own: Any = x[token]
    hidden: Any = activate(ragged_product(own, gate, sizes)) * ragged_product(own, up, sizes)
    made: Any = ragged_product(hidden, down, sizes)
    counted = made.astype(jnp.float32) * shares.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(counted)
