"""Causal attention, computed by the program that suits the device.

    xla      matrix products and a softmax; everywhere. With `remat: block` for some queries at
             a time, otherwise with memory for every pair of tokens
    cudnn    flash attention of cuDNN; NVIDIA GPUs, in bfloat16
    splash   flash attention in Pallas; TPUs

Queries, keys and values are (batch, sequence, heads, numbers of a head); several query heads
may share one of keys and values. In each of them the softmax is float32. Where `segments`, the
number of the document that each token is of, are given, a token sees its own document only;
with a `window`, itself and the window − 1 tokens before it. `scale` multiplies the scores;
without it that is the root of a head's length, inverted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco_cli.errors import SpecError
from diloco_cli.models.protocol import LossForm
from diloco_cli.models.transformer import QUERIES

PLATFORMS = {"xla": ("cpu", "gpu", "tpu"), "cudnn": ("gpu",), "splash": ("tpu",)}
"""Where each program runs."""
LANES = 128
"""Splash works on blocks of so many tokens."""


def checked(form: LossForm) -> LossForm:
    """Refuses a program that these devices cannot run, before anything is compiled."""
    platform, asked = _platform(form), form.attention
    if asked != "auto" and platform not in PLATFORMS[asked]:
        raise SpecError(
            f"inner.attention is {asked!r}, but the devices here are {platform}.",
            hint=f"Leave inner.attention at `auto`; {asked} is for {PLATFORMS[asked][0]}.",
        )
    if asked == "cudnn" and form.compute != "bfloat16":
        raise SpecError(
            f"inner.attention is 'cudnn', which computes in bfloat16, but inner.compute is "
            f"{form.compute!r}.",
            hint="Set inner.compute to bfloat16, or leave inner.attention at `auto`.",
        )
    if asked == "cudnn" and form.separator is not None:
        raise SpecError(
            "inner.attention is 'cudnn', which cannot keep documents apart, but the data says "
            "`mask: documents`.",
            hint="Leave inner.attention at `auto`, or data.mask at `none`.",
        )
    return form


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    form: LossForm,
    segments: jax.Array | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Mixes what every token sees of those before it and of itself."""
    chosen = form.attention
    if chosen == "auto":
        chosen = choose(_platform(form), form.compute, q.shape[1], q.shape[-1])
    if chosen == "splash":
        return splash(q, k, v, form.mesh, segments, window=window, scale=scale)
    causal = partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
    )
    if chosen == "cudnn" and segments is None:
        return causal(q, k, v, implementation="cudnn")
    if form.remat == "block" and q.shape[1] > QUERIES and q.shape[1] % QUERIES == 0:
        return in_parts(q, k, v, QUERIES, segments, window=window, scale=scale)
    mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    return causal(q, k, v, mask=mask, implementation="xla")


def attend_to_cache(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attends for queries from place `start` on to keys and values from the first place on."""
    seen = _seen(start, q.shape[1], k.shape[1], window)
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None], scale=scale)


def _seen(first: jax.Array, queries: int, keys: int, window: int | None) -> jax.Array:
    """Which keys each of some queries sees, (queries, keys)."""
    ago = (first + jnp.arange(queries))[:, None] - jnp.arange(keys)
    return (ago >= 0) if window is None else (ago >= 0) & (ago < window)


def _platform(form: LossForm) -> str:
    return jax.default_backend() if form.mesh is None else form.mesh.devices.flat[0].platform


def choose(platform: str, compute: str, sequence: int, head: int) -> str:
    """The program for a device; what is asked for fits the shapes each of them can do."""
    if platform == "gpu" and compute == "bfloat16" and head % 8 == 0 and head <= 128:
        return "cudnn"
    if platform == "tpu" and sequence % LANES == 0:
        return "splash"
    return "xla"


def in_parts(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: int,
    segments: jax.Array | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attends for some queries at a time and remembers none of the scores."""
    batch, length, *others = q.shape
    parts = q.reshape(batch, length // queries, queries, *others).swapaxes(0, 1)
    # In float32, because what every part adds to their slopes is summed up in their type.
    wide = k.astype(jnp.float32), v.astype(jnp.float32)

    @jax.checkpoint
    def attend_to(first: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = _seen(first, queries, length, window)[None]
        if segments is not None:
            own = jax.lax.dynamic_slice_in_dim(segments, first, queries, axis=1)
            seen &= own[:, :, None] == segments[:, None, :]
        k, v = (each.astype(part.dtype) for each in wide)
        mixed = jax.nn.dot_product_attention(part, k, v, mask=seen[:, None], scale=scale)
        return first + queries, mixed

    _, mixed = jax.lax.scan(attend_to, jnp.int32(0), parts)
    return mixed.swapaxes(0, 1).reshape(q.shape)


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mesh: Any = None,
    segments: jax.Array | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Runs the Pallas kernel, on a mesh by each device for its own sequences and heads."""
    share = mesh.shape["tensor"] if mesh is not None else 1
    kernel = _kernel(q.shape[1], q.shape[2] // share, window, interpret)
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        scaled = q * factor
        heads_first = (one.swapaxes(1, 2) for one in (scaled, k, v))
        documents = (_segment_ids(one) for one in segments)
        return jax.vmap(kernel)(*heads_first, *documents).swapaxes(1, 2)

    documents = () if segments is None else (segments,)
    if mesh is None:
        return local(q, k, v, *documents)
    spec = PartitionSpec(("data", "fsdp"), None, "tensor", None)
    # Pallas does not say how its outputs vary over a mesh, so that is not checked.
    spread = partial(jax.shard_map, mesh=mesh, out_specs=spec, check_vma=False)
    rows = (PartitionSpec(("data", "fsdp"), None),) * len(documents)
    return spread(local, in_specs=(spec, spec, spec, *rows))(q, k, v, *documents)


def _segment_ids(segments: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )

    return kernels.SegmentIds(q=segments, kv=segments)


def _kernel(sequence: int, heads: int, window: int | None, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    square = (sequence, sequence)
    seen = (
        masks.CausalMask(square)
        if window is None
        else masks.LocalMask(square, (window - 1, 0), offset=0)
    )
    causal = masks.MultiHeadMask([seen] * heads)
    return kernels.make_splash_mha(causal, head_shards=1, q_seq_shards=1, interpret=interpret)
