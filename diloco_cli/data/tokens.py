"""Tokens that were prepared before the run: one folder, or several mixed by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from diloco_cli.core.lanes import LANES
from diloco_cli.data.foreign_tokens import open_foreign
from diloco_cli.data.heldout import HeldoutFile, HeldoutText
from diloco_cli.data.hf_tokenizer import open_tokenizer
from diloco_cli.data.order import Corpus, MixedOrder, ReadingOrder, Stream
from diloco_cli.data.protocol import datasets
from diloco_cli.data.text import Lanes, build_tokenizer, meaning_of
from diloco_cli.data.text import spelled_out as spelled_out_tokenizer
from diloco_cli.data.token_folder import MANIFEST, TOKENIZER, TokenManifest, open_shards
from diloco_cli.errors import RegistryError, SpecError

UNFINISHED = "progress.json"


@dataclass(frozen=True)
class OpenFolder:
    """The tokens of one folder."""

    training: Corpus
    apart: Corpus
    digest: str
    separator: int | None
    heldout: tuple[HeldoutFile, ...]
    """Counted in bytes of tokens."""
    documents: int | None


@datasets.register("tokens")
@dataclass(frozen=True)
class PreparedTokens:
    """Tokens that `diloco data prepare` made, or files of nanoGPT, llm.c or Megatron."""

    folder: str | None = None
    """Where they are, relative to the spec's folder."""

    mix: tuple[dict[str, Any], ...] = ()
    """Several folders instead of one, each with a `folder` and a `weight`, its share of what is
    read; by their sizes where no weight is given."""

    mask: Literal["none", "documents"] = "none"
    """`documents`: no token sees another document, positions begin anew in each, and the first
    token of a document is not predicted."""

    tokenizer: dict[str, Any] | None = None
    """What the numbers mean; a prepared folder says it. A host without the folder, as a server
    may be, needs `{kind: hf, digest: …}`."""

    vocabulary: Annotated[int, Field(ge=0)] = 0
    """Different tokens; a prepared folder says it, files of others do not."""

    separator: Annotated[int, Field(ge=0)] | None = None
    """The token that ends a document; a prepared folder says it, files of others do not."""

    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Share that is never trained on, of files of others without one of their own; a prepared
    folder has been divided already."""

    lanes: Lanes = LANES
    """Parts of the text that change hands when regions come and go, one reader each; at least as
    many as there will ever be regions."""

    def __post_init__(self) -> None:
        if (self.folder is None) == (not self.mix):
            raise _wrong("folder", "needs a `folder` or a `mix`, one of them")
        for number, part in enumerate(self.mix):
            _check_part(number, part)
        given = {"weight" in part for part in self.mix}
        if len(given) > 1:
            raise _wrong("mix", "has weights for some of its folders: give one to each or to none")
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", spelled_out_tokenizer(self.tokenizer))
        manifests = {name: _manifest(Path(name).expanduser()) for name in self.folders}
        self._take_over({name: one for name, one in manifests.items() if one})

    def _take_over(self, manifests: Mapping[str, TokenManifest]) -> None:
        """Fills in what the folders here say, which must be the same and what is asked for."""
        for name, manifest in manifests.items():
            given = self.tokenizer or {"kind": "hf", "digest": manifest.tokenizer}
            if given.get("digest") != manifest.tokenizer:
                raise _wrong(
                    "tokenizer",
                    f"{name} was made with the tokenizer {manifest.tokenizer[:12]}, another one is "
                    f"{str(given.get('digest', given['kind']))[:12]}",
                    "Prepare all text with one tokenizer.",
                )
            if self.separator not in (None, manifest.separator):
                raise _wrong(
                    "separator",
                    f"documents in {name} end with {manifest.separator}, not with {self.separator}",
                    "Leave it out for a prepared folder, and prepare all with the same.",
                )
            object.__setattr__(self, "tokenizer", {**_in_folder(name, manifest), **given})
            object.__setattr__(self, "separator", manifest.separator)
            most = max(self.vocabulary, manifest.vocabulary)
            object.__setattr__(self, "vocabulary", most)
        if not self.vocabulary and self.tokenizer is not None:
            here = build_tokenizer(self.tokenizer).vocabulary
            object.__setattr__(self, "vocabulary", here)

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(part["folder"] for part in self.mix) or (self.folder or "",)

    @property
    def tokenizer_digest(self) -> str | None:
        return None if self.tokenizer is None else meaning_of(self.tokenizer)

    def find(self) -> list[Path]:
        found = [Path(name).expanduser() for name in self.folders]
        for path in found:
            if not path.is_dir():
                raise SpecError(
                    f"data.folder: there is no folder {path} in {Path.cwd()}.",
                    hint="Check the spelling, or make it with `diloco data prepare`.",
                )
        return found

    def open(self, seed: int, batch: int, sequence: int) -> Stream:
        opened = [self._opened(path) for path in self.find()]
        if self.mask == "documents" and self.separator is None:
            raise SpecError(
                "data.mask is documents, but these files do not say which token ends one.",
                hint="Set `data.separator`; GPT-2's is 50256.",
            )
        if not self.vocabulary:
            raise SpecError(
                "data: these files do not say how many different tokens there are.",
                hint="Set `data.vocabulary`; GPT-2's is 50257.",
            )
        training = Corpus([piece for one in opened for piece in one.training.pieces])
        apart = Corpus([piece for one in opened for piece in one.apart.pieces])
        weights = [part.get("weight") for part in self.mix]
        settings = {"dataset": "tokens", "weights": weights, "heldout": self.heldout}
        content = hashlib.sha256(" ".join(one.digest for one in opened).encode()).hexdigest()
        sizes = [one.training.size for one in opened]
        how = {"seed": seed, "sequence": sequence, "lanes": self.lanes, "content": content}
        if len(opened) == 1:
            order = ReadingOrder.of(settings, training.size, **how)
        else:
            _check_sizes(self.folders, sizes, sequence)
            shares = [weight or size for weight, size in zip(weights, sizes, strict=True)]
            order = MixedOrder.mixed(settings, sizes, shares, **how)
        return Stream.checked(
            training,
            apart,
            order,
            batch,
            separator=self.separator if self.mask == "documents" else None,
            vocabulary=self.vocabulary,
        )

    def look(self, sequence: int) -> None:
        self.open(0, 1, sequence)

    def held_out(self) -> HeldoutText:
        opened = list(zip(self.folders, map(self._opened, self.find()), strict=True))
        prefix = [f"{name}/" if len(opened) > 1 else "" for name, _ in opened]
        files = [
            replace(file, path=f"{before}{file.path}")
            for before, (_, one) in zip(prefix, opened, strict=True)
            for file in one.heldout
        ]
        total = sum(file.bytes for file in files)
        ranked = sorted(files, key=lambda file: (-file.bytes, file.path))
        counts = [one.documents for _, one in opened if one.documents is not None]
        return HeldoutText(
            self.folders[0] if len(opened) == 1 else "",
            total,
            sum(file.of for file in files),
            tuple(replace(file, share=file.bytes / total) for file in ranked if file.bytes),
            sum(counts) if len(counts) == len(opened) else None,
        )

    def _opened(self, path: Path) -> OpenFolder:
        return open_folder(path, self.heldout)


def open_folder(path: Path, heldout: float) -> OpenFolder:
    """Maps the tokens of a folder; damage is a StoreError, anything else a SpecError."""
    if (path / UNFINISHED).exists():
        raise SpecError(
            f"{path} is not finished.", hint="Give the same `diloco data prepare` again."
        )
    if manifest := _manifest(path):
        training, apart = open_shards(path, manifest)
        item = np.dtype(manifest.dtype).itemsize
        files = tuple(
            HeldoutFile(source.path, source.heldout_tokens * item, source.tokens * item, 0)
            for source in manifest.sources
        )
        return OpenFolder(
            Corpus(training),
            Corpus([apart]),
            manifest.digest,
            manifest.separator,
            files,
            manifest.heldout.documents,
        )
    foreign = open_foreign(path, heldout)
    item = foreign.apart[0].itemsize if foreign.apart else 2
    files = tuple(
        HeldoutFile(file.name, apart * item, of * item, 0) for file, apart, of in foreign.files
    )
    corpora = Corpus(foreign.training), Corpus(foreign.apart)
    return OpenFolder(*corpora, foreign.digest, None, files, None)


def _manifest(path: Path) -> TokenManifest | None:
    """What a prepared folder says; None for one that is not here, or not ours."""
    try:
        at = (path / MANIFEST).stat()
    except OSError:
        return None
    return _read(path, at.st_mtime_ns, at.st_size)


@lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int) -> TokenManifest:
    return TokenManifest.read(path)


def _in_folder(name: str, manifest: TokenManifest) -> dict[str, Any]:
    """The tokenizer that lies beside the tokens, for whoever turns them into text again."""
    path = Path(name) / TOKENIZER
    if not path.expanduser().is_file():
        return {}
    opened = open_tokenizer(path)
    if opened.separator == manifest.separator:
        return {"file": str(path)}
    return {"file": str(path), "separator": opened.library.id_to_token(manifest.separator)}


def _check_part(number: int, part: Mapping[str, Any]) -> None:
    if unknown := sorted(part.keys() - {"folder", "weight"}):
        raise _wrong(f"mix.{number}.{unknown[0]}", f"{unknown[0]} is no key of a mix")
    if not isinstance(part.get("folder"), str):
        raise _wrong(f"mix.{number}.folder", "a part of the mix needs a `folder`")
    weight = part.get("weight", 1)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < 1e12:
        raise _wrong(f"mix.{number}.weight", f"a weight is a number above 0; got {weight!r}")


def _check_sizes(names: tuple[str, ...], sizes: list[int], sequence: int) -> None:
    for name, size in zip(names, sizes, strict=True):
        if size < 2 * sequence + 1:
            raise SpecError(
                f"data.mix: {name} has {size} tokens to train on, too few for sequences of "
                f"{sequence}.",
                hint="Leave it out, or shorten `inner.sequence`.",
            )


def _wrong(key: str, message: str, hint: str | None = None) -> RegistryError:
    shown = hint or "Options: folder, mix: [{folder, weight}], mask, lanes; `diloco explain data`."
    return RegistryError(f"The dataset 'tokens': {message}.", hint=shown, key=key)
