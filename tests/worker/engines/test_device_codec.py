"""What a device packs is what the host would have packed, to the bit."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_cli.wire.chunks import CHUNK
from diloco_cli.wire.codecs import NotFinite, codecs
from diloco_cli.wire.frame import Header, pack, pack_bodies
from diloco_cli.worker.engines.device_codec import body_of, pack_on_device, packable

LARGEST = float(np.finfo(np.float32).max)
NORMAL = float(np.finfo(np.float32).smallest_normal)
CODECS = [
    {"kind": "int8", "block": 32},
    {"kind": "int4", "block": 32},
    {"kind": "int4", "block": 512},
    {"kind": "uniform", "block": 32},
    {"kind": "uniform", "block": 64, "step": 0.7},
]
SIZE = 75
"""One shape, so that XLA compiles once; the last block is short."""

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda c: "-".join(map(str, c.values())))
numbers = st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=True)
narrow = st.floats(-4, 4, width=16)


def header(codec: dict, size: int) -> Header:
    return Header.contribution(
        run="quickstart-1",
        layout="5" * 64,
        fragment=0,
        size=size,
        codec=codec,
        base=0,
        region="paris",
    )


@every_codec
@settings(deadline=None, max_examples=60)
@given(values=hnp.arrays(np.float32, SIZE, elements=numbers | narrow))
@example(np.zeros(SIZE, np.float32))
@example(np.full(SIZE, LARGEST, np.float32))
@example(np.linspace(-LARGEST, LARGEST, SIZE, dtype=np.float32))
@example(np.array([1e-45, -1e-40, NORMAL, -NORMAL, 2 * NORMAL] * 15, np.float32))
@example(np.array([LARGEST, -LARGEST, 1e-45, 1.0, -0.0] * 15, np.float32))
def test_bodies_are_those_of_the_host(codec, values):
    built = codecs.build(codec)
    body, wrong = body_of(built, jnp.asarray(values))
    assert int(wrong) == -1
    assert np.asarray(body).tobytes() == built.encode(values)


@every_codec
def test_so_are_those_of_many_values(codec):
    rng = np.random.default_rng(1)
    scales = np.exp2(rng.integers(-130, 120, 700)).astype(np.float32)
    values = (rng.standard_t(4, (700, 100)).astype(np.float32) * scales[:, None]).reshape(-1)
    built = codecs.build(codec)
    body, _ = body_of(built, jnp.asarray(values))
    assert np.asarray(body).tobytes() == built.encode(values)


@pytest.mark.parametrize(
    "codec", [{"kind": "int8"}, {"kind": "int4"}, {"kind": "uniform"}], ids=str
)
def test_frames_are_those_of_the_host(codec):
    values = np.random.default_rng(2).standard_normal(CHUNK + 999, np.float32)
    said = header(codec, values.size)
    packed = pack_on_device(said, jnp.asarray(values))
    assert packed == pack(said, values)


@pytest.mark.parametrize("place", [0, 40, CHUNK + 3])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_value_that_is_no_number_is_refused_by_its_place(place, value):
    values = np.zeros(CHUNK + 999, np.float32)
    values[[place, CHUNK + 900]] = value
    codec = {"kind": "int4", "block": 512}
    with pytest.raises(NotFinite, match=f"Value {place} is {value}"):
        pack_on_device(header(codec, values.size), jnp.asarray(values))


def test_kinds_that_stay_on_the_host_are_told_apart():
    assert [kind for kind in codecs.kinds() if packable(codecs.build({"kind": kind}))] == [
        "int4",
        "int8",
        "uniform",
    ]
    with pytest.raises(ValueError, match="on the host alone"):
        body_of(codecs.build({"kind": "sparse"}), jnp.zeros(5))


def test_bodies_of_another_length_are_a_callers_mistake():
    with pytest.raises(ValueError, match=r"\[3\] bytes where \[258\] belong"):
        pack_bodies(header({"kind": "int4"}, 100), [b"abc"])
