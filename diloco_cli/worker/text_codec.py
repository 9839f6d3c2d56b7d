"""Text ⇄ tokens, for a prompt and what follows it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from diloco_cli.errors import SpecError
from diloco_cli.models.hf.bytes import byte_tokenizer

TOKENIZER = "tokenizer.json"


class TextCodec(Protocol):
    """What the numbers of a model mean."""

    end: int | None
    """The token that ends a document."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def files(self) -> dict[str, bytes]:
        """The files that a folder of the Hugging Face Hub has of it."""
        ...


class ByteText:
    """Every byte is a token."""

    end: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def files(self) -> dict[str, bytes]:
        return {name: json.dumps(each).encode() for name, each in byte_tokenizer().items()}


class LibraryText:
    """A tokenizer.json."""

    def __init__(self, path: Path, separator: str | None = None) -> None:
        from diloco_cli.data.hf_tokenizer import open_tokenizer

        self._opened, self._path = open_tokenizer(path, separator), path.expanduser()
        self.end = self._opened.separator

    def encode(self, text: str) -> list[int]:
        return next(self._opened.encode([text])).tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        return self._opened.library.decode(list(tokens), skip_special_tokens=False)

    def files(self) -> dict[str, bytes]:
        found = {TOKENIZER: self._path.read_bytes()}
        name = None if self.end is None else self._opened.library.id_to_token(self.end)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name}
        return found | {"tokenizer_config.json": json.dumps(about).encode()}


def codec_of(choice: Mapping[str, Any]) -> TextCodec | None:
    """What the tokens of a dataset mean, by its choice in a spec; None if it cannot be said."""
    tokenizer = choice.get("tokenizer")
    if isinstance(tokenizer, Mapping):
        if tokenizer.get("kind") == "bytes":
            return ByteText()
        if tokenizer.get("kind") == "hf" and tokenizer.get("file"):
            return LibraryText(
                Path(tokenizer["file"]).expanduser().absolute(), tokenizer.get("separator")
            )
        return None
    folder = choice.get("folder")
    return codec_in(Path(folder).expanduser().absolute()) if isinstance(folder, str) else None


def codec_in(folder: Path) -> TextCodec | None:
    """What the tokens of a folder's model mean, by its tokenizer.json; None if it has none."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    try:
        if json.loads(path.read_text("utf-8")) == byte_tokenizer()[TOKENIZER]:
            return ByteText()
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}.") from None
    return LibraryText(path)


def as_it_comes(codec: TextCodec, tokens: Iterable[int]) -> Iterator[str]:
    """Gives the text of tokens piece by piece, each once its letters are whole."""
    so_far: list[int] = []
    given = ""
    for token in tokens:
        so_far.append(token)
        text = codec.decode(so_far)
        if not text.endswith("\ufffd") and text.startswith(given):
            yield text[len(given) :]
            given = text
    yield codec.decode(so_far)[len(given) :]
