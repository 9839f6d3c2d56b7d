"""What a tokenizer and a dataset are, and the registries of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

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

    @property
    def lanes(self) -> int:
        """Parts of the text that one region at a time reads."""
        ...

    def find(self) -> list[Path]:
        """Lists the files, or raises a SpecError that says what is missing."""
        ...

    def open(self, seed: int, batch: int, sequence: int) -> Stream:
        """Gives the text; which part of it a region reads, the server says."""
        ...


@runtime_checkable
class NamesTokenizer(Protocol):
    """A dataset that can say what its tokens mean; optional."""

    @property
    def tokenizer_digest(self) -> str | None:
        """Equal where the same numbers mean the same text; None where it is not known here."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A dataset that can tell in seconds whether `open` would find enough text; optional."""

    def look(self, sequence: int) -> None:
        """Raises a SpecError that says what is missing, as far as that is known before a start."""
        ...


tokenizers: Registry[Tokenizer] = Registry("tokenizer")
datasets: Registry[Dataset] = Registry("dataset")
