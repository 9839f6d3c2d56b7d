"""However many threads work on a frame, it is the same frame, and the same numbers."""

import subprocess
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from diloco_cli.core.fragments import Fragment, Piece, piece_of
from diloco_cli.errors import WireError
from diloco_cli.wire import chunks
from diloco_cli.wire.chunks import CHUNK, in_chunks, spread
from diloco_cli.wire.codecs import NotFinite, codecs
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import open_frame, pack
from tests import ROOT
from tests.wire.forged_frames import header

every_codec = pytest.mark.parametrize("kind", codecs.kinds())
SIZE = 3 * CHUNK + 12_345


def noise(size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return noise(SIZE)


@every_codec
def test_threads_change_neither_frame_nor_numbers(kind, values):
    said = header(SIZE, codec={"kind": kind})
    data = pack(said, values, threads=1)
    assert pack(said, values, threads=3) == data
    frame = open_frame(data, size=SIZE)
    alone = frame.values(threads=1)
    np.testing.assert_array_equal(frame.values(threads=3), alone)
    np.testing.assert_array_equal(np.concatenate(list(frame.chunks())), alone)
    edges = [0, 5, 700, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 9, 2 * CHUNK + 9, SIZE]
    squares = frame.squares(edges, threads=1)
    np.testing.assert_array_equal(frame.squares(edges, threads=3), squares)
    exact = np.square(alone, dtype=np.float64)
    expected = [exact[a:b].sum() for a, b in pairwise(edges)]
    np.testing.assert_allclose(squares, expected, rtol=1e-13)


@every_codec
@pytest.mark.parametrize("threads, dtype", [(1, np.float64), (3, np.float64), (3, np.float32)])
def test_accumulating_a_frame_is_adding_its_values(kind, threads, dtype, values):
    frame = open_frame(pack(header(SIZE, codec={"kind": kind}), values))
    sums = np.linspace(-1, 1, SIZE, dtype=dtype)
    expected = sums + dtype(0.3) * frame.values().astype(dtype)
    frame.accumulate(sums, 0.3, threads=threads)
    np.testing.assert_array_equal(sums, expected)


@every_codec
@pytest.mark.parametrize("threads", [1, 3])
def test_the_weights_after_a_delta_are_a_vector_of_their_own(kind, threads, values):
    frame = open_frame(pack(header(SIZE, codec={"kind": kind}), values))
    weights = noise(SIZE, seed=2)
    before = weights.copy()
    found, digest = frame.added_to(weights, threads=threads)
    np.testing.assert_array_equal(found, before + frame.values())
    np.testing.assert_array_equal(weights, before)
    assert digest == vector_digest(found)


HELPED = """
import threading, numpy as np
from tests.wire.forged_frames import header
from diloco_cli.wire.chunks import CHUNK, FEW
from diloco_cli.wire.frame import open_frame, pack

for size in (FEW * CHUNK, FEW * CHUNK + 1):
    values = np.zeros(size, np.float32)
    frame = open_frame(pack(header(size), values, **{packing}))
    frame.added_to(values, **{adding})
    print(any(thread.name.startswith("chunks") for thread in threading.enumerate()))
"""


@pytest.mark.skipif(chunks.cores() < 2, reason="there is nobody to help")
@pytest.mark.parametrize("alone", ["pack", "added_to"])
def test_helpers_are_not_woken_for_a_few_chunks(alone):
    one, free = {"threads": 1}, {}
    packing, adding = (free, one) if alone == "pack" else (one, free)
    program = HELPED.format(packing=packing, adding=adding)
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    assert found.stdout.split() == ["False", "True"], found.stderr


def test_sums_that_do_not_fit_are_a_callers_mistake():
    frame = open_frame(pack(header(100), noise(100)))
    for sums in (np.zeros(99), np.zeros(100, np.int64), np.zeros(200)[::2]):
        with pytest.raises(ValueError, match="sums of 100 contiguous floats are needed"):
            frame.accumulate(sums, 1.0)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_value_that_is_no_number_is_named_whoever_finds_one_first(threads, values):
    broken = values.copy()
    broken[[CHUNK + 77, 2 * CHUNK, 3 * CHUNK + 1]] = np.nan
    with pytest.raises(NotFinite) as refusal:
        pack(header(SIZE), broken, threads=threads)
    assert refusal.value.index == CHUNK + 77


def test_a_place_in_a_fragment_has_a_tensors_name():
    first = Piece("embed", 2, 5, (3, 4), offset=0)
    second = Piece("norm", 0, 7, (7,), offset=12)
    fragment = Fragment(0, (first, second))
    named = [piece_of(fragment, index).tensor for index in (0, 11, 12, 18)]
    assert named == ["embed", "embed", "norm", "norm"]
    with pytest.raises(IndexError, match="fragment 0 has 19 values, there is no value 19"):
        piece_of(fragment, 19)


def test_results_come_in_order_from_as_many_threads_as_asked():
    barrier = threading.Barrier(3, timeout=30)

    def work(place: int) -> tuple[int, str]:
        barrier.wait()  # Passes only if three of them are at work at once.
        return place, threading.current_thread().name

    answers = list(spread(work, 6, threads=3))
    assert [place for place, _ in answers] == list(range(6))
    assert len({name for _, name in answers}) == 3


def test_whoever_asks_takes_part():
    me = threading.current_thread()
    barrier = threading.Barrier(2, timeout=30)

    def work(_: int) -> threading.Thread:
        barrier.wait()  # Two are at work at once, so one of them is the caller.
        return threading.current_thread()

    assert me in list(spread(work, 2, threads=2))


def test_nothing_is_under_way_when_a_failure_rises():
    begun, go = threading.Event(), threading.Event()
    over: list[int] = []

    def work(place: int) -> None:
        if place == 0:
            assert begun.wait(30)
            threading.Timer(0.05, go.set).start()
            raise ValueError("place 0")
        begun.set()
        assert go.wait(30)
        over.append(place)

    with pytest.raises(ValueError, match="place 0"):
        list(spread(work, 4, threads=2))
    assert len(over) == 1  # What was begun is done, what was not is left.


def test_helpers_that_others_keep_busy_are_not_waited_for():
    busy, done = threading.Barrier(3, timeout=30), threading.Event()

    def occupy(_: int) -> None:
        busy.wait()  # Who asked for this, the one helper there is, and the test.
        assert done.wait(30)

    thread = threading.Thread(target=lambda: list(spread(occupy, 2, threads=2)), daemon=True)
    thread.start()
    busy.wait()
    try:
        assert list(spread(lambda place: place, 3, threads=2)) == [0, 1, 2]
    finally:
        done.set()
        thread.join()


def test_calls_for_other_numbers_of_helpers_share_them():
    def threads() -> int:
        return sum(each.name.startswith("chunks") for each in threading.enumerate())

    for wanted in range(2, 10):
        together = threading.Barrier(wanted, timeout=30)
        list(spread(lambda _, all_at_once=together: all_at_once.wait(), wanted, threads=wanted))
    deadline = time.monotonic() + 30
    while threads() > 8:  # Not 1 + 2 + … + 8: every thread keeps its scratch memory.
        assert time.monotonic() < deadline, threads()
        time.sleep(0.01)


def test_one_thread_or_one_chunk_needs_no_helper():
    me = threading.current_thread()
    assert set(spread(lambda _: threading.current_thread(), 3, threads=1)) == {me}
    assert list(in_chunks(lambda *_: threading.current_thread(), CHUNK, threads=8)) == [me]


def test_a_helper_does_its_own_chunks_instead_of_waiting_for_others():
    def outer(_: int) -> set[str]:
        return set(spread(lambda _: threading.current_thread().name, 4, threads=2))

    assert all(len(names) == 1 for names in spread(outer, 4, threads=2))


def test_a_thread_uses_the_cores_it_may_use(monkeypatch):
    monkeypatch.setattr(chunks.os, "sched_getaffinity", lambda _: {3}, raising=False)
    me = threading.current_thread()
    assert set(spread(lambda _: threading.current_thread(), 4)) == {me}


def test_a_damaged_chunk_is_named_also_by_a_helper(values):
    frame = open_frame(pack(header(SIZE), values))
    data = bytearray(frame.data)
    data[-40] ^= 1  # In the checksum of the last chunk.
    broken = type(frame)(frame.header, frame.digest, memoryview(data), frame.lengths, frame.codec)
    with pytest.raises(WireError, match="Chunk 3 does not decompress"):
        broken.values(threads=3)


class Half:
    """A codec as a plugin writes it: three methods, no base class."""

    def encode(self, values: np.ndarray) -> bytes:
        return values.astype("<f2").tobytes()

    def decode(self, body: bytes, size: int) -> np.ndarray:
        return np.frombuffer(body, "<f2", size).astype(np.float32)

    def body_size(self, size: int) -> int:
        return 2 * size


def test_a_codec_with_three_methods_is_enough(monkeypatch):
    monkeypatch.setitem(codecs._choices, "half", Half)
    monkeypatch.setattr(codecs, "inspect", lambda _: (Half(), []))
    source = noise(CHUNK + 9)
    frame = open_frame(pack(header(source.size, codec={"kind": "half"}), source, threads=2))
    expected = source.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(frame.values(threads=2), expected)
    sums = np.ones(source.size)
    frame.accumulate(sums, 2.0)
    np.testing.assert_array_equal(sums, 1 + 2.0 * expected.astype(np.float64))
