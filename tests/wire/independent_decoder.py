"""A decoder as a stranger would write it from docs/reference/wire-format.md: slow and plain.

It shares no line with the package, so that it notices when the page and the package part.
"""

import hashlib
import json
import math
import struct

import zstandard

CHUNK = 1048576
DEFAULTS = {
    "fp32": {},
    "bf16": {},
    "int8": {"block": 512},
    "int4": {"block": 512},
    "uniform": {"block": 1024},
    "sign": {"block": 1024},
    "sparse": {"block": 4096, "density": 0.03},
}


def read_frame(data: bytes) -> tuple[dict, list[float]]:
    magic, version, reserved, header_length, frame_length = struct.unpack("<8sHHIQ", data[:24])
    assert (magic, version, reserved) == (b"\x89DiLoCo\n", 1, 0)
    assert frame_length == len(data)
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    header = json.loads(data[24 : 24 + header_length])
    at, left, values = 24 + header_length, header["size"], []
    for length in header["chunks"]:
        body = zstandard.ZstdDecompressor().decompress(data[at : at + length])
        values += decode(header["codec"], body, min(left, CHUNK))
        at, left = at + length, left - CHUNK
    assert at + 32 == len(data)
    return header, values


def decode(codec: dict, body: bytes, count: int) -> list[float]:
    codec = {**DEFAULTS[codec["kind"]], **codec}
    if codec["kind"] == "fp32":
        planes = [body[k * count : (k + 1) * count] for k in range(4)]
        return [struct.unpack("<f", bytes(quad))[0] for quad in zip(*planes, strict=True)]
    if codec["kind"] == "bf16":
        return [bf16(low, high) for low, high in zip(body[:count], body[count:], strict=True)]
    if codec["kind"] == "sparse":
        return sparse(codec["block"], codec["density"], body, count)
    block = codec["block"]
    rows = (count + block - 1) // block
    if codec["kind"] == "int8":
        codes = [byte - 256 if byte > 127 else byte for byte in body[:count]]
        at = count
    elif codec["kind"] == "sign":
        codes, eighth = [], block // 8
        for row in range(rows):
            part = body[row * eighth : (row + 1) * eighth]
            codes += [-1 if byte >> bit & 1 else 1 for bit in range(8) for byte in part]
        at = rows * eighth
    else:
        codes, half = [], block // 2
        for row in range(rows):
            part = body[row * half : (row + 1) * half]
            codes += [nibble(byte & 15) for byte in part] + [nibble(byte >> 4) for byte in part]
        at = rows * half
    scales = [bf16(body[at + row], body[at + rows + row]) for row in range(rows)]
    return [codes[i] * scales[i // block] for i in range(count)]


def sparse(block: int, density: float, body: bytes, count: int) -> list[float]:
    lengths = [min(block, count - start) for start in range(0, count, block)]
    keeps = [math.ceil(density * length) for length in lengths]
    codes_at = sum(keeps) + sum((length - 1) // 255 for length in lengths)
    rows, at = len(lengths), codes_at + (sum(keeps) + 3) // 4
    values, gap, code = [0.0] * count, 0, 0
    for row in range(rows):
        place = row * block - 1
        sizes = [bf16(body[at + k * rows + row], body[at + (k + 1) * rows + row]) for k in (2, 4)]
        for _ in range(body[at + row] + 256 * body[at + rows + row]):
            while body[gap] == 0:
                place, gap = place + 255, gap + 1
            place, gap = place + body[gap], gap + 1
            bits = body[codes_at + code // 4] >> 2 * (code % 4) & 3
            values[place] = sizes[bits >> 1] * (-1 if bits & 1 else 1)
            code += 1
    return values


def nibble(code: int) -> int:
    return code - 16 if code > 7 else code


def bf16(low: int, high: int) -> float:
    return struct.unpack("<f", bytes([0, 0, low, high]))[0]
