"""Chunks of a frame, each on its own, on as many cores as this process may use.

    values ──codec──▶ body, in this thread's scratch memory ──zstd──▶ bytes

Threads share nothing: each has its (de)compressors and its scratch, and keeps them, since
fresh memory costs more than the work done in it. Results come in order and depend on
nothing but the values, whatever the number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import numpy as np
import zstandard

from diloco_cli.errors import WireError
from diloco_cli.wire.codecs.protocol import Body, Codec, InPlace, NotFinite, raw

CHUNK = 1 << 20
"""Values in one independent zstd frame."""

MOST_WINDOW_BYTES = 8 << 20

FEW = 4
"""Chunks of one frame that one thread handles alone: helpers would save some milliseconds by the
clock, if a core is idle at all, and cost a tenth more processor time, which training loses."""

T = TypeVar("T")


class Tools(threading.local):
    """What one thread works with."""

    def __init__(self) -> None:
        self.helping = False
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}
        self._decompressor: zstandard.ZstdDecompressor | None = None
        self._scratch: dict[str, np.ndarray] = {}

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        if level not in self._compressors:
            self._compressors[level] = zstandard.ZstdCompressor(
                level, write_checksum=True, write_content_size=True
            )
        return self._compressors[level]

    @property
    def decompressor(self) -> zstandard.ZstdDecompressor:
        if self._decompressor is None:
            self._decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES)
        return self._decompressor

    def scratch(self, purpose: str, size: int, dtype: type) -> np.ndarray:
        """Memory for one purpose, with whatever was left in it; valid until asked for again."""
        memory = self._scratch.get(purpose)
        if memory is None or memory.size < size or memory.dtype != dtype:
            memory = self._scratch[purpose] = np.empty(size, dtype)
        return memory[:size]


tools = Tools()


def span_of(place: int, size: int) -> slice:
    """Which values of a frame of `size` are in a chunk."""
    return slice(place * CHUNK, min((place + 1) * CHUNK, size))


def squeeze(codec: Codec, values: np.ndarray, level: int) -> bytes:
    """Encodes and compresses one chunk."""
    return tools.compressor(level).compress(body_of(codec, values))


def body_of(codec: Codec, values: np.ndarray) -> Body:
    """Encodes one chunk, if possible into scratch memory."""
    if not isinstance(codec, InPlace):
        return codec.encode(values)
    body = tools.scratch("body", codec.body_size(values.size), np.uint8)
    codec.write(values, body)
    return body.data


def unsqueeze(compressed: Body, place: int) -> bytes:
    """Decompresses a chunk whose declared size has been checked; `place` is for the message."""
    try:
        return tools.decompressor.decompress(compressed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"Chunk {place} does not decompress: {error}.") from None


def read_into(codec: Codec, body: Body, values: np.ndarray) -> None:
    """Decodes a chunk's body into values that are already there."""
    if isinstance(codec, InPlace):
        codec.read(raw(body, codec.body_size(values.size)), values)
    else:
        values[:] = codec.decode(body, values.size)


def add_into(codec: Codec, body: Body, sums: np.ndarray, weight: float) -> None:
    """Adds `weight` times a chunk's values to sums of float64 or float32."""
    if isinstance(codec, InPlace):
        codec.add(raw(body, codec.body_size(sums.size)), sums, weight)
    else:
        sums += np.multiply(codec.decode(body, sums.size), weight, dtype=sums.dtype)


def plus_into(codec: Codec, body: Body, base: np.ndarray, sums: np.ndarray) -> None:
    """Fills the sums with base + a chunk's values, all of them float32."""
    if isinstance(codec, InPlace):
        codec.plus(raw(body, codec.body_size(sums.size)), base, sums)
    else:
        np.add(base, codec.decode(body, sums.size), out=sums)


def spread(work: Callable[[int], T], count: int, threads: int | None = None) -> Iterator[T]:
    """Does work(0) … work(count − 1) on several threads; yields the results in order.

    The caller's thread is one of them. What went wrong first in that order is what rises, and
    nothing is under way any more when it does. Nothing is done for a caller who does not ask
    for results.
    """
    wanted = min(cores() if threads is None else threads, count)
    if wanted <= 1 or tools.helping:  # A helper has no helpers of its own.
        return map(work, range(count))
    return _Shared(work, count).results(wanted - 1)


class _Shared(Generic[T]):
    """Work that several threads take from one pile.

    A thread that sleeps until a result is there has to be woken for each, which takes longer
    than a tenth of the work. So a thread that waits for a result does what is left meanwhile.
    """

    def __init__(self, work: Callable[[int], T], count: int) -> None:
        self._work, self._count = work, count
        self._pile = iter(range(count))
        self._done: dict[int, Future[T]] = {}

    def results(self, helpers: int) -> Iterator[T]:
        helping = _helpers.ask(helpers, self._help)
        try:
            for place in range(self._count):
                while place not in self._done and self._take():
                    pass
                if place not in self._done:  # The last ones are under way.
                    _settle(helping)
                yield self._done.pop(place).result()
        finally:
            self._pile = iter(())
            _settle(helping)

    def _help(self) -> None:
        while self._take():
            pass

    def _take(self) -> bool:
        """Does what comes next; says whether there was anything."""
        place = next(self._pile, None)
        if place is None:
            return False
        outcome: Future[T] = Future()
        tools.helping, before = True, tools.helping
        try:
            outcome.set_result(self._work(place))
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            tools.helping = before
        self._done[place] = outcome
        return True


def _settle(helping: list[Future[None]]) -> None:
    """Waits for helpers, but for those that others kept busy and that never came to help."""
    wait([future for future in helping if not future.cancel()])


def in_chunks(
    work: Callable[[int, slice], T], size: int, threads: int | None = None
) -> Iterator[T]:
    """Does the work for every chunk of `size` values; a NotFinite names its place in the whole."""

    def work_on(place: int) -> T:
        span = span_of(place, size)
        try:
            return work(place, span)
        except NotFinite as error:
            raise NotFinite(error.value, span.start + error.index) from None

    return spread(work_on, -(-size // CHUNK), threads)


def hands(size: int, threads: int | None) -> int | None:
    """How many threads work on one frame of `size` values, unless told otherwise."""
    return 1 if threads is None and size <= FEW * CHUNK else threads


def cores() -> int:
    """Says how many cores this thread may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Helpers:
    """One pool for all, with as many threads as any call has asked for.

    One for each number would be, on many cores, many times as many threads, each with scratch
    memory of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._most = 0

    def ask(self, count: int, work: Callable[[], None]) -> list[Future[None]]:
        """Lets so many threads do the work, as soon as they are free."""
        with self._lock:
            if self._pool is None or count > self._most:
                if self._pool is not None:
                    self._pool.shutdown(wait=False)  # What it was asked for, it still does.
                self._pool, self._most = ThreadPoolExecutor(count, "chunks"), count
            return [self._pool.submit(work) for _ in range(count)]


_helpers = _Helpers()
