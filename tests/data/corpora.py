"""Small corpora for the tests: documents, a tokenizer trained on them, files of every form."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import zstandard

from diloco_cli.data.hf_tokenizer import open_tokenizer, train_tokenizer
from diloco_cli.data.prepare import Preparation
from diloco_cli.data.sources import find_sources

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dogs",
    "while",
    "seven",
]


def documents(count: int, first: int = 0) -> list[str]:
    """Texts of different lengths, none like another."""
    return [
        f"Document {number}.\n"
        + " ".join(WORDS[(number * 7 + at * (1 + number % 5)) % len(WORDS)] for at in range(length))
        for number in range(first, first + count)
        for length in [3 + number * 13 % 40]
    ]


@cache
def _tokenizer_text(vocabulary: int) -> str:
    return train_tokenizer(documents(50), vocabulary).to_str()


def write_tokenizer(folder: Path, vocabulary: int = 320, name: str = "tokenizer.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(_tokenizer_text(vocabulary))
    return path


def preparation(folder: Path, out: Path, **changes: Any) -> Preparation:
    """Of a folder's files, with the tokenizer beside it, in small batches."""
    path = folder.parent / "tokenizer.json"
    tokenizer = open_tokenizer(path if path.exists() else write_tokenizer(folder.parent))
    usual = {"shards": 3, "share": 0.1, "letters": 2000}
    return Preparation(tuple(find_sources([str(folder)])), tokenizer, out, **{**usual, **changes})


def write_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    """JSON lines, packed if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts))
    data = lines.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = zstandard.compress(data)
    path.write_bytes(data)
    return path


def write_table(path: Path, texts: list[str], field: str = "text") -> Path:
    """Parquet in small row groups, or Arrow: a file, or a stream where the name says so."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(texts))), field: texts})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
        return path
    make = pyarrow.ipc.new_stream if "stream" in path.name else pyarrow.ipc.new_file
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path
