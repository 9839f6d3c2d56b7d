"""Some seconds of `make fuzz`: no input does worse than a refusal, none is taken for another."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.verify.fuzz.engines import ENGINES, ROOM_BYTES, ROOT, TARGETS, hunt
from tests.verify.fuzz.seeds import SEEDS
from tests.verify.fuzz.targets import DEPTHS
from tests.verify.fuzz.targets import TARGETS as FUNCTIONS
from tests.wire.forged_frames import squeezed

RUNS = {"hypothesis": 700, "atheris": 4000}


@pytest.mark.parametrize("target", TARGETS)
def test_honest_bytes_are_taken(target):
    """Or else the refusals below would prove nothing."""
    found = [FUNCTIONS[target](data) for data in SEEDS[target]()]
    assert set(found) <= {"taken", "chain"}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in /proc")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("engine", ENGINES)
def test_bad_bytes_are_refused_within_64_mebibytes(engine, target, tmp_path, capfd):
    if engine == "atheris" and not importlib.util.find_spec("atheris"):
        pytest.skip("atheris is not installed; `make fuzz` does that")
    assert hunt(engine, target, 0, RUNS[engine], tmp_path), capfd.readouterr().out


GUARDLESS = "import diloco_cli.wire.frame as f; f._wrong_zstd = lambda *_: None; "
"""A decoder that believes what a chunk says about its own size."""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in /proc")
def test_a_decoder_that_believes_declared_sizes_is_caught_at_the_limit(tmp_path):
    depth = [each.__name__ for each in DEPTHS].index("_chunk")
    bomb = bytes([depth, 0]) + squeezed(bytes(ROOM_BYTES + (1 << 20)))
    assert FUNCTIONS["frame"](bomb) == "refused"
    file = tmp_path / "bomb"
    file.write_bytes(bomb)
    said = ["--target", "frame", "--keep", str(tmp_path / "kept"), "--replay", str(file)]
    code = (
        f"{GUARDLESS}import sys; from tests.verify.fuzz.engines import main; sys.exit(main({said}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "MemoryError" in done.stderr, done.stdout
    assert (tmp_path / "kept" / "failed-frame").read_bytes() == bomb
