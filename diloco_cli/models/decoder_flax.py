"""Decoder-only transformers in Flax: tokens in, nats out.

Activations stay (batch · sequence, width) and become 4-D only inside attention. On a
CPU the flat form trains 1.2–1.3 times as fast: the 3-D one puts transposes and copies
in front of every weight gradient.

Outside this file parameters are a flat dict of name → array. A name is the path of
the module that owns the array, `blocks.00.attention.q`, or `blocks.attention.q` where one
loop walks through the stacked weights of all blocks; `merge` and `names` are the only
places that know.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from diloco_cli.models.attention_flax import attend, attend_to_cache, checked
from diloco_cli.models.experts_flax import fed_forward, routed
from diloco_cli.models.positions import Rope
from diloco_cli.models.products_flax import rounded_product
from diloco_cli.models.protocol import PLAIN, LossFn, LossForm
from diloco_cli.models.transformer import AttentionShape, Shape, stack_name

ROWS = ("data", "fsdp")
"""The axes of a mesh over which sequences are dealt out."""
ACTIVATIONS = {"silu": nnx.silu, "gelu": partial(nnx.gelu, approximate=True)}


class Documents(NamedTuple):
    """Which document every token of a batch is of, and where in it the token stands."""

    segments: jax.Array
    positions: jax.Array

    @classmethod
    def of(cls, tokens: jax.Array, separator: int) -> Documents:
        """A separator is the last token of its document."""
        begins = jnp.pad(tokens[:, :-1] == separator, ((0, 0), (1, 0)))
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        first = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
        return cls(jnp.cumsum(begins, axis=1, dtype=jnp.int32), places - first)


class KeysAndValues(NamedTuple):
    """What a layer remembers of the tokens so far, (batch, places, kv_heads, head)."""

    keys: jax.Array
    values: jax.Array


class Attention(nnx.Module):
    def __init__(self, shape: Shape, own: AttentionShape, form: LossForm, rngs: nnx.Rngs) -> None:
        self.own, self.form = own, form
        width = shape.width
        self.norm = _norm(width, shape, rngs)
        self.q = _linear(width, own.queries, form, rngs, bias="q" in own.bias)
        self.k = _linear(width, own.keys, form, rngs, bias="k" in own.bias)
        if not own.value_is_key:
            self.v = _linear(width, own.keys, form, rngs, bias="v" in own.bias)
        if own.qk_norm:
            self.q_norm = _norm(own.head, shape, rngs)
            self.k_norm = _norm(own.head, shape, rngs)
        if own.value_norm:
            self.value_norm = nnx.RMSNorm(own.head, epsilon=shape.eps, use_scale=False, rngs=rngs)
        self.o = _linear(own.queries, width, form, rngs, bias="o" in own.bias)
        if shape.post_norms:
            self.post_norm = _norm(width, shape, rngs)

    def __call__(self, x: jax.Array, batch: int, documents: Documents | None) -> jax.Array:
        own = self.own
        segments, positions = documents or (None, None)
        q, k, v = self._project(x, batch, positions)
        mixed = attend(q, k, v, self.form, segments, window=own.window, scale=own.scale)
        return self._give(mixed, x)

    def cached(
        self, x: jax.Array, batch: int, start: jax.Array, so_far: KeysAndValues
    ) -> tuple[jax.Array, KeysAndValues]:
        """Does the same for tokens from place `start` on, and remembers them as well."""
        own = self.own
        places = start + jnp.arange(x.shape[0] // batch)
        q, *new = self._project(x, batch, places[None])
        kept = KeysAndValues(
            *(
                jax.lax.dynamic_update_slice(old, more, (0, start, 0, 0))
                for old, more in zip(so_far, new, strict=True)
            )
        )
        mixed = attend_to_cache(q, *kept, start, window=own.window, scale=own.scale)
        return self._give(mixed, x), kept

    def _project(
        self, x: jax.Array, batch: int, positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        own, normed = self.own, self.norm(x).astype(x.dtype)
        q = self.q(normed).reshape(batch, -1, own.heads, own.head)
        k = self.k(normed).reshape(batch, -1, own.kv_heads, own.head)
        v = k if own.value_is_key else self.v(normed).reshape(k.shape)
        if own.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if own.value_norm:
            v = self.value_norm(v)
        q = rotate(q, own.rope, positions).astype(x.dtype)
        k = rotate(k, own.rope, positions).astype(x.dtype)
        return q, k, v.astype(x.dtype)

    def _give(self, mixed: jax.Array, x: jax.Array) -> jax.Array:
        given = self.o(mixed.reshape(len(x), -1))
        if hasattr(self, "post_norm"):
            given = self.post_norm(given)
        return given.astype(x.dtype)


class FeedForward(nnx.Module):
    def __init__(self, shape: Shape, form: LossForm, rngs: nnx.Rngs) -> None:
        self.activation = shape.activation
        self.norm = _norm(shape.width, shape, rngs)
        self.gate = _linear(shape.width, shape.ffn, form, rngs)
        self.up = _linear(shape.width, shape.ffn, form, rngs)
        self.down = _linear(shape.ffn, shape.width, form, rngs)
        if shape.post_norms:
            self.post_norm = _norm(shape.width, shape, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = self.norm(x).astype(x.dtype)
        given = self.down(ACTIVATIONS[self.activation](self.gate(normed)) * self.up(normed))
        if hasattr(self, "post_norm"):
            given = self.post_norm(given)
        return given.astype(x.dtype)


class ExpertWeights(nnx.Module):
    """One matrix of every expert, (experts, inputs, outputs)."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        self.kernel = nnx.Param(jnp.zeros((experts, rows, columns)))


