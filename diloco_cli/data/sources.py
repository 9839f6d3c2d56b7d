"""Documents out of files, in the same order every time.

    *.jsonl *.ndjson *.json   one JSON object per line, the text in one of its fields
    *.parquet                 the text in one of the columns
    *.arrow *.feather *.ipc   the same, files and streams
    anything else             one file, one document

Text and JSON lines may be packed: *.gz, *.zst.
"""

from __future__ import annotations

import glob
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from diloco_cli.data.first_bytes import NotText, refuse_other_kinds
from diloco_cli.errors import SpecError

Form = Literal["text", "jsonl", "parquet", "arrow"]
Packing = Literal["gzip", "zstd"]

PACKED: dict[str, Packing] = {".gz": "gzip", ".zst": "zstd"}
FORMS: dict[str, Form] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
ROWS = 1024
"""Of a table, read at a time."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""What an Arrow stream ends with."""


@dataclass(frozen=True)
class TextSource:
    """One file with documents in it."""

    path: Path
    form: Form
    packed: Packing | None = None

    @classmethod
    def of(cls, path: Path) -> TextSource:
        """By the name of the file."""
        packed = PACKED.get(path.suffix.lower())
        name = path.with_suffix("") if packed else path
        form = FORMS.get(name.suffix.lower(), "text")
        return cls(path, form, packed)


def find_sources(patterns: Sequence[str], *, what: str = "IN") -> list[TextSource]:
    """Lists files, the files of folders and what patterns match; sorted, each once."""
    found: set[Path] = set()
    for pattern in patterns:
        matches = glob.glob(os.path.expanduser(pattern), recursive=True)
        paths = {path for match in matches for path in _files(Path(match))}
        if not paths:
            folder = [match for match in matches if os.path.isdir(match)]
            raise SpecError(
                f"{what}: the folder {pattern} holds no files."
                if folder
                else f"{what}: no file matches {pattern!r} in {Path.cwd()}.",
                hint="Check the spelling, or start the command in the folder the pattern is "
                "relative to.",
            )
        found |= paths
    return [TextSource.of(path) for path in sorted(found)]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path.resolve()
    for parent, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name).resolve() for name in names if not name.startswith("."))


def documents(source: TextSource, field: str = "text", skip: int = 0) -> Iterator[str]:
    """Gives the texts of a file from the `skip`-th on; raises a SpecError that says where not."""
    readers: dict[Form, Callable[[TextSource, str, int], Iterator[str]]] = {
        "text": _whole,
        "jsonl": _lines,
        "parquet": _parquet,
        "arrow": _arrow,
    }
    try:
        yield from readers[source.form](source, field, skip)
    except OSError as error:
        # Packed files that end too early are an EOFError or an OSError without a number.
        reason = error.strerror or str(error)
        raise _unreadable(source.path, reason) from None
    except EOFError as error:
        raise _unreadable(source.path, str(error) or "it ends too early") from None
    except Exception as error:
        if type(error).__name__ in ("ZstdError", "IsalError", "error"):
            raise _unreadable(source.path, str(error)) from None
        if type(error).__module__.startswith("pyarrow"):
            raise _unreadable(source.path, str(error).splitlines()[0]) from None
        raise


def _unreadable(path: Path, reason: str) -> SpecError:
    # A library may quote the damaged bytes, and over several lines.
    shown = "".join(each if each.isprintable() else " " for each in reason)
    return SpecError(
        f"{path} cannot be read: {' '.join(shown.split()).rstrip('.')}.",
        hint="The file is damaged or not what its name says; fetch it again, or leave it out.",
    )


def _opened(source: TextSource) -> BinaryIO:
    if source.packed == "gzip":
        from isal import igzip

        return cast(BinaryIO, igzip.open(source.path, "rb"))
    if source.packed == "zstd":
        return cast(BinaryIO, io.BufferedReader(_Unzstd(source.path), 1 << 20))
    refuse_other_kinds(source.path, strict=True)
    return source.path.open("rb")


