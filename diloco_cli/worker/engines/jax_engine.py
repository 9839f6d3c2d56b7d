"""The engine in JAX: one jitted, donated function from weights and tokens to weights.

    step = make_step(model, inner, RatePlan.of(inner, 2_000))
    engine = step.engine()
    engine.load(model.init(seed), None)
    loss = engine.step(tokens)

Donation means that the arrays given to a step are gone after it: keep nothing that
points into them. On several devices the shardings of everything that a step takes and
gives are said, so that it is compiled once and nothing of it moves in between.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco_cli.core.fragments import Fragment, Tensor
from diloco_cli.core.unmerged_work import Mix
from diloco_cli.errors import SpecError
from diloco_cli.models import (
    PLAIN,
    Described,
    LossFn,
    LossForm,
    Model,
    Partitioned,
    parameters,
)
from diloco_cli.spec.schema import InnerSpec
from diloco_cli.worker.engines.devices import devices_of, memory_in_use, peak_of
from diloco_cli.worker.engines.exchange import exchange_of
from diloco_cli.worker.engines.learning_rate import RatePlan
from diloco_cli.worker.engines.optimizers import MovesMatrices, optimizers
from diloco_cli.worker.engines.orbax_folder import SavedOptimizer
from diloco_cli.worker.engines.placement import (
    ONE_PROCESS,
    ROWS,
    Params,
    Placement,
    State,
    ValueTransfer,
    place_model,
)
from diloco_cli.worker.engines.protocol import (
    Arrays,
    EngineSnapshot,
    HeldWork,
    ShardedFolder,
    StepCost,
    StepFacts,
    Vector,
)


@dataclass(frozen=True)
class JaxStep:
    """An inner step, compiled on first use; its arguments `params` and `state` are given up."""

    placement: Placement
    """Where the weights lie that it takes and gives."""

    cost: StepCost

    init_state: Callable[[Params], State]
    step: Callable[[Params, State, np.ndarray], tuple[Params, State, jax.Array, jax.Array]]
    """The loss is NaN when it, or the gradient, was not finite: then nothing has moved. Last come
    the learning rate and the norm of the gradient before it was clipped."""

    gradient: Callable[[Params, np.ndarray], tuple[jax.Array, Params]]
    """The first half of a step, for those who average gradients before they move."""

    move: Callable[[Params, State, jax.Array, Params], tuple[Params, State, jax.Array]]
    """The second half: from `params, state, loss, slope`; gives up what `step` does."""

    loss: Callable[..., tuple[jax.Array, jax.Array]]
    """The model's loss without penalties; gives nothing up."""

    def evaluate(self, params: Mapping[str, Any], batches: Iterable[np.ndarray]) -> float:
        """Measures the mean loss in nats per token; the weights are where `placement` puts them."""
        put = self.placement.place_batch
        results = [self.loss(dict(params), put(tokens)) for tokens in batches]
        tokens = sum(int(count) for _, count in results)
        return sum(float(loss) * int(count) for loss, count in results) / tokens

    def state_fits(self, saved: Mapping[str, np.ndarray]) -> bool:
        """Says whether a saved state is one of this optimiser."""
        return self.placement.fits(self._state_like(), saved)

    def restore_state(self, saved: Mapping[str, np.ndarray] | None) -> State:
        """Rebuilds the state that `placement.flatten` took apart, bit for bit.

        None stands for a state that another process sends.
        """
        return self.placement.restore(self._state_like(), saved)

    def _state_like(self) -> State:
        return jax.eval_shape(self.init_state, self.placement.like())

    def was_saved(self, saved: SavedOptimizer) -> bool:
        """Says whether the arrays that were saved are those that a state has here."""
        return saved.matches(self.placement.spread_out(self._state_like()))

    def read_state(self, saved: SavedOptimizer) -> State:
        """Reads a state that was saved in the same arrays to where it belongs."""
        like = self._state_like()
        return self.placement.put_together(like, saved.restore(self.placement.spread_out(like)))

    def compile(self, inner: InnerSpec) -> Any:
        """Compiles the step and gives what XLA knows of it; allocates nothing."""
        weights = self.placement.like()
        tokens = jax.ShapeDtypeStruct((inner.batch, inner.sequence + 1), jnp.int32)
        state = jax.eval_shape(self.init_state, weights)
        return cast(Any, self.step).lower(weights, state, tokens).compile()

    def engine(self) -> JaxEngine:
        return JaxEngine(self)


