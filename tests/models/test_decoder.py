"""A model is its tensors and its arithmetic; the server needs only the first."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from diloco_cli.core.fragments import cut
from diloco_cli.errors import RegistryError
from diloco_cli.models import PLAIN, LossForm, decoder_flax, models, parameters, products_flax
from diloco_cli.models.decoder import Decoder
from diloco_cli.worker.engines.jax_engine import use_compile_cache

use_compile_cache()

SMALL = Decoder(layers=2, width=16, heads=4, kv_heads=2, ffn=24, vocabulary=50)


TOKENS = np.random.default_rng(1).integers(0, SMALL.vocabulary, (2, 8), dtype=np.int32)


def logits(params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_forward(params, tokens)).reshape(*tokens.shape, -1)


@jax.jit
def _forward(params, tokens):
    return decoder_flax.merge(SMALL.shape, params)(tokens)


def loss_of(model: Decoder, *, penalties: bool) -> float:
    loss, count = jax.jit(model.loss_fn(penalties=penalties))(model.init(0), TOKENS)
    assert int(count) == 2 * 7
    return float(loss)


def test_describing_a_model_does_not_load_jax():
    modules = "diloco_cli.models, diloco_cli.data, diloco_cli.worker.engines.optimizers"
    probe = f"import sys, {modules}; print(*{{'jax', 'flax', 'optax'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).split() == []


@pytest.mark.parametrize(
    "size, millions", [("tiny", 1), ("small", 10), ("50m", 50), ("150m", 150), ("1b", 1000)]
)
def test_a_named_size_is_what_its_name_says(size, millions):
    assert parameters(Decoder(size)) / 1e6 == pytest.approx(millions, rel=0.06)


def test_explicit_numbers_override_the_named_size():
    shape = Decoder("small", layers=3).shape
    assert (shape.layers, shape.width, shape.attention[0].kv_heads) == (3, 384, 2)


def test_without_kv_heads_every_given_head_has_its_own():
    assert Decoder(width=96, heads=3).shape.attention[0].kv_heads == 3


@pytest.mark.parametrize(
    "asked, key, said, hint",
    [
        ({"size": "huge"}, "size", "no decoder of size 'huge'", "tiny"),
        ({"width": 130, "heads": 4}, "width", "width 130 cannot be shared by 4 heads", "128"),
        ({"width": 12, "heads": 4}, "width", "heads of 3", "multiple of 8"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads", "4 heads", "[1, 2, 4]"),
    ],
)
def test_an_impossible_shape_names_the_option_and_a_way_out(asked, key, said, hint):
    with pytest.raises(RegistryError) as caught:
        models.build({"kind": "decoder", **asked})
    assert caught.value.key == key
    assert said in caught.value.message and hint in (caught.value.hint or "")


def test_first_weights_depend_on_seed_and_name_only():
    deeper = Decoder(layers=3, width=16, heads=4, kv_heads=2, ffn=24, vocabulary=50)
    name = "blocks.01.attention.q"
    np.testing.assert_array_equal(SMALL.init(7)[name], deeper.init(7)[name])
    assert not np.array_equal(SMALL.init(7)[name], SMALL.init(8)[name])
    assert not np.array_equal(SMALL.init(7)[name], SMALL.init(7)["blocks.00.attention.q"])


def test_first_weights_fit_the_tensors():
    drawn = {name: (values.shape, values.dtype) for name, values in SMALL.init(0).items()}
    wanted = {tensor.name: (tensor.shape, np.float32) for tensor in SMALL.tensors()}
    assert drawn == wanted
    assert [tensor.name for tensor in SMALL.tensors() if tensor.embedding] == ["embed"]


def test_the_network_has_exactly_the_named_tensors():
    described = {tensor.name: tensor.shape for tensor in SMALL.tensors()}
    assert decoder_flax.names(SMALL.shape) == described


def test_a_token_sees_the_past_and_not_the_future():
    changed, params = TOKENS.copy(), SMALL.init(0)
    changed[0, 5] = (changed[0, 5] + 1) % SMALL.vocabulary
    differs = np.abs(logits(params, TOKENS) - logits(params, changed)).max(axis=-1)
    assert (differs[0, :5] == 0).all() and (differs[0, 5:] > 0).all()
    assert (differs[1] == 0).all()


def test_the_order_of_the_past_matters():
    swapped, params = TOKENS[:, [1, 0, *range(2, 8)]], SMALL.init(0)
    assert np.abs(logits(params, TOKENS) - logits(params, swapped))[0, -1].max() > 1e-4


def test_an_untrained_model_knows_nothing_and_the_penalty_is_for_training_only():
    model = dataclasses.replace(SMALL, layers=1, z_loss=0.1)
    plain = loss_of(model, penalties=False)
    assert plain == pytest.approx(np.log(SMALL.vocabulary), abs=1.0)
    # The logarithm of the sum over all tokens is about log(50) for each, squared 15.
    assert loss_of(model, penalties=True) == pytest.approx(plain + 1.5, abs=0.7)


def test_the_network_agrees_with_a_plain_account_of_it():
    """Written again in numpy, head by head and token by token, in double precision."""
    params = SMALL.init(3)
    # Norms start at one; other values show that each is applied in its place.
    source = np.random.default_rng(5)
    for name, values in params.items():
        if values.ndim == 1:
            params[name] = source.uniform(0.5, 1.5, values.shape).astype(np.float32)
    expected = np.stack([_by_hand(params, row) for row in TOKENS])
    np.testing.assert_allclose(logits(params, TOKENS), expected, rtol=1e-4, atol=1e-4)


def _by_hand(params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    layers, shape = SMALL.shape.layers, SMALL.shape.attention[0]
    weights = {name: values.astype(np.float64) for name, values in params.items()}
    x = weights["embed"][tokens]
    for number in range(layers):
        w = {name.removeprefix(f"blocks.{number:02d}."): values for name, values in weights.items()}
        h = _norm(x, w["attention.norm"])
        groups = shape.heads // shape.kv_heads
        heads = []
        for head in range(shape.heads):
            q = _turn(_norm(h @ _head(w["attention.q"], head), w["attention.q_norm"]))
            k = _turn(_norm(h @ _head(w["attention.k"], head // groups), w["attention.k_norm"]))
            v = h @ _head(w["attention.v"], head // groups)
            scores = q @ k.T / np.sqrt(shape.head)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(share / share.sum(axis=1, keepdims=True) @ v)
        x = x + np.concatenate(heads, axis=1) @ w["attention.o"]
        h = _norm(x, w["ffn.norm"])
        gate = h @ w["ffn.gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn.up"])) @ w["ffn.down"]
    return _norm(x, weights["norm"]) @ weights["embed"].T


def _norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale


def _head(matrix: np.ndarray, number: int) -> np.ndarray:
    head = SMALL.shape.attention[0].head
    return matrix[:, number * head : (number + 1) * head]


def _turn(x: np.ndarray) -> np.ndarray:
    half = x.shape[1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(
        1j * np.outer(np.arange(len(x)), SMALL.rope_theta ** (-np.arange(half) / half))
    )
    return np.concatenate([turned.real, turned.imag], axis=1)


# Forms of the loss

SCANNED = LossForm(remat="block")
BFLOAT16 = LossForm(compute="bfloat16")
LEARNS = dataclasses.replace(SMALL, layers=3, z_loss=1e-2)


def stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    stacks = LEARNS.stacks()
    inside = {name for stack in stacks.values() for name in stack}
    alone = {name: values for name, values in weights.items() if name not in inside}
    return alone | {
        name: np.stack([weights[each] for each in stack]) for name, stack in stacks.items()
    }


def loss_and_slope(form: LossForm) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of a form and its gradient, by the names of the tensors."""
    weights, tokens = LEARNS.init(0), np.tile(TOKENS, (2, 2))[:, :13]
    given = stacked(weights) if form.remat == "block" else weights
    slope = jax.value_and_grad(LEARNS.loss_fn(form=form), has_aux=True)
    (loss, count), found = jax.jit(slope)(given, tokens)
    assert int(count) == 4 * 12
    if form.remat == "block":
        for name, stack in LEARNS.stacks().items():
            found |= zip(stack, found.pop(name), strict=True)
    return float(loss), {name: np.asarray(values) for name, values in found.items()}