class _Unzstd(io.RawIOBase):
    """Unpacks all frames of a file; the library's own reader takes a cut-off one for its end."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._file = path.open("rb")
        self._frames = zstandard.ZstdDecompressor()
        self._frame = self._frames.decompressobj()
        self._inside, self._left = False, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            if self._frame.eof:
                packed = self._frame.unused_data or self._file.read(1 << 18)
                self._frame, self._inside = self._frames.decompressobj(), False
            else:
                packed = self._file.read(1 << 18)
            if not packed:
                if self._inside:
                    raise EOFError("it ends too early")
                return 0
            self._inside = True
            self._left = self._frame.decompress(packed)
            self._inside = not self._frame.eof
        part, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()


def _whole(source: TextSource, field: str, skip: int) -> Iterator[str]:
    if skip:
        return
    with _opened(source) as file:
        data = file.read()
    if source.packed and b"\0" in data[:4096]:
        raise NotText(
            f"{source.path} does not hold text: what is packed in it is binary.",
            hint="Leave it out, or turn it into text first.",
        )
    yield data.decode("utf-8", "replace")


def _lines(source: TextSource, field: str, skip: int) -> Iterator[str]:
    """Empty lines are no documents."""
    with _opened(source) as file:
        numbered = enumerate(io.BufferedReader(cast(Any, file), 1 << 20), 1)
        filled = ((number, line) for number, line in numbered if not line.isspace())
        for number, line in islice(filled, skip, None):
            yield _field(line, field, f"{source.path}, line {number}")


def _field(line: bytes, field: str, where: str) -> str:
    try:
        found = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{where}: not JSON: {error}.",
            hint="Every line has one JSON object; a file that is one long list has to be split.",
        ) from None
    if not isinstance(found, dict):
        raise SpecError(
            f"{where}: needs a JSON object, has a {type(found).__name__}.",
            hint='Every line has one, such as {"text": "…"}.',
        )
    if not isinstance(text := found.get(field), str):
        raise _no_field(where, field, text, [key for key in found if isinstance(found[key], str)])
    return _whole_characters(text) if b"\\u" in line else text


def _whole_characters(text: str) -> str:
    """Replaces what an escape left of half a character, which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _no_field(where: str, field: str, value: object, names: Sequence[str]) -> SpecError:
    said = "there is no field" if value is None else f"{type(value).__name__}, not text, in field"
    texts = ", ".join(names) or "none"
    return SpecError(
        f"{where}: {said} {field!r}; fields with text are: {texts}.",
        hint=f"Name the one with the documents: `--field {names[0]}`, or `field:` in a spec."
        if names
        else "Leave the file out.",
    )


def _parquet(source: TextSource, field: str, skip: int) -> Iterator[str]:
    parquet = _arrow_library(source.path, "parquet")
    with parquet.ParquetFile(source.path) as file:
        _check_column(source.path, file.schema_arrow, field)
        groups = list[int]()
        for number in range(file.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if not groups and skip >= rows:
                skip -= rows
            else:
                groups.append(number)
        batches = file.iter_batches(ROWS, row_groups=groups, columns=[field])
        yield from _column(source.path, batches, skip)


def _arrow(source: TextSource, field: str, skip: int) -> Iterator[str]:
    ipc = _arrow_library(source.path, "ipc")
    with source.path.open("rb") as file:
        whole = file.read(6) == b"ARROW1"
        file.seek(0)
        if whole:
            reader = ipc.open_file(file)
            _check_column(source.path, reader.schema, field)
            found = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            # A stream that was cut off between two tables looks complete but for its end.
            file.seek(-len(END_OF_STREAM), os.SEEK_END)
            if file.read() != END_OF_STREAM:
                raise EOFError("it is no Arrow file, or ends too early")
            file.seek(0)
            reader = ipc.open_stream(file)
            _check_column(source.path, reader.schema, field)
            found = iter(reader)
        yield from _column(source.path, (batch.select([field]) for batch in found), skip)


def _arrow_library(path: Path, part: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"pyarrow.{part}")
    except ImportError:
        raise SpecError(
            f"{path} cannot be read without pyarrow, which is not installed.",
            hint="pip install 'diloco-cli[arrow]'",
        ) from None


def _check_column(path: Path, schema: Any, field: str) -> None:
    import pyarrow

    def is_text(kind: Any) -> bool:
        return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)

    kinds = dict(zip(schema.names, schema.types, strict=True))
    if field not in kinds or not is_text(kinds[field]):
        value = kinds.get(field)
        raise _no_field(str(path), field, value, [name for name in kinds if is_text(kinds[name])])


def _column(path: Path, batches: Iterator[Any], skip: int) -> Iterator[str]:
    row = 0
    for batch in batches:
        if (row := row + batch.num_rows) <= skip:
            continue
        texts = batch.column(0).to_pylist()
        for number, text in enumerate(texts, row - batch.num_rows):
            if number < skip:
                continue
            if text is None:
                raise SpecError(
                    f"{path}: row {number} of those read has no text.",
                    hint="Fill it or leave the row out.",
                )
            yield text
