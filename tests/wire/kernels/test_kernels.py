"""The compiled loops write what plain numpy writes, and add what numpy adds, to the bit."""

import shutil
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_cli.errors import WireError
from diloco_cli.wire.codecs import InPlace, codecs
from diloco_cli.wire.codecs.block import SCALE_FLOOR, Int4, largest_scale
from diloco_cli.wire.kernels import bits as shared
from diloco_cli.wire.kernels import jit
from diloco_cli.wire.kernels import sums as sum_kernels
from diloco_cli.wire.kernels.jit import MODULES, Floats, Kernel, real, warm
from tests.wire import numpy_encoders as plain

LARGEST = float(np.finfo(np.float32).max)
NORMAL = float(np.finfo(np.float32).smallest_normal)
EXTREMES = np.array([LARGEST, -LARGEST, 1e-45, -1e-45, NORMAL, -0.0, 0.0, 1.0], np.float32)
CODECS = [
    {"kind": "int8", "block": 32},
    {"kind": "int8"},
    {"kind": "int4", "block": 64},
    {"kind": "int4"},
    {"kind": "uniform", "block": 32},
    {"kind": "uniform", "step": 0.25},
    {"kind": "uniform", "step": 4.0, "block": 64},
    {"kind": "sign", "block": 32},
    {"kind": "sign"},
    {"kind": "sparse", "block": 64, "density": 0.1},
    {"kind": "sparse", "block": 1024, "density": 0.002},
    {"kind": "sparse"},
]
compact = pytest.mark.parametrize(
    "codec", CODECS, ids=lambda each: "-".join(map(str, each.values()))
)
every_kind = pytest.mark.parametrize("kind", codecs.kinds())
numbers = st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=True)
small = st.floats(-4, 4, width=16)
arrays = hnp.arrays(np.float32, st.integers(1, 300), elements=numbers | small)


@compact
@settings(deadline=None, max_examples=60)
@given(values=arrays)
@example(EXTREMES)
@example(EXTREMES[2:5])
@example(np.full(130, -LARGEST, np.float32))
@example(np.array([1e30] + [1.0] * 200, np.float32))
@example(np.array([0.5] * 300, np.float32))
def test_bodies_are_those_of_plain_numpy(codec, values):
    with np.errstate(all="ignore"):
        expected = plain.encode(codec, values)
    assert codecs.build(codec).encode(values) == expected


@compact
@pytest.mark.parametrize("size", [4096, 70_001])
def test_long_bodies_are_too(codec, size):
    values = np.random.default_rng(size).standard_t(5, size).astype(np.float32) * 1e-3
    values[100:900] = 0
    assert codecs.build(codec).encode(values) == plain.encode(codec, values)


@every_kind
@pytest.mark.parametrize("size", [1, 512, 5000])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_adding_a_body_is_adding_its_values(kind, size, dtype):
    rng = np.random.default_rng(size)
    codec = codecs.build({"kind": kind})
    assert isinstance(codec, InPlace)
    body = np.frombuffer(codec.encode(rng.standard_normal(size, np.float32)), np.uint8)
    sums = rng.standard_normal(size).astype(dtype)
    expected = sums + dtype(0.3) * codec.decode(body.data, size).astype(dtype)
    codec.add(body, sums, 0.3)
    np.testing.assert_array_equal(sums, expected)


def bits(values: np.ndarray) -> bytes:
    """What tells −0 from 0."""
    return np.ascontiguousarray(values, np.float32).tobytes()


def plus(codec, body: bytes | bytearray, base: np.ndarray) -> np.ndarray:
    sums = np.full_like(base, np.nan)
    codec.plus(np.frombuffer(bytes(body), np.uint8), base, sums)
    return sums


@compact
@settings(deadline=None, max_examples=60)
@given(values=arrays, data=st.data())
def test_a_base_plus_a_body_has_the_bits_that_numpy_gives(codec, values, data):
    base = data.draw(hnp.arrays(np.float32, values.size, elements=numbers | small))
    made = codecs.build(codec)
    body = made.encode(values)
    with np.errstate(all="ignore"):
        expected = np.add(base, made.decode(body, values.size))
        assert bits(plus(made, body, base)) == bits(expected)


