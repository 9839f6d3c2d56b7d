"""Weights in a tree of JAX arrays, on one device or many: a dict, a list, an nnx state.

    weights = JaxWeights(params)
    while outer.go_on():
        weights.params, optimizer.state, loss = train_step(weights.params, optimizer.state, batch)

A loop reads `params` before each step and sets it after it. A Flax NNX model keeps its own:
`JaxWeights.of_nnx(model)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from diloco_cli.core.fragments import Piece, Tensor
from diloco_cli.errors import SpecError
from diloco_cli.region.names import Names, sources
from diloco_cli.region.numpy_weights import refuse_narrow


class JaxWeights:
    """The leaves of a tree, under the keys that lead to them, joined by dots."""

    def __init__(
        self,
        params: Any,
        *,
        names: Names | None = None,
        embeddings: Collection[str] = (),
    ) -> None:
        self.params = params
        """What the next step starts from, and what the last one has made."""
        self._read: Callable[[], Any] = lambda: self.params
        self._replace: Callable[[Any], None] = partial(setattr, self, "params")
        self._begin(names, embeddings)

    @classmethod
    def of_nnx(
        cls, model: Any, *, names: Names | None = None, embeddings: Collection[str] = ()
    ) -> JaxWeights:
        """The parameters of a Flax NNX module, which is updated in place."""
        from flax import nnx

        made = cls.__new__(cls)
        made.params = None
        made._read = lambda: nnx.state(model, nnx.Param)
        made._replace = lambda state: nnx.update(model, state)
        made._begin(names, embeddings)
        return made

    def _begin(self, names: Names | None, embeddings: Collection[str]) -> None:
        leaves = _leaves(self._read())
        for name, values in leaves.items():
            refuse_narrow(name, str(values.dtype))
            if not getattr(values, "is_fully_addressable", True):
                raise SpecError(
                    f"{name} lies on devices of several processes.",
                    hint="JaxWeights reads and writes what one process holds; the built-in trainer "
                    "trains regions of several hosts.",
                )
        self._sources = sources(leaves, names, embeddings)

    def tensors(self) -> tuple[Tensor, ...]:
        leaves = _leaves(self._read())
        return tuple(
            Tensor(
                wire,
                tuple(reversed(shape) if source.transposed else shape),
                source.embedding,
            )
            for wire, source in self._sources.items()
            for shape in [tuple(leaves[source.name].shape)]
        )

    def read(self, piece: Piece) -> np.ndarray:
        source = self._sources[piece.tensor]
        values = _leaves(self._read())[source.name]
        index = _index(piece, source.transposed, len(values.shape))
        rows = np.asarray(values[index])
        return np.array(rows.T if source.transposed else rows, np.float32, copy=True, order="C")

    def write(self, piece: Piece, rows: np.ndarray) -> None:
        source = self._sources[piece.tensor]

        def replaced(path: Any, old: Any) -> Any:
            if _name(path) != source.name:
                return old
            whole = np.array(old, copy=True)
            turned = rows.T if source.transposed else rows
            whole[_index(piece, source.transposed, whole.ndim)] = turned
            if not isinstance(old, jax.Array):
                return whole
            # Each device is given its share, and nothing is compiled.
            return jax.make_array_from_callback(
                old.shape, old.sharding, lambda index: whole[index]
            ).block_until_ready()

        self._replace(jax.tree_util.tree_map_with_path(replaced, self._read()))


class JaxOptimizer:
    """The state of an optax optimiser: a tree of arrays that the loop reads and sets."""

    def __init__(self, state: Any, init: Callable[[], Any]) -> None:
        """`init` makes a fresh state, as in `lambda: tx.init(weights.params)`."""
        self.state, self._init = state, init

    def save(self) -> dict[str, np.ndarray]:
        found, _ = jax.tree_util.tree_flatten_with_path(self.state)
        return {jax.tree_util.keystr(path): np.array(leaf, copy=True) for path, leaf in found}

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        def restored(path: Any, old: Any) -> Any:
            values = np.array(saved[jax.tree_util.keystr(path)], copy=True)
            if not isinstance(old, jax.Array):
                return values
            return jax.device_put(values, old.sharding).block_until_ready()

        self.state = jax.tree_util.tree_map_with_path(restored, self.state)

    def reset(self) -> None:
        self.state = self._init()


def _leaves(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _name(path: Any) -> str:
    words = [getattr(step, "key", getattr(step, "idx", getattr(step, "name", ""))) for step in path]
    # An nnx variable is a node around its array.
    return ".".join(str(word) for word in words if word not in ("value", ""))


def _index(piece: Piece, transposed: bool, axes: int) -> Any:
    if not piece.shape:
        return ()
    rows = slice(piece.start, piece.stop)
    return (*[slice(None)] * (axes - 1), rows) if transposed else rows