class JaxEngine:
    """One region's weights and optimiser state on its devices; see `Engine`."""

    def __init__(self, compiled: JaxStep) -> None:
        self._compiled, self._placement = compiled, compiled.placement
        self._exchange = exchange_of(compiled.placement)
        self.params: Params = {}
        self.state: State = None
        self._next = 0
        """Where the next step is in the learning-rate schedule, if this one counts."""
        self._facts: tuple[jax.Array | None, jax.Array | None] = (None, None)
        """Learning rate and gradient norm of the step before the last, and of the last."""

    def load(self, params: Arrays, optimizer: Arrays | None) -> bool:
        if isinstance(optimizer, SavedOptimizer) and self._compiled.was_saved(optimizer):
            self.begin_saved(params, optimizer)
            return True
        fits = bool(optimizer) and self._compiled.state_fits(optimizer or {})
        self.begin(params, optimizer, restore=fits)
        return fits

    def begin_saved(self, params: Arrays | None, optimizer: SavedOptimizer) -> None:
        """Goes on from these; the optimiser is read to where it belongs."""
        self.params = self._placement.place(params)
        self.state = self._compiled.read_state(optimizer)
        self._next = place_of(self.state)

    def begin(self, params: Arrays | None, optimizer: Arrays | None, *, restore: bool) -> None:
        """Goes on from these; None stands for what another process sends."""
        self.params = self._placement.place(params)
        self.state = (
            self._compiled.restore_state(optimizer)
            if restore
            else self._compiled.init_state(self.params)
        )
        self._next = place_of(self.state)

    def place(self, place: int) -> None:
        if place != self._next:
            self.state, self._next = at_place(self.state, place), place

    def step(self, tokens: np.ndarray) -> jax.Array:
        params, state, loss, facts = self._compiled.step(self.params, self.state, tokens)
        self._facts = self._facts[1], facts
        self.moved(params, state)
        return loss

    def facts(self) -> StepFacts | None:
        known = self._facts[0]
        return None if known is None else StepFacts(*np.asarray(known).tolist())

    def moved(self, params: Params, state: State) -> None:
        """Goes on from the result of a step that was made for it."""
        self.params, self.state = params, state
        self._next += 1

    def wait(self) -> None:
        jax.block_until_ready(self.params)

    def read(self, fragment: Fragment) -> np.ndarray:
        return self._placement.read(self.params, fragment)

    def write(self, fragment: Fragment, values: np.ndarray) -> None:
        self.params = self._placement.write(self.params, fragment, values)

    def keep(self, fragment: Fragment, values: np.ndarray) -> Vector:
        return self._exchange.keep(fragment, values)

    def held(self, fragment: Fragment, anchor: Vector, codec: Mapping[str, Any]) -> HeldWork:
        return self._exchange.held(self.params, fragment, anchor, codec)

    def adopt(
        self, fragment: Fragment, anchor: Vector, new: Vector, mix: Mix, frame: Vector | None
    ) -> None:
        self.params = self._exchange.adopt(self.params, fragment, anchor, new, mix, frame)

    def snapshot(self) -> EngineSnapshot:
        placement = self._placement
        return EngineSnapshot(
            placement.fetch(self.params), placement.flatten(self.state), place_of(self.state)
        )

    def place_now(self) -> int:
        return place_of(self.state)

    def save(
        self,
        folder: ShardedFolder,
        notes: Mapping[str, Any],
        anchors: Iterable[tuple[Fragment, Vector]],
        number: int | None = None,
    ) -> None:
        """Of several hosts all save under the same number."""
        held = [
            self._exchange.held_values(self.params, fragment, anchor)
            for fragment, anchor in anchors
        ]
        arrays, parts = self._placement.named(self.state)
        folder.save(notes, held, arrays, parts, number)

    def reset_optimizer(self) -> None:
        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return old if new.ndim == 0 and new.dtype.kind in "iu" else new

        self.state = jax.tree.map(choose, self._compiled.init_state(self.params), self.state)

    def evaluate(self, params: Arrays, batches: Iterable[np.ndarray]) -> float:
        return self._compiled.evaluate(self._placement.place(params), batches)

    def start_trace(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.wait()
        jax.profiler.start_trace(folder)

    def stop_trace(self) -> None:
        self.wait()
        jax.profiler.stop_trace()

    def memory(self) -> int | None:
        here = jax.local_devices()  # Those of other hosts do not tell us.
        return memory_in_use([each for each in devices_of(self._placement.mesh) if each in here])


def make_step(
    model: Model,
    inner: InnerSpec,
    rate: RatePlan,
    *,
    mesh: Mesh | None = None,
    separator: int | None = None,
    transfer: ValueTransfer = ONE_PROCESS,
) -> JaxStep:
    """Builds the step a region repeats, on one device or on a mesh.

    Documents that end with `separator`, if one is given, are kept apart.
    """
    if inner.batch % inner.accumulate:
        raise SpecError(
            f"inner.batch is {inner.batch}, which does not part into {inner.accumulate} "
            "equal micro-batches.",
            hint="Set `inner.accumulate` to a divisor of `inner.batch`.",
        )
    form = form_of(model, inner, mesh, separator)
    placement = place_model(model, stacked=form.remat == "block", mesh=mesh, transfer=transfer)
    optimizer, rates = inner_optimizer(placement, inner, rate), rate.build()
    gradient = _gradient(model.loss_fn(form=form), inner.accumulate, form)

    def advanced(
        params: Params, state: State, loss: jax.Array, slope: Params
    ) -> tuple[Params, State, jax.Array, jax.Array]:
        # A step that is not finite changes nothing, so that one poisoned batch does not
        # undo a run; the loss it returns tells. A condition rather than a choice between old
        # and new: with both at hand XLA would keep a copy of the optimiser's averages.
        norm = optax.tree.norm(slope)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)

        def advance() -> tuple[Params, State]:
            updates, moved = optimizer.update(slope, state, params)
            return cast(Params, optax.apply_updates(params, updates)), moved

        new, moved = jax.lax.cond(sound, advance, lambda: (params, state))
        facts = jnp.stack([jnp.asarray(rates(count_of(state)), jnp.float32), norm])
        return new, moved, jnp.where(sound, loss, jnp.nan), facts

    def move(
        params: Params, state: State, loss: jax.Array, slope: Params
    ) -> tuple[Params, State, jax.Array]:
        return advanced(params, state, loss, slope)[:3]

    def step(
        params: Params, state: State, tokens: jax.Array
    ) -> tuple[Params, State, jax.Array, jax.Array]:
        return advanced(params, state, *gradient(params, tokens))

    jit = partial(
        _jit, placement, placement.of_state(jax.eval_shape(optimizer.init, placement.like()))
    )
    return JaxStep(
        placement=placement,
        cost=cost_of(model, inner, devices_of(mesh)),
        init_state=jit(optimizer.init, "params", "state"),
        step=jit(step, "params state rows", "params state scalar scalar", donate=(0, 1)),
        gradient=jit(gradient, "params rows", "scalar params"),
        move=jit(move, "params state scalar params", "params state scalar", donate=(0, 1)),
        loss=jax.jit(model.loss_fn(penalties=False, form=form)),
    )