@every_kind
@pytest.mark.parametrize("size", [1, 8, 511, 512, 513, 5000, 70_001])
def test_extreme_numbers_are_added_as_numpy_adds_them(kind, size):
    values = np.resize(np.concatenate([EXTREMES, np.zeros(5, np.float32)]), size)
    base = np.resize(np.roll(EXTREMES, 3), size)
    codec = codecs.build({"kind": kind})
    body = codec.encode(values)
    with np.errstate(all="ignore"):
        expected = np.add(base, codec.decode(body, size))
        assert bits(plus(codec, body, base)) == bits(expected)


@pytest.mark.parametrize("kind", ["int4", "uniform"])
@pytest.mark.parametrize(
    "place, byte, said",
    [
        (5, 0x08, "A code is -8"),
        (5, 0x80, "A code is -8"),
        (32 + 2, 0x08, "A code is -8"),
        (-1, 0x80, "scale of block 2 is"),
        (-2, 0x80, "scale of block 1 is"),
        (-3, 0x00, "scale of block 0 is"),
        (32 + 15, 0x10, "padding"),
    ],
)
def test_nothing_is_added_of_a_body_that_no_encoder_writes(kind, place, byte, said):
    codec = codecs.build({"kind": kind, "block": 32})
    body = bytearray(codec.encode(np.ones(69, np.float32)))
    body[place] = byte
    with pytest.raises(WireError, match=said):
        plus(codec, body, np.zeros(69, np.float32))
    with pytest.raises(WireError, match=said):
        codec.decode(bytes(body), 69)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, 100_003])
def test_squares_are_summed_in_64_lanes(size):
    values = np.random.default_rng(size).standard_normal(size, np.float32)
    padded = np.pad(values, (0, -size % 64)).astype(np.float64).reshape(-1, 64)
    lanes = np.zeros(64)
    for row in padded:
        lanes += row * row
    expected = 0.0
    for lane in lanes:
        expected += lane
    assert sum_kernels.square_sum(values, np.empty(64)) == expected


def test_bounds_in_the_kernels_are_those_of_the_format():
    assert shared.SCALE_FLOOR == SCALE_FLOOR
    assert largest_scale(127) == shared.MOST_INT8
    assert largest_scale(7) == shared.MOST_INT4
    assert largest_scale(1) == shared.MOST_SCALE


def double(values):
    return np.float64(values[0]) * 2


def test_a_kernel_that_cannot_be_kept_is_compiled_all_the_same(monkeypatch):
    real_njit, asked = numba.njit, []

    def njit(*, cache, **flags):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real_njit(cache=cache, **flags)

    monkeypatch.setattr(jit, "numba", SimpleNamespace(njit=njit))
    assert Kernel(double, real(Floats))(np.ones(1, np.float32)) == 2
    assert asked == [True, False]


def test_a_cache_that_was_cut_short_is_no_obstacle(tmp_path):
    """Power can fail between the rename of a cache file and the arrival of its bytes."""
    source = "\n".join(
        [
            "import numpy as np",
            "from diloco_cli.wire.kernels.jit import Floats, kernel, real",
            "@kernel(real(Floats))",
            "def twice(values):",
            "    return np.float64(values[0]) * 2",
            "print(twice(np.ones(1, np.float32)))",
        ]
    )
    (tmp_path / "some.py").write_text(source)
    run = [sys.executable, "-W", "error", str(tmp_path / "some.py")]
    root = Path(jit.__file__).parents[3]
    assert subprocess.check_output(run, text=True, cwd=root) == "2.0\n"
    kept = list((tmp_path / "__pycache__").glob("*.nbc"))
    assert len(kept) == 1
    kept[0].write_bytes(b"")
    assert subprocess.check_output(run, text=True, cwd=root) == "2.0\n"
    shutil.rmtree(tmp_path / "__pycache__")