class Experts(nnx.Module):
    def __init__(self, shape: Shape, form: LossForm, rngs: nnx.Rngs) -> None:
        assert shape.experts is not None
        self.experts, self.form, self.activation = shape.experts, form, shape.activation
        count = shape.experts.number
        self.norm = _norm(shape.width, shape, rngs)
        self.router = nnx.Linear(shape.width, count, use_bias=False, rngs=rngs)
        self.gate = ExpertWeights(count, shape.width, shape.ffn)
        self.up = ExpertWeights(count, shape.width, shape.ffn)
        self.down = ExpertWeights(count, shape.ffn, shape.width)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        normed = self.norm(x)
        # In float32: a rounded score would send tokens elsewhere.
        route = routed(self.router(normed.astype(jnp.float32)), self.experts)
        weights = self.gate.kernel[...], self.up.kernel[...], self.down.kernel[...]
        activate = ACTIVATIONS[self.activation]
        given = fed_forward(normed.astype(x.dtype), route, weights, activate, self.form)
        return given.astype(x.dtype), route.uneven


class Block(nnx.Module):
    def __init__(self, shape: Shape, layer: int, form: LossForm, rngs: nnx.Rngs) -> None:
        self.attention = Attention(shape, shape.attention_of(layer), form, rngs)
        self.ffn = (Experts if shape.experts else FeedForward)(shape, form, rngs)

    def __call__(
        self, x: jax.Array, batch: int, documents: Documents | None, scalar: Any = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Gives what follows, and how unevenly tokens went to experts, if there are any."""
        x = x + self.attention(x, batch, documents)
        given, uneven = self._fed_forward(x)
        return _scaled(x + given, scalar), uneven

    def _fed_forward(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return self.ffn(x) if isinstance(self.ffn, Experts) else (self.ffn(x), None)

    def cached(
        self, x: jax.Array, batch: int, start: jax.Array, so_far: KeysAndValues, scalar: Any
    ) -> tuple[jax.Array, KeysAndValues]:
        given, kept = self.attention.cached(x, batch, start, so_far)
        x = x + given
        return _scaled(x + self._fed_forward(x)[0], scalar), kept


def _scaled(x: jax.Array, scalar: Any) -> jax.Array:
    return x if scalar is None else (x * scalar).astype(x.dtype)


class Network(nnx.Module):
    def __init__(self, shape: Shape, form: LossForm, rngs: nnx.Rngs) -> None:
        self.shape, self.form = shape, form
        self.embed = nnx.Embed(shape.vocabulary, shape.width, rngs=rngs)
        # Scanned, the blocks of one turn stand for all and hold the stacks of their weights.
        scanned = form.remat == "block"
        self.blocks = nnx.List(
            [
                Block(shape, layer, form, rngs)
                for layer in range(len(shape.attention) if scanned else shape.layers)
            ]
        )
        self.norm = _norm(shape.width, shape, rngs)
        if not shape.tied:
            self.output = _linear(shape.width, shape.vocabulary, form, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Gives the logits of every next token, (batch · sequence, vocabulary)."""
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Gives what the output is read from, (batch · sequence, width)."""
        return self.hidden_and_uneven(tokens)[0]

    def hidden_and_uneven(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Gives that, and how unevenly the layers' experts were taken: 1 is evenly."""
        x = self._looked_up(tokens)
        separator = self.form.separator
        documents = None if separator is None else Documents.of(tokens, separator)
        through = self._scanned if self.form.remat == "block" else self._in_turn
        x, uneven = through(x, len(tokens), documents)
        if uneven is not None:
            uneven = uneven / self.shape.layers
        return self.norm(x).astype(x.dtype), uneven

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Gives the logits, in float32."""
        tied, cap = self.shape.tied, self.shape.softcap
        if self.form.compute == "float32":
            logits = self.embed.attend(hidden) if tied else self.output(hidden)
        else:
            weights, axis = (self.embed.embedding, 1) if tied else (self.output.kernel, 0)
            product: Any = rounded_product(hidden, weights[...], axis, jnp.float32)
            logits = product
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def cached(
        self, tokens: jax.Array, start: jax.Array, so_far: list[KeysAndValues]
    ) -> tuple[jax.Array, list[KeysAndValues]]:
        """Gives the logits after the last of some tokens, which follow those remembered."""
        x, batch, kept = self._looked_up(tokens), len(tokens), []
        for block, own, scalar in zip(self.blocks, so_far, self._scalars(), strict=True):
            x, more = block.cached(x, batch, start, own, scalar)
            kept.append(more)
        last = x.reshape(batch, -1, x.shape[-1])[:, -1]
        return self.logits(self.norm(last).astype(x.dtype)), kept

    def nothing_yet(self, batch: int, places: int) -> list[KeysAndValues]:
        """What is remembered before the first token, with room for so many."""
        dtype = jnp.dtype(self.form.compute)

        def empty(own: AttentionShape) -> jax.Array:
            return jnp.zeros((batch, places, own.kv_heads, own.head), dtype)

        layers = map(self.shape.attention_of, range(self.shape.layers))
        # Two arrays, not one twice: each is given up when the next tokens are added.
        return [KeysAndValues(empty(own), empty(own)) for own in layers]

    def _looked_up(self, tokens: jax.Array) -> jax.Array:
        # Each device first looks up its columns of all sequences, then its sequences are put
        # together: that moves activations, and the embedding never lies anywhere in one piece.
        looked_up = pinned(self.embed(tokens.reshape(-1)), self.form, "data", "fsdp")
        if self.shape.embed_scale != 1:
            looked_up = looked_up * self.shape.embed_scale
        return self._pinned(looked_up.astype(jnp.dtype(self.form.compute)))

    def _scalars(self) -> Any:
        return self.shape.scalars or (None,) * self.shape.layers

    def _in_turn(
        self, x: jax.Array, batch: int, documents: Documents | None
    ) -> tuple[jax.Array, jax.Array | None]:
        total: Any = jnp.zeros(()) if self.shape.experts else None
        for block, scalar in zip(self.blocks, self._scalars(), strict=True):
            x, uneven = block(x, batch, documents, scalar)
            x, total = self._pinned(x), total if uneven is None else total + uneven
        return x, total

    def _scanned(
        self, x: jax.Array, batch: int, documents: Documents | None
    ) -> tuple[jax.Array, jax.Array | None]:
        turns = len(self.blocks)
        parts = [nnx.split(block) for block in self.blocks]
        scalars = jnp.asarray(self.shape.scalars, jnp.float32).reshape(-1, turns)

        # Saves the input of each block and nothing else. Without the loop it would save
        # nothing: XLA then finds the same values twice and computes them once.
        def block(x: jax.Array, graph: Any, weights: Any, scalar: Any) -> Any:
            x, uneven = nnx.merge(graph, weights)(x, batch, documents, scalar)
            return self._pinned(x), uneven

        again = partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)

        def through(carried: Any, turn: tuple[Any, jax.Array]) -> tuple[Any, None]:
            (x, total), (weights, scalar) = carried, turn
            for number, (graph, _) in enumerate(parts):
                own = scalar[number] if self.shape.scalars else None
                x, uneven = again(block, static_argnums=1)(x, graph, weights[number], own)
                total = total if uneven is None else total + uneven
            return (x, total), None

        stacks = [stack for _, stack in parts]
        if not self.shape.scalars:
            scalars = jnp.zeros((self.shape.layers // turns, turns))
        begin = x, jnp.zeros(()) if self.shape.experts else None
        return jax.lax.scan(through, begin, (stacks, scalars))[0]

    def _pinned(self, x: jax.Array) -> jax.Array:
        return pinned(x, self.form, ROWS)


def pinned(x: jax.Array, form: LossForm, *axes: Any) -> jax.Array:
    """Says over which axes of the mesh, if there is one, those of an activation are dealt out."""
    if form.mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(form.mesh, PartitionSpec(*axes)))


def _norm(length: int, shape: Shape, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(length, epsilon=shape.eps, rngs=rngs)


def _linear(
    rows: int, columns: int, form: LossForm, rngs: nnx.Rngs, *, bias: bool = False
) -> nnx.Linear:
    if form.compute == "float32":
        return nnx.Linear(rows, columns, use_bias=bias, rngs=rngs)
    # A bias is added in float32; whoever uses the sum rounds it.
    return nnx.Linear(
        rows,
        columns,
        use_bias=bias,
        promote_dtype=lambda arrays, **_: arrays,
        dot_general=lambda x, kernel, *_, **__: rounded_product(x, kernel, 0, x.dtype),
        rngs=rngs,
    )


def rotate(x: jax.Array, rope: Rope, positions: jax.Array | None = None) -> jax.Array:
    """Turns each pair of numbers by an angle that grows with the position (RoPE).

    Without `positions`, (batch, sequence), that is the place in the sequence.
    """
    half = x.shape[-1] // 2
    if rope.kind == "default":
        speeds = rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    else:
        speeds = jnp.asarray(rope.speeds(x.shape[-1]))
    places = jnp.arange(x.shape[1]) if positions is None else positions
    angles = places.astype(jnp.float32)[..., None] * speeds
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    if rope.gain != 1:
        cos, sin = cos * rope.gain, sin * rope.gain
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def loss_fn(
    shape: Shape, form: LossForm = PLAIN, *, z_loss: float = 0.0, balance: float = 0.0
) -> LossFn:
    """Gives the mean cross-entropy of the next token, in nats, with the number of tokens."""
    checked(form)

    def penalised(loss: jax.Array, uneven: jax.Array | None) -> jax.Array:
        return loss if uneven is None or not balance else loss + balance * uneven

    def loss(params: dict[str, jax.Array], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        network, targets = merge(shape, params, form), tokens[:, 1:]
        hidden, uneven = network.hidden_and_uneven(tokens[:, :-1])
        if form.separator is not None:
            # Nothing says what comes first in the next document: −1 has no loss.
            targets = jnp.where(tokens[:, :-1] == form.separator, -1, targets)
        count = _count(targets, form)
        if form.chunks == 1:
            nats = _nats(network, hidden, targets.reshape(-1), z_loss)
            mean = jnp.sum(nats) / count if form.separator is not None else jnp.mean(nats)
            return penalised(mean, uneven), count

        # Parts of every sequence rather than some sequences: each device has a share of all.
        def part(of: jax.Array) -> jax.Array:
            cut = of.reshape(len(tokens), form.chunks, -1, *of.shape[2:])
            return pinned(cut.swapaxes(0, 1), form, None, ROWS)

        @jax.checkpoint
        def add(total: jax.Array, parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            rows = pinned(parts[0].reshape(-1, shape.width), form, ROWS)
            return total + jnp.sum(_nats(network, rows, parts[1].reshape(-1), z_loss)), None

        parts = part(hidden.reshape(*targets.shape, shape.width)), part(targets)
        total, _ = jax.lax.scan(add, jnp.zeros(()), parts)
        return penalised(total / count, uneven), count

    return loss


def _count(targets: jax.Array, form: LossForm) -> jax.Array:
    """Counts the tokens that are predicted; at least one, for what divides by it."""
    if form.separator is None:
        return jnp.asarray(targets.size, jnp.int32)
    return jnp.maximum(1, jnp.sum(targets >= 0, dtype=jnp.int32))


def _nats(network: Network, hidden: jax.Array, targets: jax.Array, z_loss: float) -> jax.Array:
    """The loss of every token, its penalty included."""
    logits = network.logits(hidden)
    total = jax.nn.logsumexp(logits, axis=-1)
    # An index of −1 takes some number or other, which does not count.
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    nats = total - chosen
    nats = nats + z_loss * jnp.square(total) if z_loss else nats
    return nats if network.form.separator is None else jnp.where(targets >= 0, nats, 0)


def merge(shape: Shape, params: dict[str, jax.Array], form: LossForm = PLAIN) -> Network:
    """Makes the network out of named arrays."""
    graph, places = _skeleton(shape, form)
    return nnx.merge(graph, nnx.from_flat_state([(path, params[name]) for path, name, _ in places]))


def names(shape: Shape, form: LossForm = PLAIN) -> dict[str, tuple[int, ...]]:
    """Says which arrays the network needs: their names and shapes."""
    return {name: dims for _, name, dims in _skeleton(shape, form)[1]}


@cache
def _skeleton(shape: Shape, form: LossForm) -> tuple[Any, list[tuple[Any, str, tuple[int, ...]]]]:
    """Gives the network without its arrays, and the path, name and shape of each it lacks."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Network(shape, form, nnx.Rngs(0))))
    turns = len(shape.attention)

    def place(path: tuple[Any, ...], leaf: Any) -> tuple[Any, str, tuple[int, ...]]:
        if path[0] == "blocks" and form.remat == "block":
            name = stack_name(turns, path[1], _name(path[2:]))
            return path, name, (shape.layers // turns, *leaf.shape)
        return path, _name(path), tuple(leaf.shape)

    return graph, [place(path, leaf) for path, leaf in nnx.to_flat_state(state)]


def _name(path: tuple[Any, ...]) -> str:
    # The last part is Flax's own word for an array of a layer: kernel, scale, bias, …
    name = ".".join(f"{part:02d}" if isinstance(part, int) else part for part in path[:-1])
    return f"{name}_bias" if path[-1] == "bias" else name
