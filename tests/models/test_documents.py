"""Documents that share a window do not see each other: packed, they cost what each costs alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_cli.errors import SpecError
from diloco_cli.models import LossForm, attention_flax
from diloco_cli.models.attention_flax import attend, checked, in_parts, splash
from diloco_cli.models.decoder import Decoder
from diloco_cli.models.decoder_flax import Documents
from diloco_cli.spec.schema import InnerSpec
from diloco_cli.worker.engines.jax_engine import make_step, use_compile_cache
from diloco_cli.worker.engines.learning_rate import RatePlan
from tests.models.plain_attention import by_hand, queries_keys_values

use_compile_cache()

END = 49
MODEL = Decoder(layers=2, width=16, heads=4, kv_heads=2, ffn=24, vocabulary=50)
APART = LossForm(separator=END)


def documents(*lengths: int) -> list[np.ndarray]:
    source = np.random.default_rng(3)
    return [np.append(source.integers(0, END, size), END).astype(np.int32) for size in lengths]


ROWS = [documents(5, 1, 9, 3, 2), documents(20, 3)]
"""Two windows of as many tokens."""


def packed() -> np.ndarray:
    # The last separator is a target only, as the first token of the next window would be.
    return np.stack([np.concatenate(row) for row in ROWS])


def loss_of(tokens: np.ndarray, form: LossForm) -> tuple[float, int]:
    weights = MODEL.init(0)
    if form.remat == "block":
        for name, stack in MODEL.stacks().items():
            weights[name] = np.stack([weights.pop(each) for each in stack])
    loss, count = jax.jit(MODEL.loss_fn(form=form))(weights, tokens)
    return float(loss), int(count)


@pytest.mark.parametrize(
    "form",
    [APART, *(dataclasses.replace(APART, **more) for more in ({"remat": "block"}, {"chunks": 3}))],
    ids=str,
)
def test_packed_documents_cost_what_each_costs_alone(form):
    alone = [loss_of(each[None], LossForm()) for row in ROWS for each in row]
    counted = sum(count for _, count in alone)
    loss, count = loss_of(packed(), form)
    assert count == counted == packed().size - sum(map(len, ROWS))
    assert loss == pytest.approx(sum(loss * count for loss, count in alone) / counted, abs=1e-5)


def test_without_the_mask_they_see_each_other():
    kept_apart, together = (loss_of(packed(), form)[0] for form in (APART, LossForm()))
    assert abs(kept_apart - together) > 1e-3


def test_documents_are_numbered_and_their_positions_begin_anew():
    found = Documents.of(jnp.array([[3, END, 4, 5, END, END, 6]]), END)
    assert found.segments.tolist() == [[0, 0, 1, 1, 1, 2, 3]]
    assert found.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0]]


def test_a_window_of_nothing_but_separators_has_no_loss_and_no_slope():
    tokens = np.full((2, 9), END, np.int32)
    value = jax.value_and_grad(MODEL.loss_fn(form=APART), has_aux=True)
    (loss, _), slope = jax.jit(value)(MODEL.init(0), tokens)
    assert float(loss) == 0 and all((values == 0).all() for values in slope.values())


SEGMENTS = np.array([[0] * 5 + [1] * 7, [0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]], np.int32)
VALUES = queries_keys_values(batch=2, sequence=12, heads=4, kv_heads=2, head=8)


def apart_by_hand(values, segments: np.ndarray) -> np.ndarray:
    """Each document's tokens attended to alone, by the account that knows of no documents."""
    mixed = np.empty(values[0].shape)
    for row, numbers in enumerate(segments):
        for number in np.unique(numbers):
            own = np.nonzero(numbers == number)[0]
            mixed[row, own] = by_hand(*(each[row : row + 1, own] for each in values))[0]
    return mixed


@pytest.mark.parametrize(
    "program",
    [
        lambda q, k, v, segments: attend(q, k, v, LossForm(), segments),
        lambda q, k, v, segments: in_parts(q, k, v, 3, segments),
    ],
    ids=["xla", "in parts"],
)
def test_every_program_keeps_them_apart(program):
    mixed = np.asarray(program(*VALUES, SEGMENTS))
    np.testing.assert_allclose(mixed, apart_by_hand(VALUES, SEGMENTS), atol=2e-6)


def test_so_does_the_pallas_kernel():
    long = queries_keys_values(batch=1, sequence=256, heads=2, kv_heads=1, head=16)
    segments = np.repeat(np.arange(4, dtype=np.int32), [100, 1, 55, 100])[None]
    mixed = np.asarray(splash(*long, None, jnp.asarray(segments), interpret=True))
    np.testing.assert_allclose(mixed, apart_by_hand(long, segments), atol=2e-5)


def test_a_program_that_cannot_is_refused(monkeypatch):
    monkeypatch.setattr(attention_flax, "_platform", lambda form: "gpu")
    asked = LossForm(attention="cudnn", compute="bfloat16", separator=END)
    with pytest.raises(SpecError, match="'cudnn', which cannot keep documents apart"):
        checked(asked)
    # Unasked, it gives way to one that can.
    automatic = dataclasses.replace(asked, attention="auto")
    q, k, v = VALUES
    mixed = np.asarray(attend(q, k, v, automatic, jnp.asarray(SEGMENTS)))
    np.testing.assert_allclose(mixed, apart_by_hand(VALUES, SEGMENTS), atol=2e-6)


def test_micro_batches_of_different_documents_make_the_same_step():
    """The rows predict 20 and 23 tokens: a mean of means would be another one."""

    def moved(parts: int) -> tuple[float, dict[str, np.ndarray]]:
        inner = InnerSpec(batch=2, sequence=24, accumulate=parts)
        step = make_step(MODEL, inner, RatePlan.of(inner, 10), separator=END)
        weights = step.placement.place(MODEL.init(0))
        loss, slope = step.gradient(weights, packed())
        return float(loss), step.placement.fetch(slope)

    (whole, slope), (parts, summed) = moved(1), moved(2)
    assert parts == pytest.approx(whole, abs=1e-6)
    for name, values in slope.items():
        np.testing.assert_allclose(summed[name], values, atol=1e-6)
