"""Frames that nobody's encoder writes, with everything else about them right."""

import hashlib
import json
import struct
from typing import Any

import numpy as np
import zstandard

from diloco_cli.wire.frame import Frame, Header, open_frame, pack

LAYOUT = "5" * 64
PUBLISHED = "9" * 32


def header(size: int, **fields: Any) -> Header:
    known: dict[str, Any] = {
        "kind": "contribution",
        "run": "quickstart-1",
        "layout": LAYOUT,
        "fragment": 3,
        "size": size,
        "codec": {"kind": "int4", "block": 512},
        "base": 41,
        "version": 41,
        "region": "paris",
        "clock": 500,
    }
    return Header(**{**known, **fields})


def delta(size: int, base: int, **fields: Any) -> Header:
    return header(
        size,
        **{
            "kind": "delta",
            "base": base,
            "version": base + 1,
            "region": "",
            "clock": 0,
            "published": PUBLISHED,
            **fields,
        },
    )


def ramp(size: int) -> np.ndarray:
    return np.linspace(-1, 1, size, dtype=np.float32)


def honest(size: int = 100, **fields: Any) -> bytes:
    return pack(header(size, **fields), ramp(size))


def taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns a frame's header and its chunks."""
    length = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[24 : 24 + length]), data[24 + length : -32]


def put_together(
    fields: dict[str, Any] | bytes,
    chunks: bytes,
    *,
    magic: bytes = b"\x89DiLoCo\n",
    version: int = 1,
    reserved: int = 0,
) -> bytes:
    """Writes a frame around any header and any chunks, lengths and digest right."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    length = 24 + len(text) + len(chunks) + 32
    whole = struct.pack("<8sHHIQ", magic, version, reserved, len(text), length)
    whole += text + chunks
    return whole + hashlib.sha256(whole).digest()


def with_header(data: bytes, **changes: Any) -> bytes:
    fields, chunks = taken_apart(data)
    return put_together({**fields, **changes}, chunks)


def with_chunk(data: bytes, chunk: bytes) -> bytes:
    fields, _ = taken_apart(data)
    return put_together({**fields, "chunks": [len(chunk)]}, chunk)


def squeezed(body: bytes, **options: Any) -> bytes:
    chosen = {"write_checksum": True, "write_content_size": True, **options}
    return zstandard.ZstdCompressor(level=1, **chosen).compress(body)


def opened(data: bytes, size: int = 100) -> Frame:
    return open_frame(data, size=size)
