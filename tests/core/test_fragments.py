"""Every parameter is in exactly one fragment, and fragments are of nearly equal size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.core.fragments import Fragment, Layout, Piece, Tensor, cut, gather, norm, scatter

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 60)),
    st.tuples(st.integers(1, 40), st.integers(1, 9)),
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3)),
)
models = st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=12).map(
    lambda drawn: [Tensor(f"t{i}", shape, embedding) for i, (shape, embedding) in enumerate(drawn)]
)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[Tensor], Layout]:
    tensors = draw(models)
    rows = sum(tensor.rows for tensor in tensors)
    return tensors, cut(tensors, draw(st.integers(1, min(rows, 8))))


def numbered(tensors: list[Tensor]) -> dict[str, np.ndarray]:
    """Parameters in which no two values are equal."""
    params, start = {}, 0
    for tensor in tensors:
        values = np.arange(start, start + tensor.size, dtype=np.float32)
        params[tensor.name] = values.reshape(tensor.shape)
        start += tensor.size
    return params


@settings(deadline=None)
@given(cuts())
def test_every_parameter_travels_in_exactly_one_fragment(cutting):
    tensors, layout = cutting
    params = numbered(tensors)
    travelled = np.concatenate([gather(params, fragment) for fragment in layout.fragments])
    np.testing.assert_array_equal(np.sort(travelled), np.arange(layout.size))


@settings(deadline=None)
@given(cuts())
def test_scattering_undoes_gathering(cutting):
    tensors, layout = cutting
    params = numbered(tensors)
    restored = {name: np.full_like(values, -1) for name, values in params.items()}
    for fragment in layout.fragments:
        scatter(gather(params, fragment), fragment, restored)
    for name, values in params.items():
        np.testing.assert_array_equal(restored[name], values)


@settings(deadline=None)
@given(cuts())
def test_no_fragment_is_empty_or_much_above_the_ideal_size(cutting):
    tensors, layout = cutting
    ideal = layout.size / len(layout.fragments)
    row = max(tensor.size // tensor.rows for tensor in tensors)
    assert all(0 < fragment.size <= 4 / 3 * ideal + row for fragment in layout.fragments)


@settings(deadline=None)
@given(cuts())
def test_the_order_in_which_tensors_are_listed_does_not_matter(cutting):
    tensors, layout = cutting
    assert cut(tensors[::-1], len(layout.fragments)) == layout


@settings(deadline=None)
@given(cuts())
def test_pieces_are_in_name_order_and_leave_no_gap(cutting):
    _, layout = cutting
    for fragment in layout.fragments:
        assert list(fragment.pieces) == sorted(fragment.pieces, key=lambda p: (p.tensor, p.start))
        ends = np.cumsum([piece.size for piece in fragment.pieces])
        assert [piece.offset for piece in fragment.pieces] == [0, *ends[:-1]]


def test_a_tensor_far_above_the_ideal_size_is_split_by_rows():
    layout = cut([Tensor("embed", (90, 2), embedding=True), Tensor("w", (5, 4))], 2)
    parts = [piece for each in layout.fragments for piece in each.pieces if piece.tensor == "embed"]
    assert [(piece.start, piece.stop, piece.embedding) for piece in parts] == [
        (0, 45, True),
        (45, 90, True),
    ]


def test_a_tensor_below_the_bound_stays_whole():
    layout = cut([Tensor("a", (12, 10)), Tensor("b", (8, 10))], 2)
    assert [[piece.tensor for piece in each.pieces] for each in layout.fragments] == [["a"], ["b"]]


def test_five_equal_tensors_do_not_make_one_of_four_fragments_twice_as_large():
    layout = cut([Tensor(f"w{i}", (30, 10)) for i in range(5)], 4)
    assert max(fragment.size for fragment in layout.fragments) <= 4 / 3 * 375


def test_a_scalar_is_a_tensor_of_one_row():
    (fragment,) = cut([Tensor("scale", ()), Tensor("w", (2,))], 1).fragments
    params = {"scale": np.array(7, np.float32), "w": np.array([1, 2], np.float32)}
    vector = gather(params, fragment)
    assert vector.tolist() == [7, 1, 2]
    scatter(vector + 1, fragment, params)
    assert params["scale"] == 8


def test_small_tensors_are_split_when_fragments_would_stay_empty():
    layout = cut([Tensor("huge", (1, 1000)), Tensor("small", (10,))], 5)
    assert len(layout.fragments) == 5 and all(fragment.size for fragment in layout.fragments)


@pytest.mark.parametrize("count", [0, 8])
def test_more_fragments_than_rows_are_refused_with_the_numbers(count):
    with pytest.raises(ValueError, match=rf"{count} fragments .* 2 tensors have 7 rows"):
        cut([Tensor("a", (5, 100)), Tensor("b", (2,))], count)


def test_a_name_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match="two tensors are called 'a'"):
        cut([Tensor("a", (5,)), Tensor("a", (2,))], 1)


def test_a_tensor_without_values_is_refused():
    with pytest.raises(ValueError, match=r"'a' of shape \(3, 0\) has no values"):
        cut([Tensor("a", (3, 0)), Tensor("b", (9,))], 1)


def test_the_digest_of_a_layout_never_changes():
    tensors = [Tensor("embed", (8, 2), embedding=True), Tensor("w", (4, 3)), Tensor("norm", (3,))]
    assert cut(tensors, 2).digest == (
        "34e6260cc470456fa8328002a10a3a2200e595995fd66448348240d8f36c1c2c"
    )
    assert cut(tensors, 3).digest != cut(tensors, 2).digest


def test_a_vector_of_the_wrong_size_is_refused_with_both_sizes():
    fragment = Fragment(3, (Piece("w", 0, 4, (4,), 0),))
    with pytest.raises(ValueError, match=r"fragment 3 has 4 values, the vector \(5,\)"):
        scatter(np.zeros(5, np.float32), fragment, {"w": np.zeros(4, np.float32)})


@pytest.mark.parametrize("shape", [(3, 2), (4, 3)])
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(shape):
    fragment = Fragment(0, (Piece("w", 2, 4, (2, 2), 0),))
    with pytest.raises(ValueError, match=r"rows 2:4 of 'w' should have the shape \(2, 2\)"):
        gather({"w": np.zeros(shape, np.float32)}, fragment)


def test_the_norm_of_large_values_does_not_overflow():
    assert norm(np.full(4, 3e38, np.float32)) == pytest.approx(6e38, rel=1e-6)


def test_the_norm_spans_several_chunks(monkeypatch):
    monkeypatch.setattr("diloco_cli.core.fragments.CHUNK", 3)
    assert norm(np.full(16, 2, np.float32)) == 8
