"""A frame carries its numbers whole, or is refused with a reason."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.errors import WireError
from diloco_cli.wire.codecs import NotFinite, codecs
from diloco_cli.wire.frame import CHUNK, most_bytes, open_frame, pack, read_chain
from tests.wire.forged_frames import delta, header, honest, opened, ramp

every_codec = pytest.mark.parametrize("kind", codecs.kinds())


@every_codec
def test_what_was_packed_comes_out_again(kind):
    said = header(
        700,
        codec={"kind": kind},
        prev="a" * 64,
        tokens=4096.0,
        steps=24.0,
        totals={"trained": 9000.0},
        cursor={"epoch": 1, "files": ["a.txt", None], "share": 0.25},
    )
    frame = open_frame(pack(said, ramp(700)), size=700)
    codec = codecs.build({"kind": kind})
    assert frame.header == said
    np.testing.assert_array_equal(frame.values(), codec.decode(codec.encode(ramp(700)), 700))


def test_the_last_32_bytes_are_the_identity():
    data = honest()
    assert opened(data).digest == data[-32:].hex() == hashlib.sha256(data[:-32]).hexdigest()
    assert bytes(opened(data).data) == data


def test_packing_the_same_twice_gives_the_same_frame():
    assert honest() == honest()


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 777])
def test_long_vectors_travel_in_chunks_that_decode_alone(size):
    values = ramp(size)
    frame = open_frame(pack(header(size, codec={"kind": "fp32"}), values))
    parts = list(frame.chunks())
    assert [part.size for part in parts[:-1]] == [CHUNK] * (len(parts) - 1)
    np.testing.assert_array_equal(np.concatenate(parts), values)
    np.testing.assert_array_equal(frame.values(), values)


@every_codec
def test_a_chunk_boundary_is_no_boundary_for_the_numbers(kind):
    values = np.random.default_rng(7).standard_normal(CHUNK + 600).astype(np.float32)
    codec = codecs.build({"kind": kind})
    frame = open_frame(pack(header(values.size, codec={"kind": kind}), values))
    np.testing.assert_array_equal(frame.values(), codec.decode(codec.encode(values), values.size))


@pytest.mark.parametrize("place", [0, 99, CHUNK + 5])
def test_a_value_that_is_no_number_is_named_by_its_place_in_the_fragment(place):
    values = np.zeros(CHUNK + 100, np.float32)
    values[place] = np.nan
    with pytest.raises(NotFinite) as refusal:
        pack(header(values.size), values)
    assert refusal.value.index == place


def test_the_header_must_know_how_many_values_there_are():
    with pytest.raises(ValueError, match="the header says 5 values, there are 4"):
        pack(header(5), ramp(4))


@pytest.mark.parametrize("level", [-5, 0, 20])
def test_levels_that_skip_entropy_coding_do_not_exist(level):
    with pytest.raises(ValueError, match="not within 1 to 19"):
        pack(header(10), ramp(10), level=level)


@every_codec
@pytest.mark.parametrize("level", [1, 19])
def test_any_level_is_readable_and_no_longer_than_allowed(kind, level):
    noise = np.random.default_rng(1).integers(0, 2**32, 3000, np.uint32).view(np.float32)
    values = np.nan_to_num(noise, nan=0.0, posinf=0.0, neginf=0.0)
    data = pack(header(3000, codec={"kind": kind}), values, level=level)
    assert len(data) <= most_bytes(3000, codecs.build({"kind": kind})) <= most_bytes(3000) + 7000
    assert open_frame(data).values().size == 3000


@pytest.mark.parametrize("size", [1, 31, 32, 33, 512, 513])
def test_small_fragments_are_frames_too(size):
    assert open_frame(honest(size), size=size).values().size == size


def test_another_fragment_of_another_size_is_refused():
    with pytest.raises(WireError, match="holds 100 values, fragment 3 has 101"):
        open_frame(honest(), size=101)


def test_every_single_flipped_bit_is_noticed():
    noise = np.random.default_rng(2).standard_normal(7600).astype(np.float32)
    data = pack(header(7600), noise)
    assert 3500 < len(data) < 4600
    flipped = bytearray(data)
    for bit in range(8 * len(data)):
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(WireError):
            open_frame(flipped)
        flipped[bit // 8] ^= 1 << (bit % 8)
    assert open_frame(flipped).values().size == 7600


def test_every_truncation_is_noticed():
    data = honest()
    for length in range(len(data)):
        with pytest.raises(WireError):
            open_frame(data[:length])


@pytest.mark.parametrize("more", [b"\0", b"\n", honest()])
def test_bytes_after_the_frame_are_noticed(more):
    with pytest.raises(WireError, match="bytes"):
        open_frame(honest() + more)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_bytes_changed_in_many_places_are_noticed(data):
    frame = bytearray(honest())
    original = bytes(frame)
    for _ in range(data.draw(st.integers(1, 5))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    if bytes(frame) != original:
        with pytest.raises(WireError):
            open_frame(bytes(frame))


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_frame(data):
    with pytest.raises(WireError):
        open_frame(data)
    with pytest.raises(WireError):
        open_frame(b"\x89DiLoCo\n\x01\0\0\0" + data)


def test_another_frame_version_is_refused_by_name():
    data = bytearray(honest())
    data[8] = 2
    with pytest.raises(WireError, match="has version 2, this program reads version 1"):
        open_frame(data)


def chain(*bases: int, **fields: object) -> bytes:
    return b"".join(pack(delta(50, base, **fields), ramp(50)) for base in bases)


def test_a_chain_is_the_deltas_one_after_another():
    frames = read_chain(chain(4, 5, 6), size=50)
    assert [frame.header.version for frame in frames] == [5, 6, 7]
    assert read_chain(b"") == []


@pytest.mark.parametrize(
    "data, said",
    [
        (chain(4, 6), "version 6; a delta of fragment 3 on version 5 belongs"),
        (chain(4, 4), "on version 4; a delta of fragment 3 on version 5 belongs"),
        (chain(4) + chain(5, fragment=2), "of fragment 2"),
        (chain(4) + chain(5, run="other"), "belongs there"),
        (honest(50), "a contribution"),
        (chain(4) + b"x", "too few"),
        (chain(4, 5)[:-1], "are left"),
    ],
)
def test_a_chain_with_a_wrong_link_is_refused(data, said):
    with pytest.raises(WireError, match=said):
        read_chain(data, size=50)


def test_a_chain_of_wrong_sizes_is_refused():
    with pytest.raises(WireError, match="holds 50 values"):
        read_chain(chain(4, 5), size=51)
