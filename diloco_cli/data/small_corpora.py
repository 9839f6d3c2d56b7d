"""JSON lines and Parquet read directly: tokens are made at the first start and kept in a cache.

Fit for what is tokenized in a minute or two. What is larger is prepared before the run, on one
host, and copied: `diloco data prepare`.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from diloco_cli.core.lanes import LANES
from diloco_cli.data.heldout import HeldoutText
from diloco_cli.data.hf_tokenizer import HfTokenizer
from diloco_cli.data.order import Enough, Stream
from diloco_cli.data.patterns import matching_files
from diloco_cli.data.prepare import Preparation, is_held_out, prepare
from diloco_cli.data.protocol import datasets
from diloco_cli.data.sources import Form, TextSource, documents
from diloco_cli.data.text import Lanes, Tokenized, build_tokenizer
from diloco_cli.data.tokens import PreparedTokens
from diloco_cli.errors import RegistryError, SpecError
from diloco_cli.observe.units import bytes_

LARGEST = 2 << 30
"""Bytes of all files together."""


@dataclass(frozen=True)
class SmallCorpus(Tokenized):
    """What the kinds have in common."""

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    """Paths or patterns; `**` means any depth."""

    tokenizer: dict[str, Any]
    """Of kind hf."""

    field: str = "text"
    """Where the text is."""

    mask: Literal["none", "documents"] = "none"
    """`documents`: no token sees another document, positions begin anew in each, and the first
    token of a document is not predicted."""

    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the documents that is never trained on."""

    lanes: Lanes = LANES
    """Parts of the text that change hands when regions come and go, one reader each; at least as
    many as there will ever be regions."""

    form: ClassVar[Form]

    def __post_init__(self) -> None:
        built = build_tokenizer(self.tokenizer)
        if not isinstance(built, HfTokenizer):
            raise RegistryError(
                f"The dataset {self.form!r} needs a tokenizer of kind hf; got "
                f"{self.tokenizer['kind']}.",
                hint="`diloco data train-tokenizer` makes one; bytes have no token between "
                "documents.",
                key="tokenizer.kind",
            )
        super().__post_init__()

    def find(self) -> list[Path]:
        found = matching_files(self.files)
        for path in found:
            if TextSource.of(path).form != self.form:
                raise SpecError(
                    f"data.files: {path} is not called like a {self.form} file.",
                    hint="Leave it out, or prepare files of several forms together: "
                    "`diloco data prepare`.",
                )
        return found

    def open(self, seed: int, batch: int, sequence: int) -> Stream:
        return self._prepared().open(seed, batch, sequence)

    def held_out(self) -> HeldoutText:
        return self._prepared().held_out()

    def look(self, sequence: int) -> None:
        """Reads documents until there are enough tokens to train on and to hold out."""
        opened = self._tokenizer().opened()
        enough = Enough(self.lanes, sequence)
        needed, found = (enough.training, enough.apart), [0, 0]
        count, alike, first = 0, True, None
        for path in self._paths():
            for text in documents(TextSource.of(path), self.field):
                count, first = count + 1, text if first is None else first
                alike = alike and text == first
                apart = is_held_out(text, self.heldout)
                if found[apart] < needed[apart]:
                    # With the token that ends the document.
                    found[apart] += sum(tokens.size for tokens in opened.encode([text])) + 1
                if found[0] >= needed[0] and found[1] >= needed[1]:
                    return
        if alike and count > 1:
            raise _alike(count, held_out=not found[0])
        enough.check(*found)

    def _tokenizer(self) -> HfTokenizer:
        built = build_tokenizer(self.tokenizer)
        assert isinstance(built, HfTokenizer)
        return built

    def _paths(self) -> list[Path]:
        """The files, unless they are too large for this kind."""
        paths = self.find()
        if (total := sum(path.stat().st_size for path in paths)) > LARGEST:
            raise SpecError(
                f"data: {bytes_(total)} of files are too many to tokenize at every start.",
                hint="`diloco data prepare` does it once; then `data: {kind: tokens}`.",
            )
        return paths

    def _prepared(self) -> PreparedTokens:
        """The tokens, made now if no process of this host has made them before."""
        paths = self._paths()
        sizes = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
        opened = self._tokenizer()
        key = json.dumps(
            [sizes, self.tokenizer["digest"], opened.separator, self.field, self.heldout]
        )
        folder = token_cache() / hashlib.sha256(key.encode()).hexdigest()[:32]
        prepare(
            Preparation(
                tuple(map(TextSource.of, paths)),
                opened.opened(),
                folder,
                shards=1,
                share=self.heldout,
                field=self.field,
                wait=math.inf,
            )
        )
        return PreparedTokens(folder=str(folder), mask=self.mask, lanes=self.lanes)


def _alike(count: int, *, held_out: bool) -> SpecError:
    both = ("held out", "trained on") if held_out else ("trained on", "held out")
    return SpecError(
        f"data: all {count} documents are alike, so all are {both[0]} and none is {both[1]}.",
        hint="Which documents are held out follows from their text alone: give documents that "
        "differ.",
    )


@datasets.register("jsonl")
@dataclass(frozen=True)
class JsonLines(SmallCorpus):
    """JSON lines (.jsonl, also .gz and .zst), tokenized at the first start; for small corpora."""

    form = "jsonl"


@datasets.register("parquet")
@dataclass(frozen=True)
class ParquetFiles(SmallCorpus):
    """Parquet files, tokenized at the first start; for small corpora."""

    form = "parquet"


def token_cache() -> Path:
    """Where tokens are kept between starts; it may be removed at any time."""
    folder = Path.home() / ".cache" / "diloco" / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"{folder} cannot be made: {error.strerror}.",
            hint="Make it writable, or prepare the tokens elsewhere: `diloco data prepare`.",
        ) from None
    return folder