def form_of(
    model: Model, inner: InnerSpec, mesh: Mesh | None, separator: int | None = None
) -> LossForm:
    """Says how the model's loss is computed in this region."""
    form = LossForm(inner.compute, inner.remat, inner.loss_chunks, inner.attention, mesh, separator)
    if not isinstance(model, Partitioned) and replace(form, mesh=None) != PLAIN:
        raise SpecError(
            f"{type(model).__name__} computes its loss in one way only, so `inner.compute`, "
            "`remat`, `loss_chunks`, `attention` and `data.mask` have no effect.",
            hint="Remove these keys, or choose another model.",
        )
    return form


def cost_of(model: Model, inner: InnerSpec, devices: Sequence[Any]) -> StepCost:
    """Counts the operations of a step; a model that does not say has six a weight and token."""
    batch, sequence = inner.batch, inner.sequence
    counted = isinstance(model, Described)
    flops = (
        model.step_flops(batch, sequence) if counted else 6.0 * parameters(model) * batch * sequence
    )
    return StepCost(flops, len(devices), peak_of(devices))


def _jit(
    placement: Placement,
    state: State,
    function: Callable[..., Any],
    takes: str,
    gives: str,
    *,
    donate: tuple[int, ...] = (),
) -> Any:
    """Compiles a function whose arguments and results lie where they belong."""
    if placement.mesh is None:
        return jax.jit(function, donate_argnums=donate)
    places = {
        "params": placement.shardings,
        "state": state,
        "rows": placement.rows,
        "scalar": placement.everywhere,
    }
    inward, outward = ([places[word] for word in words.split()] for words in (takes, gives))
    return jax.jit(
        function,
        donate_argnums=donate,
        in_shardings=tuple(inward),
        out_shardings=tuple(outward) if len(outward) > 1 else outward[0],
    )


