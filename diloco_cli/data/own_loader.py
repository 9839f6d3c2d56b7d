"""A lab's own loader: a Python function that gives rows of tokens by number.

    def corpus(sequence: int, **options):
        return Rows(training=…, heldout=…)

`training` and `heldout` have a length and give row n as `rows[n]`: `sequence` + 1 whole numbers.
Because rows have numbers, everything else is as with files: regions divide them in lanes, each
epoch has its own order, and a restart neither repeats nor skips.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field

from diloco_cli.core.lanes import LANES
from diloco_cli.data.order import Corpus, ReadingOrder, Stream, shuffled
from diloco_cli.data.protocol import datasets
from diloco_cli.data.text import Lanes, meaning_of, spelled_out
from diloco_cli.errors import RegistryError, SpecError


class Rows(Protocol):
    """Rows of tokens by number: a list, a map-style dataset, an array on disk."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...


@datasets.register("python")
@dataclass(frozen=True)
class OwnLoader:
    """Rows of tokens that a function of yours gives by number."""

    object: str
    """`module:function`; called with `sequence` and the options. What it returns has `training`
    and `heldout`, both with a length and with rows of `sequence` + 1 tokens by number."""

    vocabulary: Annotated[int, Field(ge=1)]
    """Different tokens."""

    options: dict[str, Any] = field(default_factory=dict)
    """Handed to the function as they are."""

    tokenizer: dict[str, Any] | None = None
    """What the numbers mean, `{kind: hf, …}`; regions with other tokenizers do not merge."""

    mask: Literal["none", "documents"] = "none"
    """`documents`: no token sees another document, positions begin anew in each, and the first
    token of a document is not predicted."""

    separator: Annotated[int, Field(ge=0)] | None = None
    """The token that ends a document; needed to keep documents apart."""

    lanes: Lanes = LANES
    """Parts of the text that change hands when regions come and go, one reader each; at least as
    many as there will ever be regions."""

    def __post_init__(self) -> None:
        module, _, name = self.object.partition(":")
        if not module or not name:
            raise RegistryError(
                f"The dataset 'python': object is {self.object!r}.",
                hint="Write `module:function`.",
                key="object",
            )
        if self.mask == "documents" and self.separator is None:
            raise RegistryError(
                "The dataset 'python': mask is documents, but no separator says where one ends.",
                hint="Set `separator`.",
                key="separator",
            )
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", spelled_out(self.tokenizer))

    @property
    def tokenizer_digest(self) -> str | None:
        return None if self.tokenizer is None else meaning_of(self.tokenizer)

    def find(self) -> list[Path]:
        return []

    def open(self, seed: int, batch: int, sequence: int) -> Stream:
        made = self._called(sequence)
        try:
            training, apart = (
                NumberedRows(self.object, rows, sequence) for rows in (made.training, made.heldout)
            )
        except (AttributeError, TypeError) as error:
            raise self._unfit(f"gave something else: {error}") from error
        settings = {"dataset": "python", **asdict(self)}
        for own in ("lanes", "mask", "separator"):
            del settings[own]
        tokens = len(training.rows) * sequence
        plain = ReadingOrder.of(settings, tokens, seed=seed, sequence=sequence, lanes=self.lanes)
        named = replace(plain.named, windows=len(training.rows))
        separator = self.separator if self.mask == "documents" else None
        return Stream.checked(
            training,
            apart,
            RowOrder(plain.seed, named),
            batch,
            separator=separator,
            vocabulary=self.vocabulary,
        )

    def _called(self, sequence: int) -> Any:
        module, _, name = self.object.partition(":")
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
            return function(sequence=sequence, **self.options)
        except SpecError:
            raise
        # It is somebody else's code: whatever it raises is news about that code.
        except Exception as error:
            raise self._unfit(f"failed: {type(error).__name__}: {error}") from error

    def _unfit(self, said: str) -> SpecError:
        return SpecError(
            f"data.object: {self.object} {said}.",
            hint="It is called with `sequence` and `data.options`, and returns an object with "
            "`training` and `heldout`; the guide about your own text shows one.",
        )


@dataclass(frozen=True)
class RowOrder(ReadingOrder):
    """An order of rows, which begin nowhere else than they do."""

    def starts(self, lanes: np.ndarray, positions: np.ndarray, count: int) -> np.ndarray:
        starts = np.empty_like(positions)
        epochs, rows = np.divmod(positions, self.windows // count)
        places = rows * count + lanes
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            starts[chosen] = shuffled(places[chosen], self.windows, self.seed, epoch)
        return starts


class NumberedRows(Corpus):
    """Somebody's rows, looked at before they are trained on."""

    def __init__(self, name: str, rows: Rows, sequence: int) -> None:
        self.name, self.rows, self.sequence = name, rows, sequence
        super().__init__([])
        self.size = len(rows) * (sequence + 1)

    def window(self, start: int, size: int) -> np.ndarray:
        try:
            row = np.asarray(self.rows[start])
        except Exception as error:
            raise self._unfit(start, f"{type(error).__name__}: {error}") from error
        if row.shape != (size,) or row.dtype.kind not in "iu":
            raise self._unfit(
                start, f"{size} whole numbers are needed, it has {list(row.shape)} of {row.dtype}"
            )
        return row

    def spread(self, count: int, size: int) -> np.ndarray:
        return np.linspace(0, len(self.rows) - 1, count).astype(np.int64)

    def _unfit(self, number: int, said: str) -> SpecError:
        return SpecError(
            f"data.object: row {number} of {self.name}: {said}.",
            hint="Rows have one token more than `inner.sequence`: the last is only predicted.",
        )
