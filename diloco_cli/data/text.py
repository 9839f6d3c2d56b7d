"""What a region reads: datasets, tokenizers, and an order that survives a restart.

A corpus is cut into windows of one sequence. Each epoch visits all windows in its own
shuffled order; region i of N takes every N-th place of that order, starting at i, so
regions that share a corpus (and a sequence length) never read the same window in one
epoch. How far a region has come is one number, the cursor; it is plain data and says
everything, so a restart neither repeats nor skips.

    order of epoch e   ▸ 17  4 92  8 61 30  5 …
    region 0 of 3        ↑        ↑        ↑
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from diloco_cli.errors import RegistryError, SpecError
from diloco_cli.registry import Registry
from diloco_cli.spec.schema import RunSpec

Cursor = dict[str, int]

MAPPED_FROM = 1 << 20
"""Files of at least so many bytes stay on disk and are read through a memory map."""


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


def place_of(spec: RunSpec, region: str) -> tuple[int, int]:
    """Says which of how many readers of its corpus a region is, for `open`."""
    together = [one.name for one in spec.regions if spec.data_of(one.name) == spec.data_of(region)]
    return together.index(region), len(together)


@dataclass(frozen=True)
class Share:
    """Which part of a corpus one region reads, and in what portions."""

    seed: int
    index: int
    count: int
    batch: int
    sequence: int


@dataclass(frozen=True)
class Stream:
    """One region's batches, in an order fixed by the seed."""

    training: Corpus
    apart: Corpus
    share: Share

    def start(self) -> Cursor:
        return {"windows": 0}

    def batch(self, cursor: Cursor) -> tuple[np.ndarray, Cursor]:
        """Gives int32[batch, sequence + 1] and the cursor of the batch after it."""
        begin = cursor["windows"]
        end = begin + self.share.batch
        starts = self._starts(np.arange(begin, end))
        return self._rows(self.training, starts), {"windows": end}

    def heldout(self, count: int) -> list[np.ndarray]:
        """Gives `count` batches of text nobody trains on, the same for every region."""
        last = self.apart.size - self.share.sequence - 1
        starts = np.linspace(0, last, count * self.share.batch).astype(np.int64)
        return [self._rows(self.apart, part) for part in np.split(starts, count)]

    @property
    def windows(self) -> int:
        """Windows this region reads in one epoch."""
        return _windows(self.training.size, self.share.sequence) // self.share.count

    def _starts(self, numbers: np.ndarray) -> np.ndarray:
        total = _windows(self.training.size, self.share.sequence)
        starts = np.empty_like(numbers)
        epochs, places = np.divmod(numbers, self.windows)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            slots = places[chosen] * self.share.count + self.share.index
            window = shuffled(slots, total, self.share.seed, int(epoch))
            # Each epoch cuts at other places, so that later ones show new beginnings.
            shift = _mix(self.share.seed, int(epoch), 99) % self.share.sequence
            starts[chosen] = window * self.share.sequence + shift
        return starts

    def _rows(self, corpus: Corpus, starts: np.ndarray) -> np.ndarray:
        size = self.share.sequence + 1
        return np.stack([corpus.window(int(start), size) for start in starts]).astype(np.int32)


class Corpus:
    """Many files read as one row of tokens, without copying the large ones."""

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self.pieces = list(pieces)
        self.ends = np.cumsum([piece.size for piece in pieces])
        self.size = int(self.ends[-1]) if self.pieces else 0

    def window(self, start: int, size: int) -> np.ndarray:
        number = int(np.searchsorted(self.ends, start, side="right"))
        offset = start - (int(self.ends[number]) - self.pieces[number].size)
        parts = [self.pieces[number][offset : offset + size]]
        while (missing := size - sum(part.size for part in parts)) > 0:
            number += 1
            parts.append(self.pieces[number][:missing])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


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


def _windows(size: int, sequence: int) -> int:
    """Counts windows with room for the next token and for a shift of up to one window."""
    return max(0, (size - 1) // sequence - 1)


def shuffled(places: np.ndarray, total: int, seed: int, epoch: int) -> np.ndarray:
    """Says which window stands at each place of an epoch's order.

    A Feistel network is a permutation whatever its round function, and needs no table:
    a corpus of a billion windows costs no memory. Numbers that fall outside `total` are
    sent through again until they land inside.
    """
    half = max(1, ((total - 1).bit_length() + 1) // 2)
    keys = [_mix(seed, epoch, number) for number in range(6)]
    result = _feistel(places.astype(np.uint64), half, keys)
    while (outside := result >= total).any():
        result[outside] = _feistel(result[outside], half, keys)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = values >> np.uint64(half), values & mask
    for key in keys:
        # Odd multiplier and high bits: the low bits of a product mix badly.
        noise = (right + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
        noise ^= noise >> np.uint64(29)
        noise *= np.uint64(0xBF58476D1CE4E5B9)
        left, right = right, left ^ ((noise >> np.uint64(32)) & mask)
    return (left << np.uint64(half)) | right


def _mix(*numbers: int) -> int:
    text = ".".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
