"""A folder of sharded checkpoints, written and read by Orbax.

    FOLDER/NUMBER/state   what is held of every fragment, and the optimiser, each device its part
    FOLDER/NUMBER/notes   everything else, as JSON

Saving waits for the copy from the devices to the host; writing goes on beside the training. A
checkpoint is written under another name and renamed when all of it is there, so what a process
leaves behind that dies meanwhile is never taken for one. Numbers only ever rise. Arrays come back
on whatever devices ask for them.

In a region of several hosts each writes what its own devices hold, into the same folder, and the
checkpoint gets its name when all have. They wait for each other through JAX's own meeting point
and never through the devices. Each host reads by itself, and only what its devices need.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diloco_cli.errors import SpecError, StoreError
from diloco_cli.system.files import keep_bytes, make_folder

HELD, OPTIMIZER = "held", "optimizer"
"""Where the arrays are in the state; in the notes, what to expect there."""
OPENED = ("_writer", "_reader")
MARK = "hosts.mark"
"""By which the other hosts know that they look at the same disk."""


class OrbaxFolder:
    """The checkpoints of one region."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.failed = ""
        """What went wrong with the last one that did not become durable."""
        self._last: int | None = None

    @cached_property
    def _writer(self) -> Any:
        """What all hosts use at once, if there are several."""
        return self._open(range(jax.process_count()))

    @cached_property
    def _reader(self) -> Any:
        several = jax.process_count() > 1
        return self._open([jax.process_index()]) if several else self._writer

    def _open(self, processes: Sequence[int]) -> Any:
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)  # It has a line for every file.
        together = ocp.options.MultiprocessingOptions()
        if jax.process_count() > 1:  # Those who are named do not wait through the devices.
            name = "-".join(map(str, processes))
            together = ocp.options.MultiprocessingOptions(processes[0], set(processes), name)
        try:
            make_folder(self.folder)
            return ocp.CheckpointManager(
                self.folder.resolve(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=self.keep, create=False, multiprocessing_options=together
                ),
            )
        except OSError as error:
            raise StoreError(
                f"The folder of checkpoints {self.folder} cannot be used: {error.strerror}.",
                hint="Fix its permissions or its disk, or change `checkpoint.to` of the region.",
            ) from None

    def numbers(self) -> list[int]:
        """The checkpoints that there are, the newest first."""
        if not self.folder.exists():
            return []
        if jax.process_count() > 1:
            self._reader.reload()  # What others write it does not know of.
        return sorted(self._reader.all_steps(), reverse=True)

    def next_number(self) -> int:
        if self._last is None:
            self._last = next(iter(self.numbers()), 0)
        self._last += 1
        return self._last

    @cached_property
    def mark(self) -> str:
        """Lies in the folder from now on, for other hosts to find."""
        mark = secrets.token_hex(16)

        def write() -> None:
            make_folder(self.folder)
            keep_bytes(self.folder / MARK, mark.encode())

        self._written(write)
        return mark

    def find_mark(self, mark: str) -> None:
        """Makes sure that this host sees the folder of host 0, and not one of its own."""
        try:
            found = (self.folder / MARK).read_text()
        except (OSError, ValueError):
            found = ""
        if found != mark:
            raise SpecError(
                f"The folder of checkpoints {self.folder} is not the one that host 0 sees.",
                hint="Set `checkpoint.to` of the region to a folder on a disk that all its hosts "
                "share, or remove `checkpoint`: host 0 then keeps one file.",
            )

    def save(
        self,
        notes: Mapping[str, Any],
        held: Sequence[Any],
        optimizer: Mapping[str, Any],
        parts: Mapping[str, Sequence[str]],
        number: int | None = None,
    ) -> None:
        """Copies the arrays to the host and begins to write them; `wait` says how that ended.

        `parts` names the tensors in arrays of the optimiser that hold several. Of several hosts
        all save under the same number, and the first host's notes count.
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
        number = self.next_number() if number is None else number
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            notes=ocp.args.JsonSave({**notes, HELD: len(held), OPTIMIZER: arrays}),
        )
        self._written(lambda: self._writer.save(number, args=items, force=True))

    def wait(self) -> None:
        """Waits until what is being written is durable under its name; raises what went wrong."""
        self._written(self._writer.wait_until_finished)

    def _written(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except Exception as error:  # Whatever a full or lost disk makes Orbax raise.
            self.failed = f"{self.folder}: {_reason(error)}"
            raise StoreError(
                self.failed,
                hint="Make room there, or change `checkpoint.to` of the region.",
            ) from None

    def read(self, number: int) -> SavedState:
        """Reads the notes of a checkpoint; StoreError if it is not whole."""
        import orbax.checkpoint as ocp

        def read() -> SavedState:
            found = self._reader.restore(
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
            number, lambda: self._reader.restore(number, args=ocp.args.Composite(state=args))
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
        opened = {id(each): each for key, each in self.__dict__.items() if key in OPENED}
        for manager in opened.values():
            manager.close()


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

    def record(self) -> dict[str, Any]:
        """What another host needs to read the same."""
        return {
            "folder": str(self._folder.folder),
            "number": self._number,
            "arrays": list(self._arrays.values()),
        }

    @classmethod
    def of_record(
        cls, folder: str, number: int, arrays: Sequence[Mapping[str, Any]]
    ) -> SavedOptimizer:
        return cls(OrbaxFolder(Path(folder), keep=1), number, arrays)

    def matches(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
        """Says whether these very arrays were saved."""
        arrays = self._arrays.values()
        saved = {each["name"]: (tuple(each["shape"]), each["type"]) for each in arrays}
        return saved == {name: (leaf.shape, str(leaf.dtype)) for name, leaf in like.items()}

    def restore(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The arrays on the devices that `like` says."""
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
