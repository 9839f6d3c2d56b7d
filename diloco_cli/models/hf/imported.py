"""`kind: hf`: a model as a folder of the Hugging Face Hub describes it, and its first weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.core.fragments import Tensor
from diloco_cli.errors import RegistryError, SpecError
from diloco_cli.models.hf.read import HfWeights, read_choice
from diloco_cli.models.protocol import models
from diloco_cli.models.transformer import Shape, Transformer


@models.register("hf")
@dataclass(frozen=True)
class Imported(Transformer):
    """A model from a folder with config.json and safetensors: its architecture and first weights.

    Qwen3, Llama, Qwen2, Gemma 4. A region needs config.json only; the server reads weights, once.
    """

    folder: str | None = None
    """The folder, relative to that of the spec."""

    architecture: dict[str, Any] | None = None
    """The model that config.json describes, as a choice of model; read from there when left out.
    With it a host needs no folder, unless it is the server's and the run has not begun."""

    def __post_init__(self) -> None:
        if self.architecture is None:
            if self.folder is None:
                raise RegistryError(
                    "The model 'hf' needs a folder.",
                    hint="Name the folder that holds config.json and the safetensors.",
                    key="folder",
                )
            try:
                object.__setattr__(self, "architecture", read_choice(self._path))
            except SpecError as error:
                raise RegistryError(error.message, hint=error.hint, key="folder") from None
        _ = self._described

    @property
    def _path(self) -> Path:
        return Path(self.folder or "").expanduser()

    @cached_property
    def _described(self) -> Transformer:
        choice = self.architecture or {}
        try:
            built = models.build(choice)
        except RegistryError as error:
            key = "folder" if self.folder else f"architecture.{error.key}"
            raise RegistryError(error.message, hint=error.hint, key=key) from None
        if not isinstance(built, Transformer) or isinstance(built, Imported):
            raise RegistryError(
                f"architecture is of kind {choice.get('kind')}, which no config.json describes.",
                key="architecture",
            )
        return built

    def _shape(self) -> Shape:
        return self._described.shape

    @property
    def penalty(self) -> float:
        return self._described.penalty

    @property
    def vocabulary(self) -> int:
        return self.shape.vocabulary

    @cached_property
    def _weights(self) -> HfWeights:
        if self.folder is None:
            raise SpecError(
                "model.folder is left out, but the first weights are to be read from it.",
                hint="Name the folder that holds the safetensors.",
            )
        return HfWeights(self._path, self._described)

    def check_files(self) -> None:
        """Raises unless all first weights are there, by their headers."""
        _ = self._weights

    def draw(self, tensor: Tensor, seed: int) -> np.ndarray:
        """Reads the first weights of one tensor; no seed changes them."""
        return self._weights[tensor.name]
