"""Causal attention written again in numpy, head by head, in double precision."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def queries_keys_values(
    *, batch: int, sequence: int, heads: int, kv_heads: int, head: int
) -> tuple[Any, Any, Any]:
    source = np.random.default_rng(11)
    shapes = ((batch, sequence, count, head) for count in (heads, kv_heads, kv_heads))
    q, k, v = (jnp.asarray(source.standard_normal(shape, np.float32)) for shape in shapes)
    return q, k, v


def by_hand(*queries_keys_values: Any, window: int | None = None) -> np.ndarray:
    q, k, v = (np.asarray(values, np.float64) for values in queries_keys_values)
    group = q.shape[2] // k.shape[2]
    mixed = np.empty(q.shape)
    for number in range(q.shape[2]):
        theirs = number // group
        scores = np.einsum("btd,bsd->bts", q[:, :, number], k[:, :, theirs])
        scores /= np.sqrt(q.shape[-1])
        scores[:, *np.triu_indices(q.shape[1], 1)] = -np.inf
        if window is not None:
            scores[:, *np.tril_indices(q.shape[1], -window)] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed[:, :, number] = shares @ v[:, :, theirs]
    return mixed
