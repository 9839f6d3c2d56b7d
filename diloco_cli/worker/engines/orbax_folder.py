"""A folder of sharded checkpoints, written and read by Orbax.

    FOLDER/NUMBER/state   what is held of every fragment, and the optimiser, each device its part
    FOLDER/NUMBER/notes   everything else, as JSON

Saving waits for the copy from the devices to the host; writing goes on beside the training. A
checkpoint is written under another name and renamed when all of it is there, so what a process
leaves behind that dies meanwhile is never taken for one. Numbers only ever rise. Arrays come back
on whatever devices ask for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diloco_cli.errors import StoreError

HELD, OPTIMIZER = "held", "optimizer"
"""Where the arrays are in the state; in the notes, what to expect there."""


class OrbaxFolder:
    """The checkpoints of one region."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self._keep = folder, keep

    @cached_property
    def _manager(self) -> Any:
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)  # It has a line for every file.
        try:
            return ocp.CheckpointManager(
                self.folder.resolve(),
                options=ocp.CheckpointManagerOptions(max_to_keep=self._keep, create=True),
            )
        except OSError as error:
            raise StoreError(
                f"The folder of checkpoints {self.folder} cannot be used: {error.strerror}.",
                hint="Fix its permissions or its disk, or change `checkpoint.to` of the region.",
            ) from None

    def numbers(self) -> list[int]:
        """The checkpoints that there are, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True) if self.folder.exists() else []

    def save(
        self,
        notes: Mapping[str, Any],
        held: Sequence[Any],
        optimizer: Mapping[str, Any],
        parts: Mapping[str, Sequence[str]],
    ) -> None:
        """Copies the arrays to the host and begins to write them; `wait` says how that ended.

        `parts` names the tensors in arrays of the optimiser that hold several.
        """
        import orbax.checkpoint as ocp

        arrays = [
            {
                "name": name,
                "parts": list(parts.get(name, ())),
                "shape": list(values.shape),
                "type": str(values.dtype),
            }
            for name, values in optimizer.items()
        ]
        state = {
            HELD: {_key(number): values for number, values in enumerate(held)},
            OPTIMIZER: {_key(n): values for n, values in enumerate(optimizer.values())},
        }
        number = next(iter(self.numbers()), 0) + 1
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            notes=ocp.args.JsonSave({**notes, HELD: len(held), OPTIMIZER: arrays}),
        )
        self._written(lambda: self._manager.save(number, args=items, force=True))

    def wait(self) -> None:
        """Waits until what is being written is durable under its name; raises what went wrong."""
        self._written(self._manager.wait_until_finished)

    def _written(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except Exception as error:  # Whatever a full or lost disk makes Orbax raise.
            raise StoreError(
                f"{self.folder}: {_reason(error)}",
                hint="Make room there, or change `checkpoint.to` of the region.",
            ) from None

    def read(self, number: int) -> SavedState:
        """Reads the notes of a checkpoint; StoreError if it is not whole."""
        import orbax.checkpoint as ocp

        def read() -> SavedState:
            found = self._manager.restore(
                number, args=ocp.args.Composite(notes=ocp.args.JsonRestore())
            )
            return SavedState(self, number, found["notes"])

        return self._believed(number, read)

    def arrays(self, number: int, like: Mapping[str, Any]) -> Mapping[str, Any]:
        """Reads arrays of a checkpoint as `like` says, on its devices or into numpy."""
        import orbax.checkpoint as ocp

        args = ocp.args.PyTreeRestore(
            dict(like),
            restore_args=jax.tree.map(_restore_args, dict(like)),
            partial_restore=True,
        )
        found = self._believed(
            number, lambda: self._manager.restore(number, args=ocp.args.Composite(state=args))
        )
        return found["state"]

    def _believed(self, number: int, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:  # Whatever a damaged file makes Orbax or TensorStore raise.
            raise StoreError(
                f"The checkpoint {self.folder / str(number)} cannot be read: {_reason(error)}.",
                hint="Delete it; the region then goes on from the one before, or from the "
                "published weights.",
            ) from None

    def close(self) -> None:
        if "_manager" in self.__dict__:
            self._manager.close()


class SavedState:
    """One checkpoint: its notes are here, its arrays are read when they are asked for."""

    def __init__(self, folder: OrbaxFolder, number: int, notes: Mapping[str, Any]) -> None:
        self._folder, self.number, self.notes = folder, number, notes
        self.optimizer = SavedOptimizer(folder, number, notes[OPTIMIZER])

    def held(self) -> list[np.ndarray]:
        """What was held of each fragment; there may be more after the last value."""
        like = {HELD: {_key(n): np.empty(0, np.float32) for n in range(self.notes[HELD])}}
        found = self._folder.arrays(self.number, like)[HELD]
        return [np.asarray(found[key]) for key in sorted(found)]


class SavedOptimizer(Mapping[str, np.ndarray]):
    """An optimiser in a checkpoint: read to its devices where it fits, else tensor by tensor."""

    def __init__(
        self, folder: OrbaxFolder, number: int, arrays: Sequence[Mapping[str, Any]]
    ) -> None:
        self._folder, self._number = folder, number
        self._arrays = {_key(place): each for place, each in enumerate(arrays)}

    def restore(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array] | None:
        """The arrays on the devices that `like` says; None if others were saved than these."""
        arrays = self._arrays.values()
        saved = {each["name"]: (tuple(each["shape"]), each["type"]) for each in arrays}
        if saved != {name: (leaf.shape, str(leaf.dtype)) for name, leaf in like.items()}:
            return None
        keys = {each["name"]: key for key, each in self._arrays.items()}
        asked = {OPTIMIZER: {keys[name]: leaf for name, leaf in like.items()}}
        found = self._folder.arrays(self._number, asked)[OPTIMIZER]
        return {name: found[key] for name, key in keys.items()}

    @cached_property
    def _on_the_host(self) -> dict[str, np.ndarray]:
        like = {key: np.empty(0, each["type"]) for key, each in self._arrays.items()}
        found = self._folder.arrays(self._number, {OPTIMIZER: like})[OPTIMIZER]
        arrays: dict[str, np.ndarray] = {}
        for key, each in self._arrays.items():
            values, parts = np.asarray(found[key]), each["parts"]
            arrays |= zip(parts, values, strict=True) if parts else {each["name"]: values}
        return arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self._on_the_host[name]

    def __iter__(self) -> Iterator[str]:
        names = (each["parts"] or [each["name"]] for each in self._arrays.values())
        return iter([name for several in names for name in several])

    def __len__(self) -> int:
        return sum(len(each["parts"]) or 1 for each in self._arrays.values())


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else repr(error)).rstrip(".")


def _key(number: int) -> str:
    return f"{number:05d}"


def _restore_args(leaf: Any) -> Any:
    import orbax.checkpoint as ocp

    if isinstance(leaf, jax.ShapeDtypeStruct):
        return ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        )
    return ocp.RestoreArgs(restore_type=np.ndarray)
