"""A frame that claims more than it may is refused before any memory is spent on it."""

import struct
import tracemalloc
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zstandard

from diloco_cli.errors import WireError
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import open_frame
from tests.wire.forged_frames import (
    honest,
    opened,
    put_together,
    ramp,
    squeezed,
    taken_apart,
    with_chunk,
    with_header,
)

BODY = codecs.build({"kind": "int4"}).encode(ramp(100))


@contextmanager
def memory_below(limit: int):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def zstd_header(content: int, *, window: int | None = None) -> bytes:
    """The start of a zstd frame with a checksum that declares any size and any window."""
    single = 0 if window else 1
    descriptor = (3 << 6) | (single << 5) | (1 << 2)
    start = struct.pack("<IB", 0xFD2FB528, descriptor)
    if window:
        start += bytes([(window.bit_length() - 1 - 10) << 3])
    return start + struct.pack("<Q", content)


def test_the_forger_can_write_an_honest_frame():
    """Or else the refusals below would prove nothing."""
    np.testing.assert_array_equal(
        opened(with_chunk(honest(), squeezed(BODY))).values(), opened(honest()).values()
    )


@pytest.mark.parametrize("claimed", [len(BODY) + 1, 256 << 20, 1 << 40, 2**63])
def test_a_forged_content_size_is_refused_unread(claimed):
    bomb = with_chunk(honest(), zstd_header(claimed) + b"\x01\0\0")
    with memory_below(1 << 20), pytest.raises(WireError, match=r"declares \d+ .* where 258 belong"):
        opened(bomb)


def test_eight_kilobytes_that_become_256_megabytes_are_refused_unread():
    bomb = with_chunk(honest(), squeezed(bytes(256 << 20)))
    assert len(bomb) < 20_000
    with memory_below(1 << 20), pytest.raises(WireError, match="declares 268435456 bytes"):
        opened(bomb)


@pytest.mark.parametrize("window", [16 << 20, 1 << 31])
def test_a_window_of_gigabytes_is_refused_unread(window):
    bomb = with_chunk(honest(), zstd_header(len(BODY), window=window) + b"\x01\0\0")
    with memory_below(1 << 20), pytest.raises(WireError, match="window"):
        opened(bomb)


def test_a_header_that_claims_a_trillion_values_is_refused_unread():
    for bomb in (
        with_header(honest(), size=2**40),
        with_header(honest(), size=2**40, chunks=[50] * 100_000),
    ):
        with memory_below(8 << 20), pytest.raises(WireError):
            open_frame(bomb)
    with memory_below(1 << 20), pytest.raises(WireError, match="fragment 3 has 100"):
        opened(with_header(honest(), size=2**40))


def test_a_frame_of_a_frame_length_no_disk_has_is_refused():
    data = bytearray(honest())
    struct.pack_into("<Q", data, 16, 2**63)
    with memory_below(1 << 20), pytest.raises(WireError, match="says it has 9223372036854775808"):
        opened(bytes(data))


@pytest.mark.parametrize(
    "start, said",
    [
        ({"magic": b"\x89DiLoCo\r"}, "not a diloco frame"),
        ({"version": 0}, "has version 0"),
        ({"version": 257}, "has version 257"),
        ({"reserved": 1}, "reserved 1"),
    ],
)
def test_another_beginning_is_refused_even_under_a_forged_digest(start, said):
    with pytest.raises(WireError, match=said):
        opened(put_together(*taken_apart(honest()), **start))


def test_a_frame_without_checksum_is_refused():
    with pytest.raises(WireError, match="no checksum"):
        opened(with_chunk(honest(), squeezed(BODY, write_checksum=False)))


def test_a_frame_that_does_not_say_its_size_is_refused():
    with pytest.raises(WireError, match="declares"):
        opened(with_chunk(honest(), squeezed(BODY, write_content_size=False)))


def test_a_frame_that_needs_a_dictionary_is_refused():
    samples: list[Any] = [ramp(100 + n).tobytes() for n in range(200)]
    dictionary = zstandard.train_dictionary(2048, samples)
    with pytest.raises(WireError, match="dictionary"):
        opened(with_chunk(honest(), squeezed(BODY, dict_data=dictionary)))


@pytest.mark.parametrize(
    "chunk",
    [
        squeezed(BODY) + b"\0",
        squeezed(BODY) + squeezed(BODY),
        squeezed(BODY) + b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        squeezed(BODY)[:-1],
        squeezed(BODY)[:-4],
    ],
    ids=["trailing byte", "second frame", "skippable frame", "cut checksum", "no checksum"],
)
def test_more_or_less_than_one_zstd_frame_is_refused(chunk):
    with pytest.raises(WireError, match="Chunk 0 does not decompress"):
        opened(with_chunk(honest(), chunk)).values()


@pytest.mark.parametrize("chunk", [b"", b"\x50\x2a\x4d\x18\x04\0\0\0abcd", b"PK\3\4", b"\x28\xb5"])
def test_what_is_no_zstd_frame_is_refused(chunk):
    fields, _ = taken_apart(honest())
    bad = put_together({**fields, "chunks": [len(chunk)]}, chunk)
    with pytest.raises(WireError):
        opened(bad)


def test_a_content_size_that_lies_within_the_allowed_is_refused():
    """The header is right for us; what follows is shorter, longer or of another kind."""
    for body in (BODY[:-1], BODY + b"\0"):
        liar = bytearray(squeezed(body))
        place = bytes(liar).index(struct.pack("<H", len(body) - 256), 4)
        struct.pack_into("<H", liar, place, len(BODY) - 256)
        frame = opened(with_chunk(honest(), bytes(liar)))
        with memory_below(4 << 20), pytest.raises(WireError, match="does not decompress"):
            frame.values()


def test_a_flipped_bit_in_a_chunk_never_gives_other_numbers_even_under_a_forged_digest():
    """zstd has bits without a meaning; any other one is caught by its checksum."""
    chunk = bytearray(squeezed(BODY))
    expected = opened(honest()).values()
    refused = 0
    for bit in range(8 * len(chunk)):
        chunk[bit // 8] ^= 1 << (bit % 8)
        try:
            found = opened(with_chunk(honest(), bytes(chunk))).values()
            np.testing.assert_array_equal(found, expected)
        except WireError:
            refused += 1
        chunk[bit // 8] ^= 1 << (bit % 8)
    assert refused > 0.97 * 8 * len(chunk)


def test_chunk_lengths_must_add_up_and_be_as_many_as_needed():
    data = honest()
    length = taken_apart(data)[0]["chunks"][0]
    for chunks, said in [
        ([length - 1], "said to have"),
        ([length + 1], "said to have"),
        ([length - 5, 5], "has 2 chunks; 100 values need 1"),
        ([], "has 0 chunks"),
    ]:
        with pytest.raises(WireError, match=said):
            opened(with_header(data, chunks=chunks))


def test_decoding_costs_no_more_than_the_values_and_a_chunk():
    size = 4 << 20
    data = honest(size)
    with memory_below(4 * size + (24 << 20)):
        open_frame(data, size=size).values()
