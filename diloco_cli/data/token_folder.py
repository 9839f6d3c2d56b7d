"""A folder of tokens, as `diloco data prepare` writes it.

    00000.bin …     tokens, little-endian, two bytes each where the vocabulary allows it, else four
    00000.idx …     where each document ends, counted in tokens from the beginning, eight bytes each
    heldout.bin     the documents that nobody trains on, and .idx
    heldout.jsonl   which documents those are, one a line
    tokenizer.json  what the numbers mean
    manifest.json   the digest of everything; written last

Every document ends with the separator, a token that occurs nowhere else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from diloco_cli.errors import StoreError
from diloco_cli.system.files import keep_bytes

FORM = 1
MANIFEST = "manifest.json"
HELDOUT = "heldout"
HELDOUT_LIST = "heldout.jsonl"
TOKENIZER = "tokenizer.json"
CHECKED_UP_TO = 1 << 30
"""A folder of so many bytes is read and compared with its digests whenever it is opened; of a
larger one only the sizes are."""
_AGAIN = "Copy the folder again, or remove it and prepare it again."


@dataclass(frozen=True)
class TokenShard:
    name: str
    tokens: int
    documents: int
    digest: str
    """XXH3 of the tokens."""
    ends: str
    """XXH3 of the ends of documents."""


@dataclass(frozen=True)
class PreparedSource:
    path: str
    """Below the folder that all of them lie in."""
    documents: int
    tokens: int
    """Separators included, of documents that are held out as well."""
    heldout: int
    """Of those documents."""
    heldout_tokens: int


@dataclass(frozen=True)
class TokenManifest:
    tokenizer: str
    """Digest of tokenizer.json."""
    vocabulary: int
    separator: int
    begin: int | None
    """The token that every document begins with, if there is one."""
    dtype: str
    share: float
    """Of the documents that is held out."""
    shards: tuple[TokenShard, ...]
    heldout: TokenShard
    sources: tuple[PreparedSource, ...]

    @property
    def tokens(self) -> int:
        """To train on."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """To train on."""
        return sum(shard.documents for shard in self.shards)

    @property
    def digest(self) -> str:
        """Equal where the same tokens are in the same order, wherever they came from."""
        parts = [self.tokenizer, *(shard.digest for shard in (*self.shards, self.heldout))]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        return (self.tokens + self.heldout.tokens) * np.dtype(self.dtype).itemsize

    def write(self, folder: Path) -> None:
        said = {"form": FORM, "digest": self.digest, **asdict(self)}
        keep_bytes(folder / MANIFEST, f"{json.dumps(said, indent=1)}\n".encode(), mode=0o644)

    @classmethod
    def read(cls, folder: Path) -> TokenManifest:
        """Reads it, or raises a StoreError that says what is wrong with it."""
        path = folder / MANIFEST
        try:
            said: dict[str, Any] = json.loads(path.read_bytes())
            if (form := said.pop("form")) != FORM:
                raise ValueError(f"it has form {form}, this version reads {FORM}")
            digest = said.pop("digest")
            manifest = cls(
                **{
                    **said,
                    "shards": tuple(TokenShard(**shard) for shard in said["shards"]),
                    "heldout": TokenShard(**said["heldout"]),
                    "sources": tuple(PreparedSource(**source) for source in said["sources"]),
                }
            )
            if manifest.digest != digest:
                raise ValueError(f"its digest is {manifest.digest[:12]}…, it says {digest[:12]}…")
            return manifest
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise StoreError(f"{path} cannot be used: {reason}.", hint=_AGAIN) from None


def open_shards(folder: Path, manifest: TokenManifest) -> tuple[list[np.ndarray], np.ndarray]:
    """Maps what is trained on and what is held out; raises a StoreError where a file is damaged."""
    shards = [*manifest.shards, manifest.heldout]
    item = np.dtype(manifest.dtype).itemsize
    for shard in shards:
        _check_size(folder / f"{shard.name}.bin", shard.tokens * item)
        _check_size(folder / f"{shard.name}.idx", shard.documents * 8)
    if manifest.bytes <= CHECKED_UP_TO:
        check_digests(folder, manifest)
    *training, apart = (_mapped(folder / f"{one.name}.bin", manifest.dtype) for one in shards)
    return training, apart


def check_digests(folder: Path, manifest: TokenManifest) -> None:
    """Reads everything; raises a StoreError that names the first file that is not as it was."""
    for shard in (*manifest.shards, manifest.heldout):
        for name, said in ((f"{shard.name}.bin", shard.digest), (f"{shard.name}.idx", shard.ends)):
            if (found := file_digest(folder / name)) != said:
                raise StoreError(
                    f"{folder / name} is damaged: its digest is {found[:12]}…, the manifest says "
                    f"{said[:12]}….",
                    hint=_AGAIN,
                )


def file_digest(path: Path) -> str:
    """XXH3 of a file, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.", hint=_AGAIN) from None
    if found != size:
        raise StoreError(
            f"{path} is damaged: it has {found:,} bytes, the manifest says {size:,}.", hint=_AGAIN
        )


def _mapped(path: Path, dtype: str) -> np.ndarray:
    # Nothing cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def document_ends(folder: Path, shard: TokenShard) -> np.ndarray:
    return np.fromfile(folder / f"{shard.name}.idx", "<u8")


def heldout_list(folder: Path) -> Iterator[dict[str, Any]]:
    """Which documents are held out: their source, their number in it, their tokens."""
    with (folder / HELDOUT_LIST).open("rb") as file:
        yield from map(json.loads, file)


def as_lines(records: Iterable[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()
