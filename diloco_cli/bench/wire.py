"""How close do the codecs come to the memory, and how few bits are enough?

    speed   what a frame costs, beside copying the same floats and beside zstd alone
    bits    of every kind, on pseudo-gradients of the quickstart's model or of a file
    merge   of eight regions, beside the same merge in plain numpy

Everything is measured in turns, many times over, and the best of each counts: what else
the machine does then disturbs a figure and its limit alike. What is compared with each
other is measured one right after the other, and a turn of two threads needs both cores to
be free for its few milliseconds, so there are enough turns for that to happen.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import typer

from diloco_cli.bench.figure import Figure
from diloco_cli.errors import SpecError
from diloco_cli.spec.schema import Choice
from diloco_cli.wire.chunks import CHUNK, cores, in_chunks, squeeze
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import Header, open_frame, pack

INT4 = {"kind": "int4", "block": 512}

MOST_BITS = {
    **{"fp32": 27.5, "bf16": 12.0, "int8": 7.5, "int4": 3.3},
    **{"uniform": 2.3, "sign": 1.1, "sparse": 0.35},
}
MOST_ERROR = {
    **{"fp32": 0.0, "bf16": 0.002, "int8": 0.01, "int4": 0.2},
    **{"uniform": 0.35, "sign": 0.7, "sparse": 0.92},
}
MOST_BITS_DOWN = {"int8": 7.5, "int4": 3.5}


def wire_figures(
    *, tries: int = 25, parameters: int = 32 << 20, file: Path | None = None, train: bool = True
) -> list[Figure]:
    """Measures speed, size and error of the codecs, and the merge.

    Sizes and errors are those of the vector in `file` (.npy), or of pseudo-gradients from a
    minute's training, or without `train` of random numbers that look like them.
    """
    given = _load(file) if file is not None else None  # Before minutes have passed.
    figures = speed_figures(parameters, tries)
    up, down = ([given], []) if given is not None else _samples(train)
    for kind in sorted(codecs.kinds(), key=lambda kind: -MOST_BITS.get(kind, 0)):
        if kind in MOST_BITS:
            figures += size_figures("up", {"kind": kind}, up, MOST_BITS[kind], MOST_ERROR[kind])
    for kind, most in MOST_BITS_DOWN.items() if down else ():
        figures += size_figures("down", {"kind": kind}, down, most, MOST_ERROR[kind])
    return figures + merge_figures(tries)


def speed_figures(parameters: int, tries: int) -> list[Figure]:
    """Measures the default codec beside memcpy and zstd alone, in GB/s of float32."""
    import zstandard

    _say(f"measuring speed on {parameters:,} parameters")
    values = student(parameters)
    copy, sums = np.zeros_like(values), np.zeros_like(values)
    header = _header(INT4, parameters)
    frame = open_frame(pack(header, values))
    bodies = [frame.body(place) for place in range(len(frame.lengths))]
    compressor = zstandard.ZstdCompressor(1, write_checksum=True, write_content_size=True)
    codec = frame.codec

    def encode(threads: int) -> list[bytes]:
        return list(in_chunks(lambda _, part: squeeze(codec, values[part], 1), parameters, threads))

    work: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(copy, values),
        "copy 2": lambda: _copy(values, copy, 2),
        "encode": lambda: encode(1),
        "encode 2": lambda: encode(2),
        "zstd": lambda: [compressor.compress(body) for body in bodies],
        "add": lambda: frame.accumulate(sums, 0.5, threads=1),
        "add 2": lambda: frame.accumulate(sums, 0.5, threads=2),
        "unzstd": lambda: [frame.body(place) for place in range(len(bodies))],
        "frame": lambda: pack(header, values, threads=1),
        "decode": lambda: frame.values(threads=1),
        # What a second core is worth here and now, for work without and with much memory.
        "hash": lambda: _hash(values, 1),
        "hash 2": lambda: _hash(values, 2),
    }
    if not (several := cores() >= 2):
        work = {name: act for name, act in work.items() if not name.endswith(" 2")}
    speed = {name: 4e-9 * parameters / best for name, best in in_turns(work, tries).items()}
    pairs = [
        ("encode / memcpy", "encode", "copy", 0.33),
        ("decode + add / memcpy", "add", "copy", 0.30),
        ("encode / zstd alone", "encode", "zstd", None),
        ("decode + add / zstd alone", "add", "unzstd", None),
        ("decode / memcpy", "decode", "copy", None),
        ("frame with SHA-256 / memcpy", "frame", "copy", None),
    ]
    if several:
        pairs += [
            ("encode, 2 threads / 1", "encode 2", "encode", 1.7),
            ("decode + add, 2 threads / 1", "add 2", "add", 1.7),
            ("SHA-256, 2 threads / 1", "hash 2", "hash", None),
            ("memcpy, 2 threads / 1", "copy 2", "copy", None),
        ]
    return [
        Figure(name, speed[ours], "GB/s", speed[other], goal) for name, ours, other, goal in pairs
    ]


def _hash(values: np.ndarray, threads: int) -> None:
    def hash_part(_: int, part: slice) -> None:
        hashlib.sha256(values[part][: CHUNK // 8].data)

    list(in_chunks(hash_part, values.size, threads))


def _copy(values: np.ndarray, into: np.ndarray, threads: int) -> None:
    list(in_chunks(lambda _, p: np.copyto(into[p], values[p]), values.size, threads))


def size_figures(
    way: str, codec: Choice, vectors: Sequence[np.ndarray], bits: float, error: float
) -> list[Figure]:
    """Measures whole frames: bits per parameter, and the error as a share of the length.

    Their limit is what no code can beat if the values are Gaussian: one bit halves the
    error.
    """
    length = wrong = exact = 0.0
    for vector in vectors:
        data = pack(_header(codec, vector.size), vector)
        length += 8 * len(data)
        wrong += float(np.sum(np.square(open_frame(data).values() - vector, dtype=np.float64)))
        exact += float(np.sum(np.square(vector, dtype=np.float64)))
    spent = length / sum(vector.size for vector in vectors)
    share = math.sqrt(wrong / exact)
    bound = -math.log2(share) if share > 0 else 32.0
    kind = codec["kind"]
    return [
        _at_most(f"{kind} {way}", spent, "bits/parameter", bound, bits),
        _at_most(f"{kind} {way}, error", share, "of norm", 2**-spent, error),
    ]


def merge_figures(tries: int, *, regions: int = 8, size: int = 4 * CHUNK) -> list[Figure]:
    """Measures a whole merge, from frames to the next delta frame, beside plain numpy."""
    from diloco_cli.bench.support.numpy_merge import MergeRound, fused_merge, plain_merge

    _say(f"merging {regions} regions of {size:,} parameters")
    header = _header(INT4, size)
    frames = [pack(header, student(size, seed)) for seed in range(regions)]
    round_ = MergeRound(frames, student(size, regions))
    work: dict[str, Callable[[], object]] = {
        "plain": lambda: plain_merge(round_),
        "fused": lambda: fused_merge(round_),
    }
    speed = {name: 1e-6 * size * regions / b for name, b in in_turns(work, tries).items()}
    name = f"merge of {regions} / numpy"
    return [Figure(name, speed["fused"], "M values/s", speed["plain"], 4.5)]


def _at_most(name: str, value: float, unit: str, reference: float, goal: float) -> Figure:
    return Figure(name, value, unit, reference, goal, "value", lower=True)


def in_turns(work: dict[str, Callable[[], object]], tries: int) -> dict[str, float]:
    """Gives the best time of each, in seconds; all are measured in every round."""
    best = dict.fromkeys(work, math.inf)
    for act in work.values():  # Compiles, and touches every page.
        act()
    for _ in range(tries):
        for name, act in work.items():
            began = time.perf_counter()
            act()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def student(size: int, seed: int = 0) -> np.ndarray:
    """Numbers that look like a pseudo-gradient: Student's t, tensors of different sizes."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(9, size).astype(np.float32)
    tensors = np.array_split(values, max(1, size // 100_000))
    for tensor in tensors:
        tensor *= np.float32(10 ** rng.uniform(-3.5, -2.5))
    return values


def _samples(train: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    if not train:
        return [student(4 << 20, 1)], []
    from diloco_cli.bench.support.quickstart_gradients import quickstart_round

    _say("training the quickstart's model to get pseudo-gradients")
    return quickstart_round()


def _load(file: Path) -> np.ndarray:
    try:
        values = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not in numpy's format"
        raise SpecError(f"{file} is no array: {why}.", hint="numpy.save writes one.") from None
    if values.dtype != np.float32 or not values.size:
        raise SpecError(f"{file} holds {values.size} values of {values.dtype}, not of float32.")
    return values.reshape(-1)


def _header(codec: Choice, size: int) -> Header:
    return Header.contribution(
        run="bench",
        layout="0" * 64,
        fragment=0,
        size=size,
        codec=codec,
        base=0,
        region="bench",
    )


def _say(text: str) -> None:
    typer.echo(text, err=True)
