"""`diloco bench wire` puts every figure beside a limit of the same run."""

import numpy as np
import pytest

from diloco_cli.bench import wire
from diloco_cli.bench.support.numpy_merge import MergeRound, decoded, fused_merge, plain_merge
from diloco_cli.bench.wire import merge_figures, size_figures, student, wire_figures
from diloco_cli.errors import SpecError
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import open_frame, pack

KEYS = {"name", "value", "unit", "reference", "ratio", "goal", "met"}
CODEC = {"kind": "int4", "block": 512}


def test_speed_size_and_error_of_every_kind_are_measured(monkeypatch):
    monkeypatch.setattr(wire, "merge_figures", lambda tries: [])
    figures = wire_figures(tries=1, parameters=1 << 18, train=False)
    assert all(KEYS <= set(each.plain()) <= KEYS | {"better"} for each in figures)
    named = [each.name for each in figures]
    assert len(named) == len(set(named)) and "encode / memcpy" in named
    for kind in codecs.kinds():
        assert {f"{kind} up", f"{kind} up, error"} <= set(named)


@pytest.mark.parametrize("kind", [k for k in codecs.kinds() if k != "fp32"])
def test_random_numbers_that_look_like_it_meet_the_goals(kind):
    bits, error = wire.MOST_BITS[kind], wire.MOST_ERROR[kind]
    figures = size_figures("up", {"kind": kind}, [student(1 << 18)], bits, error)
    assert [each.met for each in figures] == [True, True]
    assert 0.9 < (figures[0].ratio or 0.0) < 2.2  # Nothing beats the bound of a Gaussian by far.


def test_both_merges_compute_the_same():
    header = wire._header(CODEC, 100_000)
    frames = [pack(header, student(100_000, seed)) for seed in range(3)]
    given = MergeRound(frames, student(100_000, 7))
    outcome, (theta, momentum, _, _) = fused_merge(given), plain_merge(given)
    # Weights here are below 0.1: one in the last place is 4e-9 at most.
    np.testing.assert_allclose(outcome.theta, theta, rtol=0, atol=4e-9)
    np.testing.assert_allclose(outcome.momentum, momentum, rtol=1e-6, atol=1e-12)
    frame = open_frame(frames[0])
    np.testing.assert_array_equal(decoded(frame), frame.values())


def test_a_merge_is_measured_beside_numpy():
    (found,) = merge_figures(1, regions=2, size=50_000)
    assert found.value > 0 and found.goal == 4.5 and found.name == "merge of 2 / numpy"


def test_a_vector_of_ones_own_can_be_measured(tmp_path):
    np.save(tmp_path / "delta.npy", student(5000).reshape(50, 100))
    assert wire._load(tmp_path / "delta.npy").shape == (5000,)
    np.save(tmp_path / "wide.npy", np.ones(3))
    with pytest.raises(SpecError, match="3 values of float64"):
        wire._load(tmp_path / "wide.npy")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        (b"", "not in numpy's format"),
        (b"hi\n", "not in numpy"),
    ],
)
def test_a_file_that_is_no_array_is_named_before_anything_is_measured(
    tmp_path, capsys, content, why
):
    file = tmp_path / "given.npy"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match=f"given.npy is no array: .*{why}") as refused:
        wire_figures(file=file)
    assert "pickle" not in refused.value.message and capsys.readouterr().err == ""
