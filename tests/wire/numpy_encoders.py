"""The encoders of the page in plain numpy: block by block, nothing clever.

The package's kernels must write the same bytes. Whoever changes one of the two changes
the format.
"""

import math

import numpy as np

FLOOR = 0x0100
F = np.float32


def encode(codec: dict, values: np.ndarray) -> bytes:
    options = dict(codec)
    kind = options.pop("kind")
    return {"int8": int8, "int4": int4, "uniform": uniform, "sign": sign, "sparse": sparse}[kind](
        values, **options
    )


def int8(values: np.ndarray, block: int = 512) -> bytes:
    codes, scales = quantised(values, block, 127)
    return codes[: values.size].tobytes() + planes(scales)


def int4(values: np.ndarray, block: int = 512) -> bytes:
    codes, scales = quantised(values, block, 7)
    return nibbles(codes, block) + planes(scales)


def uniform(values: np.ndarray, block: int = 1024, step: float = 1.0) -> bytes:
    codes, scales = [], []
    for part, count in blocks(values, block):
        unit = widened(rounded_up(largest(part) * (F(1) / F(127)), 127))
        total = int(np.sum(np.square(np.rint(part * (F(1) / unit)).astype(np.int64))))
        bits = nearest(np.sqrt(F(total) / F(count)) * F(step) * unit, 7)
        scaled = np.rint(part * (F(1) / widened(bits)))
        codes.append(np.clip(scaled, -7, 7).astype(np.int8))
        scales.append(bits)
    return nibbles(np.concatenate(codes), block) + planes(scales)


def sign(values: np.ndarray, block: int = 1024) -> bytes:
    marks, scales = b"", []
    for part, count in blocks(values, block):
        unit = widened(rounded_up(largest(part) * (F(1) / F(32767)), 1))
        total = int(np.sum(np.rint(np.abs(part) * (F(1) / unit)).astype(np.int64)))
        bits = nearest(F(total) / F(count) * unit, 1) if total else 0
        eighths = (part < 0).reshape(8, block // 8) & bool(total)
        marks += np.packbits(eighths, axis=0, bitorder="little").tobytes()
        scales.append(bits)
    return marks + planes(scales)


def sparse(values: np.ndarray, block: int = 4096, density: float = 0.03) -> bytes:
    gaps, codes, counts, lows, highs, gap_room, code_room = b"", [], [], [], [], 0, 0
    for start in range(0, values.size, block):
        part = values[start : start + block]
        keep = math.ceil(density * part.size)
        gap_room += keep + (part.size - 1) // 255
        code_room += keep
        order = sorted(range(part.size), key=lambda i: (-abs(float(part[i])), i))
        places = sorted(i for i in order[:keep] if abs(float(part[i])) >= 2.0**-126)
        picked = part[places]
        for last, place in zip([-1, *places], places, strict=False):
            gap = place - last
            gaps += bytes((gap - 1) // 255) + bytes([(gap - 1) % 255 + 1])
        unit = widened(rounded_up(largest(picked) * (F(1) / F(32767)), 1))
        sizes = np.rint(np.abs(picked) * (F(1) / unit)).astype(np.int64)
        above = sizes * len(places) > sizes.sum()
        for group, into in ((sizes[~above], lows), (sizes[above], highs)):
            mean = F(group.sum()) / F(group.size) * unit if group.size else F(0)
            into.append(nearest(mean, 1) if group.size else 0)
        codes += [int(v < 0) | int(a) << 1 for v, a in zip(picked, above, strict=True)]
        counts.append(len(places))
    codes += [0] * (-(-code_room // 4) * 4 - len(codes))
    quads = np.array(codes, np.uint8).reshape(-1, 4)
    packed = (quads << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1).astype(np.uint8)
    listed = planes(counts) + planes(lows) + planes(highs)
    return gaps + bytes(gap_room - len(gaps)) + packed.tobytes() + listed


def blocks(values: np.ndarray, block: int):
    """Yields each block, the last one padded with zeros, and how many values are its own."""
    for start in range(0, values.size, block):
        part = values[start : start + block]
        yield np.pad(part, (0, block - part.size)), part.size


def quantised(values: np.ndarray, block: int, top: int) -> tuple[np.ndarray, list[int]]:
    codes, scales = [], []
    for part, _ in blocks(values, block):
        bits = rounded_up(largest(part) * (F(1) / F(top)), top)
        codes.append(np.rint(part * (F(1) / widened(bits))).astype(np.int8))
        scales.append(bits)
    return np.concatenate(codes), scales


def largest(part: np.ndarray) -> np.float32:
    return np.abs(part).max(initial=F(0))


def rounded_up(wanted: np.float32, top: int, half: int = 0xFFFF) -> int:
    """bf16 bits that are not below `wanted`, where `top × scale` stays finite."""
    most = int(F(np.finfo(F).max / top).view(np.uint32) >> 16)
    bits = (int(F(wanted).view(np.uint32)) + half) >> 16
    return min(max(bits, FLOOR), most)


def nearest(wanted: np.float32, top: int) -> int:
    return rounded_up(wanted, top, 0x8000)


def widened(bits: int) -> np.float32:
    return np.uint32(bits << 16).view(F)


def nibbles(codes: np.ndarray, block: int) -> bytes:
    halves = codes.view(np.uint8).reshape(-1, 2, block // 2)
    return ((halves[:, 1] << 4) | (halves[:, 0] & 15)).tobytes()


def planes(numbers: list[int]) -> bytes:
    return bytes(n & 255 for n in numbers) + bytes(n >> 8 for n in numbers)
