"""A model that somebody else trains: its tensors and first weights, from a safetensors file.

There is no loss, so only regions with a trainer of their own train it. `Region.describe` writes
the file. Its metadata may name the tensors whose rows are used one by one:

    metadata   embeddings: JSON list of names
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from diloco_cli.core.fragments import Tensor
from diloco_cli.errors import RegistryError, SpecError
from diloco_cli.models.protocol import PLAIN, LossFn, LossForm, models

EMBEDDINGS = "embeddings"
"""The key of the metadata."""
DESCRIBE = "`Region.describe(weights, FILE)` writes such a file."


@models.register("tensors")
@dataclass(frozen=True)
class TensorsModel:
    """Tensors and first weights of a model that programs of your own train, in every region."""

    file: str
    """A safetensors file of float32 tensors under the names they have on the wire; on every host
    of the run, under the same path."""

    def __post_init__(self) -> None:
        if not self.tensors():
            raise RegistryError(f"{self.file} holds no tensor.", hint=DESCRIBE, key="file")

    def tensors(self) -> tuple[Tensor, ...]:
        return self._tensors

    @cached_property
    def _tensors(self) -> tuple[Tensor, ...]:
        try:
            with safe_open(Path(self.file).expanduser(), framework="numpy") as file:
                names = file.keys()
                slices: dict[str, Any] = {name: file.get_slice(name) for name in names}
                notes = file.metadata() or {}
        except FileNotFoundError:
            raise self._unfit(f"there is no {self.file} in {Path.cwd()}") from None
        except (OSError, SafetensorError) as error:
            raise self._unfit(f"{self.file} is not a safetensors file: {error}") from None
        for name, values in slices.items():
            if values.get_dtype() != "F32":
                raise self._unfit(f"{name} in {self.file} is {values.get_dtype()}, not F32")
            if 0 in values.get_shape():
                raise self._unfit(f"{name} in {self.file} has no values: {values.get_shape()}")
        embeddings = self._embeddings(notes, slices)
        return tuple(
            Tensor(name, tuple(values.get_shape()), name in embeddings)
            for name, values in sorted(slices.items())
        )

    def init(self, seed: int) -> dict[str, np.ndarray]:
        return {tensor.name: self.draw(tensor, seed) for tensor in self.tensors()}

    def draw(self, tensor: Tensor, seed: int) -> np.ndarray:
        """Reads a tensor's first weights, which no seed changes."""
        try:
            with safe_open(Path(self.file).expanduser(), framework="numpy") as file:
                values = file.get_tensor(tensor.name)
        except (OSError, SafetensorError) as error:
            raise SpecError(f"model.file: {self.file} cannot be read: {error}.") from None
        if not np.isfinite(values).all():
            place = tuple(np.argwhere(~np.isfinite(values))[0].tolist())
            raise SpecError(
                f"model.file: {tensor.name}{list(place)} in {self.file} is {values[place]}.",
                hint=DESCRIBE,
            )
        return values

    def loss_fn(self, *, penalties: bool = True, form: LossForm = PLAIN) -> LossFn:
        raise SpecError(
            "A model of kind tensors has no loss.",
            hint="Give the region a `trainer` of its own, or choose another model.",
        )

    def _embeddings(self, notes: dict[str, str], known: dict[str, Any]) -> set[str]:
        try:
            named = set(json.loads(notes.get(EMBEDDINGS, "[]")))
        except (ValueError, TypeError):
            raise self._unfit(f"the metadata of {self.file} has no list of {EMBEDDINGS}") from None
        if missing := sorted(named - known.keys()):
            raise self._unfit(f"{self.file} calls {missing[0]} an embedding and does not hold it")
        return named

    def _unfit(self, message: str) -> RegistryError:
        return RegistryError(f"{message}.", hint=DESCRIBE, key="file")
