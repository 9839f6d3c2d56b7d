"""Token files that other programs wrote, used as they are.

    nanoGPT     train.bin, val.bin: uint16 and nothing else
    llm.c       *_train_*.bin, *_val_*.bin: a header of 256 int32, then uint16 or uint32
    Megatron    *.bin with *.idx beside it, which says the type and where documents end

Files with `val` in their names are held out; where there are none, the end of each file.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco_cli.errors import SpecError, StoreError

HEADER = 1024
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Magic number and version → type of the tokens."""
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_TYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_AGAIN = "Copy the file again, or leave it out."


@dataclass(frozen=True)
class ForeignFile:
    path: Path
    tokens: np.ndarray
    ends: np.ndarray | None = None
    """Where documents end, if the file says so."""

    @property
    def apart(self) -> bool:
        return "val" in self.path.stem.lower()

    def cut(self, share: float) -> int:
        """Where the held-out end begins, between two documents if that is known."""
        at = int(self.tokens.size * (1 - share))
        if self.ends is None or not self.ends.size:
            return at
        earlier = self.ends[self.ends <= at]
        return int(earlier[-1]) if earlier.size else at


@dataclass(frozen=True)
class ForeignTokens:
    training: list[np.ndarray]
    apart: list[np.ndarray]
    digest: str
    """Of names, sizes and beginnings: reading all would take too long."""
    files: tuple[tuple[Path, int, int], ...]
    """Path, tokens held out, tokens."""


def open_foreign(folder: Path, heldout: float) -> ForeignTokens:
    """Maps the token files of a folder; raises a SpecError where there are none."""
    files = [_opened(path) for path in sorted(folder.glob("*.bin"))]
    if not files:
        holds = sorted(path.name for path in folder.iterdir())[:3]
        raise SpecError(
            f"{folder} holds no tokens: {'it is empty' if not holds else ', '.join(holds) + ' …'}.",
            hint="Name a folder that `diloco data prepare` made, or one with .bin files of "
            "nanoGPT, llm.c or Megatron.",
        )
    share = 0.0 if any(file.apart for file in files) else heldout
    training: list[np.ndarray] = []
    apart: list[np.ndarray] = []
    listed: list[tuple[Path, int, int]] = []
    for file in files:
        cut = 0 if file.apart else file.cut(share)
        training += [file.tokens[:cut]] if cut else []
        apart += [file.tokens[cut:]] if cut < file.tokens.size else []
        listed.append((file.path, file.tokens.size - cut, file.tokens.size))
    return ForeignTokens(training, apart, _digest(files), tuple(listed))


def _digest(files: list[ForeignFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.path.name} {file.tokens.dtype.str} {file.tokens.size} ".encode())
        digest.update(np.ascontiguousarray(file.tokens[: 1 << 19]).tobytes())
    return digest.hexdigest()


def _opened(path: Path) -> ForeignFile:
    beside, size = path.with_suffix(".idx"), path.stat().st_size
    if beside.exists():
        return _megatron(path, beside)
    with path.open("rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    if dtype := LLM_C.get((magic, version)):
        expected = HEADER + tokens * np.dtype(dtype).itemsize
        _check_size(path, size, expected)
        return ForeignFile(path, np.memmap(path, dtype, "r", HEADER))
    if {"train", "val"}.isdisjoint(path.stem.lower().split("_")) or size % 2 or not size:
        raise SpecError(
            f"{path} is no file of tokens that is known here.",
            hint="nanoGPT calls them train.bin and val.bin, llm.c begins them with a header, "
            "Megatron has an .idx beside them; others: `data: {kind: python}`.",
        )
    return ForeignFile(path, np.memmap(path, "<u2", "r"))


def _megatron(path: Path, beside: Path) -> ForeignFile:
    data = beside.read_bytes()
    if not data.startswith(MEGATRON) or len(data) < 34:
        raise SpecError(f"{beside} is no index of Megatron.", hint=_AGAIN)
    version, code, sequences, documents = struct.unpack_from("<QBQQ", data, 9)
    if version != 1 or code not in MEGATRON_TYPES:
        raise SpecError(
            f"{beside} has version {version} and type {code}, which are not known here.",
            hint=f"Known are version 1 and the types {', '.join(map(str, MEGATRON_TYPES))}.",
        )
    _check_size(beside, len(data), 34 + sequences * 12 + documents * 8)
    lengths = np.frombuffer(data, "<i4", sequences, 34)
    firsts = np.frombuffer(data, "<i8", documents, 34 + sequences * 12)
    if (beyond := (firsts < 0) | (firsts > sequences)).any():
        raise StoreError(
            f"{beside} is damaged: it says that a document begins at sequence "
            f"{firsts[beyond][0]}, there are {sequences}.",
            hint=_AGAIN,
        )
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    dtype = np.dtype(MEGATRON_TYPES[code])
    _check_size(path, path.stat().st_size, int(ends[-1]) * dtype.itemsize)
    if not ends[-1]:
        raise SpecError(f"{path} holds no tokens.", hint=_AGAIN)
    return ForeignFile(path, np.memmap(path, dtype, "r"), ends[firsts[1:]])


def _check_size(path: Path, found: int, said: int) -> None:
    if found != said:
        raise StoreError(
            f"{path} is damaged: it has {found:,} bytes, it should have {said:,}.", hint=_AGAIN
        )
