"""Is a file text? Its first bytes say what it is, whatever it is called."""

from __future__ import annotations

from pathlib import Path

from diloco_cli.errors import SpecError

LOOKED_AT = 4096
"""Bytes of a file that are looked at."""

SIGNATURES: dict[bytes, str] = {
    b"%PDF-": "a PDF",
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh91AY&SY": "compressed with bzip2",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"PK\x03\x04": "a zip archive or an office document",
    b"\x7fELF": "a program",
    b"MZ\x90\x00": "a program",
    b"\xcf\xfa\xed\xfe": "a program",
    b"\xca\xfe\xba\xbe": "a program",
    b"\x00asm": "a program",
    b"\x89PNG\r\n": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF87a": "an image",
    b"GIF89a": "an image",
    b"II*\x00": "an image",
    b"MM\x00*": "an image",
    b"OggS\x00": "a recording",
    b"ID3\x03": "a recording",
    b"fLaC\x00": "a recording",
    b"PAR1": "a Parquet file",
    b"ARROW1\x00\x00": "an Arrow file",
    b"SQLite format 3\x00": "a database",
    b"\x93NUMPY": "a numpy array",
    b"\xff\xfe\x00\x00": "text in UTF-32",
    b"\x00\x00\xfe\xff": "text in UTF-32",
}
"""What files of other kinds begin with; none of these can begin a text in UTF-8 by accident."""

_PREPARE = "`diloco data prepare` reads it"
HINTS = {
    "compressed with gzip": "Unpack it (`gunzip`), or call it *.txt.gz or *.jsonl.gz: "
    f"{_PREPARE} then.",
    "compressed with zstd": "Unpack it (`unzstd`), or call it *.txt.zst or *.jsonl.zst: "
    f"{_PREPARE} then.",
    "a Parquet file": f"{_PREPARE.capitalize()} where it is called *.parquet; or use "
    "`data: {kind: parquet}`.",
    "an Arrow file": f"{_PREPARE.capitalize()} where it is called *.arrow.",
    "text in UTF-32": "Convert it: `iconv -f UTF-32 -t UTF-8`.",
    "text in UTF-16": "Convert it: `iconv -f UTF-16 -t UTF-8`.",
}
_OTHERWISE = "Leave it out, or turn it into text first."


class NotText(SpecError):
    """A file that was named as text and is none."""


def refuse_other_kinds(path: Path, *, strict: bool = False) -> None:
    """Raises NotText for a file that begins as files of another kind do.

    With `strict` also for one with a zero byte, which no text in UTF-8 has.
    """
    with path.open("rb") as file:
        head = file.read(LOOKED_AT)
    if what := kind_of(head, strict=strict):
        raise NotText(f"{path} is not text: it is {what}.", hint=HINTS.get(what, _OTHERWISE))


def kind_of(head: bytes, *, strict: bool = False) -> str | None:
    """Says what a file that begins like this is; None if it may be text."""
    for signature, what in SIGNATURES.items():
        if head.startswith(signature):
            return what
    if head[:4] == b"RIFF" and head[8:12] in (b"WAVE", b"WEBP", b"AVI "):
        return "an image" if head[8:12] == b"WEBP" else "a recording"
    if strict and head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "text in UTF-16"
    return "a binary file" if strict and b"\0" in head else None
