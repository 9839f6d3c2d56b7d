"""What a tokenizer and a dataset are, and the registries of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from diloco_cli.data.order import Stream
from diloco_cli.registry import Registry


class Tokenizer(Protocol):
    @property
    def vocabulary(self) -> int: ...

    def read(self, path: Path) -> np.ndarray:
        """Gives a file's tokens, 1-D, in the smallest unsigned type that holds them."""
        ...


class Dataset(Protocol):
    @property
    def vocabulary(self) -> int: ...

    def find(self) -> list[Path]:
        """Lists the files, or raises a SpecError that says what is missing."""
        ...

    def open(
        self, seed: int, region_index: int, region_count: int, batch: int, sequence: int
    ) -> Stream:
        """Gives one region's part of the text."""
        ...


tokenizers: Registry[Tokenizer] = Registry("tokenizer")
datasets: Registry[Dataset] = Registry("dataset")
