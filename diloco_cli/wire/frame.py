"""A frame: numbers in an envelope that describes and proves itself.

    magic 8 │ version 2 │ zero 2 │ header length 4 │ frame length 8 │   little endian
    header: canonical JSON
    chunk 0 │ chunk 1 │ …          one zstd frame each, 2**20 values but for the last
    sha256 of everything before: the frame's identity

`open_frame` checks all of it without decompressing anything; numbers are decoded later,
one chunk at a time, each into a buffer whose size was known before. A frame therefore
costs no more memory than its caller expected, whatever it claims about itself.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import zstandard

from diloco_cli.errors import WireError
from diloco_cli.wire.buffers import fresh
from diloco_cli.wire.chunks import (
    CHUNK,
    MOST_WINDOW_BYTES,
    add_into,
    hands,
    in_chunks,
    plus_into,
    read_into,
    span_of,
    spread,
    squeeze,
    tools,
    unsqueeze,
)
from diloco_cli.wire.codecs.protocol import Body, Codec, Foldable, NotFinite, codecs, raw, vector
from diloco_cli.wire.digest import VectorHash
from diloco_cli.wire.header import MOST_HEADER_BYTES, Header, read_header, write_header

__all__ = [
    "CHUNK",
    "Frame",
    "Header",
    "Outline",
    "most_bytes",
    "open_frame",
    "pack",
    "pack_bodies",
    "read_chain",
    "seal",
]

FRAME_VERSION = 1
MAGIC = b"\x89DiLoCo\n"
PRELUDE = struct.Struct("<8sHHIQ")
DIGEST_BYTES = 32

DAMAGED = (
    "It was cut or changed on its way and travels again by itself. "
    "If this repeats, look for a proxy that rewrites bodies."
)


@dataclass(frozen=True)
class Frame:
    """One frame whose envelope has been checked; its numbers decode on demand."""

    header: Header
    digest: str
    """Hex of the sha256 that ends the frame: its identity."""

    data: memoryview = field(repr=False)
    """All bytes of the frame, as they travel."""

    lengths: tuple[int, ...] = field(repr=False)
    """Bytes of each chunk's zstd frame."""

    codec: Codec = field(repr=False)

    @property
    def outline(self) -> Outline:
        head = self.data.nbytes - DIGEST_BYTES - sum(self.lengths)
        return Outline(self.header, self.digest, bytes(self.data[:head]), self.lengths, self.codec)

    def chunks(self) -> Iterator[np.ndarray]:
        """Yields the values, at most CHUNK of them at a time."""
        for place in range(len(self.lengths)):
            span = span_of(place, self.header.size)
            values = np.empty(span.stop - span.start, np.float32)
            try:
                self.read(place, values)
            except NotFinite as error:
                raise NotFinite(error.value, span.start + error.index) from None
            yield values

    def values(self, *, threads: int | None = None) -> np.ndarray:
        """Returns all values as one float32 vector; on all cores unless told otherwise."""
        values = np.empty(self.header.size, np.float32)
        list(in_chunks(lambda place, span: self.read(place, values[span]), values.size, threads))
        return values

    def accumulate(self, sums: np.ndarray, weight: float, *, threads: int | None = None) -> None:
        """Adds `weight` times the values to sums, without laying the values out.

        Gives the bits of `sums += weight * values` in numpy, all in the type of the sums:
        one rounding for the product, one for the sum. Merges add in float64; float32 is
        twice as fast where memory is the limit. After a WireError the sums are worthless.
        """
        _refuse_unfitting(sums, self.header.size)

        def add(place: int, span: slice) -> None:
            add_into(self.codec, self.body(place), sums[span], weight)

        list(in_chunks(add, sums.size, threads))

    def added_to(
        self, weights: np.ndarray, *, threads: int | None = None
    ) -> tuple[np.ndarray, str]:
        """Gives weights + values, and the digest of the sum; the weights stay as they are.

        The digest is of the kind that the header names the sum with.
        """
        base = vector(weights)
        _refuse_unfitting(base, self.header.size)
        sums, digest = fresh(base.size), VectorHash()

        def add(place: int, span: slice) -> None:
            plus_into(self.codec, self.body(place), base[span], sums[span])

        for place, _ in enumerate(in_chunks(add, sums.size, hands(sums.size, threads))):
            digest.update(sums[span_of(place, sums.size)])  # While it is in the cache.
        return sums, digest.hexdigest()

    def squares(self, edges: Sequence[int], *, threads: int | None = None) -> np.ndarray:
        """Sums the squares between each edge and the next, in float64.

        A sum over several chunks is added up chunk by chunk, so it does not depend on the
        number of threads.
        """
        parts = in_chunks(
            lambda place, _: self.chunk_squares(place, edges), self.header.size, threads
        )
        return functools.reduce(np.add, parts)

    def chunk_squares(
        self, place: int, edges: Sequence[int], body: bytes | None = None
    ) -> np.ndarray:
        """Sums the squares of one chunk's values between each edge and the next."""
        from diloco_cli.wire.kernels.sums import LANES, square_sum

        span = span_of(place, self.header.size)
        count = span.stop - span.start
        inside = [min(max(edge - span.start, 0), count) for edge in edges]
        body = self.body(place) if body is None else body
        if isinstance(self.codec, Foldable):
            return self.codec.squares(raw(body, self.codec.body_size(count)), count, inside)
        values = tools.scratch("values", count, np.float32)
        read_into(self.codec, body, values)
        lanes = np.empty(LANES)
        return np.array([square_sum(values[a:b], lanes) for a, b in pairwise(inside)])

    def read(self, place: int, values: np.ndarray) -> None:
        """Decodes one chunk into values that are already there."""
        read_into(self.codec, self.body(place), values)

    def body(self, place: int) -> bytes:
        """Decompresses one chunk."""
        return unsqueeze(self._compressed(place), place)

    def _compressed(self, place: int) -> memoryview:
        start = self.data.nbytes - DIGEST_BYTES - sum(self.lengths[place:])
        return self.data[start : start + self.lengths[place]]


