"""Text from files: the byte tokenizer, text files by pattern, Python's own library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from pydantic import Field

from diloco_cli.core.lanes import LANES, MOST_LANES
from diloco_cli.data.first_bytes import refuse_other_kinds
from diloco_cli.data.heldout import HeldoutText
from diloco_cli.data.order import Corpus, Enough, ReadingOrder, Stream
from diloco_cli.data.patterns import matching_files
from diloco_cli.data.protocol import Tokenizer, datasets, tokenizers
from diloco_cli.errors import RegistryError, SpecError

MAPPED_FROM = 1 << 20
"""Files of at least so many bytes stay on disk and are read through a memory map."""

Lanes = Annotated[int, Field(ge=1, le=MOST_LANES)]


@tokenizers.register("bytes")
@dataclass(frozen=True)
class Bytes:
    """Every byte is a token: nothing to train, nothing to download, loss in nats per byte."""

    @property
    def vocabulary(self) -> int:
        return 256

    def read(self, path: Path) -> np.ndarray:
        if path.stat().st_size >= MAPPED_FROM:
            return np.memmap(path, np.uint8, mode="r")
        return np.fromfile(path, np.uint8)


class Tokenized:
    """What a dataset says of its tokenizer."""

    tokenizer: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer", spelled_out(self.tokenizer))

    @property
    def vocabulary(self) -> int:
        return build_tokenizer(self.tokenizer).vocabulary

    @property
    def tokenizer_digest(self) -> str | None:
        return meaning_of(self.tokenizer)


class _TextFiles(Tokenized, ABC):
    """Files that are tokenized as they are read."""

    heldout: float
    lanes: int

    @abstractmethod
    def find(self) -> list[Path]: ...

    def look(self, sequence: int) -> None:
        if self.tokenizer["kind"] == "bytes":  # Any other has to read all of it to know.
            held = self.held_out()
            Enough(self.lanes, sequence).check(held.of - held.bytes, held.bytes)

    def open(self, seed: int, batch: int, sequence: int) -> Stream:
        return _open(self, seed, batch, sequence)

    def held_out(self) -> HeldoutText:
        paths = self.find()
        return HeldoutText.of_files(paths, _shares_apart(paths, self.heldout))


@datasets.register("text")
@dataclass(frozen=True)
class Text(_TextFiles):
    """Text files, by path or pattern, relative to the spec's folder."""

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    """Paths or patterns; `**` means any depth."""

    tokenizer: dict[str, Any] = field(default_factory=lambda: {"kind": "bytes"})
    """What makes tokens of the text; regions with other tokenizers do not merge."""

    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text that is never trained on."""

    lanes: Lanes = LANES
    """Parts of the text that change hands when regions come and go, one reader each; at least as
    many as there will ever be regions."""

    def find(self) -> list[Path]:
        found = matching_files(self.files)
        for path in found:
            refuse_other_kinds(path)
        return found


@datasets.register("python-source")
@dataclass(frozen=True)
class PythonSource(_TextFiles):
    """The standard library of the Python that runs this: real text on every machine."""

    tokenizer: dict[str, Any] = field(default_factory=lambda: {"kind": "bytes"})
    """What makes tokens of the text; regions with other tokenizers do not merge."""

    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text that is never trained on."""

    limit: Annotated[int, Field(ge=100_000)] = 12_000_000
    """Bytes to use at most; files are left out whole."""

    lanes: Lanes = LANES
    """Parts of the text that change hands when regions come and go, one reader each; at least as
    many as there will ever be regions."""

    def find(self) -> list[Path]:
        folder = Path(sysconfig.get_path("stdlib"))
        found: list[Path] = []
        for parent, children, names in os.walk(folder):
            children[:] = [name for name in children if _is_library(name)]
            found += [Path(parent, name) for name in names if name.endswith(".py")]
        if kept := _as_far_as_fits(found, folder, self.limit):
            return sorted(kept)
        raise SpecError(
            f"data: {folder} holds no Python sources.",
            hint="This Python came without the sources of its library; use `kind: text`.",
        )


NOT_LIBRARY = {"site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
TABLES = {"test", "tests", "encodings", "pydoc_data"}
"""Test data, character tables, one long help text: easy bytes that would flatter the loss."""


def _is_library(folder: str) -> bool:
    generated = folder.startswith(("config-", "__"))
    return not generated and folder not in NOT_LIBRARY | TABLES


def build_tokenizer(asked: Mapping[str, Any]) -> Tokenizer:
    """Makes the tokenizer of a dataset."""
    try:
        return tokenizers.build(asked)
    except RegistryError as error:
        # Seen from the dataset the key at fault lies one level down.
        key = f"tokenizer.{error.key}"
        raise RegistryError(error.message, hint=error.hint, key=key) from None


def meaning_of(asked: Mapping[str, Any]) -> str | None:
    """What is equal of two tokenizers whose numbers mean the same text; None if nobody knows."""
    return "bytes" if asked["kind"] == "bytes" else asked.get("digest")


def spelled_out(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer with what its file says: the run stays with that file."""
    built = build_tokenizer(asked)
    options = {key: value for key, value in asdict(cast(Any, built)).items() if value is not None}
    return {"kind": asked["kind"], **options}


def _open(dataset: _TextFiles, seed: int, batch: int, sequence: int) -> Stream:
    tokenizer = build_tokenizer(dataset.tokenizer)
    training, apart = (Corpus(part) for part in _split(dataset.find(), tokenizer, dataset.heldout))
    settings = {"dataset": type(dataset).__name__, **asdict(cast(Any, dataset))}
    lanes = settings.pop("lanes")
    if "digest" in dataset.tokenizer:  # It says more than where the file lies.
        settings["tokenizer"] = {**dataset.tokenizer, "file": None}
    order = ReadingOrder.of(settings, training.size, seed=seed, sequence=sequence, lanes=lanes)
    return Stream.checked(training, apart, order, batch)


def _split(
    paths: list[Path], tokenizer: Tokenizer, heldout: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gives what is trained on and what is set apart, file by file."""
    shares = _shares_apart(paths, heldout)
    texts = [(tokenizer.read(path), shares.get(path, 0.0)) for path in paths]
    cuts = [(tokens, int(tokens.size * (1 - share))) for tokens, share in texts]
    training = [tokens[:cut] for tokens, cut in cuts if cut]
    return training, [tokens[cut:] for tokens, cut in cuts if cut < tokens.size]


def _shares_apart(paths: list[Path], heldout: float) -> dict[Path, float]:
    """Sets whole files apart; where files are too large or too few for that, the end of each."""
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    limit = int(sum(path.stat().st_size for path in paths) * heldout)
    chosen = _as_far_as_fits(paths, folder, limit)
    if sum(path.stat().st_size for path in chosen) * 2 >= limit and chosen:
        return dict.fromkeys(chosen, 1.0)
    return dict.fromkeys(paths, heldout)


def _as_far_as_fits(paths: list[Path], folder: Path, limit: int) -> list[Path]:
    """Picks files up to a size; the choice depends on their names, not on where they lie."""

    def order(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()

    picked: list[Path] = []
    for path in sorted(paths, key=order):
        size = path.stat().st_size
        if 0 < size <= limit:
            limit -= size
            picked.append(path)
    return picked
