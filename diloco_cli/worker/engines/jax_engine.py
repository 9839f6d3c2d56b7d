"""The engine in JAX: one jitted, donated function from weights and tokens to weights.

    step = make_step(model, inner, horizon=2_000)
    engine = step.engine()
    engine.load(model.init(seed), None)
    loss = engine.step(tokens)

Donation means that the arrays given to a step are gone after it: keep nothing that
points into them. On a CPU numpy and JAX would share memory wherever they can, so
everything that enters or leaves the device through this module is copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_cli.core.fragments import Fragment, Piece
from diloco_cli.errors import SpecError, StoreError
from diloco_cli.models import LossFn, Model
from diloco_cli.spec.schema import InnerSpec
from diloco_cli.worker.engines.optimizers import optimizers, schedules
from diloco_cli.worker.engines.protocol import Arrays, EngineSnapshot

Params = dict[str, jax.Array]
State = Any
"""What the inner optimiser remembers; a tree of arrays only optax can read."""


@dataclass(frozen=True)
class JaxStep:
    """An inner step, compiled on first use; its arguments `params` and `state` are given up."""

    init_state: Callable[[Params], State]
    step: Callable[[Params, State, np.ndarray], tuple[Params, State, jax.Array]]
    """The loss is NaN when it, or the gradient, was not finite: then nothing has moved."""

    gradient: Callable[[Params, np.ndarray], tuple[jax.Array, Params]]
    """The first half of a step, for those who average gradients before they move."""

    move: Callable[[Params, State, jax.Array, Params], tuple[Params, State, jax.Array]]
    """The second half: from `params, state, loss, slope`; gives up what `step` does."""

    loss: Callable[..., tuple[jax.Array, jax.Array]]
    """The model's loss without penalties; gives nothing up."""

    def evaluate(self, params: Mapping[str, Any], batches: Iterable[np.ndarray]) -> float:
        """Measures the mean loss in nats per token; weights may be on the device or in numpy."""
        results = [self.loss(dict(params), tokens) for tokens in batches]
        tokens = sum(int(count) for _, count in results)
        return sum(float(loss) * int(count) for loss, count in results) / tokens

    def engine(self) -> JaxEngine:
        return JaxEngine(self)


class JaxEngine:
    """One region's weights and optimiser state on the default device; see `Engine`."""

    def __init__(self, compiled: JaxStep) -> None:
        self._compiled = compiled
        self.params: Params = {}
        self.state: State = None

    def load(self, params: Arrays, optimizer: Arrays | None) -> None:
        self.params = place(params)
        self.state = (
            restore_state(self._compiled, self.params, optimizer)
            if optimizer
            else self._compiled.init_state(self.params)
        )

    def step(self, tokens: np.ndarray) -> jax.Array:
        self.params, self.state, loss = self._compiled.step(self.params, self.state, tokens)
        return loss

    def wait(self) -> None:
        jax.block_until_ready(self.params)

    def read(self, fragment: Fragment) -> np.ndarray:
        return fragment_vector(self.params, fragment)

    def write(self, fragment: Fragment, values: np.ndarray) -> None:
        self.params = replace_fragment(self.params, fragment, values)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(fetch(self.params), flatten_state(self.state))

    def reset_optimizer(self) -> None:
        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return old if new.ndim == 0 and new.dtype.kind in "iu" else new

        self.state = jax.tree.map(choose, self._compiled.init_state(self.params), self.state)

    def evaluate(self, params: Arrays, batches: Iterable[np.ndarray]) -> float:
        return self._compiled.evaluate(place(params), batches)


def make_step(model: Model, inner: InnerSpec, *, horizon: int) -> JaxStep:
    """Builds the step a region repeats; `horizon` is how many it will make, about."""
    if inner.batch % inner.accumulate:
        raise SpecError(
            f"inner.batch is {inner.batch}, which does not part into {inner.accumulate} "
            "equal micro-batches.",
            hint="Set `inner.accumulate` to a divisor of `inner.batch`.",
        )
    optimizer = inner_optimizer(model, inner, horizon)
    gradient = _gradient(model.loss_fn(), inner.accumulate)

    def move(
        params: Params, state: State, loss: jax.Array, slope: Params
    ) -> tuple[Params, State, jax.Array]:
        updates, moved = optimizer.update(slope, state, params)
        # A step that is not finite changes nothing, so that one poisoned batch does not
        # undo a run; the loss it returns tells.
        sound = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(slope))
        keep = partial(jax.tree.map, lambda new, old: jnp.where(sound, new, old))
        loss = jnp.where(sound, loss, jnp.nan)
        return keep(optax.apply_updates(params, updates), params), keep(moved, state), loss

    def step(params: Params, state: State, tokens: jax.Array) -> tuple[Params, State, jax.Array]:
        return move(params, state, *gradient(params, tokens))

    return JaxStep(
        init_state=jax.jit(optimizer.init),
        step=jax.jit(step, donate_argnums=(0, 1)),
        gradient=jax.jit(gradient),
        move=jax.jit(move, donate_argnums=(0, 1)),
        loss=jax.jit(model.loss_fn(penalties=False)),
    )