OTHER_FILE = """
import sys
from pathlib import Path
from diloco_cli.wire.kernels import jit

folder = Path(sys.argv[1])
jit.__file__ = str(folder / "jit.py")  # The folder whose files count.
sys.path.insert(0, str(folder))
from caller import twice
import numpy as np
print(twice(np.ones(1, np.float32)))
"""


def test_a_kernel_is_compiled_again_when_a_function_of_another_file_changes(tmp_path):
    (tmp_path / "called.py").write_text(
        "import numpy as np\n"
        "from diloco_cli.wire.kernels.jit import inlined\n"
        "@inlined\n"
        "def multiple(value):\n"
        "    return np.float64(value) * 2\n"
    )
    (tmp_path / "caller.py").write_text(
        "from called import multiple\n"
        "from diloco_cli.wire.kernels.jit import Floats, kernel, real\n"
        "@kernel(real(Floats))\n"
        "def twice(values):\n"
        "    return multiple(values[0])\n"
    )
    run = [sys.executable, "-c", OTHER_FILE, str(tmp_path)]
    root = Path(jit.__file__).parents[3]

    def said() -> str:
        return subprocess.check_output(run, text=True, cwd=root)

    def entries() -> dict[Path, int]:
        kept = (tmp_path / "__pycache__").glob("*.nbi")
        return {path: path.stat().st_mtime_ns for path in kept}

    assert said() == "2.0\n"
    before = entries()
    assert len(before) == 1
    assert said() == "2.0\n" and entries() == before, "what is kept is used"
    changed = (tmp_path / "called.py").read_text().replace("* 2", "* 3")
    (tmp_path / "called.py").write_text(changed)
    assert said() == "3.0\n"


def test_every_kernel_is_in_a_file_that_is_compiled_ahead_of_time():
    package = Path(jit.__file__).parents[2]
    paths = [*package.rglob("kernels/*.py"), *package.rglob("*kernels.py")]
    with_kernels = {
        ".".join(("diloco_cli", *path.relative_to(package).with_suffix("").parts))
        for path in paths
        if "\n@kernel(" in path.read_text()
    }
    assert with_kernels == set(MODULES)
    kernels = [
        value
        for name in MODULES
        for value in vars(import_module(name)).values()
        if isinstance(value, Kernel)
    ]
    assert len(kernels) == warm() >= 25


@pytest.mark.parametrize(
    "edges", [[0, 700], [0, 1, 31, 32, 40, 63, 64, 64, 69, 200, 700], [65, 66]]
)
def test_squares_of_nibbles_are_exact_in_whole_numbers(edges):
    values = np.random.default_rng(8).standard_normal(700, np.float32)
    codec = Int4(block=64)
    body = np.frombuffer(codec.encode(values), np.uint8)
    exact = np.square(codec.decode(body.data, 700), dtype=np.float64)
    expected = [exact[a:b].sum() for a, b in pairwise(edges)]
    np.testing.assert_allclose(codec.squares(body, 700, edges), expected, rtol=1e-14)


@pytest.mark.parametrize("place, value", [(3, 0x80), (32 * 11 + 11 + 5, 0xFF), (32 * 11 - 1, 0x70)])
def test_squares_are_not_taken_of_bodies_that_no_encoder_writes(place, value):
    codec = Int4(block=64)
    body = bytearray(codec.encode(np.ones(700, np.float32)))
    body[place] = value
    with pytest.raises(WireError):
        codec.squares(np.frombuffer(body, np.uint8), 700, [0, 700])


def test_naming_codecs_and_opening_frames_does_not_load_a_compiler():
    probe = (
        "import sys, diloco_cli.wire.frame; from diloco_cli.wire.codecs import codecs\n"
        "for kind in codecs.kinds(): codecs.build({'kind': kind}).body_size(5000)\n"
        "print('numba' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "False\n"
