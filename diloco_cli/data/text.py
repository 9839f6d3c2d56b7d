"""Text from files: the byte tokenizer, text files by pattern, Python's own library."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from diloco_cli.data.order import Corpus, Share, Stream
from diloco_cli.data.protocol import Tokenizer, datasets, tokenizers
from diloco_cli.errors import RegistryError, SpecError

MAPPED_FROM = 1 << 20
"""Files of at least so many bytes stay on disk and are read through a memory map."""


@tokenizers.register("bytes")
@dataclass(frozen=True)
class Bytes:
    """Every byte is a token: nothing to train, nothing to download, loss in nats a byte."""

    @property
    def vocabulary(self) -> int:
        return 256

    def read(self, path: Path) -> np.ndarray:
        if path.stat().st_size >= MAPPED_FROM:
            return np.memmap(path, np.uint8, mode="r")
        return np.fromfile(path, np.uint8)


@datasets.register("text")
@dataclass(frozen=True)
class Text:
    """Text files, by path or pattern, relative to the folder the command runs in."""

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    """Paths or patterns; `**` means any depth."""

    tokenizer: dict[str, Any] = field(default_factory=lambda: {"kind": "bytes"})
    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text that is never trained on."""

    def __post_init__(self) -> None:
        _tokenizer(self.tokenizer)

    @property
    def vocabulary(self) -> int:
        return _tokenizer(self.tokenizer).vocabulary

    def find(self) -> list[Path]:
        found: set[Path] = set()
        for pattern in self.files:
            matches = glob.glob(os.path.expanduser(pattern), recursive=True)
            paths = {Path(match).resolve() for match in matches if os.path.isfile(match)}
            if not paths:
                raise SpecError(
                    f"data.files: no file matches {pattern!r} in {Path.cwd()}.",
                    hint="Check the spelling, or start the command in the folder the "
                    "pattern is relative to.",
                )
            found |= paths
        return sorted(found)

    def open(
        self, seed: int, region_index: int, region_count: int, batch: int, sequence: int
    ) -> Stream:
        share = Share(seed, region_index, region_count, batch, sequence)
        return _open(self.find(), _tokenizer(self.tokenizer), self.heldout, share)


@datasets.register("python-source")
@dataclass(frozen=True)
class PythonSource:
    """The standard library of the Python that runs this: real text on every machine."""

    tokenizer: dict[str, Any] = field(default_factory=lambda: {"kind": "bytes"})
    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text that is never trained on."""

    limit: Annotated[int, Field(ge=100_000)] = 12_000_000
    """Bytes to use at most; files are left out whole."""

    def __post_init__(self) -> None:
        _tokenizer(self.tokenizer)

    @property
    def vocabulary(self) -> int:
        return _tokenizer(self.tokenizer).vocabulary

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

    def open(
        self, seed: int, region_index: int, region_count: int, batch: int, sequence: int
    ) -> Stream:
        share = Share(seed, region_index, region_count, batch, sequence)
        return _open(self.find(), _tokenizer(self.tokenizer), self.heldout, share)


NOT_LIBRARY = {"site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
TABLES = {"test", "tests", "encodings", "pydoc_data"}
"""Test data, character tables, one long help text: easy bytes that would flatter the loss."""


def _is_library(folder: str) -> bool:
    generated = folder.startswith(("config-", "__"))
    return not generated and folder not in NOT_LIBRARY | TABLES


def _tokenizer(asked: dict[str, Any]) -> Tokenizer:
    try:
        return tokenizers.build(asked)
    except RegistryError as error:
        # Seen from the dataset the key at fault lies one level down.
        key = f"tokenizer.{error.key}"
        raise RegistryError(error.message, hint=error.hint, key=key) from None


def _open(paths: list[Path], tokenizer: Tokenizer, heldout: float, share: Share) -> Stream:
    training, apart = (Corpus(part) for part in _split(paths, tokenizer, heldout))
    stream = Stream(training, apart, share)
    needed = share.sequence * (share.count + 1) + 1
    if not stream.windows:
        raise SpecError(
            f"data: {training.size} tokens to train on are too few for {share.count} regions "
            f"with sequences of {share.sequence}; at least {needed} are needed.",
            hint="Give more text, or shorten `inner.sequence`.",
        )
    if apart.size < share.sequence + 1:
        raise SpecError(
            f"data: the held-out part has {apart.size} tokens, one sequence takes "
            f"{share.sequence + 1}.",
            hint="Give more text, shorten `inner.sequence`, or raise `data.heldout`.",
        )
    return stream


def _split(
    paths: list[Path], tokenizer: Tokenizer, heldout: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sets whole files apart; where files are too large or too few for that, the end of each."""
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    limit = int(sum(path.stat().st_size for path in paths) * heldout)
    chosen = set(_as_far_as_fits(paths, folder, limit))
    texts = {path: tokens for path in paths if (tokens := tokenizer.read(path)).size}
    if sum(path.stat().st_size for path in chosen) * 2 >= limit and chosen:
        apart = [tokens for path, tokens in texts.items() if path in chosen]
        return [tokens for path, tokens in texts.items() if path not in chosen], apart
    cuts = [(tokens, int(tokens.size * (1 - heldout))) for tokens in texts.values()]
    return [tokens[:cut] for tokens, cut in cuts], [tokens[cut:] for tokens, cut in cuts]


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