def inner_optimizer(model: Model, inner: InnerSpec, horizon: int) -> optax.GradientTransformation:
    """Clips, then moves; only matrices decay."""
    chosen = optimizers.build(inner.optimizer)
    rate = schedules.build(inner.schedule).build(chosen.lr, max(1, horizon))
    matrices = {tensor.name: len(tensor.shape) > 1 for tensor in model.tensors()}
    return optax.chain(optax.clip_by_global_norm(inner.clip), chosen.build(rate, matrices))


def _gradient(
    loss_fn: LossFn, parts: int
) -> Callable[[Params, jax.Array], tuple[jax.Array, Params]]:
    """Gives loss and gradient; in several parts it needs the memory of one."""

    def whole(params: Params, tokens: jax.Array) -> tuple[jax.Array, Params]:
        (loss, _), slope = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens)
        return loss, slope

    def in_parts(params: Params, tokens: jax.Array) -> tuple[jax.Array, Params]:
        def add(sums: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, whole(params, part)), None

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(add, nothing, tokens.reshape(parts, -1, tokens.shape[1]))
        return jax.tree.map(lambda total: total / parts, sums)

    return whole if parts == 1 else in_parts


def place(params: Mapping[str, np.ndarray]) -> Params:
    """Copies weights to the device."""
    return {name: _copied(values) for name, values in params.items()}


def _copied(values: np.ndarray) -> jax.Array:
    # JAX only queues the copy, and would copy whatever the array holds by then.
    return jnp.array(values, jnp.float32, copy=True).block_until_ready()


def fetch(params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Copies arrays to the host; the copies stay as they are, whatever the next step does."""
    for values in params.values():
        values.copy_to_host_async()
    return {name: np.array(values, copy=True) for name, values in params.items()}


def fragment_vector(params: Mapping[str, jax.Array], fragment: Fragment) -> np.ndarray:
    """Copies one fragment to the host as a vector; nothing else leaves the device."""
    parts = [_rows(params[piece.tensor], piece) for piece in fragment.pieces]
    for part in parts:
        part.copy_to_host_async()
    vector = np.empty(fragment.size, np.float32)
    for piece, part in zip(fragment.pieces, parts, strict=True):
        vector[piece.span] = np.asarray(part).reshape(-1)
    return vector


def replace_fragment(params: Params, fragment: Fragment, vector: np.ndarray) -> Params:
    """Gives the weights with one fragment replaced; all others are the same arrays."""
    changed = dict(params)
    for piece in fragment.pieces:
        rows = _copied(vector[piece.span].reshape(piece.shape))
        old = changed[piece.tensor]
        whole = old.shape == rows.shape
        changed[piece.tensor] = rows if whole else _overwrite(old, rows, piece.start)
    return changed


def _rows(values: jax.Array, piece: Piece) -> jax.Array:
    count = piece.stop - piece.start
    # The start is an argument of the compiled slice, so pieces of one size share it.
    return values if count == values.shape[0] else _slice(values, piece.start, count)


@partial(jax.jit, static_argnames="count")
def _slice(values: jax.Array, start: int, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(values, start, count)


@jax.jit
def _overwrite(values: jax.Array, rows: jax.Array, start: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(values, rows, start, axis=0)


def flatten_state(state: State) -> dict[str, np.ndarray]:
    """Copies an optimiser's state to the host, each array under its place in the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return fetch({jax.tree_util.keystr(path): leaf for path, leaf in leaves})


def restore_state(step: JaxStep, params: Params, saved: Mapping[str, np.ndarray]) -> State:
    """Rebuilds the state `flatten_state` took apart, bit for bit."""
    like = jax.eval_shape(step.init_state, params)
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    found = {name: (values.shape, values.dtype) for name, values in saved.items()}
    if found != {name: (leaf.shape, leaf.dtype) for name, leaf in wanted.items()}:
        differing = sorted(set(wanted) ^ set(found)) or ["the shapes of its arrays"]
        raise StoreError(
            "The saved optimiser state does not fit the optimiser of this run: "
            f"it differs in {differing[0]}.",
            hint="Delete the region's checkpoint; it then restarts from the published weights.",
        )
    return tree.unflatten([jnp.array(saved[name], copy=True) for name in wanted])


def use_compile_cache(folder: Path | None = None) -> Path | None:
    """Keeps compiled steps for the next start; says where, or None if it cannot write."""
    try:
        folder = folder or Path.home() / ".cache" / "diloco" / "compile"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