@dataclass(frozen=True)
class Outline:
    """All about a frame but its chunks: enough to open the same bytes again without hashing them.

    Chunks have checksums of their own, which decompressing looks at.
    """

    header: Header
    digest: str
    head: bytes
    lengths: tuple[int, ...]
    codec: Codec

    def opened(self, data: Body) -> Frame:
        view = memoryview(data).cast("B")
        if view[: len(self.head)] != self.head or view[-DIGEST_BYTES:].hex() != self.digest:
            raise WireError("The frame does not begin or end as it did.", hint=DAMAGED)
        body = view[len(self.head) : -DIGEST_BYTES]
        _check_chunks(body, self.header.size, self.lengths, self.codec)
        return Frame(self.header, self.digest, view, self.lengths, self.codec)


def _refuse_unfitting(sums: np.ndarray, size: int) -> None:
    sound = sums.dtype in (np.float64, np.float32) and sums.flags.c_contiguous
    if sums.shape != (size,) or not sound:
        raise ValueError(
            f"sums of {size} contiguous floats are needed, not {sums.shape} of {sums.dtype}"
        )


def pack(
    header: Header, values: np.ndarray, *, level: int = 1, threads: int | None = None
) -> bytes:
    """Writes one frame; raises NotFinite where a value is NaN or infinite.

    Many chunks are encoded on all cores this process may use, or on `threads` of them; the
    frame is the same.
    """
    source = vector(values)
    if source.size != header.size:
        raise ValueError(f"the header says {header.size} values, there are {source.size}")
    _check_level(level)
    codec = codecs.build(header.codec)
    threads = hands(source.size, threads)
    chunks = in_chunks(lambda _, span: squeeze(codec, source[span], level), source.size, threads)
    return seal(header, list(chunks))


