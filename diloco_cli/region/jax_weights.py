"""Weights in a tree of JAX arrays, on one device or many: a dict, a list, an nnx state.

    weights = JaxWeights(params)
    while outer.go_on():
        weights.params, optimizer.state, loss = train_step(weights.params, optimizer.state, batch)

A loop reads `params` before each step and sets it after it. A Flax NNX model keeps its own:
`JaxWeights.of_nnx(model)`.

The devices may belong to several processes that `jax.distributed` has joined. Every process then
joins the region with `ranks=JaxRanks()`: an array is put together on all of them to be read, and
each writes its own shares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from diloco_cli.core.fragments import Piece, Tensor
from diloco_cli.errors import SpecError
from diloco_cli.region.names import Names, sources
from diloco_cli.region.numpy_weights import refuse_narrow
from diloco_cli.worker.engines.placement import put_together

HEADER_BYTES = 1024
"""What is shared first, whatever the size: orders fit in."""


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
            _refuse_unnamed(name, values)
        self.spread = any(not _is_here(values) for values in leaves.values())
        """Whether other processes hold some of it; `join` then wants `ranks`."""
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
        rows = np.asarray(values[index] if _is_here(values) else _whole(values)[index])
        return np.array(rows.T if source.transposed else rows, np.float32, copy=True, order="C")

    def write(self, piece: Piece, rows: np.ndarray) -> None:
        source = self._sources[piece.tensor]

        def replaced(path: Any, old: Any) -> Any:
            if _name(path) != source.name:
                return old
            whole = np.array(_whole(old), copy=True)
            turned = rows.T if source.transposed else rows
            whole[_index(piece, source.transposed, whole.ndim)] = turned
            if not isinstance(old, jax.Array):
                return whole
            return _placed(whole, old)

        self._replace(jax.tree_util.tree_map_with_path(replaced, self._read()))


class JaxOptimizer:
    """The state of an optax optimiser: a tree of arrays that the loop reads and sets."""

    def __init__(self, state: Any, init: Callable[[], Any]) -> None:
        """`init` makes a fresh state, as in `lambda: tx.init(weights.params)`."""
        self.state, self._init = state, init

    def save(self) -> dict[str, np.ndarray]:
        found, _ = jax.tree_util.tree_flatten_with_path(self.state)
        return {
            jax.tree_util.keystr(path): np.array(_whole(leaf), copy=True) for path, leaf in found
        }

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        def restored(path: Any, old: Any) -> Any:
            values = np.array(saved[jax.tree_util.keystr(path)], copy=True)
            return _placed(values, old) if isinstance(old, jax.Array) else values

        self.state = jax.tree_util.tree_map_with_path(restored, self.state)

    def reset(self) -> None:
        self.state = self._init()


class JaxRanks:
    """The processes that `jax.distributed.initialize` has joined; the first of them leads.

    Orders travel as programs on the devices, in the order in which every process starts them.
    """

    def __init__(self) -> None:
        if jax.process_count() == 1:
            raise SpecError(
                "JaxRanks needs several processes, and JAX knows of one.",
                hint="Call jax.distributed.initialize() first, or leave ranks= out.",
            )
        self.leads = jax.process_index() == 0

    def share(self, data: bytes) -> bytes:
        """Gives every process what the leading one has; `data` of the others is not looked at."""
        head = self._sent(len(data).to_bytes(8, "little") + data[: HEADER_BYTES - 8], HEADER_BYTES)
        size = int.from_bytes(head[:8], "little")
        if size <= HEADER_BYTES - 8:
            return head[8 : 8 + size]
        rest = size - (HEADER_BYTES - 8)
        # A program is compiled for every length, so there are few of them.
        return head[8:] + self._sent(data[HEADER_BYTES - 8 :], 1 << (rest - 1).bit_length())[:rest]

    def _sent(self, data: bytes, length: int) -> bytes:
        sent = np.zeros(length, np.uint8)
        if self.leads:
            sent[: len(data)] = np.frombuffer(data, np.uint8)
        return np.asarray(broadcast_one_to_all(sent, is_source=self.leads)).tobytes()


def _is_here(values: Any) -> bool:
    return getattr(values, "is_fully_addressable", True)


def _refuse_unnamed(name: str, values: Any) -> None:
    if not _is_here(values) and not isinstance(values.sharding, jax.sharding.NamedSharding):
        raise SpecError(
            f"{name} lies on devices of several processes as {type(values.sharding).__name__}.",
            hint="Place it with a jax.sharding.NamedSharding.",
        )


def _whole(values: Any) -> np.ndarray:
    """All of an array; a program of all processes that hold it."""
    return np.asarray(put_together(values) if isinstance(values, jax.Array) else values)


def _placed(values: np.ndarray, like: jax.Array) -> jax.Array:
    """Each device is given its share, and nothing is compiled."""
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: values[index]
    ).block_until_ready()


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
