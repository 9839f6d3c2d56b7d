"""Tokenizers of the `tokenizers` library: one from a file, and training a new one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diloco_cli.data.first_bytes import refuse_other_kinds
from diloco_cli.data.protocol import tokenizers
from diloco_cli.errors import RegistryError, SpecError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEPARATORS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "[SEP]",
)
"""Tokens that end a document in the vocabularies we know, the usual one first."""
PIECE = 1 << 20
"""Letters of a long document that are encoded at a time; several threads share it so."""


@tokenizers.register("hf")
@dataclass(frozen=True)
class HfTokenizer:
    """A tokenizer.json of the `tokenizers` library, as Hugging Face models have one."""

    file: str | None = None
    """Path of tokenizer.json, relative to the spec's folder."""

    digest: str | None = None
    """SHA-256 of that file: regions with other tokenizers do not merge. Found out where the file
    is; a host that lacks the file, as a server may, needs it."""

    separator: str | None = None
    """The token that ends a document; found out where it has a usual name."""

    def __post_init__(self) -> None:
        if self.file is None and self.digest is None:
            raise RegistryError(
                "The tokenizer 'hf' needs a `file`.",
                hint="Name a tokenizer.json; `diloco data train-tokenizer` makes one.",
                key="file",
            )
        if self.file is None or not Path(self.file).expanduser().is_file():
            if self.digest is None:
                raise RegistryError(
                    f"The tokenizer 'hf': file {self.file!r} is not there; looked in {Path.cwd()}.",
                    hint="Copy it here (paths are relative to the folder of the spec), or give "
                    "`digest`, its SHA-256, if this host only serves.",
                    key="file",
                )
            return
        found = self.opened().digest
        if self.digest is not None and self.digest != found:
            raise RegistryError(
                f"The tokenizer 'hf': {self.file} has the digest {found[:12]}…, the spec asks "
                f"for {self.digest[:12]}….",
                hint="Bring back the file that the run began with: with another one the numbers "
                "of the tokens mean other text.",
                key="file",
            )
        object.__setattr__(self, "digest", found)

    def opened(self) -> OpenTokenizer:
        """Ready to encode; raises a SpecError on a host that has only the digest."""
        if self.file is None:
            raise SpecError(
                "data.tokenizer: there is no `file` to read text with, only a digest.",
                hint="Name the tokenizer.json of that digest.",
            )
        return open_tokenizer(Path(self.file), self.separator)

    @property
    def vocabulary(self) -> int:
        """0 where the file is not here."""
        here = self.file is not None and Path(self.file).expanduser().is_file()
        return self.opened().vocabulary if here else 0

    def read(self, path: Path) -> np.ndarray:
        refuse_other_kinds(path, strict=True)
        text = path.read_bytes().decode("utf-8", "replace")
        tokens = next(self.opened().encode([text]))
        dtype = smallest_type(self.vocabulary)
        end = self.opened().separator
        return np.append(tokens, [] if end is None else [end]).astype(dtype)


@dataclass(frozen=True, eq=False)
class OpenTokenizer:
    """A tokenizer that is ready to encode."""

    library: Tokenizer
    digest: str
    vocabulary: int
    separator: int | None
    """None where it has none that we know."""
    path: Path

    def encode(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Gives the tokens of each text, without a separator.

        A special token that is spelled out in a text is text: nobody ends a document from inside.
        """
        texts = list(texts)
        cuts = [pieces(text) for text in texts]
        flat = [piece for cut in cuts for piece in cut]
        found = iter(self.library.encode_batch_fast(flat, add_special_tokens=False))
        dtype = smallest_type(self.vocabulary)
        for cut in cuts:
            parts = [np.array(next(found).ids, dtype) for _ in cut]
            yield parts[0] if len(parts) == 1 else np.concatenate(parts)

    def number(self, token: str) -> int:
        """The number of a token that somebody named."""
        if (found := self.library.token_to_id(token)) is None:
            raise SpecError(
                f"{self.path} has no token {token!r}.",
                hint=f"Its special tokens are: {', '.join(self._special()) or 'none'}.",
            )
        return found

    def _special(self) -> list[str]:
        added = self.library.get_added_tokens_decoder().values()
        return sorted(token.content for token in added if token.special)


def smallest_type(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """The type that token files have: two bytes where they are enough, else four."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def pieces(text: str, size: int = PIECE) -> list[str]:
    """Cuts a long text between lines; encoded one by one they are what the whole would be.

    Cuts only where a single line end has letters on both sides: there every pre-tokenizer that
    splits at white space splits, too.
    """
    found: list[str] = []
    begin = 0
    while len(text) - begin > size:
        at = text.find("\n", begin + size)
        while 0 <= at < len(text) - 1 and (text[at - 1].isspace() or text[at + 1].isspace()):
            at = text.find("\n", at + 1)
        if at < 0 or at == len(text) - 1:
            break
        found.append(text[begin : at + 1])
        begin = at + 1
    return [*found, text[begin:]]


def open_tokenizer(path: Path, separator: str | None = None) -> OpenTokenizer:
    """Reads a tokenizer.json, or raises a SpecError that says what is wrong with it."""
    path = path.expanduser()
    try:
        at = path.stat()
        return _read(path, separator, at.st_mtime_ns, at.st_size)
    except OSError as error:
        raise SpecError(
            f"The tokenizer {path} cannot be read: {error.strerror}.",
            hint="Name a tokenizer.json; `diloco data train-tokenizer` makes one.",
        ) from None


@lru_cache(maxsize=4)
def _read(path: Path, separator: str | None, changed: int, size: int) -> OpenTokenizer:
    from tokenizers import Tokenizer

    data = path.read_bytes()
    try:
        library = Tokenizer.from_str(data.decode())
    except Exception as error:  # The library raises plain Exceptions.
        reason = str(error).splitlines()[0][:200]
        raise SpecError(
            f"{path} is not a tokenizer.json: {reason}.",
            hint="It is the file of that name of a Hugging Face model; vocab.json, merges.txt and "
            "SentencePiece models are other things.",
        ) from None
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    # The largest number counts, not how many there are: numbers may be left out.
    vocabulary = max(library.get_vocab().values(), default=-1) + 1
    digest = hashlib.sha256(data).hexdigest()
    opened = OpenTokenizer(library, digest, vocabulary, None, path)
    if separator is not None:
        return OpenTokenizer(library, digest, vocabulary, opened.number(separator), path)
    usual = (library.token_to_id(token) for token in SEPARATORS)
    number = next((number for number in usual if number is not None), None)
    return OpenTokenizer(library, digest, vocabulary, number, path)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Makes a byte-level BPE tokenizer: any text can be encoded, and comes back as it was."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return tokenizer