def pack_bodies(
    header: Header, bodies: Sequence[Body], *, level: int = 1, threads: int | None = None
) -> bytes:
    """Writes one frame from chunks that are already encoded, on a device for example."""
    codec = codecs.build(header.codec)
    spans = [span_of(place, header.size) for place in range(-(-header.size // CHUNK))]
    expected = [codec.body_size(span.stop - span.start) for span in spans]
    if (actual := [memoryview(body).nbytes for body in bodies]) != expected:
        raise ValueError(f"the bodies have {actual} bytes where {expected} belong")
    _check_level(level)
    chunks = spread(
        lambda place: tools.compressor(level).compress(bodies[place]), len(bodies), threads
    )
    return seal(header, list(chunks))


def _check_level(level: int) -> None:
    if not 1 <= level <= 19:
        # Below 1 zstd gives up the entropy coding that all the gain comes from.
        raise ValueError(f"zstd level {level} is not within 1 to 19")


def seal(header: Header, chunks: Sequence[bytes]) -> bytes:
    """Puts compressed chunks into their envelope."""
    described = write_header(header, [len(chunk) for chunk in chunks])
    length = PRELUDE.size + len(described) + sum(map(len, chunks)) + DIGEST_BYTES
    prelude = PRELUDE.pack(MAGIC, FRAME_VERSION, 0, len(described), length)
    digest = hashlib.sha256()
    for part in (prelude, described, *chunks):
        digest.update(part)
    return b"".join([prelude, described, *chunks, digest.digest()])


def open_frame(data: Body, *, size: int | None = None) -> Frame:
    """Checks everything about a frame that can be checked without decompressing it.

    Give the number of values you expect as `size`: it is what bounds the memory that
    decoding takes.
    """
    view = memoryview(data).cast("B")
    header_length, length = _prelude(view)
    if length != view.nbytes:
        raise WireError(
            f"The frame says it has {length} bytes, {view.nbytes} are here.", hint=DAMAGED
        )
    digest = hashlib.sha256(view[:-DIGEST_BYTES]).hexdigest()
    claimed = view[-DIGEST_BYTES:].hex()
    if digest != claimed:
        why = f"The frame hashes to {digest[:12]}…, it says {claimed[:12]}…."
        raise WireError(why, hint=DAMAGED)
    header, lengths, codec = read_header(bytes(view[PRELUDE.size :][:header_length]))
    if size is not None and header.size != size:
        raise WireError(
            f"The frame holds {header.size} values, fragment {header.fragment} has {size}.",
            hint="The two sides cut the model differently; compare their specs.",
        )
    body = view[PRELUDE.size + header_length : -DIGEST_BYTES]
    _check_chunks(body, header.size, lengths, codec)
    return Frame(header, digest, view, tuple(lengths), codec)


def read_chain(data: Body, *, size: int | None = None) -> list[Frame]:
    """Opens concatenated deltas, each of which starts from the version the last one yields."""
    view = memoryview(data).cast("B")
    frames: list[Frame] = []
    while view.nbytes:
        _, length = _prelude(view)
        if length > view.nbytes:
            raise WireError(
                f"Delta {len(frames)} says it has {length} bytes, {view.nbytes} are left.",
                hint=DAMAGED,
            )
        frames.append(open_frame(view[:length], size=size))
        view = view[length:]
    for place, frame in enumerate(frames):
        first, here = frames[0].header, frame.header
        base = first.base + place
        expected = ("delta", first.run, first.layout, first.fragment, first.size, base)
        if (here.kind, here.run, here.layout, here.fragment, here.size, here.base) != expected:
            raise WireError(
                f"Frame {place} of the chain is a {here.kind} of fragment {here.fragment} on "
                f"version {here.base}; a delta of fragment {first.fragment} on version {base} "
                "belongs there."
            )
    return frames


def most_bytes(size: int, codec: Codec | None = None) -> int:
    """Says how long a frame of `size` values can get; without a codec, in any of them."""
    chunks = -(-size // CHUNK)
    body = codec.body_size(size) if codec else 4 * size
    # What zstd may add to bytes it cannot shrink, and each chunk's last, padded block.
    body += body // 256 + chunks * (64 + (1 << 16))
    return PRELUDE.size + MOST_HEADER_BYTES + body + DIGEST_BYTES


def _prelude(view: memoryview) -> tuple[int, int]:
    """Reads (header length, frame length), both possible, from the start of a frame."""
    least = PRELUDE.size + DIGEST_BYTES
    if view.nbytes < least:
        raise WireError(
            f"{view.nbytes} bytes are too few for a frame, which has at least {least}.",
            hint=DAMAGED,
        )
    magic, version, zero, header_length, length = PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"These bytes are not a diloco frame: they begin with {magic!r}.")
    if version != FRAME_VERSION:
        raise WireError(
            f"The frame has version {version}, this program reads version {FRAME_VERSION}.",
            hint="Update the older side.",
        )
    if zero or header_length > MOST_HEADER_BYTES or length < least + header_length:
        raise WireError(
            f"The frame's first bytes contradict each other: reserved {zero}, "
            f"header of {header_length} bytes, frame of {length}.",
            hint=DAMAGED,
        )
    return header_length, length


def _check_chunks(body: memoryview, size: int, lengths: Sequence[int], codec: Codec) -> None:
    """Refuses chunks whose number, lengths or declared sizes are not what `size` values need."""
    needed = -(-size // CHUNK)
    if len(lengths) != needed:
        raise WireError(f"The frame has {len(lengths)} chunks; {size} values need {needed}.")
    if sum(lengths) != body.nbytes:
        raise WireError(
            f"The chunks are said to have {sum(lengths)} bytes together, {body.nbytes} are here."
        )
    for place, compressed in enumerate(_chunks(body, lengths)):
        expected = codec.body_size(min(CHUNK, size - place * CHUNK))
        if why := _wrong_zstd(compressed, expected):
            raise WireError(f"Chunk {place} is refused before decompressing: {why}.")


def _wrong_zstd(compressed: memoryview, expected: int) -> str | None:
    """Says what is wrong with a zstd frame's own header, if anything.

    Asked before decompressing, because the library allocates whatever size a frame
    declares, and takes limits given to it for frames that declare none.
    """
    try:
        declared = zstandard.get_frame_parameters(compressed)
    except zstandard.ZstdError as error:
        return str(error)
    if declared.content_size != expected:
        return f"it declares {declared.content_size} bytes of content where {expected} belong"
    if declared.window_size > MOST_WINDOW_BYTES:
        return f"it wants a window of {declared.window_size} bytes, {MOST_WINDOW_BYTES} are allowed"
    if not declared.has_checksum:
        return "it has no checksum"
    return "it needs a dictionary" if declared.dict_id else None


def _chunks(body: memoryview, lengths: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for length in lengths:
        yield body[start : start + length]
        start += length
