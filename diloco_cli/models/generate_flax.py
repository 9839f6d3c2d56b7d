"""Text from a model, token by token, with what the earlier ones gave kept; and its loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_cli.models.decoder_flax import KeysAndValues, Network, merge
from diloco_cli.models.protocol import LossForm, Model
from diloco_cli.models.transformer import Shape


def generate(
    shape: Shape,
    weights: Mapping[str, np.ndarray],
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Continues a prompt by so many tokens; with temperature 0 always by the likeliest one."""
    params = {name: jnp.asarray(values) for name, values in weights.items()}
    places = _room(len(prompt) + tokens)
    choose = jax.jit(partial(chosen, temperature=temperature, top_p=top_p))
    kept = merge(shape, params).nothing_yet(1, places)
    ahead = jnp.asarray([list(prompt)], jnp.int32)
    start, key = 0, jax.random.key(seed)
    for _ in range(tokens):
        logits, kept = _further(shape, params, ahead, start, kept)
        start += ahead.shape[1]
        key, own = jax.random.split(key)
        ahead = choose(logits, own)[:, None]
        yield int(ahead[0, 0])


def chosen(logits: jax.Array, key: jax.Array, *, temperature: float, top_p: float) -> jax.Array:
    """Draws the next token of each row: among the likeliest that together have `top_p`."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits / temperature
    if top_p < 1:
        order = jnp.argsort(-scaled, axis=-1)
        ranked = jnp.take_along_axis(scaled, order, axis=-1)
        shares = jax.nn.softmax(ranked, axis=-1)
        # What is before it has less than `top_p`: so the likeliest is always among them.
        before = jnp.cumsum(shares, axis=-1) - shares
        ranked = jnp.where(before < top_p, ranked, -jnp.inf)
        place = jax.random.categorical(key, ranked, axis=-1)
        return jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0].astype(jnp.int32)
    return jax.random.categorical(key, scaled, axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _further(
    shape: Shape, params: dict[str, Any], tokens: jax.Array, start: Any, kept: list[KeysAndValues]
) -> tuple[jax.Array, list[KeysAndValues]]:
    network: Network = merge(shape, params)
    return network.cached(tokens, start, kept)


def _room(places: int) -> int:
    """Rounds up, so that lengths that differ little share a compiled program."""
    return -(-places // 64) * 64


def mean_loss(
    model: Model,
    weights: Mapping[str, np.ndarray],
    batches: Iterable[np.ndarray],
    separator: int | None = None,
) -> float:
    """The loss in nats per token over some batches, on one device in float32.

    Documents that end with `separator`, if one is given, are kept apart.
    """
    params = {name: jnp.asarray(values) for name, values in weights.items()}
    loss = jax.jit(model.loss_fn(penalties=False, form=LossForm(separator=separator)))
    found = [loss(params, batch) for batch in batches]
    tokens = sum(int(count) for _, count in found)
    return sum(float(mean) * int(count) for mean, count in found) / tokens
