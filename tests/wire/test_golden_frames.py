"""Frames of version 1 stay readable for ever, and are still written the same.

When one of these fails, the format has changed: give it a new version number, keep reading
the old one, and leave the files in tests/golden alone.
"""

import hashlib

import numpy as np
import pytest
import zstandard

from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import open_frame, pack
from diloco_cli.wire.header import write_header
from tests.wire.golden_frames import CODECS, SIZE, golden_header, golden_values, path
from tests.wire.independent_decoder import decode, read_frame

DECODED = {
    "fp32": "cd9e82eec6df92e027c13b303140ad3a281a9a0106b58335a2bbc22f0f38ea78",
    "bf16": "add1ca997f91f27ba53baabc29076a8209b98be326e85059f5e2f674b3182fb8",
    "int8": "078aeccdbe8de04ae884a58ffb10f8791f4c9778ce2697264c87e87f8775f6ee",
    "int4": "487cb4107bf398cac0972014c8e6f23c884c1055b2dd0937f0af47258d0a9836",
    "int4-64": "c2ab1abf96550bc9fb5697b4c7f0e0f46f7c6027f259a8b7cd453aa45e953dd5",
    "uniform": "8c8c6f27ca1a33101b368ff731e1561663f7b3fdd08564dcdaef0524d2cd0b5c",
    "sign": "d9e4aa73b2a92191470d8c5ae00005982dfa3d434d37f3c07b6be8de30277c46",
    "sparse": "eaba709940b36602e60c187ff19048ce5c64eaddf00ac0effc4d479d887c7d64",
}
every_file = pytest.mark.parametrize("name", CODECS)


@every_file
def test_the_numbers_of_a_committed_frame_are_what_they_were(name):
    frame = open_frame(path(name).read_bytes(), size=SIZE)
    assert frame.header == golden_header(name)
    assert hashlib.sha256(frame.values().astype("<f4").tobytes()).hexdigest() == DECODED[name]


@every_file
def test_a_decoder_written_from_the_page_alone_reads_the_same_numbers(name):
    data = path(name).read_bytes()
    header, values = read_frame(data)
    assert (header["region"], header["size"]) == ("paris", SIZE)
    np.testing.assert_array_equal(np.array(values, np.float32), open_frame(data).values())


@every_file
def test_bodies_and_header_are_still_written_to_the_byte(name):
    """Without zstd, whose own output may change from release to release."""
    data = path(name).read_bytes()
    frame = open_frame(data)
    compressed = data[-32 - frame.lengths[0] : -32]
    body = zstandard.ZstdDecompressor().decompress(compressed)
    assert codecs.build(CODECS[name]).encode(golden_values()) == body
    assert write_header(golden_header(name), list(frame.lengths)) in data


@pytest.mark.parametrize("kind", codecs.kinds())
def test_the_page_has_the_right_defaults(kind):
    values = golden_values()
    body = codecs.build({"kind": kind}).encode(values)
    restored = codecs.build({"kind": kind}).decode(body, SIZE)
    np.testing.assert_array_equal(np.array(decode({"kind": kind}, body, SIZE)), restored)


@every_file
@pytest.mark.skipif(zstandard.ZSTD_VERSION != (1, 5, 7), reason="zstd itself writes other bytes")
def test_the_whole_frame_is_still_written_to_the_byte(name):
    assert pack(golden_header(name), golden_values()) == path(name).read_bytes()