def inner_optimizer(
    placement: Placement, inner: InnerSpec, rate: RatePlan
) -> optax.GradientTransformation:
    """Clips, then moves; only matrices decay."""
    chosen = optimizers.build(inner.optimizer)
    # A stack of norms has two axes and is no matrix.
    matrices = {array: len(members[0].shape) > 1 for array, members in placement.members.items()}
    if isinstance(chosen, MovesMatrices):
        move = chosen.build_by_matrix(rate.build(), hidden_matrices(placement))
    else:
        move = chosen.build(rate.build(), matrices)
    return optax.chain(optax.clip_by_global_norm(inner.clip), move)


def hidden_matrices(placement: Placement) -> dict[str, tuple[int, int] | None]:
    """By array: the two axes of its matrices; None for embeddings, norms and the like."""

    def axes(array: str, tensor: Tensor) -> tuple[int, int] | None:
        if tensor.embedding or len(tensor.shape) != 2:
            return None
        return (1, 2) if array in placement.stacks else (0, 1)

    return {array: axes(array, members[0]) for array, members in placement.members.items()}


def _gradient(
    loss_fn: LossFn, parts: int, form: LossForm
) -> Callable[[Params, jax.Array], tuple[jax.Array, Params]]:
    """Gives loss and gradient; in several parts it needs the memory of one."""

    def whole(params: Params, tokens: jax.Array) -> tuple[jax.Array, Params]:
        (loss, _), slope = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens)
        return loss, slope

    def in_parts(params: Params, tokens: jax.Array) -> tuple[jax.Array, Params]:
        def add(sums: Any, part: jax.Array) -> tuple[Any, None]:
            (loss, count), slope = jax.value_and_grad(loss_fn, has_aux=True)(params, part)
            if form.separator is not None:
                # Parts predict different numbers of tokens, and every token counts the same.
                share = parts * count / jnp.sum(tokens[:, :-1] != form.separator)
                loss, slope = jax.tree.map(lambda values: values * share, (loss, slope))
            return jax.tree.map(jnp.add, sums, (loss, slope)), None

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        batches = tokens.reshape(parts, -1, tokens.shape[1])
        if form.mesh is not None:  # Every device has a share of each part.
            dealt = NamedSharding(form.mesh, PartitionSpec(None, *ROWS))
            batches = jax.lax.with_sharding_constraint(batches, dealt)
        sums, _ = jax.lax.scan(add, nothing, batches)
        return jax.tree.map(lambda total: total / parts, sums)

    return whole if parts == 1 else in_parts


def _is_schedule(node: Any) -> TypeGuard[optax.ScaleByScheduleState]:
    return isinstance(node, optax.ScaleByScheduleState)


def count_of(state: State) -> Any:
    """What counts the places of the learning-rate schedule."""
    nodes = jax.tree.leaves(state, is_leaf=_is_schedule)
    return next((node.count for node in nodes if _is_schedule(node)), 0)


def place_of(state: State) -> int:
    """Where the next step is in the learning-rate schedule."""
    return int(np.asarray(count_of(state)))


def at_place(state: State, place: int) -> State:
    """The state with another place in the learning-rate schedule."""

    def moved(node: Any) -> Any:
        if not _is_schedule(node):
            return node
        before = cast(jax.Array, node.count)
        value = np.asarray(place, before.dtype)
        if isinstance(before.sharding, jax.sharding.SingleDeviceSharding):
            # Bound to no device, like the weights beside it: for every other mixture of bound
            # and unbound arguments the step would be compiled again.
            return node._replace(count=jnp.asarray(value))
        # Not put: hosts would compare their values.
        count = jax.make_array_from_callback((), before.sharding, lambda _: value)
        return node._replace(count=count)

    return jax.tree.map(moved, state, is_leaf=_is_schedule)


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