def distance(slope: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert slope.keys() == other.keys()
    apart = sum(((slope[name] - other[name]) ** 2).sum() for name in slope)
    return float(np.sqrt(apart / sum((values**2).sum() for values in other.values())))


@pytest.fixture(scope="module")
def plain() -> tuple[float, dict[str, np.ndarray]]:
    return loss_and_slope(PLAIN)


@pytest.mark.parametrize(
    "form", [SCANNED, LossForm(chunks=4), dataclasses.replace(SCANNED, chunks=3)], ids=str
)
def test_every_form_in_float32_is_the_same_loss(plain, form):
    loss, slope = loss_and_slope(form)
    assert loss == pytest.approx(plain[0], abs=1e-5)
    assert distance(slope, plain[1]) < 1e-5


@pytest.mark.parametrize(
    "form", [BFLOAT16, dataclasses.replace(BFLOAT16, remat="block", chunks=2)], ids=str
)
def test_bfloat16_rounds_products_and_leaves_slopes_in_float32(plain, form):
    loss, slope = loss_and_slope(form)
    assert loss == pytest.approx(plain[0], abs=1e-2)
    assert 1e-5 < distance(slope, plain[1]) < 0.05
    for name, values in slope.items():
        assert values.dtype == np.float32
        # Numbers of 8 bits would all end in 16 zeros.
        if values.ndim > 1:
            assert (values.view(np.uint32) & 0xFFFF).any(), name


WIDE: dict[str, Any] = {
    **{"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "vocabulary": 50},
    **{"head": 12, "tied": False, "bias": "qkvo", "eps": 1e-5},
}
OPTIONS = Decoder(**WIDE, rope={"kind": "yarn", "factor": 4.0, "original": 8})


def test_every_option_has_every_form():
    weights, tokens = OPTIONS.init(0), np.tile(TOKENS, (2, 2))[:, :13]
    stacks = OPTIONS.stacks()
    inside = {name for stack in stacks.values() for name in stack}
    scanned = {name: values for name, values in weights.items() if name not in inside}
    scanned |= {name: np.stack([weights[each] for each in all_]) for name, all_ in stacks.items()}
    plain = float(jax.jit(OPTIONS.loss_fn())(weights, tokens)[0])
    forms = {"float32": 1e-5, "bfloat16": 1e-2}
    for compute, close in forms.items():
        form = LossForm(compute=compute, remat="block", chunks=2)
        (loss, _), slope = jax.jit(jax.value_and_grad(OPTIONS.loss_fn(form=form), has_aux=True))(
            scanned, tokens
        )
        assert float(loss) == pytest.approx(plain, abs=close)
        assert {each.dtype for each in slope.values()} == {np.dtype("float32")}
        assert all(np.abs(values).max() > 0 for name, values in slope.items() if "k_b" not in name)


@pytest.mark.parametrize(
    "asked, key, said",
    [
        ({"rope": {"kind": "dynamic"}}, "rope.kind", "'dynamic'"),
        ({"rope": {"kind": "llama3", "factor": 8}}, "rope.kind", "needs 'original'"),
        ({"rope": {"kind": "yarn", "factor": 0, "original": 8}}, "rope.factor", "positive"),
        ({"rope": {"kind": "linear", "factor": 2, "low": 1}}, "rope.low", "no option 'low'"),
        ({"head": 15}, "head", "pairs"),
    ],
)
def test_an_option_that_means_nothing_is_refused(asked, key, said):
    with pytest.raises(RegistryError) as caught:
        models.build({"kind": "decoder", **asked})
    assert caught.value.key == key and said in caught.value.message


def test_slopes_add_up_in_float32_where_products_are_rounded():
    """One weight, 4,096 tokens that each add a little: in bfloat16 the sum would stop growing."""
    x, weights = np.full((4096, 1), 0.01, jax.numpy.bfloat16), np.ones((1, 1), np.float32)

    def total(weights):
        return jax.numpy.sum(products_flax.rounded_product(x, weights, 0, x.dtype), dtype="float32")

    slope = jax.grad(total)(weights)
    assert float(slope[0, 0]) == pytest.approx(4096 * float(x[0, 0]), rel=1e-3)


def test_stacks_and_cut_axes_speak_of_every_tensor_as_it_is():
    shapes = {tensor.name: tensor.shape for tensor in LEARNS.tensors()}
    wanted = {name: values.shape for name, values in stacked(LEARNS.init(0)).items()}
    assert decoder_flax.names(LEARNS.shape, SCANNED) == wanted
    shape, axes = LEARNS.shape, LEARNS.tensor_axes()
    for name, axis in axes.items():
        assert shapes[name][axis] in (shape.vocabulary, shape.ffn, shape.width, shape.width // 2)
    assert {name for name in shapes if name not in axes} == {
        name for name, dims in shapes.items() if len(dims) == 1
    }


def test_the_layout_does_not_depend_on_the_form():
    """It is what every region of a run has in common, however each computes."""
    digest = cut(Decoder("tiny").tensors(), 4).digest
    assert digest == "43ceeec8bbd0ad5f312e560614c99551167927c4e8741d848916c032b61cfb90"


def test_operations_are_counted_by_hand():
    """A matrix of n weights takes 2 n a token forwards and 4 n backwards; so do scores."""
    model = Decoder(layers=1, width=8, heads=2, kv_heads=1, ffn=16, vocabulary=32)
    matrices = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 32 * 8
    # Each query meets half of 10 keys, twice: once for its score, once for its value.
    scores = 2 * 10 / 2 * 8
    assert model.step_flops(3, 10) == 6 * 30 * (matrices + scores)
